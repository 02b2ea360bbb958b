"""Crowd: who might give way for somebody, host by host, and in which order they are asked.

A plan looks at few hosts of a large fleet. So who is on a host is worked out as a plan looks there, and only a turn
before which nobody there is asked is told of every host: that is enough to look at the hosts in the right order.
Source: memory 12; lifecycle 12.3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import itemgetter

import attrs

from capyctl.fsm.types import HostId, Millis, Phase
from capyctl.ledger.charges import Holding, Ledger

SETTLED = frozenset({Phase.READY, Phase.PARKING, Phase.PARKED})
"""Charges of instances that may be released. A park that was refused without proof leaves its peak charged
while the model serves on; one that is still in progress is no candidate, which its owner knows."""

Turn = tuple[int, Millis, str]
"""Whose turn to be asked comes first: parked or not, when last used, who."""


@attrs.frozen(kw_only=True)
class Candidate:
    """An instance that might give way, and what policy says about it. What it holds is in the ledger.

    `parks`: its residency and its engine allow a park. `last_used_at_ms`: when a request last used it.
    `oldest_waiter_at_ms`: since when a request waits for its deployment, None when none does.
    """

    owner: str
    last_used_at_ms: Millis
    keeps_another_ready: bool = False
    parks: bool = False
    warm: bool = False
    explicit: bool = False
    oldest_waiter_at_ms: Millis | None = None


def may_give_way(candidate: Candidate, since_ms: Millis) -> bool:
    """it is neither warm nor explicit, and nobody has waited for its deployment longer than for the target"""
    return (
        not candidate.warm
        and not candidate.explicit
        and (candidate.oldest_waiter_at_ms is None or candidate.oldest_waiter_at_ms >= since_ms)
    )


def can_be_released(held: Holding | None, host: HostId) -> bool:
    """it serves or is parked on the target's host, and its state is known"""
    return held is not None and held.host == host and not held.uncertain and held.phase in SETTLED


def turn(owner: str, last_used_at_ms: Millis, *, parked: bool, keeps_another_ready: bool) -> Turn:
    """Who is asked first: parked instances, then deployments that keep another READY one, then least recently used."""
    return (0 if parked else 1 if keeps_another_ready else 2, last_used_at_ms, owner)


def order(candidate: Candidate, held: Holding) -> Turn:
    """The turn of a candidate that holds this."""
    return turn(
        candidate.owner,
        candidate.last_used_at_ms,
        parked=held.phase is Phase.PARKED,
        keeps_another_ready=candidate.keeps_another_ready,
    )


@attrs.frozen
class Crowd:
    """Who might give way for one target. `on`: everybody on a host, in any order.

    `first`: a turn before which nobody there is asked, None where nobody is. It may be too early, never too late.
    """

    on: Callable[[HostId], Sequence[Candidate]]
    first: Callable[[HostId], Turn | None]
    gone: frozenset[str] = frozenset()  # owners that are out of it

    @classmethod
    def of(cls, ledger: Ledger, candidates: Sequence[Candidate]) -> Crowd:
        """These candidates. One that holds nothing is nowhere."""
        here: dict[HostId, list[Candidate]] = {}
        first: dict[HostId, Turn] = {}
        for one in candidates:
            held = ledger.holding(one.owner)
            if held is not None:
                here.setdefault(held.host, []).append(one)
                first[held.host] = min(first.get(held.host, _LAST), order(one, held))
        return cls(lambda host: here.get(host, ()), first.get)

    def but(self, owners: Collection[str]) -> Crowd:
        """The same crowd without these."""
        return attrs.evolve(self, gone=self.gone | frozenset(owners))

    def pool(self, ledger: Ledger, host: HostId, since_ms: Millis) -> list[Candidate]:
        """Who may be asked on a host, in the order in which they are asked."""
        asked = [(order(one, held), one) for one, held in self._held_on(ledger, host) if may_give_way(one, since_ms)]
        return [one for _, one in sorted(asked, key=itemgetter(0))]

    def staying(self, ledger: Ledger, host: HostId, since_ms: Millis) -> list[Candidate]:
        """Who could be released on a host and is not asked, by policy."""
        return [one for one, _ in self._held_on(ledger, host) if not may_give_way(one, since_ms)]

    def _held_on(self, ledger: Ledger, host: HostId) -> Iterator[tuple[Candidate, Holding]]:
        """Those on a host that can be released, and what they hold."""
        for one in self.on(host):
            held = ledger.holding(one.owner)
            if held is not None and can_be_released(held, host) and one.owner not in self.gone:
                yield one, held


_LAST: Turn = (3, Millis(0), "")
