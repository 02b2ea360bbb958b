"""Victims, the parked set and several targets: the smallest set, how each is released, and who is never asked."""

from __future__ import annotations

import itertools
import random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_values import (
    GPU0,
    GPU1,
    HOST,
    NOW,
    OTHER_HOST,
    POOL,
    SYSTEM,
    card_host,
    gone,
    ledger_of,
    owner,
    parked,
    plan,
    plenty,
    pool_host,
    ready,
    resident,
    seen,
    start,
    step,
    usable,
)

from capyctl.fsm.types import Bytes, Domain, Millis, Phase
from capyctl.ledger import (
    Ask,
    Candidate,
    Crowd,
    Eviction,
    Forecast,
    Ledger,
    Nowhere,
    Proposal,
    Seen,
    Shortfall,
    Unplaceable,
    Victim,
    Way,
    ask_start,
    ask_step,
    grew_too_much,
    keep_larger,
    parked_set,
    plan_eviction,
    plan_together,
    propose,
    reclaim,
    release,
    settle_down,
)
from capyctl.ledger import parked as parked_room
from capyctl.ledger.search import STATES_MAX, covers, smallest

SINCE = Millis(500)
NOBODY = Crowd.of(Ledger.empty(), [])


def candidate(name: str, used: int = 0, **flags) -> Candidate:
    return Candidate(owner=owner(name), last_used_at_ms=Millis(used), **flags)


def evict(ledger: Ledger, asks, candidates, view: Seen | None = None, since: int = SINCE) -> Eviction | Nowhere:
    asks = [asks] if isinstance(asks, Ask) else asks
    views = {ask.host: view if view is not None else plenty(ledger.hosts[ask.host]) for ask in asks}
    return plan_eviction(ledger, asks, Crowd.of(ledger, candidates), since_ms=Millis(since), seen=views, now_ms=NOW)


def names(plan_: Eviction | Nowhere) -> dict[str, Way]:
    assert isinstance(plan_, Eviction), plan_.message()
    return {name_of(victim.owner): victim.way for victim in plan_.victims}


def name_of(key: str) -> str:
    return key.removeprefix("deployment:").removesuffix("/instance:0")


def cold(name: str, plan_, host=HOST) -> Ask:
    return ask_start(owner=owner(name), host=host, plan=plan_)


# --- the search ------------------------------------------------------------------------------------------------

AMOUNTS = st.lists(st.integers(0, 6), min_size=2, max_size=2)


@given(st.lists(AMOUNTS, max_size=7), AMOUNTS, st.sets(st.integers(0, 6), max_size=2))
@settings(derandomize=True, max_examples=400, deadline=None)
def test_the_search_finds_what_trying_every_set_finds(items, wants, forced):  # M16
    forced = frozenset(one for one in forced if one < len(items))
    gives = [dict(enumerate(item)) for item in items]
    want = dict(enumerate(wants))

    def enough(chosen) -> bool:
        return all(sum(items[i][key] for i in chosen) >= amount for key, amount in want.items())

    everything = [set(some) for n in range(len(items) + 1) for some in itertools.combinations(range(len(items)), n)]
    good = [sorted(some) for some in everything if forced <= some and enough(some)]
    found = smallest(want, gives, forced=forced)
    if not good:
        assert found is None
        return
    assert found is not None
    assert found.exact
    assert list(found.chosen) == min(good, key=lambda some: (len(some), some))


