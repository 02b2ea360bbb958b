"""Victims: which instances would have to give way so that a target fits, and how each is released.

The set is the ledger's: the smallest whose release makes the target's peak fit by charges, never more than
that because of an observation. Observations decide whether a victim may park or has to stop, and they
refuse a plan whose target would still not fit if everything that is charged came back.
Source: memory 12, 14; lifecycle 12.3, 12.4 and 23, invariants 40, 45-49; decision 9.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop

import attrs

from capyctl.errors import check
from capyctl.fsm.types import Bytes, HostId, Millis, Phase
from capyctl.ledger.asks import Ask, Seen
from capyctl.ledger.charges import Ledger
from capyctl.ledger.crowd import Candidate, Crowd, Turn, order
from capyctl.ledger.forecast import Forecast
from capyctl.ledger.placement import Lacks, Nowhere, Tries, asks_at, each_once, fewest_on, hosts_of
from capyctl.ledger.search import Covered, smallest
from capyctl.ledger.shortfall import Names, Shortfall
from capyctl.ledger.wants import Wants, gives, wants_of

LIFTED = frozenset(
    {
        "stands_alone",
        "whole_host_taken",
        "managed_limit",
        "capacity",
        "parked_copies",
        "parked_count",
        "host_kv",
        "devices",
    }
)
"""Checks that releasing somebody can satisfy. The others are refused without looking for victims."""


class Way(enum.Enum):
    """How a victim is released (lifecycle 12.4)."""

    PARK = "park"
    STOP = "stop"
    STOP_NO_ROOM = "stop (no room to park)"


@attrs.frozen(kw_only=True)
class Victim:
    """One instance that gives way. `parked`: it is parked already, and is stopped for its residue."""

    owner: str
    way: Way
    parked: bool = False


@attrs.frozen(kw_only=True)
class Eviction:
    """Releasing `victims`, all on the ask's host, makes `ask` fit. Nothing was charged or released for it.

    `exact`: no smaller set exists; otherwise the search was cut short, and no victim can be spared.
    """

    ask: Ask
    victims: tuple[Victim, ...]
    exact: bool = True

    @property
    def host(self) -> HostId:
        return self.ask.host

    @property
    def owners(self) -> tuple[str, ...]:
        return tuple(victim.owner for victim in self.victims)


@attrs.frozen(kw_only=True)
class Unplaceable:
    """Several targets were planned together, and this one cannot be placed: nobody is released."""

    owner: str
    nowhere: Nowhere

    def message(self, names: Names | None = None) -> str:
        """One line for people."""
        return f"{(names or {}).get(self.owner, self.owner)}: {self.nowhere.message(names)}"


def plan_eviction(
    ledger: Ledger,
    asks: Sequence[Ask],
    crowd: Crowd,
    *,
    since_ms: Millis,
    seen: Mapping[HostId, Seen],
    now_ms: Millis,
) -> Eviction | Nowhere:
    """Choose the host or card on which fewest instances give way, and who they are.

    Args:
      asks: the target's possible steps in placement order; a parked target has one, its wake. Not empty.
      since_ms: since when the target's oldest request waits, or when the operator asked.
      seen: newest samples per host. Stale ones plan nothing.
    Returns: an eviction, without victims where it fits already, or what every host lacks even if all gave way.
    """
    return _plan(Forecast(ledger=ledger, seen=seen, now_ms=now_ms), asks, crowd, since_ms)


def plan_together(
    ledger: Ledger,
    targets: Sequence[Sequence[Ask]],
    crowd: Crowd,
    *,
    since_ms: Millis,
    seen: Mapping[HostId, Seen],
    now_ms: Millis,
) -> tuple[Eviction, ...] | Unplaceable:
    """Plan every instance that one command activates before anyone is released (lifecycle 12.3, rule 13).

    Whoever can parks; where a target has no room beside the copies of those who gave way for one before it, they stop.

    Returns: one eviction per target, no owner in two of them; or the first target that cannot be placed.
    """
    future = Forecast(ledger=ledger, seen=seen, now_ms=now_ms)
    plans = _together(future, targets, crowd, since_ms, parks=True)
    if isinstance(plans, Unplaceable) and len(targets) > 1:
        return _together(future, targets, crowd, since_ms, parks=False)
    return plans


def _together(
    future: Forecast, targets: Sequence[Sequence[Ask]], crowd: Crowd, since_ms: Millis, *, parks: bool
) -> tuple[Eviction, ...] | Unplaceable:
    plans = list[Eviction]()
    for asks in targets:
        plan = _plan(future, asks, crowd, since_ms, parks=parks)
        if isinstance(plan, Nowhere):
            return Unplaceable(owner=next(iter(asks)).owner, nowhere=plan)
        for victim in plan.victims:
            parked = victim.way is Way.PARK
            future = future.settled(victim.owner, Phase.PARKED) if parked else future.gone(victim.owner, hoped=True)
        future = future.taking(plan.ask).settled(plan.ask.owner, Phase.READY)  # the next one waits until it is loaded
        crowd = crowd.but((*plan.owners, plan.ask.owner))
        plans.append(plan)
    return tuple(plans)


# --- planning ---------------------------------------------------------------------------------------


Rank = tuple[int, tuple[Turn, ...], tuple[int, int]]
"""Of a plan among the hosts and cards: fewest victims, then by their order, then as placed."""


@attrs.frozen(kw_only=True)
class _Choice:
    """Who would give way for one step. How each is released is worked out for the best choice alone."""

    rank: Rank
    ask: Ask
    chosen: tuple[Candidate, ...] = ()
    exact: bool = True


def _plan(
    future: Forecast, asks: Sequence[Ask], crowd: Crowd, since_ms: Millis, *, parks: bool = True
) -> Eviction | Nowhere:
    best: _Choice | None = None
    lacks: dict[HostId, tuple[Shortfall, ...]] = {}
    for least, place, host in _in_turn(future.ledger, asks, crowd):
        if least == HOPELESS or (best is not None and best.rank[:2] < least):
            break  # whoever would give way from here on is asked after those of the plan that is found
        short = []
        for found in _at(future, place, asks_at(asks, place, host), crowd, since_ms, best):
            if isinstance(found, Shortfall):
                short.append(found)
            else:
                best = found
        lacks[host] = each_once(short)
    if best is None:
        return Nowhere(shortfalls=_lacks(future, asks, crowd, since_ms, lacks))
    return Eviction(ask=best.ask, victims=_ways(future, best.ask, best.chosen, parks=parks), exact=best.exact)


def _at(
    future: Forecast, place: int, here: Iterable[Ask], crowd: Crowd, since_ms: Millis, best: _Choice | None
) -> Iterator[_Choice | Shortfall]:
    """What the steps of one host lack, and each choice there that is better than all before."""
    ledger = future.ledger
    for number, ask in enumerate(here):
        if number == 0:
            pool = crowd.pool(ledger, ask.host, since_ms)
        found = _on(future, ask, pool, (place, number), best)
        if isinstance(found, Shortfall):
            if found.evictable_bytes is not None and not found.evicted:
                found = attrs.evolve(found, stay=_told(ledger, found, crowd.staying(ledger, ask.host, since_ms)))
            yield found
        elif found is not None:
            best = found
            yield found


def _lacks(
    future: Forecast,
    asks: Sequence[Ask],
    crowd: Crowd,
    since_ms: Millis,
    known: dict[HostId, tuple[Shortfall, ...]],
) -> Lacks:
    """What is known to be lacking, and the rest as somebody looks: where nobody can give way, nobody has to yet."""
    hosts = hosts_of(asks)
    places = {host: place for place, host in enumerate(hosts)}

    def work_out(host: HostId) -> Iterator[Shortfall]:
        for found in _at(future, 0, asks_at(asks, places[host], host), crowd, since_ms, None):
            check(isinstance(found, Shortfall), "where room is lacking and nobody can give way there is no plan")
            if isinstance(found, Shortfall):
                yield found

    return Lacks(hosts, work_out, known)


def kept_out_by_samples(nowhere: Nowhere) -> frozenset[HostId]:
    """The hosts where what was seen is in the way, and not what is charged alone."""
    assert isinstance(nowhere.shortfalls, Lacks)  # of a plan of this module
    return frozenset(
        host
        for host, shortfalls in nowhere.shortfalls.known.items()
        if any(short.evicted or short.check not in LIFTED for short in shortfalls)
    )


Least = tuple[int, tuple[Turn, ...]]
"""Of the plans on a host: fewer do not give way there, nor does anybody whose turn is before this one."""

ASKS_NOBODY: Least = (0, ())
HOPELESS: Least = (2**31, ())  # where room is lacking and nobody can give it: more than there can be on a host


def _in_turn(ledger: Ledger, asks: Sequence[Ask], crowd: Crowd) -> Iterator[tuple[Least, int, HostId]]:
    """The hosts, those first where less may be asked for: the least that a plan there comes to, its place, itself.

    What may fit as it is asks for nobody; else somebody gives way, and not before the first of the host.
    """
    if not isinstance(asks, Tries) or asks.ledger is not ledger:
        yield from ((ASKS_NOBODY, place, host) for place, host in enumerate(hosts_of(asks)))
        return
    turns, first_on, shelves = [], crowd.first, ledger.shelves
    for place, (_, left, seat) in enumerate(
        asks.seated
    ):  # once for every host that there is: nothing is looked up twice
        least, host = ASKS_NOBODY, seat.host
        if left < 0:
            first = first_on(host)
            fewest = 1 if shelves[host].card_held + left >= 0 else fewest_on(ledger, seat, left)
            least = HOPELESS if first is None or fewest is None else (fewest, (first,))
        turns.append((least, place, host))
    heapify(turns)  # few are looked at
    while turns:
        yield heappop(turns)


def _told(ledger: Ledger, short: Shortfall, stay: Sequence[Candidate]) -> tuple[tuple[str, str], ...]:
    """Of those, who holds what is lacking, and why it is not asked."""
    assert short.domain is not None  # whoever names evictable bytes names where
    return tuple((one.owner, _why_it_stays(one)) for one in stay if ledger.held_by(one.owner).on(short.domain))


def _why_it_stays(candidate: Candidate) -> str:
    if candidate.warm:
        return "lifecycle.warm"
    return "activation: explicit" if candidate.explicit else "a request has waited for it for longer"


def _on(
    future: Forecast, ask: Ask, pool: Sequence[Candidate], place: tuple[int, int], best: _Choice | None
) -> _Choice | Shortfall | None:
    """The choice for one host or card; None where it is no better than the best one so far."""
    ledger = future.ledger
    short = future.judge(ask, observed=False)
    if short is None:  # nobody is released because of an observation alone
        unseen = future.judge(ask)
        return unseen if unseen is not None else _better(_Choice(rank=(0, (), place), ask=ask), best)
    if short.check not in LIFTED:
        return short
    pool = [one for one in pool if one.owner != ask.owner]
    found = _cover(ledger, wants_of(ledger, ask), pool)
    if found is None:
        return attrs.evolve(short, evictable_bytes=_evictable(ledger, short, pool))
    chosen = tuple(pool[index] for index in found.chosen)
    orders = tuple(sorted(order(one, ledger.held_by(one.owner)) for one in chosen))
    choice = _better(_Choice(rank=(len(chosen), orders, place), ask=ask, chosen=chosen, exact=found.exact), best)
    if choice is None:
        return None
    after = future
    for one in chosen:
        after = after.gone(one.owner, hoped=True)
    still = after.judge(ask)
    if still is not None:  # a limit that releasing cannot lift, or memory that is not ours to give back
        return attrs.evolve(still, evictable_bytes=_evictable(ledger, still, chosen), evicted=True)
    return choice


def _better(choice: _Choice, best: _Choice | None) -> _Choice | None:
    return choice if best is None or choice.rank < best.rank else None


def _cover(ledger: Ledger, wants: Wants, pool: Sequence[Candidate]) -> Covered | None:
    """The smallest part of `pool` that frees everything wanted, the owners that have to go in it."""
    owners = [one.owner for one in pool]
    if not wants.owners <= set(owners):
        return None
    forced = frozenset(index for index, owner in enumerate(owners) if owner in wants.owners)
    return smallest(wants.amounts, [gives(ledger, wants, owner) for owner in owners], forced=forced)


def _evictable(ledger: Ledger, short: Shortfall, pool: Sequence[Candidate]) -> Bytes | None:
    if short.domain is None:
        return None
    return Bytes(sum(ledger.held_by(one.owner).on(short.domain) for one in pool))


def _ways(future: Forecast, ask: Ask, chosen: Sequence[Candidate], *, parks: bool) -> tuple[Victim, ...]:
    """Park whoever can: in order, each if its copy fits beside the target and the copies before it. Or nobody."""
    parking: list[str] = []
    victims: list[Victim] = []
    for one in chosen:
        parked = future.ledger.held_by(one.owner).phase is Phase.PARKED
        way = Way.STOP
        if one.parks and not parked:
            fits = parks and has_room_to_park(future, ask, [other.owner for other in chosen], [*parking, one.owner])
            way = Way.PARK if fits else Way.STOP_NO_ROOM
        if way is Way.PARK:
            parking.append(one.owner)
        victims.append(Victim(owner=one.owner, way=way, parked=parked))
    return tuple(victims)


def has_room_to_park(future: Forecast, ask: Ask, victims: Sequence[str], parking: Sequence[str]) -> bool:
    """the parks fit now, before anything is released, and the target fits beside their copies afterwards

    A target that is parked leaves the parked set by its wake, so its own copy is not counted beside theirs.
    """
    before, after = future, future
    leaving = frozenset({ask.owner}) if ask.phase is Phase.WAKE else frozenset()
    for owner in parking:
        step = before.step(owner, Phase.PARKING, leaving=leaving)
        if before.judge(step) is not None:
            return False
        before = before.taking(step)
    for owner in victims:
        after = after.settled(owner, Phase.PARKED) if owner in parking else after.gone(owner)
    return after.judge(ask) is None
