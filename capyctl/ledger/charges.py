"""The ledger: which owner holds how many bytes of which domain, and why it may.

A ledger is a value. Rows are the only figures in it: every sum is made from them when it is asked for.
Each write gives a new ledger with the next epoch. A charge rises in `admission.arm` alone, which needs
observations, and falls in `settlement` alone, which needs a proof. Source: memory 4, 16, 17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs

from capyctl.errors import InvariantBroken, check
from capyctl.fsm.types import Bytes, Device, Domain, Generation, HostId, Phase
from capyctl.ledger.types import Allocation, Claim, DomainKind, HostPolicy

PARKED_SET = frozenset({Phase.PARKING, Phase.PARKED, Phase.WAKE})
"""Phases that count toward the parked limits: on its way there, there, or back there if the wake is never sent."""

BYTES_MAX = 2**63 - 1  # what the store and the wire carry


@attrs.frozen(kw_only=True)
class Holding:
    """What one owner holds: its one row per domain, its claims, and what each phase of this run is charged.

    `allocation` is the present charge. `phases` was frozen when the run was armed, so that settling needs no
    figures from outside; only what was measured replaces one of them (a parked residue, more than it was planned
    to hold). `kept` names the phases around a step whose outcome nobody knows; it is empty while the outcome is
    known. `lowered_by` is the proof under which the charge fell last.
    """

    host: HostId
    phase: Phase
    generation: Generation
    allocation: Allocation
    phases: Mapping[Phase, Allocation]
    whole_host: bool = False  # charged the whole managed limit until READY (memory 14)
    kept: tuple[Phase, ...] = ()
    lowered_by: str | None = None
    overrun: Mapping[Domain, Bytes] = attrs.field(factory=dict)  # planned charge, where more was found resident

    @property
    def uncertain(self) -> bool:
        """Whether nobody knows which phase holds: the charge is the largest of `kept`."""
        return bool(self.kept)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Device claims that are active now."""
        return self.allocation.claims

    @property
    def parks(self) -> bool:
        """Whether it counts toward the parked limits, now or once its step is over."""
        return self.phase in PARKED_SET or not PARKED_SET.isdisjoint(self.kept)

    def at(self, phase: Phase) -> Allocation:
        """What this run is charged in `phase`; one that the plan does not have needs nothing."""
        return self.phases.get(phase, Allocation())

    def on(self, domain: Domain) -> Bytes:
        """Bytes charged on `domain` now."""
        return self.allocation.on(domain)

    def planned(self, domain: Domain) -> Bytes | None:
        """What it would be charged on `domain`, while it is charged more because it was seen to hold more."""
        planned = self.overrun.get(domain)
        return planned if planned is not None and self.on(domain) > planned else None


@attrs.frozen(kw_only=True)
class Ledger:
    """Hosts' limits and owners' holdings at one epoch. Change it with the functions of this room, never in place."""

    epoch: int = 0
    hosts: Mapping[HostId, HostPolicy] = attrs.field(factory=dict)
    holdings: Mapping[str, Holding] = attrs.field(factory=dict)

    @classmethod
    def empty(cls) -> Ledger:
        """No host, no owner, epoch 0."""
        return cls()

    @classmethod
    def load(cls, *, epoch: int, hosts: Iterable[HostPolicy], holdings: Mapping[str, Holding]) -> Ledger:
        """The ledger as it was stored. Raises: InvariantBroken when the rows cannot be of one ledger."""
        ledger = cls(epoch=epoch, hosts={policy.host: policy for policy in hosts}, holdings=dict(holdings))
        return checked(ledger)

    # --- reading ----------------------------------------------------------------------------------

    def rows(self) -> Iterator[tuple[str, Holding]]:
        """Every owner and what it holds."""
        return iter(self.holdings.items())

    def holding(self, owner: str) -> Holding | None:
        """What `owner` holds, None for nothing."""
        return self.holdings.get(owner)

    def held_by(self, owner: str) -> Holding:
        """What `owner` holds. Raises: InvariantBroken when it holds nothing."""
        holding = self.holdings.get(owner)
        if holding is None:
            raise InvariantBroken(f"not so: {owner} holds something")
        return holding

    def policy(self, host: HostId) -> HostPolicy | None:
        """The limits of `host`, None for a host that never published any."""
        return self.hosts.get(host)

    def on(self, host: HostId, *, but: str | None = None) -> Iterator[tuple[str, Holding]]:
        """Owners on `host` and what they hold, without `but`."""
        return ((owner, held) for owner, held in self.holdings.items() if held.host == host and owner != but)

    def charged(self, host: HostId, domain: Domain, *, but: str | None = None) -> Bytes:
        """The sum of the charges on a domain, without those of `but`."""
        return Bytes(sum(held.on(domain) for _, held in self.on(host, but=but)))

    def parked(self, host: HostId, domain: Domain, *, but: str | None = None) -> Bytes:
        """The sum of what parked instances hold on a domain, or will once their step is over."""
        return Bytes(sum(held.at(Phase.PARKED).on(domain) for _, held in self.on(host, but=but) if held.parks))

    def parked_count(self, host: HostId, *, but: str | None = None) -> int:
        """How many instances are parked on `host`, or will be once their step is over."""
        return sum(held.parks for _, held in self.on(host, but=but))

    def host_kv(self, host: HostId, domain: Domain, *, but: str | None = None) -> Bytes:
        """The sum of the host-side KV caches on a domain."""
        return Bytes(sum(held.allocation.host_kv.get(domain, 0) for _, held in self.on(host, but=but)))

    def room(self, host: HostId, domain: Domain, *, but: str | None = None) -> int:
        """Bytes that may still be charged on a domain; negative while it is charged past its limits."""
        limits = self.hosts[host].domains[domain]
        most = min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)
        return most - self.charged(host, domain, but=but)

    # --- writing: for this room's modules only ------------------------------------------------------

    def replaced(self, owner: str, holding: Holding | None) -> Ledger:
        """The next epoch's ledger, with `owner` holding this instead of what it held."""
        holdings = {other: held for other, held in self.holdings.items() if other != owner}
        if holding is not None:
            holdings[owner] = holding
        return self.rewritten(holdings)

    def rewritten(self, holdings: Mapping[str, Holding]) -> Ledger:
        """The next epoch's ledger, with these holdings."""
        return checked(attrs.evolve(self, epoch=self.epoch + 1, holdings=holdings))


