"""Placement: in which order hosts and cards are tried, and where a start goes.

Seats are the allowed hosts that can hold the deployment at all; who is allowed and eligible was decided
before. Source: memory 11, 13; lifecycle 23, invariant 16.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Domain, HostId, Millis, Phase
from capyctl.ledger.admission import judge
from capyctl.ledger.asks import UNSEEN, Ask, Proposal, Seen, ask_start
from capyctl.ledger.cards import cards_of, on_cards, sets
from capyctl.ledger.charges import Ledger
from capyctl.ledger.forecast import Hold, gate, loads
from capyctl.ledger.shortfall import Names, Shortfall
from capyctl.ledger.types import Plan, card_index


class Strategy(enum.Enum):
    """How instances of one deployment are laid over its hosts."""

    SPREAD = "spread"  # fewest instances of it, then most headroom
    PACK = "pack"  # most instances of it, then least headroom


@attrs.frozen(kw_only=True)
class Seat:
    """One allowed host of a deployment.

    `cards`: card domains that it may use there instead of those that the plan names; empty when devices were named,
    or where there is no choice. `last_cards` and `previous` are of the stopped instance's last run.
    """

    host: HostId
    plan: Plan
    instances: int = 0  # of this deployment, on this host, this one left out
    cards: tuple[Domain, ...] = ()
    previous: bool = False
    last_cards: tuple[Domain, ...] = ()


@attrs.frozen(kw_only=True)
class Nowhere:
    """It fits on no host: what each lacks, in the order in which they were tried."""

    shortfalls: tuple[Shortfall, ...]

    def __attrs_post_init__(self) -> None:
        check(bool(self.shortfalls), "at least one host was tried")

    @property
    def code(self) -> str:
        """The code of the first host that waiting or evicting could help, else of the first."""
        return next((short for short in self.shortfalls if not short.never), self.shortfalls[0]).code

    @property
    def never(self) -> bool:
        """Whether waiting can change nothing on any of the hosts."""
        return all(short.never for short in self.shortfalls)

    def message(self, names: Names | None = None) -> str:
        """One line for people, every host in it."""
        return " ".join(short.message(names) for short in self.shortfalls)

    def details(self) -> dict[str, Any]:  # Any: plain JSON values of several types
        """The figures per host for `--json`."""
        return {"hosts": [{"code": short.code, **short.details()} for short in self.shortfalls]}


@attrs.frozen
class Spot:
    """One way to start on one host: the cards that it would take, and what would be left there then.

    `cards` empty: as the plan says. `left_bytes`: the least that is left on any of its cards, or of RAM where it has
    none; negative if it does not fit. `fits`: the sums allow it, on every domain.
    """

    seat: Seat
    cards: tuple[Domain, ...]
    left_bytes: int
    fits: bool


@attrs.frozen
class Tries(Sequence[Ask]):
    """The starts to try, best first. Each is made when it is asked for: most never are."""

    ledger: Ledger
    owner: str
    spots: tuple[Spot, ...]

    @overload
    def __getitem__(self, index: int) -> Ask: ...

    @overload
    def __getitem__(self, index: slice) -> Tries: ...

    def __getitem__(self, index: int | slice) -> Ask | Tries:
        if isinstance(index, slice):
            return attrs.evolve(self, spots=self.spots[index])
        spot = self.spots[index]
        seat = spot.seat
        plan = on_cards(seat.plan, self.ledger.hosts[seat.host], spot.cards) if spot.cards else seat.plan
        return ask_start(owner=self.owner, host=seat.host, plan=plan)

    def __len__(self) -> int:
        return len(self.spots)


def candidates(
    ledger: Ledger,
    owner: str,
    seats: Sequence[Seat],
    *,
    strategy: Strategy = Strategy.SPREAD,
    max_per_host: int | None = None,
) -> Tries:
    """The starts to try, best first: hosts by strategy, and on each host its cards.

    Seats at `max_per_host`, hosts without limits, and hosts that have too few equal cards are left out. Nothing is
    judged here but by sums that are known.
    """
    ranked = []
    for seat in seats:
        if has_a_place(seat, max_per_host) and seat.host in ledger.hosts:
            spots = _spots(ledger, seat)
            if spots:
                ranked.append((_rank(seat, max(spot.left_bytes for spot in spots), strategy), spots))
    ranked.sort(key=operator.itemgetter(0))  # host ids differ, so the spots are never compared
    return Tries(ledger, owner, tuple(spot for _, spots in ranked for spot in spots))


def has_a_place(seat: Seat, max_per_host: int | None) -> bool:
    """the host has fewer instances of the deployment than it may"""
    return max_per_host is None or seat.instances < max_per_host


def place(
    ledger: Ledger, asks: Sequence[Ask], seen: Mapping[HostId, Seen], now_ms: Millis
) -> Proposal | Hold | Nowhere:
    """Take the first host on which the start fits, or will once the starts in flight there are READY.

    On one host a card that fits now is taken before one that will. `asks` are of `candidates`; not empty.
    Returns: a proposal to arm, a hold to wait in, or what every host lacks.
    """
    refused: dict[int, Shortfall | None] = {}
    held: Hold | None = None
    for number, host in enumerate(_hosts(asks)):
        if held is not None and held.ask.host != host:
            return held
        if is_full(asks, number) and not any(loads(one) for _, one in ledger.on(host)):
            refused[number] = None  # what it lacks is worked out only if nobody else has room
            continue
        answer = gate(ledger, asks[number], seen.get(host, UNSEEN), now_ms)
        if isinstance(answer, Proposal):
            return answer
        if isinstance(answer, Hold):
            held = held or answer
        else:
            refused[number] = answer
    if held is not None:
        return held
    return Nowhere(
        shortfalls=tuple(short or _short(ledger, asks[number], seen, now_ms) for number, short in refused.items())
    )


def is_full(asks: Sequence[Ask], number: int) -> bool:
    """the sums that are known do not let it start there"""
    return isinstance(asks, Tries) and not asks.spots[number].fits


def hosts_of(asks: Sequence[Ask]) -> tuple[HostId, ...]:
    """The hosts of these starts, in their order; those of `candidates` need not be made for it."""
    return tuple(dict.fromkeys(_hosts(asks)))


def _hosts(asks: Sequence[Ask]) -> Iterator[HostId]:
    return (spot.seat.host for spot in asks.spots) if isinstance(asks, Tries) else (ask.host for ask in asks)


def _short(ledger: Ledger, ask: Ask, seen: Mapping[HostId, Seen], now_ms: Millis) -> Shortfall:
    short = judge(ledger, ask, seen.get(ask.host, UNSEEN), now_ms)
    check(short is not None, "a start for which the sums leave no room is refused")
    assert short is not None  # for the type checker
    return short


# --- order ----------------------------------------------------------------------------------------


def _rank(seat: Seat, left_bytes: int, strategy: Strategy) -> tuple[int, int, int, str]:
    """Where a stopped instance ran, then the strategy's two rules, then the host's id."""
    counted = (seat.instances, -left_bytes) if strategy is Strategy.SPREAD else (-seat.instances, left_bytes)
    return (0 if seat.previous else 1, *counted, seat.host)


def _spots(ledger: Ledger, seat: Seat) -> list[Spot]:
    """The ways to start on a host: on its last cards, then where most is left, then on the lowest numbers."""
    policy, charged = ledger.hosts[seat.host], ledger.shelf(seat.host).charged
    named = cards_of(seat.plan, policy)
    cold, ready = seat.plan.at(Phase.COLD).bytes, seat.plan.at(Phase.READY).bytes
    needs = {domain: max(cold.get(domain, 0), ready.get(domain, 0)) for domain in (*cold, *ready)}
    known = [domain for domain in needs if domain in policy.domains]
    room = {
        domain: policy.domains[domain].most_bytes - charged.get(domain, 0)
        for domain in dict.fromkeys((*known, *seat.cards))
    }
    beside = [room[domain] - needs[domain] for domain in known if domain not in named]
    fits = len(known) == len(needs) and all(left >= 0 for left in beside)
    if not named:
        return [Spot(seat, (), min(beside, default=0), fits)]
    if not seat.cards:
        left = min(room[card] - needs.get(card, 0) for card in named)
        return [Spot(seat, (), left, fits and left >= 0)]
    shares = [needs.get(card, 0) for card in named]
    preferred = sorted(seat.cards, key=lambda card: (-room[card], card_index(card)))
    spots = []
    for cards in sets(policy, preferred, len(named)):
        left = min(room[card] - share for card, share in zip(cards, shares, strict=True))
        spots.append(Spot(seat, cards, left, fits and left >= 0))
    return sorted(
        spots, key=lambda spot: (spot.cards != seat.last_cards, -spot.left_bytes, [*map(card_index, spot.cards)])
    )
