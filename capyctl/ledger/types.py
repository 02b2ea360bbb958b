"""Plain values of the ledger: what a host may hold, what was seen on it, what an owner asks for."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Bytes, Device, Domain, HostId, Millis, Phase


class DomainKind(enum.Enum):
    """Memory topology is declared or observed, never guessed from a domain's name (memory 1)."""

    UNIFIED = "unified"  # one pool for GPU and CPU; also a machine without a GPU
    DISTINCT = "distinct"  # host RAM beside discrete cards, named "system"
    DEVICE = "device"  # one discrete card


@attrs.frozen(kw_only=True)
class DomainPolicy:
    """Limits of one domain, bytes (memory 2). The reserve is a second constraint, not a deduction."""

    kind: DomainKind
    capacity_bytes: Bytes
    managed_bytes: Bytes
    reserve_bytes: Bytes
    parked_bytes: Bytes
    host_kv_bytes: Bytes = Bytes(0)
    device: Device | None = None
    exclusive: bool = False
    uuid: str | None = None  # which card it is, where that is known; an index may be another one's tomorrow
    model: str | None = None  # what the driver calls such a card; cards of one model and size are equal

    @property
    def most_bytes(self) -> int:
        """What may be charged at all: the managed limit, and the free reserve left alone."""
        return min(self.managed_bytes, self.capacity_bytes - self.reserve_bytes)


_NUMBER = re.compile(r"\d+$")


@lru_cache(maxsize=1024)
def card_index(card: Domain) -> tuple[int, str]:
    """The number in a card's name, so that gpu10 comes after gpu2: the order of ranks."""
    digits = _NUMBER.search(card)
    return (int(digits[0]) if digits else -1, card)


@attrs.frozen(kw_only=True)
class HostPolicy:
    """What one host may hold. `domains` is keyed by domain name."""

    host: HostId
    name: str
    domains: Mapping[Domain, DomainPolicy]
    max_parked: int = 4
    observation_ttl_ms: Millis = Millis(60_000)
    parked_growth_percent: int | None = 100  # of a launch's first parked charge; beyond it its next park is a stop
    parked_growth_bytes: Bytes | None = None  # the same as an amount, instead; neither: it may grow as it likes

    @cached_property
    def cards(self) -> frozenset[Domain]:
        """The domains that are cards' own memory."""
        return frozenset(domain for domain, limits in self.domains.items() if limits.kind is DomainKind.DEVICE)


@attrs.frozen(kw_only=True)
class Observation:
    """One domain at one instant. `residents` maps an owner key to the bytes its recorded processes hold.

    `source`: what said so (`meminfo`, a control group, `nvml`), for people.
    """

    capacity_bytes: Bytes
    available_bytes: Bytes
    seen_at_ms: Millis
    residents: Mapping[str, Bytes] = attrs.field(factory=dict)
    source: str = ""


@attrs.frozen(kw_only=True)
class Claim:
    """A device that a phase uses; exclusive claims conflict with every other active claim."""

    device: Device
    exclusive: bool = False


@attrs.frozen(kw_only=True)
class Allocation:
    """What one phase of one owner needs: bytes per domain, and devices.

    `host_kv` says how many of a domain's bytes are a host-side KV cache: a part of `bytes`, never added to it.
    """

    bytes: Mapping[Domain, Bytes] = attrs.field(factory=dict)
    claims: tuple[Claim, ...] = ()
    host_kv: Mapping[Domain, Bytes] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        check(all(0 <= amount < 2**63 for amount in self.bytes.values()), "bytes are non-negative 64-bit integers")
        check(
            all(0 <= amount <= self.on(domain) for domain, amount in self.host_kv.items()),
            "a host-side KV cache is a part of its domain's bytes",
        )

    def on(self, domain: Domain) -> Bytes:
        """Bytes needed on `domain`; one that is not named needs none."""
        return self.bytes.get(domain, Bytes(0))


def peak(*allocations: Allocation) -> Allocation:
    """Per domain the largest of these, and every claim of any of them: what a step between them may reach."""
    bytes_: dict[Domain, Bytes] = {}
    host_kv: dict[Domain, Bytes] = {}
    claims: dict[Device, bool] = {}
    for allocation in allocations:
        for domain, amount in allocation.bytes.items():
            bytes_[domain] = max(bytes_.get(domain, Bytes(0)), amount)
        for domain, amount in allocation.host_kv.items():
            host_kv[domain] = max(host_kv.get(domain, Bytes(0)), amount)
        for claim in allocation.claims:
            claims[claim.device] = claims.get(claim.device, False) or claim.exclusive
    return Allocation(
        bytes=bytes_,
        claims=tuple(Claim(device=device, exclusive=exclusive) for device, exclusive in sorted(claims.items())),
        host_kv=host_kv,
    )


@attrs.frozen(kw_only=True)
class Measured:
    """One figure of a plan that runs have shown since: the most that was seen, and what was planned before, bytes."""

    seen_bytes: Bytes
    planned_bytes: Bytes


@attrs.frozen(kw_only=True)
class Plan:
    """What one revision needs on one host, resolved once and frozen (memory 5, 9).

    `provenance` is per phase: derived, declared, placeholder or whole_host. What was measured since is in `measured`,
    by phase and domain, and in the figures of `phases` already; `installation` is what it was measured on (see
    `estimates`). `stated`: a `resources` block says every figure. `context_reason` says why a fitted context is what
    it is; None when the document stated it. `pools` is what the engine is told of its memory, bytes and counts:
    `weights`, `kv_cache`, `kv_tokens`, `state`, `state_slots`, `running`, `static`; what is not there is the engine's
    own to decide. `host` is what its options keep in RAM, which on one pool is a part of its charge.
    """

    phases: Mapping[Phase, Allocation]
    provenance: Mapping[Phase, str]
    initialize_ms: Millis
    wake_ms: Millis
    context_tokens: int
    context_reason: str | None = None
    slots: int = 4
    facts: Mapping[str, str] = attrs.field(factory=dict)  # shown in status, never decided on
    pools: Mapping[str, int] = attrs.field(factory=dict)
    stated: bool = False
    measured: Mapping[Phase, Mapping[Domain, Measured]] = attrs.field(factory=dict)
    installation: str | None = None

    def at(self, phase: Phase) -> Allocation:
        """The allocation of `phase`; NONE needs nothing."""
        return self.phases.get(phase, Allocation())

    @cached_property
    def domains(self) -> frozenset[Domain]:
        """Every domain that any of its phases needs."""
        return frozenset(domain for held in self.phases.values() for domain in held.bytes)

    @cached_property
    def start_bytes(self) -> Mapping[Domain, Bytes]:
        """What a start is charged at its peak, by domain."""
        return peak(self.at(Phase.COLD), self.at(Phase.READY)).bytes

    @property
    def whole_host(self) -> bool:
        """Nobody can size its first start, and none was measured yet: it takes the whole host (memory 14).

        What counts is the engine's own memory, which is planned with more than ready then; RAM beside a card is not.
        """
        seen, ready = self.measured.get(Phase.COLD, {}), self.at(Phase.READY)
        measured = any(figure.planned_bytes > ready.on(domain) for domain, figure in seen.items())
        return self.provenance.get(Phase.COLD) == "whole_host" and not measured
