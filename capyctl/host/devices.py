"""What this machine's memory holds now: samples of RAM and of every card, and whose processes hold it.

A driver that hangs holds one thread and nothing else: its last sample ages, after 5 s its cards are
unobserved, nothing is admitted there, and every charge stays. A card is known by its UUID, whatever index the
driver gives it after another one fell off the bus.
Source: memory 3.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.errors import Refusal
from capyctl.fsm.types import Bytes, Domain, Millis, ProcessIdentity
from capyctl.host.cards import Card, CardReader, Nvml
from capyctl.host.identity import PROC, Presence, presence
from capyctl.host.memory import CGROUPS, Seen, available_beside, read_memory
from capyctl.host.policy import SYSTEM, UNIFIED, places
from capyctl.host.residents import Residents
from capyctl.ledger.types import DomainKind, HostPolicy, Observation

NEVER_MS = Millis(0)
DISCOVER_S = 30.0  # without its persistence daemon the driver wakes every card first, for seconds each
CARD_READ_S = 3.0  # one look
CARD_EVERY_S = 1.0
CARD_STALE_MS = 5_000  # an older sample leaves its card unobserved
LATELY_MS = 50  # the check right before a wake takes a sample that began no longer ago
CARD_SOURCE = "nvml"
SAMPLE_LIMITER = trio.CapacityLimiter(1)  # /proc and control groups

Owners = Mapping[str, tuple[ProcessIdentity, ...]]
"""Owner key of the ledger -> the recorded processes of its current incarnation."""

_log = logging.getLogger("capyctl.host.devices")


@attrs.frozen(kw_only=True)
class Held:
    """What some processes hold, bytes per domain, by looks none of which began before `sampled_at_ms`.

    A domain on which nobody can say what they hold is left out: its card was not read, or lists none of them.
    """

    bytes: Mapping[Domain, Bytes]
    sampled_at_ms: Millis


@attrs.frozen
class _CardSample:
    cards: tuple[Card, ...] = ()
    asked_at_ms: Millis = NEVER_MS

    @property
    def stale(self) -> bool:
        return now_ms() - self.asked_at_ms > CARD_STALE_MS


@attrs.frozen(kw_only=True)
class _Sample:
    """What was seen for whom, when somebody asked for it, by looks none of which began before `looked_at_ms`."""

    domains: Mapping[Domain, Observation]
    owners: Owners
    looked_at_ms: Millis


@attrs.define(eq=False)
class Observer:
    """Samples the machine. `discover` first, then `adopt` its limits; `run` keeps the cards fresh."""

    reader: CardReader = attrs.field(factory=Nvml)
    proc: Path = PROC
    cgroups: Path = CGROUPS
    _cards: _CardSample = attrs.field(factory=_CardSample)
    _places: Mapping[str, Domain] = attrs.field(factory=dict)  # a card's UUID, or `gpuN` without one -> its domain
    _ram: Domain = UNIFIED
    _silent: Mapping[Domain, str] = attrs.field(factory=dict)  # what cannot be read now, and why
    _last: _Sample | None = None
    _residents: Residents = attrs.field(init=False)
    _one_call: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))

    def __attrs_post_init__(self) -> None:
        self._residents = Residents(proc=self.proc)

    async def discover(self) -> tuple[Seen, tuple[Card, ...]]:
        """The machine's memory and cards, for `host_policy`. Raises: Refusal `topology_unknown`."""
        memory = await trio.to_thread.run_sync(read_memory, self.proc, self.cgroups, limiter=SAMPLE_LIMITER)
        asked_at = now_ms()
        with trio.move_on_after(DISCOVER_S):
            cards = await trio.to_thread.run_sync(self.reader.read, limiter=self._one_call, abandon_on_cancel=True)
            self._cards = _CardSample(cards, asked_at)
            self._places = {_identity(card): domain for domain, card in places(cards).items()}
            self._ram = SYSTEM if self._places else UNIFIED
            return memory, cards
        raise Refusal(
            "topology_unknown",
            f"the NVIDIA driver did not answer within {DISCOVER_S:.0f} s; `nvidia-smi` shows whether it hangs",
        )

    def adopt(self, policy: HostPolicy) -> None:
        """Take over which domain each card is, from the limits that this host publishes."""
        self._places = {
            limits.uuid or str(limits.device): domain
            for domain, limits in policy.domains.items()
            if limits.device is not None
        }
        self._ram = next(name for name, limits in policy.domains.items() if limits.kind is not DomainKind.DEVICE)

    async def run(self) -> None:
        """Look at the cards each second, for ever; a machine without any has nothing to look at."""
        while self._places:
            await self.look()
            await trio.sleep(CARD_EVERY_S)

    async def look(self) -> None:
        """Read the cards now. At most 3 s: then the last sample ages, and after 5 s its cards are unobserved."""
        if not self._places:
            return
        asked_at = now_ms()
        why = f"the driver did not answer within {CARD_READ_S:.0f} s"
        with trio.move_on_after(CARD_READ_S):
            try:
                cards = await trio.to_thread.run_sync(self.reader.read, limiter=self._one_call, abandon_on_cancel=True)
            except Refusal as refused:
                why = refused.message
            else:
                self._cards = _CardSample(cards, asked_at)
                self._tell({domain: self._fault(identity, domain) for identity, domain in self._places.items()})
                return
        self._tell(dict.fromkeys(self._places.values(), why))

    def _fault(self, identity: str, domain: Domain) -> str:
        """Why the card that should be there has no figures in the present sample; empty when it has."""
        known = next((card for card in self._cards.cards if _identity(card) == identity), None)
        if known is not None:
            return known.fault
        nameless = (card.fault for card in self._cards.cards if card.fault and f"gpu{card.index}" == domain)
        return next(nameless, "the driver does not list it any more")  # what is lost often cannot say its UUID either

    def _tell(self, found: Mapping[Domain, str]) -> None:
        """Log what changed about cards that cannot be read."""
        silent = {domain: why for domain, why in found.items() if why}
        for domain, why in silent.items():
            if self._silent.get(domain) != why:
                _log.warning("card.unobserved", extra={"fields": {"domain": domain, "why": why}})
        for domain in self._silent.keys() - silent.keys():
            _log.info("card.observed", extra={"fields": {"domain": domain}})
        self._silent = silent

    # --- samples -------------------------------------------------------------------------------------------

    async def sample(self, owners: Owners, *, asked: bool = False) -> Mapping[Domain, Observation]:
        """Every domain now, with what each owner's processes hold. An unobserved card is left out.

        `asked`: for somebody who is about to act on it, so that `sample_lately` may give it once more.
        """
        owners, looked_at_ms = dict(owners), now_ms()
        if self._places:
            looked_at_ms = min(looked_at_ms, self._cards.asked_at_ms)
        domains = await trio.to_thread.run_sync(self._sample, owners, limiter=SAMPLE_LIMITER)
        self._last = _Sample(domains=domains, owners=owners, looked_at_ms=looked_at_ms) if asked else None
        return domains

    async def sample_anew(self, owners: Owners) -> Mapping[Domain, Observation]:
        """As `sample`, after a look at the cards of its own: for the check right before a launch."""
        await self.look()
        return await self.sample(owners)

    async def sample_lately(self, owners: Owners) -> Mapping[Domain, Observation]:
        """The last sample of them, if it was asked for and all of it is at most `LATELY_MS` old; else as `sample_anew`.

        For the check right before a wake: its switch has asked for one a moment before, and to walk every engine's
        page tables again at once would find the same. A sample that nobody asked for may be of before there was
        anything to decide.
        """
        last = self._last
        if last is not None and last.owners == owners and last.looked_at_ms >= now_ms() - LATELY_MS:
            return last.domains
        return await self.sample_anew(owners)

    async def held(self, processes: tuple[ProcessIdentity, ...], within: Mapping[Domain, Bytes] | None = None) -> Held:
        """What these processes hold of each domain, by a look at the cards that begins now.

        The evidence of a park (P-RESID) and the measurement of a start's peak. `within`: of RAM it is enough to
        know that they hold no more than that.
        """
        began = now_ms()
        await self.look()
        return await trio.to_thread.run_sync(self._held, processes, began, within or {}, limiter=SAMPLE_LIMITER)

    @property
    def ram(self) -> Domain:
        """The domain that the machine's RAM is."""
        return self._ram

    @property
    def shared(self) -> bool:
        """Whether a GPU without memory of its own uses the machine's RAM, which no process shows then."""
        return self._ram in self._places.values()

    async def available_beside(self, processes: tuple[ProcessIdentity, ...]) -> Bytes:
        """What the RAM would have available if nobody but these processes held any of it, by the last look at a GPU.

        The kernel says what others hold of it, the driver what they hold through a GPU without memory of its own.
        """
        return await trio.to_thread.run_sync(self._available_beside, processes, limiter=SAMPLE_LIMITER)

    def _available_beside(self, processes: tuple[ProcessIdentity, ...]) -> Bytes:
        mine = {process.pid for process in processes}
        rows = [row for domain, card in self._observed() if domain == self._ram for row in card.held or ()]
        others = sum(amount or 0 for pid, amount in rows if pid not in mine)
        return Bytes(available_beside(self._residents.held(processes), self.proc) + others)

    def _sample(self, owners: dict[str, tuple[ProcessIdentity, ...]]) -> dict[Domain, Observation]:
        seen_at = now_ms()
        memory = read_memory(self.proc, self.cgroups)
        held = {owner: self._residents.held(processes) for owner, processes in owners.items()}
        domains: dict[Domain, Observation] = {}
        for domain, card in self._observed():
            on_card = {owner: self._on_card(card, processes) or Bytes(0) for owner, processes in owners.items()}
            if domain == self._ram:  # one pool: what a process holds of it is both
                held = {owner: Bytes(held[owner] + on_card[owner]) for owner in owners}
            elif card.total_bytes is not None:
                domains[domain] = Observation(
                    capacity_bytes=card.total_bytes,
                    available_bytes=card.free_bytes or Bytes(0),
                    seen_at_ms=self._cards.asked_at_ms,
                    residents=on_card,
                    source=CARD_SOURCE,
                )
        domains[self._ram] = Observation(
            capacity_bytes=memory.capacity_bytes,
            available_bytes=memory.available_bytes,
            seen_at_ms=seen_at,
            residents=held,
            source=memory.source,
        )
        return domains

    def _held(self, processes: tuple[ProcessIdentity, ...], since_ms: Millis, within: Mapping[Domain, Bytes]) -> Held:
        sampled_at = now_ms()
        held: dict[Domain, Bytes] = {}
        if not self.shared:
            held[self._ram] = self._of_ram(processes, within.get(self._ram))
        if self._cards.asked_at_ms >= since_ms:
            for domain, card in self._observed():
                amount = self._on_card(card, processes)
                if amount is None:
                    continue
                if domain == self._ram:  # one pool: what a process holds of it is both
                    enough = within.get(domain)
                    left = None if enough is None else Bytes(max(0, enough - amount))
                    amount = Bytes(amount + self._of_ram(processes, left))
                held[domain] = amount
                sampled_at = min(sampled_at, self._cards.asked_at_ms)
        return Held(bytes=held, sampled_at_ms=sampled_at)

    def _of_ram(self, processes: tuple[ProcessIdentity, ...], enough: Bytes | None) -> Bytes:
        if enough is None:
            return self._residents.held(processes)
        return self._residents.held_at_most(processes, enough)

    def _observed(self) -> list[tuple[Domain, Card]]:
        """The cards that are known and answered lately, each with its domain."""
        if self._cards.stale:
            return []
        known = [(self._places.get(_identity(card)), card) for card in self._cards.cards if not card.fault]
        return [(domain, card) for domain, card in known if domain is not None]

    def _on_card(self, card: Card, processes: tuple[ProcessIdentity, ...]) -> Bytes | None:
        """Bytes of a card that these processes hold; a pid counts only while it is the recorded process.

        None when the driver lists none of them, or not what one of them holds: that is no figure, and not 0.
        """
        listed = dict(card.held or ())
        alive = [p.pid for p in processes if p.pid in listed and presence(p, self.proc) is Presence.ALIVE]
        amounts = [listed[pid] for pid in alive]
        known = [amount for amount in amounts if amount is not None]
        return Bytes(sum(known)) if amounts and len(known) == len(amounts) else None


def _identity(card: Card) -> str:
    return card.uuid or f"gpu{card.index}"