@pytest.mark.parametrize("seed", range(25))
def test_past_the_bound_the_search_still_spares_whoever_can_be_spared(seed):  # M16
    rng = random.Random(seed)
    gives = [{key: rng.randrange(20) for key in "xy"} for _ in range(24)]
    want = {key: sum(one[key] for one in gives) * rng.randrange(30, 95) // 100 for key in "xy"}
    found = smallest(want, gives, states_max=50)
    assert found is not None
    assert covers(want, gives, found.chosen)
    for one in found.chosen:
        assert not covers(want, gives, [other for other in found.chosen if other != one])


def test_twelve_candidates_are_always_searched_exactly_and_forty_stay_quick():
    gives = [{"x": 1} for _ in range(12)]
    found = smallest({"x": 12}, gives)
    assert found is not None
    assert found.exact
    assert STATES_MAX == 2**12
    many = [{"x": 10 + i % 7, "y": 7 - i % 5} for i in range(40)]
    found = smallest({"x": 250, "y": 90}, many)
    assert found is not None
    assert not found.exact


# --- the plan against trying every set of victims with the ledger itself ----------------------------------------------


def _world(rng: random.Random) -> tuple[Ledger, Ask, list[Candidate]]:
    """A machine with two cards, up to six models on it in odd states, and a target that may not fit."""
    policy = card_host(30, 20, system=60, max_parked=rng.randrange(1, 4))
    ledger, candidates = ledger_of(policy), []
    for name in "abcdef"[: rng.randrange(1, 7)]:
        card = rng.choice((GPU0, GPU1))
        ready_bytes = rng.randrange(1, 14)
        one = plan(
            ready_bytes + rng.randrange(3),
            ready_bytes,
            rng.randrange(0, ready_bytes + 1),
            domain=card,
            ram=rng.randrange(8),
            device=str(card),
            exclusive=rng.random() < 0.15,
        )
        answer = propose(ledger, cold(name, one), plenty(policy), NOW)
        if isinstance(answer, Shortfall):
            continue
        ledger = start(ledger, name, one)
        state = rng.choice(("ready", "ready", "ready", "parked", "cold", "lost"))
        if state != "cold":
            ledger = settle_down(ledger, owner(name), Phase.READY, usable(name))
        if state == "parked" and isinstance(
            propose(ledger, ask_step(ledger, owner(name), Phase.PARKING), plenty(policy), NOW), Proposal
        ):
            ledger = step(ledger, name, Phase.PARKING)
            copy = ledger.held_by(owner(name)).at(Phase.PARKED).bytes
            samples = {domain: resident(name, amount) for domain, amount in copy.items()}
            ledger = settle_down(ledger, owner(name), Phase.PARKED, samples)
        if state == "lost":
            ledger = keep_larger(ledger, owner(name), (Phase.READY,))
        candidates.append(
            candidate(
                name,
                rng.randrange(5),
                keeps_another_ready=rng.random() < 0.3,
                parks=rng.random() < 0.7,
                warm=rng.random() < 0.15,
                explicit=rng.random() < 0.1,
                oldest_waiter_at_ms=rng.choice((None, None, None, Millis(SINCE - 1), SINCE)),
            )
        )
    card = rng.choice((GPU0, GPU1))
    need = rng.randrange(5, 31 if card is GPU0 else 21)
    target = plan(need, need, domain=card, ram=rng.randrange(12), device=str(card), exclusive=rng.random() < 0.2)
    return ledger, cold("target", target), candidates


def _fits_without(ledger: Ledger, ask: Ask, gone_) -> bool:
    future = Forecast(ledger=ledger, seen={HOST: plenty(ledger.hosts[HOST])}, now_ms=NOW)
    for name in gone_:
        future = future.gone(name)
    return future.judge(ask) is None


def test_a_plan_is_the_smallest_set_that_policy_allows():  # lifecycle 12.3 rules 4 and 6, M16, invariants 40, 45
    outcomes = {"fits": 0, "evicts": 0, "nowhere": 0, "parks": 0}
    for seed in range(600):
        ledger, ask, candidates = _world(random.Random(seed))
        before = attrs.asdict(ledger)
        result = evict(ledger, ask, candidates)
        assert attrs.asdict(ledger) == before  # M14
        allowed = []
        for one in candidates:
            held = ledger.held_by(one.owner)
            waits = one.oldest_waiter_at_ms is not None and one.oldest_waiter_at_ms < SINCE
            movable = held.phase in (Phase.READY, Phase.PARKED) and not held.uncertain
            if movable and not (one.warm or one.explicit or waits):
                allowed.append(one.owner)
        sizes = [
            n
            for n in range(len(allowed) + 1)
            for some in itertools.combinations(allowed, n)
            if _fits_without(ledger, ask, some)
        ]
        if not sizes:
            assert isinstance(result, Nowhere), seed
            outcomes["nowhere"] += 1
            continue
        assert isinstance(result, Eviction), seed
        assert len(result.victims) == min(sizes), seed
        assert set(result.owners) <= set(allowed), seed
        assert _fits_without(ledger, ask, result.owners), seed
        for spared in result.owners:
            assert not _fits_without(ledger, ask, set(result.owners) - {spared}), seed
        outcomes["evicts" if result.victims else "fits"] += 1
        outcomes["parks"] += any(victim.way is Way.PARK for victim in result.victims)
        _carry_out(ledger, result)
    assert min(outcomes.values()) > 20, outcomes


def _carry_out(ledger: Ledger, result: Eviction) -> None:
    """Every park is admitted when it is armed, and the target fits once the releases are proven (invariant 49)."""
    for victim in result.victims:
        name = name_of(victim.owner)
        if victim.way is Way.PARK:
            ledger = step(ledger, name, Phase.PARKING)
    for victim in result.victims:
        name = name_of(victim.owner)
        if victim.way is Way.PARK:
            copy = ledger.held_by(victim.owner).at(Phase.PARKED).bytes
            samples = {domain: resident(name, amount) for domain, amount in copy.items()}
            ledger = settle_down(ledger, victim.owner, Phase.PARKED, samples)
        else:
            ledger = release(ledger, victim.owner, gone(name))
    assert isinstance(propose(ledger, result.ask, plenty(ledger.hosts[HOST]), NOW), Proposal)


# --- stories -----------------------------------------------------------------------------------------------------


def test_two_models_that_cannot_both_be_ready():  # lifecycle 12.5
    ledger = ready(ledger_of(pool_host(100)), "a", plan(70, 60, 5))
    ask = cold("b", plan(90, 60, 5))
    assert names(evict(ledger, ask, [candidate("a", parks=True)])) == {"a": Way.PARK}
    assert names(evict(ledger, ask, [candidate("a", parks=False)])) == {"a": Way.STOP}
    bigger = cold("b", plan(96, 60, 5))
    assert names(evict(ledger, bigger, [candidate("a", parks=True)])) == {"a": Way.STOP_NO_ROOM}


def test_the_copy_that_memory_has_no_room_for_is_not_kept_however_the_ledger_stands():  # lifecycle 12.4
    ledger = ready(ledger_of(pool_host(1000, capacity=1000)), "a", plan(600, 600, 50))
    ask = cold("b", plan(900, 900))
    loaded = {owner("a"): 600}
    assert names(evict(ledger, ask, [candidate("a", parks=True)], seen(350, residents=loaded))) == {"a": Way.PARK}
    # 349 + 550 that the park returns < 900: it has to stop
    roomless = evict(ledger, ask, [candidate("a", parks=True)], seen(349, residents=loaded))
    assert names(roomless) == {"a": Way.STOP_NO_ROOM}


def test_the_parked_limit_and_the_count_make_a_victim_stop():
    ledger = ready(ledger_of(pool_host(100, parked=4)), "a", plan(60, 60, 5))
    assert names(evict(ledger, cold("b", plan(50, 50)), [candidate("a", parks=True)])) == {"a": Way.STOP_NO_ROOM}
    ledger = ready(ledger_of(pool_host(100, max_parked=0)), "a", plan(60, 60, 5))
    assert names(evict(ledger, cold("b", plan(50, 50)), [candidate("a", parks=True)])) == {"a": Way.STOP_NO_ROOM}


def test_of_two_parks_that_do_not_fit_together_the_first_in_order_parks():
    ledger = ready(ledger_of(pool_host(100)), "a", plan(50, 50, 10))
    ledger = ready(ledger, "b", plan(50, 50, 10))
    both = [candidate("a", 2, parks=True), candidate("b", 1, parks=True)]
    assert names(evict(ledger, cold("c", plan(85, 85)), both)) == {"b": Way.PARK, "a": Way.STOP_NO_ROOM}


def test_a_deployment_with_another_ready_instance_gives_way_first_then_the_least_recently_used():  # rule 5
    ledger = ledger_of(pool_host(90))
    for name in "abc":
        ledger = ready(ledger, name, plan(30, 30))
    ask = cold("t", plan(30, 30))
    three = [candidate("a", 5), candidate("b", 3), candidate("c", 9, keeps_another_ready=True)]
    assert set(names(evict(ledger, ask, three))) == {"c"}
    assert set(names(evict(ledger, ask, three[:2]))) == {"b"}


def test_few_evictions_win_over_old_ones():
    ledger = ledger_of(pool_host(100))
    for name, size in (("a", 20), ("b", 20), ("c", 40)):
        ledger = ready(ledger, name, plan(size, size))
    old_and_small = [candidate("a", 1), candidate("b", 2), candidate("c", 99)]
    assert set(names(evict(ledger, cold("t", plan(55, 55)), old_and_small))) == {"c"}


PROTECTED = [
    ({"warm": True}, "lifecycle.warm"),
    ({"explicit": True}, "activation: explicit"),
    ({"oldest_waiter_at_ms": Millis(SINCE - 1)}, "a request has waited for it for longer"),
    ({"oldest_waiter_at_ms": SINCE}, None),  # decision 9: protected only by an older waiter
    ({}, None),
]


@pytest.mark.parametrize(("flags", "why"), PROTECTED)
def test_who_is_protected(flags, why):  # invariants 40, 46
    ledger = ready(ledger_of(pool_host(100)), "a", plan(60, 60))
    result = evict(ledger, cold("b", plan(60, 60)), [candidate("a", **flags)])
    assert isinstance(result, Eviction) == (why is None)
    if isinstance(result, Nowhere):
        short = result.shortfalls[0]
        assert short.evictable_bytes == 0
        told = result.message({owner("a"): "chat"})
        assert told.endswith(f" 0.0 GiB could be evicted; chat ({why}) is not asked to give way.")
        assert short.details()["not_evicted"] == {owner("a"): why}


def test_what_cannot_be_placed_names_what_could_be_evicted():
    ledger = ready(ready(ledger_of(pool_host(100)), "a", plan(30, 30)), "b", plan(30, 30))
    result = evict(ledger, cold("t", plan(80, 80)), [candidate("a"), candidate("b", warm=True)])
    assert isinstance(result, Nowhere)
    assert (result.code, result.never) == ("insufficient_resources", False)
    (short,) = result.details()["hosts"]
    assert (short["needs_bytes"], short["free_bytes"], short["evictable_bytes"]) == (80, 40, 30)


def test_nobody_is_released_because_of_an_observation_alone():  # memory 12 step 6
    ledger = ready(ledger_of(pool_host(100)), "a", plan(20, 20))
    result = evict(ledger, cold("b", plan(60, 60)), [candidate("a")], seen(10, residents={owner("a"): 20}))
    assert isinstance(result, Nowhere)
    assert result.code == "insufficient_memory"


def test_nobody_is_released_for_a_target_that_would_still_not_fit():
    ledger = ready(ledger_of(pool_host(100, reserve=10)), "a", plan(60, 60))
    view = seen(10, capacity=110, residents={owner("a"): 60})  # others hold 40, and keep them
    result = evict(ledger, cold("b", plan(61, 61)), [candidate("a")], view)
    assert isinstance(result, Nowhere)
    assert result.code == "insufficient_memory"
    assert isinstance(evict(ledger, cold("b", plan(60, 60)), [candidate("a")], view), Eviction)


def test_a_victim_without_attribution_is_hoped_to_return_its_charge_but_not_parked_on_that():
    ledger = ready(ledger_of(pool_host(100)), "a", plan(60, 60, 5))
    result = evict(ledger, cold("b", plan(90, 90)), [candidate("a", parks=True)], seen(35))
    assert names(result) == {"a": Way.STOP_NO_ROOM}


def test_a_victim_returns_what_its_card_says_it_holds_and_a_strangers_memory_is_not_hoped_for():
    ledger = ready(ledger_of(card_host(100)), "a", plan(60, 60, domain=GPU0, device="gpu0"))
    target = cold("b", plan(60, 60, domain=GPU0, device="gpu0"))

    def view(free: int, **residents: int) -> Seen:
        card = seen(free, capacity=100, residents={owner(name): amount for name, amount in residents.items()})[POOL]
        return {SYSTEM: seen(100)[POOL], GPU0: card}

    assert isinstance(evict(ledger, target, [candidate("a")], view(10, a=50)), Eviction)
    in_vain = evict(ledger, target, [candidate("a")], view(5, a=50))  # 45 are somebody else's
    assert isinstance(in_vain, Nowhere)
    assert in_vain.code == "insufficient_device_memory"
    assert in_vain.details()["hosts"][0]["free_bytes"] == 55
    assert in_vain.message().endswith("That is with 60 B evicted.")
    assert isinstance(evict(ledger, target, [candidate("a")], view(5)), Eviction), "nobody says what it holds"


@pytest.mark.parametrize("view", [{}, seen(1000, at=NOW - 60_001), seen(1000, at=NOW + 1)])
def test_stale_observations_plan_nothing(view):  # invariant 9
    ledger = ready(ledger_of(pool_host(100)), "a", plan(60, 60))
    result = evict(ledger, cold("b", plan(60, 60)), [candidate("a")], view)
    assert isinstance(result, Nowhere)
    assert result.code == "stale_observation"


def test_the_card_with_fewest_evictions_is_taken_then_the_older_victim_then_the_lower_index():  # rule 7
    policy = card_host(20, 20)
    ledger = ledger_of(policy)
    for name, card, size in (("a", GPU0, 10), ("b", GPU0, 10), ("c", GPU1, 20)):
        ledger = ready(ledger, name, plan(size, size, domain=card, device=str(card)))
    asks = [cold("t", plan(15, 15, domain=card, device=str(card))) for card in (GPU0, GPU1)]
    everyone = [candidate("a", 1), candidate("b", 2), candidate("c", 99)]
    assert set(names(evict(ledger, asks, everyone))) == {"c"}
    small = [cold("t", plan(10, 10, domain=card, device=str(card))) for card in (GPU0, GPU1)]
    assert set(names(evict(ledger, small, everyone))) == {"a"}
    even = [candidate("a", 7), candidate("b", 8), candidate("c", 7)]
    assert set(names(evict(ledger, small, even))) == {"a"}


def test_victims_all_sit_on_one_host():  # invariant 45, rule 3
    ledger = ledger_of(pool_host(50), pool_host(100, host=OTHER_HOST))
    ledger = ready(ready(ledger, "a", plan(50, 50)), "b", plan(60, 60), host=OTHER_HOST)
    asks = [cold("t", plan(50, 50)), cold("t", plan(50, 50), OTHER_HOST)]
    result = evict(ledger, asks, [candidate("a", 9), candidate("b", 1)])
    assert isinstance(result, Eviction)
    assert (result.host, set(names(result))) == (OTHER_HOST, {"b"})


def test_an_exclusive_device_is_freed_by_whoever_uses_it():
    policy = card_host(100)
    shared = plan(5, 5, 1, domain=GPU0, device="gpu0")
    ledger = ready(ready(ledger_of(policy), "a", shared), "b", shared)
    ask = cold("t", plan(5, 5, domain=GPU0, device="gpu0", exclusive=True))
    result = evict(ledger, ask, [candidate("a", parks=True), candidate("b")])
    assert names(result) == {"a": Way.PARK, "b": Way.STOP}  # a parked owner claims no device
    blocked = evict(ledger, ask, [candidate("a", parks=True), candidate("b", warm=True)])
    assert isinstance(blocked, Nowhere)
    assert blocked.code == "device_conflict"


def test_a_whole_host_start_empties_the_host():  # rule 11, memory 14
    ledger = parked(ledger_of(pool_host(100)), "p", plan(20, 20, 5))
    ledger = ready(ledger, "a", plan(20, 20, 5))
    ask = cold("t", plan(100, 60, whole_host=True))
    result = evict(ledger, ask, [candidate("a", parks=True), candidate("p", parks=True)])
    assert names(result) == {"p": Way.STOP, "a": Way.STOP_NO_ROOM}
    blocked = evict(ledger, ask, [candidate("a", parks=True)])
    assert isinstance(blocked, Nowhere)
    assert blocked.code == "startup_requires_empty_host"


def test_a_parked_target_keeps_its_own_residue_in_its_place():
    ledger = parked(ledger_of(pool_host(100)), "b", plan(60, 60, 10))
    ledger = ready(ledger, "a", plan(60, 60, 10))
    ask = ask_step(ledger, owner("b"), Phase.WAKE)
    result = evict(ledger, ask, [candidate("a", parks=True), candidate("b")])
    assert names(result) == {"a": Way.PARK}


def test_a_starting_neighbour_is_no_victim():
    ledger = start(ledger_of(pool_host(100)), "a", plan(60, 60))
    assert isinstance(evict(ledger, cold("b", plan(60, 60)), [candidate("a")]), Nowhere)


def test_a_model_that_serves_on_after_a_refused_park_may_still_give_way():
    ledger = step(ready(ledger_of(pool_host(100)), "a", plan(60, 60, 5)), "a", Phase.PARKING)
    assert names(evict(ledger, cold("b", plan(60, 60)), [candidate("a", parks=True)])) == {"a": Way.PARK}


def test_a_target_on_an_unknown_host_is_refused_as_such():
    result = plan_eviction(
        ledger_of(pool_host()), [cold("b", plan(1, 1), OTHER_HOST)], NOBODY, since_ms=SINCE, seen={}, now_ms=NOW
    )
    assert isinstance(result, Nowhere)
    assert result.code == "topology_unknown"


# --- several targets, and the parked set ----------------------------------------------------------------------------


def together(ledger: Ledger, targets, candidates):
    views = {host: plenty(policy) for host, policy in ledger.hosts.items()}
    return plan_together(ledger, targets, Crowd.of(ledger, candidates), since_ms=SINCE, seen=views, now_ms=NOW)


def test_several_instances_are_planned_before_anyone_is_released():  # rule 13
    ledger = ledger_of(pool_host(100))
    for name in "ab":
        ledger = ready(ledger, name, plan(50, 50, 5))
    both = [candidate("a", 1, parks=True), candidate("b", 2, parks=True)]
    result = together(ledger, [[cold("t", plan(45, 45))], [cold("u", plan(45, 45))]], both)
    assert isinstance(result, tuple)
    assert [names(one) for one in result] == [{"a": Way.PARK}, {"b": Way.PARK}]
    failed = together(ledger, [[cold("t", plan(45, 45))], [cold("u", plan(60, 60))]], both)
    assert isinstance(failed, Unplaceable)
    assert failed.owner == owner("u")
    assert "needs" in failed.message({owner("u"): "u"})


def test_a_victim_whose_copy_leaves_no_room_for_the_second_instance_stops():
    ledger = ready(ledger_of(pool_host(100)), "a", plan(90, 90, 10))
    both = [[cold("t", plan(50, 50))], [cold("u", plan(50, 50))]]
    result = together(ledger, both, [candidate("a", parks=True)])
    assert isinstance(result, tuple)
    assert [names(one) for one in result] == [{"a": Way.STOP_NO_ROOM}, {}]
    alone = together(ledger, both[:1], [candidate("a", parks=True)])
    assert isinstance(alone, tuple)
    assert names(alone[0]) == {"a": Way.PARK}
    assert isinstance(together(ledger, [*both, [cold("v", plan(9, 9))]], [candidate("a", parks=True)]), Unplaceable)


def test_reclaiming_stops_the_least_recently_used_parked_instances_and_no_running_one():  # memory 15
    ledger = ledger_of(pool_host(100, max_parked=2))
    for name in "pq":
        ledger = parked(ledger, name, plan(20, 20, 10))
    ledger = ready(ledger, "r", plan(60, 60, 5))
    everyone = [candidate("p", 9, parks=True), candidate("q", 4, parks=True), candidate("r", 1, parks=True)]

    def take(ask: Ask, who) -> Eviction | Shortfall:
        return reclaim(ledger, ask, who, since_ms=SINCE, seen={HOST: plenty(ledger.hosts[HOST])}, now_ms=NOW)

    for ask in (cold("t", plan(30, 30)), ask_step(ledger, owner("r"), Phase.PARKING)):
        found = take(ask, everyone)
        assert isinstance(found, Eviction)
        assert found.victims == (Victim(owner=owner("q"), way=Way.STOP, parked=True),)
    nothing = take(cold("t", plan(20, 20)), everyone)
    assert isinstance(nothing, Eviction)
    assert nothing.victims == ()
    kept = take(ask_step(ledger, owner("r"), Phase.PARKING), [attrs.evolve(one, explicit=True) for one in everyone])
    assert isinstance(kept, Shortfall)
    assert kept.code == "parked_capacity"
    running = take(cold("t", plan(30, 30)), everyone[2:])
    assert isinstance(running, Shortfall)
    assert running.code == "insufficient_resources"
    figures = parked_set(ledger, HOST)
    assert (figures.count, figures.count_max, figures.charged_bytes) == (2, 2, {POOL: 20})


def test_a_parked_copy_that_grew_past_its_bound_is_not_parked_again():
    assert grew_too_much(Bytes(10), Bytes(21), Bytes(10))
    assert not grew_too_much(Bytes(10), Bytes(20), Bytes(10))
    assert not grew_too_much(Bytes(10), Bytes(10**9), None)


def test_a_forecast_returns_no_more_than_the_machine_has():
    ledger = ready(ledger_of(pool_host(100)), "a", plan(60, 60))
    future = Forecast(ledger=ledger, seen={HOST: seen(90, capacity=100)}, now_ms=NOW)
    assert future.gone(owner("a"), hoped=True).seen[HOST][Domain("unified")].available_bytes == 100
    assert future.gone(owner("a")).seen[HOST][Domain("unified")].available_bytes == 90


# --- a target that sleeps itself -------------------------------------------------------------------------------


def test_a_victim_takes_the_place_in_the_parked_set_that_the_target_leaves():
    one = plan(60, 60, 5)
    for limits in ({"parked": 5}, {"max_parked": 1}):
        ledger = ready(parked(ledger_of(pool_host(100, **limits)), "t", one), "v", one)
        wake = ask_step(ledger, owner("t"), Phase.WAKE)
        assert names(evict(ledger, wake, [candidate("v", parks=True)])) == {"v": Way.PARK}
        park = ask_step(ledger, owner("v"), Phase.PARKING, leaving=frozenset({owner("t")}))
        assert isinstance(propose(ledger, park, plenty(ledger.hosts[HOST]), NOW), Proposal)
        alone = propose(ledger, ask_step(ledger, owner("v"), Phase.PARKING), plenty(ledger.hosts[HOST]), NOW)
        assert isinstance(alone, Shortfall)  # a park by hand counts every copy
        assert alone.code == "parked_capacity"


def test_a_cold_target_leaves_no_place_and_a_third_copy_is_counted():
    one, victim = plan(50, 50, 5), [candidate("v", parks=True)]
    ledger = ready(parked(ledger_of(pool_host(100, parked=5)), "x", one), "v", one)
    assert names(evict(ledger, cold("t", plan(60, 60)), victim)) == {"v": Way.STOP_NO_ROOM}
    for copy, way in ((5, Way.PARK), (6, Way.STOP_NO_ROOM)):
        ledger = parked(parked(ledger_of(pool_host(100, parked=9)), "x", plan(9, 9, 4)), "t", one)
        ledger = ready(ledger, "v", plan(80, 80, copy))
        assert names(evict(ledger, ask_step(ledger, owner("t"), Phase.WAKE), victim)) == {"v": way}


def test_a_parked_set_is_over_its_limits_by_bytes_or_by_number():
    one = plan(40, 40, 5)
    ledger = parked(parked(ledger_of(pool_host(100, max_parked=2, parked=10)), "a", one), "b", one)
    assert not parked_room.is_over(ledger, HOST)
    fewer = attrs.evolve(ledger.hosts[HOST], max_parked=1)
    assert parked_room.is_over(ledger.limited(fewer), HOST)
    limits = ledger.hosts[HOST].domains[POOL]
    less = attrs.evolve(ledger.hosts[HOST], domains={POOL: attrs.evolve(limits, parked_bytes=Bytes(9))})
    assert parked_room.is_over(ledger.limited(less), HOST)
