"""Memory domains of this machine: what it has, what it may hold, what it holds now.

Without a card that has memory of its own there is one domain, `unified`, the machine's RAM. With such
cards there are `system` and one `gpuN` each. Topology is observed, never guessed from a name.
Source: memory 1-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, Device, Domain, HostId, Millis, ProcessIdentity
from capyctl.host.cards import Card, CardReader, Nvml
from capyctl.host.identity import PROC, Presence, presence
from capyctl.host.memory import CGROUPS, Seen, read_memory, resident_bytes
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy, Observation
from capyctl.units import Auto, Limit, Percent, Size, format_size

UNIFIED, SYSTEM = Domain("unified"), Domain("system")
GIB = 1 << 30
PARKED_MAX = 4
NEVER_MS = Millis(0)
CARD_EVERY_S = 1.0
CARD_STALE_MS = 5_000  # an older sample leaves its card unobserved
SAMPLE_LIMITER = trio.CapacityLimiter(1)  # /proc and control groups
CARD_LIMITER = trio.CapacityLimiter(1)  # NVML; a call that hangs holds it, and the cards become unobserved

Owners = Mapping[str, tuple[ProcessIdentity, ...]]
"""Owner key of the ledger -> the recorded processes of its current incarnation."""


# --- limits: pure ------------------------------------------------------------------------------------


def system_policy(
    kind: DomainKind,
    capacity: int,
    *,
    managed_limit: Limit = Auto.AUTO,
    free_reserve: Limit = Auto.AUTO,
    parked_limit: Limit = Auto.AUTO,
) -> DomainPolicy:
    """Limits of the machine's RAM on a standalone role: 50 % managed, 20 % reserve, 25 % parked, 10 % host KV.

    Percentages are of `capacity`, bytes. Automatic sub-limits are lowered to a smaller managed limit.
    Raises: Refusal `invalid_config` naming both numbers when they do not fit together.
    Source: memory 2.1, 2.2.
    """
    managed = _bytes(managed_limit, capacity, 50)
    reserve = _bytes(free_reserve, capacity, 20)
    parked = _bytes(parked_limit, capacity, 25)
    if managed <= 0:
        raise Refusal("invalid_config", "memory.system.managed_limit must be more than 0")
    if managed + reserve > capacity:
        raise Refusal(
            "invalid_config",
            f"managed_limit {format_size(managed)} and free_reserve {format_size(reserve)} do not fit "
            f"into the {format_size(capacity)} of this machine together",
        )
    if parked_limit is Auto.AUTO:
        parked = min(parked, managed)
    elif parked > managed:
        raise Refusal(
            "invalid_config", f"parked_limit {format_size(parked)} is above managed_limit {format_size(managed)}"
        )
    return DomainPolicy(
        kind=kind,
        capacity_bytes=Bytes(capacity),
        managed_bytes=Bytes(managed),
        reserve_bytes=Bytes(reserve),
        parked_bytes=Bytes(parked),
        host_kv_bytes=Bytes(min(capacity * 10 // 100, managed)),
    )


def card_policy(card: Card, max_parked: int = PARKED_MAX) -> DomainPolicy:
    """Limits of one discrete card: derived, not settable on standalone."""
    total = card.total_bytes or 0
    reserve = max(GIB, total * 8 // 100)
    return DomainPolicy(
        kind=DomainKind.DEVICE,
        capacity_bytes=Bytes(total),
        managed_bytes=Bytes(max(0, total - reserve)),
        reserve_bytes=Bytes(reserve),
        parked_bytes=Bytes(min(2 * GIB * max_parked, total // 4, max(0, total - reserve))),
        device=Device(f"gpu{card.index}"),
    )


def host_policy(
    host: HostId,
    name: str,
    memory: Seen,
    cards: tuple[Card, ...],
    *,
    managed_limit: Limit = Auto.AUTO,
    free_reserve: Limit = Auto.AUTO,
    parked_limit: Limit = Auto.AUTO,
    max_parked: int = PARKED_MAX,
) -> HostPolicy:
    """What a standalone machine may hold, from what it has and what its document says.

    Raises: Refusal `invalid_config`, or `unsupported_gpu_topology` for integrated beside discrete cards.
    """
    discrete = [card for card in cards if card.total_bytes is not None]
    if discrete and len(discrete) != len(cards):
        raise Refusal("unsupported_gpu_topology", "this machine mixes integrated and discrete cards")
    kind = DomainKind.DISTINCT if discrete else DomainKind.UNIFIED
    domains = {
        SYSTEM if discrete else UNIFIED: system_policy(
            kind,
            memory.capacity_bytes,
            managed_limit=managed_limit,
            free_reserve=free_reserve,
            parked_limit=parked_limit,
        )
    }
    domains |= {Domain(f"gpu{card.index}"): card_policy(card, max_parked) for card in discrete}
    return HostPolicy(host=host, name=name, domains=domains, max_parked=max_parked)


def _bytes(limit: Limit, capacity: int, default_percent: int) -> int:
    match limit:
        case Size(bytes=size):
            return size
        case Percent() as share:
            return share.of(capacity)
        case _:
            return Percent(default_percent).of(capacity)


# --- observation ----------------------------------------------------------------------------------------


@attrs.frozen
class _CardSample:
    cards: tuple[Card, ...] = ()
    seen_at_ms: Millis = NEVER_MS


@attrs.define
class Observer:
    """Samples the machine. `run` keeps the cards fresh; `sample` may be called at any time."""

    reader: CardReader = attrs.field(factory=Nvml)
    proc: Path = PROC
    cgroups: Path = CGROUPS
    _cards: _CardSample = attrs.field(factory=_CardSample)
    _discrete: frozenset[int] = frozenset()

    async def discover(self) -> tuple[Seen, tuple[Card, ...]]:
        """The machine's memory and cards, for `host_policy`. Raises: Refusal `topology_unknown`."""
        memory = await trio.to_thread.run_sync(read_memory, self.proc, self.cgroups, limiter=SAMPLE_LIMITER)
        cards = await trio.to_thread.run_sync(self.reader.read, limiter=CARD_LIMITER, abandon_on_cancel=True)
        self._cards = _CardSample(cards, now_ms())
        self._discrete = frozenset(card.index for card in cards if card.total_bytes is not None)
        return memory, cards

    async def run(self) -> None:
        """Sample the cards each second, for ever; a machine without any has nothing to sample."""
        while self._discrete:
            with trio.move_on_after(CARD_STALE_MS / 1000):
                try:
                    cards = await trio.to_thread.run_sync(
                        self.reader.read, limiter=CARD_LIMITER, abandon_on_cancel=True
                    )
                    self._cards = _CardSample(cards, now_ms())
                except Refusal:
                    pass  # the last sample ages, and after 5 s its cards are unobserved: that is the report
            await trio.sleep(CARD_EVERY_S)

    async def sample(self, owners: Owners) -> dict[Domain, Observation]:
        """Every domain now, with what each owner's processes hold. An unobserved card is left out."""
        return await trio.to_thread.run_sync(self._sample, dict(owners), limiter=SAMPLE_LIMITER)

    async def resident(self, processes: tuple[ProcessIdentity, ...]) -> Bytes:
        """Anonymous and shared bytes of these processes."""
        return await trio.to_thread.run_sync(resident_bytes, processes, self.proc, limiter=SAMPLE_LIMITER)

    async def available(self) -> dict[Domain, Bytes]:
        """What is free in each observed domain, for the check right before a launch."""
        return {name: seen.available_bytes for name, seen in (await self.sample({})).items()}

    @property
    def ram(self) -> Domain:
        """The domain that the machine's RAM is."""
        return SYSTEM if self._discrete else UNIFIED

    def _sample(self, owners: dict[str, tuple[ProcessIdentity, ...]]) -> dict[Domain, Observation]:
        seen_at = now_ms()
        memory = read_memory(self.proc, self.cgroups)
        held = {owner: resident_bytes(processes, self.proc) for owner, processes in owners.items()}
        domains = {
            self.ram: Observation(
                capacity_bytes=memory.capacity_bytes,
                available_bytes=memory.available_bytes,
                seen_at_ms=seen_at,
                residents=held,
            )
        }
        if seen_at - self._cards.seen_at_ms <= CARD_STALE_MS:
            for card in self._cards.cards:
                if card.index in self._discrete and card.total_bytes is not None:
                    domains[Domain(f"gpu{card.index}")] = Observation(
                        capacity_bytes=card.total_bytes,
                        available_bytes=card.free_bytes or Bytes(0),
                        seen_at_ms=self._cards.seen_at_ms,
                        residents=_on_card(card, owners),
                    )
        return domains


def _on_card(card: Card, owners: Owners) -> dict[str, Bytes]:
    """Bytes of each owner on a card; a pid counts only while it is the recorded process."""
    held = dict(card.held)
    return {
        owner: Bytes(sum(held.get(p.pid, 0) for p in processes if presence(p) is Presence.ALIVE))
        for owner, processes in owners.items()
    }