# --- claims about every ledger ------------------------------------------------------------------------


def every_holding_is_on_a_known_host(ledger: Ledger) -> bool:
    """Every charge is on a domain of a host that published its limits."""
    return all(
        held.host in ledger.hosts and set(held.allocation.bytes) <= set(ledger.hosts[held.host].domains)
        for _, held in ledger.rows()
    )


def exclusive_devices_have_one_owner(ledger: Ledger) -> bool:
    """A device that is claimed exclusively is claimed by nobody else (M8)."""
    users: dict[tuple[HostId, Device], list[bool]] = {}
    for _, held in ledger.rows():
        for claim in held.claims:
            users.setdefault((held.host, claim.device), []).append(claim.exclusive)
    return all(len(exclusive) == 1 or not any(exclusive) for exclusive in users.values())


def parked_owners_claim_no_device(ledger: Ledger) -> bool:
    """A parked owner holds bytes and no device (invariant 7)."""
    return all(not held.claims for _, held in ledger.rows() if held.phase is Phase.PARKED and not held.uncertain)


def a_whole_host_start_is_alone(ledger: Ledger) -> bool:
    """An owner that is charged a whole host is the only owner on it (M12)."""
    alone = {held.host for _, held in ledger.rows() if held.whole_host}
    return all(sum(1 for _ in ledger.on(host)) == 1 for host in alone)


def nobody_holds_a_phase_of_none(ledger: Ledger) -> bool:
    """An owner that holds something is in a phase that holds something."""
    return all(held.phase is not Phase.NONE for _, held in ledger.rows())


INVARIANTS: tuple[Callable[[Ledger], bool], ...] = (
    every_holding_is_on_a_known_host,
    exclusive_devices_have_one_owner,
    parked_owners_claim_no_device,
    a_whole_host_start_is_alone,
    nobody_holds_a_phase_of_none,
)
"""Checked after every write, in production too. Limits are not among them: a measured residue and a kept
uncertain charge may exceed them (M1), and admission is what refuses then."""


def checked(ledger: Ledger) -> Ledger:
    """`ledger`, if it can be one. Raises: InvariantBroken naming the claim that does not hold."""
    for invariant in INVARIANTS:
        check(invariant(ledger), (invariant.__doc__ or invariant.__name__).splitlines()[0])
    return ledger


# --- limits -------------------------------------------------------------------------------------------


def sound(policy: HostPolicy) -> None:
    """Raise InvariantBroken unless the limits of a host can be limits (memory 1, 2)."""
    kinds = [limits.kind for limits in policy.domains.values()]
    check(bool(kinds), "a host has at least one memory domain")
    pools = sum(kind is not DomainKind.DEVICE for kind in kinds)
    check(pools == 1, "a host has exactly one pool of RAM")
    check(DomainKind.UNIFIED not in kinds or len(kinds) == 1, "a unified pool has no card beside it")
    for limits in policy.domains.values():
        figures = (limits.capacity_bytes, limits.managed_bytes, limits.reserve_bytes, limits.parked_bytes)
        check(all(0 <= figure <= BYTES_MAX for figure in (*figures, limits.host_kv_bytes)), "limits are 64-bit sizes")
        check(limits.parked_bytes <= limits.managed_bytes, "the parked limit is a part of the managed limit")
        check(limits.host_kv_bytes <= limits.managed_bytes, "the host KV limit is a part of the managed limit")
        check(limits.kind is not DomainKind.DEVICE or limits.device is not None, "a card's domain names its device")
        check(limits.kind is not DomainKind.DISTINCT or limits.device is None, "host RAM beside cards is no device")
