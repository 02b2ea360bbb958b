"""Forecast: what would fit, if these owners were gone, settled or charged. It never changes the ledger.

A forecast assumes releases, so nothing that it says may be armed: it answers with a shortfall or with None,
never with a proposal. Memory that assumed releases give back is what the owners' sampled processes hold.
Source: memory 10 (forecast), 13; lifecycle 12.3, rules 6 and 13.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.fsm.types import Bytes, Generation, HostId, Millis, Phase
from capyctl.ledger.admission import judge, propose
from capyctl.ledger.asks import UNSEEN, Ask, Proposal, Seen, ask_step, charge_of
from capyctl.ledger.charges import Holding, Ledger
from capyctl.ledger.shortfall import Names, Shortfall
from capyctl.ledger.types import Allocation, DomainKind, Observation

_NEVER_ARMED = Generation(0)


@attrs.frozen(kw_only=True)
class Forecast:
    """Ledger and observations as they would be. Each method gives another forecast; none judges what it assumes."""

    ledger: Ledger  # assumed: never put it back
    seen: Mapping[HostId, Seen]
    now_ms: Millis

    def gone(self, owner: str, *, hoped: bool = False) -> Forecast:
        """With `owner` released: its resident bytes are free again.

        `hoped`: at least its charge is assumed to come back, for owners whose processes were not attributed. Where a
        card's driver says what it holds, that and no more comes back: a stranger may hold the rest.
        """
        held = self.ledger.held_by(owner)
        return self._with(None, held.host, owner, Allocation(), held if hoped else None)

    def settled(self, owner: str, phase: Phase) -> Forecast:
        """With `owner` in `phase`, its step over: what it holds beyond that charge is free again."""
        held = self.ledger.held_by(owner)
        after = held.at(phase)
        if phase is Phase.PARKED:
            after = attrs.evolve(after, claims=())
        row = attrs.evolve(held, phase=phase, allocation=after, whole_host=False)
        return self._with(row, held.host, owner, after)

    def taking(self, ask: Ask) -> Forecast:
        """With `ask` charged its peak, whether or not it fits."""
        held = self.ledger.holding(ask.owner)
        row = Holding(
            host=ask.host,
            phase=ask.phase,
            generation=held.generation if held else _NEVER_ARMED,
            allocation=charge_of(self.ledger, ask),
            phases=ask.phases,
            whole_host=ask.whole_host,
        )
        return attrs.evolve(self, ledger=self.ledger.assuming(ask.owner, row))

    def judge(self, ask: Ask, *, observed: bool = True) -> Shortfall | None:
        """What `ask` would lack then; None when it would fit. Without `observed` by the ledger alone."""
        return judge(self.ledger, ask, self.seen.get(ask.host, UNSEEN), self.now_ms, observed=observed)

    def step(self, owner: str, phase: Phase, *, leaving: frozenset[str] = frozenset()) -> Ask:
        """The park or wake of an owner as it would be then."""
        return ask_step(self.ledger, owner, phase, leaving=leaving)

    def _with(
        self, row: Holding | None, host: HostId, owner: str, after: Allocation, hoped: Holding | None = None
    ) -> Forecast:
        domains, samples = self.ledger.hosts[host].domains, {}
        for domain, sample in self.seen.get(host, UNSEEN).items():
            told = (
                domain in domains and domains[domain].kind is DomainKind.DEVICE and sample.residents.get(owner, 0) > 0
            )
            least = hoped.on(domain) if hoped is not None and not told else Bytes(0)
            samples[domain] = _returned(sample, owner, after.on(domain), least)
        return attrs.evolve(self, ledger=self.ledger.assuming(owner, row), seen={**self.seen, host: samples})


def _returned(sample: Observation, owner: str, stays: Bytes, hoped: Bytes) -> Observation:
    """The sample after `owner` gave back what it holds beyond `stays`, and at least `hoped`."""
    resident = sample.residents.get(owner, Bytes(0))
    back = max(resident - stays, hoped, 0)
    return attrs.evolve(
        sample,
        available_bytes=Bytes(min(sample.available_bytes + back, sample.capacity_bytes)),
        residents={**sample.residents, owner: Bytes(min(resident, stays))},
    )


# --- the start gate -------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Hold:
    """It does not fit beside the peaks of the starts in flight, and will once `peers` are READY: it waits."""

    ask: Ask
    peers: tuple[str, ...]
    now: Shortfall  # what it lacks now

    def message(self, names: Names | None = None) -> str:
        """One line for people."""
        shown = ", ".join((names or {}).get(peer, peer) for peer in self.peers)
        return f"waits until {shown} is loaded: {self.now.message(names)}"


def gate(ledger: Ledger, ask: Ask, seen: Seen, now_ms: Millis) -> Proposal | Hold | Shortfall:
    """Decide a start or wake beside those in flight on its host: now, once they are READY, or not even then.

    Source: memory 13.
    """
    now = propose(ledger, ask, seen, now_ms)
    if isinstance(now, Proposal):
        return now
    peers = loading(ledger, ask)
    return Hold(ask=ask, peers=peers, now=now) if peers and fits_later(ledger, ask, seen, now_ms) else now


def loading(ledger: Ledger, ask: Ask) -> tuple[str, ...]:
    """Other owners on the ask's host that are on their way to READY."""
    return tuple(sorted(owner for owner, held in ledger.on(ask.host, but=ask.owner) if held.loading))


def fits_later(ledger: Ledger, ask: Ask, seen: Seen, now_ms: Millis) -> bool:
    """it would fit once every start in flight on its host is READY"""
    later = Forecast(ledger=ledger, seen={ask.host: seen}, now_ms=now_ms)
    for peer in loading(ledger, ask):
        later = later.settled(peer, Phase.READY)
    return later.judge(ask) is None
