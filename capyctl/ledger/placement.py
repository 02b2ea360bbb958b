"""Placement: in which order hosts and cards are tried, and where a start goes.

Seats are the allowed hosts that can hold the deployment at all; who is allowed and eligible was decided
before. Source: memory 11, 13; lifecycle 23, invariant 16.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Device, Domain, HostId, Millis
from capyctl.ledger.admission import judge
from capyctl.ledger.asks import UNSEEN, Ask, Proposal, Seen, ask_start
from capyctl.ledger.cards import cards_of, choice, on_cards, sets
from capyctl.ledger.charges import Ledger
from capyctl.ledger.forecast import Hold, gate
from capyctl.ledger.shortfall import Names, Shortfall
from capyctl.ledger.types import Plan, card_index


class Strategy(enum.Enum):
    """How instances of one deployment are laid over its hosts."""

    SPREAD = "spread"  # fewest instances of it, then most headroom
    PACK = "pack"  # most instances of it, then least headroom


class Seat(NamedTuple):  # a tuple: a start that may go anywhere has one for every host that there is
    """One allowed host of a deployment.

    `named`: the devices that the document names; without any, placement chooses the cards. `last`: what the run
    before on this host was launched with, whose cards are kept when it fits; None where it did not run last.
    """

    host: HostId
    plan: Plan
    instances: int = 0  # of this deployment, on this host, this one left out
    named: tuple[Device, ...] = ()
    last: Plan | None = None
    previous: bool = False  # it ran here last


Seated = tuple[tuple[int, int, int, str], int, Seat]
"""A seat in its place: its rank, what `most_left` says of it, itself."""

HOSTS_TOLD = 3  # that one message names; `details` has all of them


@attrs.define(eq=False)
class Lacks(Sequence[Shortfall]):
    """What the steps on each of these hosts lack, worked out as somebody looks: of a large fleet most never are.

    `known`: what was worked out so far, by host.
    """

    hosts: tuple[HostId, ...]
    _work_out: Callable[[HostId], Iterable[Shortfall]]
    known: dict[HostId, tuple[Shortfall, ...]] = attrs.field(factory=dict)

    def on(self, host: HostId) -> tuple[Shortfall, ...]:
        """What they lack on one host, each lack once: sets of cards that share one lack the same."""
        if host not in self.known:
            self.known[host] = each_once(self._work_out(host))
        return self.known[host]

    def __iter__(self) -> Iterator[Shortfall]:
        return itertools.chain.from_iterable(map(self.on, self.hosts))

    @overload
    def __getitem__(self, index: int) -> Shortfall: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Shortfall]: ...

    def __getitem__(self, index: int | slice) -> Shortfall | Sequence[Shortfall]:
        return tuple(self)[index]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self.hosts)


@attrs.frozen(kw_only=True)
class Nowhere:
    """It fits on no host: what each lacks, in the order in which they were tried."""

    shortfalls: Sequence[Shortfall]

    def __attrs_post_init__(self) -> None:
        check(bool(self.shortfalls), "at least one host was tried")

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """The hosts that were tried."""
        if isinstance(self.shortfalls, Lacks):
            return self.shortfalls.hosts
        return tuple(dict.fromkeys(short.host for short in self.shortfalls))

    @property
    def code(self) -> str:
        """The code of the first host that waiting or evicting could help, else of the first."""
        helped = next((short for short in self.shortfalls if not short.never), None)
        return (helped or next(iter(self.shortfalls))).code

    @property
    def never(self) -> bool:
        """Whether waiting can change nothing on any of the hosts."""
        return all(short.never for short in self.shortfalls)

    def message(self, names: Names | None = None) -> str:
        """One line for people: every host in it, or the first of many."""
        told, more = self.hosts[:HOSTS_TOLD], self.hosts[HOSTS_TOLD:]
        text = " ".join(short.message(names) for host in told for short in self._on(host))
        return f"{text} {len(more)} more hosts have no room either." if more else text

    def details(self) -> dict[str, Any]:  # Any: plain JSON values of several types
        """The figures per host for `--json`."""
        return {"hosts": [{"code": short.code, **short.details()} for short in self.shortfalls]}

    def _on(self, host: HostId) -> Iterable[Shortfall]:
        if isinstance(self.shortfalls, Lacks):
            return self.shortfalls.on(host)
        return (short for short in self.shortfalls if short.host == host)


def each_once(shortfalls: Iterable[Shortfall]) -> tuple[Shortfall, ...]:
    """The first of those that say the same of a host."""
    lacks = {(short.host, short.check, short.domain, short.device): short for short in reversed([*shortfalls])}
    return tuple(reversed(lacks.values()))


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
    """The starts to try, best first, made as they are looked at: of a large fleet most never are."""

    ledger: Ledger
    owner: str
    strategy: Strategy
    seated: tuple[Seated, ...]

    def at(self, place: int) -> Tries:
        """Those on one of the seats."""
        return Tries(self.ledger, self.owner, self.strategy, (self.seated[place],))

    def renewed(self, ledger: Ledger) -> Tries:
        """The same starts by a later ledger, whose hosts have the same limits: seats where nothing was written stay.

        `seated` is the very same where nothing was written on any of the hosts.
        """
        check(ledger.hosts is self.ledger.hosts, "other limits may allow other cards")
        was, now, seated = self.ledger.shelves, ledger.shelves, list(self.seated)
        for place, (_, _, seat) in enumerate(self.seated):
            if now.get(seat.host) is not was.get(seat.host):
                seated[place] = _ranked(seat, _known_left(ledger, seat), self.strategy)
        if all(map(operator.is_, seated, self.seated)):
            return attrs.evolve(self, ledger=ledger)
        return attrs.evolve(self, ledger=ledger, seated=tuple(sorted(seated, key=_RANK)))

    @cached_property
    def hosts(self) -> tuple[HostId, ...]:
        """Their hosts, in their order."""
        return tuple(seat.host for _, _, seat in self.seated)

    @cached_property
    def may_fit(self) -> tuple[Seat, ...]:
        """The seats where what is charged leaves room, now or perhaps once everybody there is loaded."""
        shelf = self.ledger.shelf
        return tuple(seat for _, left, seat in self.seated if left >= 0 or left + shelf(seat.host).given_back >= 0)

    def spots(self) -> Iterator[Spot]:
        """The ways to start, host by host."""
        for _, _, seat in self.seated:
            yield from spots_of(self.ledger, seat)

    def ask(self, spot: Spot) -> Ask:
        """The start that takes this way."""
        seat = spot.seat
        plan = on_cards(seat.plan, self.ledger.hosts[seat.host], spot.cards) if spot.cards else seat.plan
        return ask_start(owner=self.owner, host=seat.host, plan=plan)

    def __iter__(self) -> Iterator[Ask]:
        return map(self.ask, self.spots())

    @overload
    def __getitem__(self, index: int) -> Ask: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Ask]: ...

    def __getitem__(self, index: int | slice) -> Ask | Sequence[Ask]:
        return tuple(self)[index]

    def __len__(self) -> int:
        return sum(1 for _ in self.spots())

    def __bool__(self) -> bool:
        return bool(self.seated)


def candidates(
    ledger: Ledger,
    owner: str,
    seats: Iterable[Seat],
    *,
    strategy: Strategy = Strategy.SPREAD,
    max_per_host: int | None = None,
) -> Tries:
    """The starts to try, best first: hosts by strategy, and on each host its cards.

    Seats at `max_per_host`, hosts without limits, and hosts that have too few equal cards are left out. Nothing is
    judged here but by sums that are known.
    """
    seated = []
    for seat in seats:
        if has_a_place(seat, max_per_host) and seat.host in ledger.hosts:
            left = most_left(ledger, seat)
            if left is not None:
                seated.append(_ranked(seat, left, strategy))
    seated.sort(key=_RANK)
    return Tries(ledger, owner, strategy, tuple(seated))


def has_a_place(seat: Seat, max_per_host: int | None) -> bool:
    """the host has fewer instances of the deployment than it may"""
    return max_per_host is None or seat.instances < max_per_host


def place(
    ledger: Ledger, asks: Tries | Sequence[Ask], seen: Mapping[HostId, Seen], now_ms: Millis
) -> Proposal | Hold | Nowhere:
    """Take the first host on which the start fits, or will once the starts in flight there are READY.

    On one host a card that fits now is taken before one that will. `asks` are of `candidates`; not empty.
    Returns: a proposal to arm, a hold to wait in, or what every host lacks.
    """
    for host, here in _worth_a_look(asks):
        holds: list[Hold] = []
        for ask in here:
            answer = gate(ledger, ask, seen.get(host, UNSEEN), now_ms)
            if isinstance(answer, Proposal):
                return answer
            if isinstance(answer, Hold):
                holds.append(answer)
        if holds:
            return holds[0]
    return Nowhere(shortfalls=_lacks(ledger, asks, seen, now_ms))


def _lacks(ledger: Ledger, asks: Tries | Sequence[Ask], seen: Mapping[HostId, Seen], now_ms: Millis) -> Lacks:
    hosts = hosts_of(asks)
    places = {host: place for place, host in enumerate(hosts)}
    samples = {host: seen.get(host, UNSEEN) for host in hosts}  # as they are now, whenever somebody looks

    def work_out(host: HostId) -> Iterator[Shortfall]:
        for ask in asks_at(asks, places[host], host):
            short = judge(ledger, ask, samples[host], now_ms)
            check(short is not None, "what was refused lacks something")
            if short is not None:
                yield short

    return Lacks(hosts, work_out)


def _worth_a_look(asks: Tries | Sequence[Ask]) -> Iterator[tuple[HostId, Iterable[Ask]]]:
    """The starts of each host for which the sums that are known leave room, now or once others there are loaded.

    What the others lack is worked out when somebody asks.
    """
    if isinstance(asks, Tries):
        for seat in asks.may_fit:
            yield seat.host, map(asks.ask, _open(asks.ledger, seat))
    else:
        for host in hosts_of(asks):
            yield host, (ask for ask in asks if ask.host == host)


def hosts_of(asks: Tries | Sequence[Ask]) -> tuple[HostId, ...]:
    """The hosts of these starts, in their order. Those of `candidates` are not made for it."""
    if isinstance(asks, Tries):
        return asks.hosts
    return tuple(dict.fromkeys(ask.host for ask in asks))


def _open(ledger: Ledger, seat: Seat) -> Iterator[Spot]:
    """The ways to start on a host that fit by what is charged, or may once what loads there has given back."""
    later = ledger.shelf(seat.host).given_back
    return (spot for spot in spots_of(ledger, seat) if spot.fits or (later and spot.left_bytes + later >= 0))


def asks_at(asks: Tries | Sequence[Ask], place: int, host: HostId) -> Iterable[Ask]:
    """Those on a host that stands at this place of `hosts_of`."""
    return asks.at(place) if isinstance(asks, Tries) else (ask for ask in asks if ask.host == host)


# --- order ----------------------------------------------------------------------------------------


_RANK = operator.itemgetter(0)


def _ranked(seat: Seat, left_bytes: int, strategy: Strategy) -> Seated:
    """Where a stopped instance ran, then the strategy's two rules, then the host's id."""
    counted = (seat.instances, -left_bytes) if strategy is Strategy.SPREAD else (-seat.instances, left_bytes)
    return ((0 if seat.previous else 1, *counted, seat.host), left_bytes, seat)


def _known_left(ledger: Ledger, seat: Seat) -> int:
    left = most_left(ledger, seat)
    assert left is not None  # it was not when it was seated, and its cards are the same
    return left


def most_left(ledger: Ledger, seat: Seat) -> int | None:
    """What is left on a host by the best way to start there; None where there is none.

    One card of any is the usual wish, and is answered from what the ledger keeps of each host.
    """
    room = ledger.shelf(seat.host).card_room
    if room is not None and not seat.named:
        named = seat.plan.domains & ledger.hosts[seat.host].cards
        if len(named) == 1:
            (card,) = named
            return room - seat.plan.start_bytes.get(card, 0)
    return max((spot.left_bytes for spot in spots_of(ledger, seat)), default=None)


def fewest_on(ledger: Ledger, seat: Seat, left_bytes: int) -> int | None:
    """How many have to give way on a host at least, where the best way to start there lacks so much; None: all are
    too few. `left_bytes`: of `most_left`, negative: on each way some card lacks no less.
    """
    most = ledger.shelf(seat.host).card_held
    if most + left_bytes >= 0 or not cards_of(seat.plan, ledger.hosts[seat.host]):
        return 1
    return -(left_bytes // most) if most else None


def spots_of(ledger: Ledger, seat: Seat) -> list[Spot]:
    """The ways to start on a host: on its last cards, then where most is left, then on the lowest numbers."""
    policy = ledger.hosts[seat.host]
    named, cards = cards_of(seat.plan, policy), choice(seat.plan, policy, seat.named)
    needs = seat.plan.start_bytes
    known = [domain for domain in needs if domain in policy.domains]
    room = {domain: ledger.room(seat.host, domain) for domain in dict.fromkeys((*known, *cards))}
    beside = [room[domain] - needs[domain] for domain in known if domain not in named]
    fits = len(known) == len(needs) and all(left >= 0 for left in beside)
    if not named:
        return [Spot(seat, (), min(beside, default=0), fits)]
    shares = [needs.get(card, 0) for card in named]
    if not cards:
        left = min(room[card] - share for card, share in zip(named, shares, strict=True))
        return [Spot(seat, (), left, fits and left >= 0)]
    spots = []
    for chosen in sets(policy, sorted(cards, key=lambda card: (-room[card], card_index(card))), len(named)):
        left = min(room[card] - share for card, share in zip(chosen, shares, strict=True))
        spots.append(Spot(seat, chosen, left, fits and left >= 0))
    last = cards_of(seat.last, policy) if seat.last is not None else ()
    return sorted(spots, key=lambda spot: (spot.cards != last, -spot.left_bytes, [*map(card_index, spot.cards)]))
