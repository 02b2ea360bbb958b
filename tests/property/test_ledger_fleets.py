"""Planning over random fleets beside plain models of its rules: strategy, ties, cards, victims, holds. Memory 10-13."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_values import NOW, SYSTEM, card_host, ledger_of, owner, parked, plan, plenty, ready, start

from capyctl.fsm.types import Domain, HostId, Millis, Phase
from capyctl.ledger import (
    Candidate,
    Crowd,
    Eviction,
    Hold,
    Ledger,
    Nowhere,
    Plan,
    Proposal,
    Seat,
    Strategy,
    Way,
    ask_step,
    candidates,
    place,
    plan_eviction,
    propose,
)
from capyctl.ledger.placement import Tries, hosts_of
from capyctl.ledger.types import card_index

NEEDS = (10, 25, 40)
SEEDS = st.integers(0, 10**9)


def fleet(rng: random.Random, *, loading: bool = False) -> Ledger:
    """Some hosts of one to three cards, with models that serve, sleep or load on them."""
    hosts = [HostId(f"h{number}") for number in range(rng.randint(1, 6))]
    ledger = ledger_of(
        *(card_host(*rng.choices((30, 50), k=rng.randint(1, 3)), system=60, host=host, max_parked=2) for host in hosts)
    )
    for number in range(rng.randint(0, 14)):
        host = rng.choice(hosts)
        card = Domain(f"gpu{rng.randrange(len(ledger.hosts[host].domains) - 1)}")
        ready_at = rng.randint(3, 20)
        one = plan(ready_at + rng.choice((0, 6)), ready_at, rng.choice((None, 2)), domain=card, ram=2, device=card)
        deed = rng.choice(
            (ready, ready, parked if Phase.PARKED in one.phases else ready, *([start] if loading else []))
        )
        try:
            ledger = deed(ledger, f"x{number}", one, host=host)
        except AssertionError:
            continue  # it has no room there
    return ledger


def seats_of(rng: random.Random, ledger: Ledger, one: Plan) -> list[Seat]:
    hosts = rng.sample(sorted(ledger.hosts), rng.randint(1, len(ledger.hosts)))
    last = rng.choice((*hosts, None))
    return [Seat(host=host, plan=one, instances=rng.choice((0, 0, 1, 2)), previous=host == last) for host in hosts]


def views(ledger: Ledger):
    return {host: plenty(policy) for host, policy in ledger.hosts.items()}


def room(ledger: Ledger, host: HostId) -> int:
    """On the card with most of it, by adding up the rows."""
    return max(
        limits.managed_bytes - sum(held.on(domain) for _, held in ledger.rows() if held.host == host)
        for domain, limits in ledger.hosts[host].domains.items()
        if domain != SYSTEM
    )


@given(SEEDS, st.sampled_from(Strategy), st.sampled_from((None, 1, 2)))
@settings(max_examples=150, deadline=None)
def test_hosts_are_tried_by_previous_run_then_strategy_then_id_and_none_beyond_what_it_may_run(seed, strategy, most):
    rng = random.Random(seed)
    ledger, need = fleet(rng), rng.choice(NEEDS)
    seats = seats_of(rng, ledger, plan(need, need, domain=Domain("gpu0"), ram=2, device="gpu0"))
    tries = candidates(ledger, owner("t"), seats, strategy=strategy, max_per_host=most)
    allowed = [seat for seat in seats if most is None or seat.instances < most]
    sign = 1 if strategy is Strategy.SPREAD else -1
    allowed.sort(
        key=lambda seat: (not seat.previous, sign * seat.instances, -sign * room(ledger, seat.host), seat.host)
    )
    assert list(hosts_of(tries)) == [seat.host for seat in allowed]


@given(SEEDS)
@settings(max_examples=150, deadline=None)
def test_a_start_is_placed_exactly_where_it_fits_first_and_a_refusal_names_every_card(seed):  # M14, M15
    rng = random.Random(seed)
    ledger, need = fleet(rng), rng.choice(NEEDS)
    seats = seats_of(rng, ledger, plan(need, need, domain=Domain("gpu0"), ram=2, device="gpu0"))
    tries, before = candidates(ledger, owner("t"), seats), ledger
    answer = place(ledger, tries, views(ledger), NOW)
    fitting = [ask for ask in tries if isinstance(propose(ledger, ask, plenty(ledger.hosts[ask.host]), NOW), Proposal)]
    assert ledger == before
    if fitting:
        assert isinstance(answer, Proposal)
        assert answer.ask == fitting[0]
        cards = [domain for domain in answer.charge.bytes if domain != SYSTEM]
        rooms = {
            one: ledger.room(answer.ask.host, one) for one in ledger.hosts[answer.ask.host].domains if one != SYSTEM
        }
        assert cards == [max(rooms, key=lambda one: (rooms[one], [-card_index(one)[0]]))]
    else:
        assert isinstance(answer, Nowhere)
        assert {short.host for short in answer.shortfalls} == {seat.host for seat in seats}
        for short in answer.shortfalls:
            assert short.needs_bytes is not None
            assert short.free_bytes is not None
            assert short.limit_bytes is not None
            assert short.short_bytes
            assert short.domain is not None


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_it_waits_for_loading_peers_exactly_where_it_will_fit_once_they_are_ready(seed):  # memory 13
    rng = random.Random(seed)
    ledger, need = fleet(rng, loading=True), rng.choice(NEEDS)
    (seat,) = seats_of(rng, ledger, plan(need, need, domain=Domain("gpu0"), ram=2, device="gpu0"))[:1]
    tries = candidates(ledger, owner("t"), [seat])
    answer = place(ledger, tries, views(ledger), NOW)
    settled = {
        owner_: held.at(Phase.READY) if held.phase is Phase.COLD else held.allocation
        for owner_, held in ledger.rows()
        if held.host == seat.host
    }
    limits = ledger.hosts[seat.host].domains
    later = any(
        all(
            sum(held.on(domain) for held in settled.values()) + amount <= limits[domain].managed_bytes
            for domain, amount in ask.phases[Phase.COLD].bytes.items()
        )
        for ask in tries
    )
    if isinstance(answer, Hold):
        assert later
        assert answer.peers
    else:
        assert isinstance(answer, Proposal) or not later


def asked(rng: random.Random, ledger: Ledger) -> list[Candidate]:
    return [
        Candidate(
            owner=name,
            last_used_at_ms=Millis(rng.randint(1, 5)),
            keeps_another_ready=rng.random() < 0.2,
            parks=Phase.PARKED in held.phases,
            warm=rng.random() < 0.1,
            explicit=rng.random() < 0.1,
        )
        for name, held in ledger.rows()
    ]


@given(SEEDS, st.sampled_from(Strategy))
@settings(max_examples=150, deadline=None)
def test_what_is_looked_at_again_after_a_write_stands_as_if_all_were_looked_at(seed, strategy):
    rng = random.Random(seed)
    ledger, need = fleet(rng), rng.choice(NEEDS)
    seats = seats_of(rng, ledger, plan(need, need, domain=Domain("gpu0"), ram=2, device="gpu0"))
    kept = candidates(ledger, owner("t"), seats, strategy=strategy)
    for name, _ in list(ledger.rows()):
        after = ledger.assuming(name, None) if rng.random() < 0.5 else ledger
        assert kept.renewed(after) == candidates(after, owner("t"), seats, strategy=strategy)
        assert (kept.renewed(after).seated is kept.seated) == all(
            after.shelf(seat.host) is kept.ledger.shelf(seat.host) for _, _, seat in kept.seated
        )
        ledger, kept = after, kept.renewed(after)


FIRST = (0, Millis(0), "")  # a turn before everybody's: what is kept of a host may be too early, never too late


def told(found: Eviction | Nowhere) -> object:
    return found if isinstance(found, Eviction) else tuple(found.shortfalls)


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_the_plan_is_the_same_however_few_hosts_are_looked_at_for_it(seed):
    rng = random.Random(seed)
    ledger, need = fleet(rng, loading=rng.random() < 0.3), rng.choice(NEEDS)
    tries = candidates(
        ledger,
        owner("t"),
        seats_of(rng, ledger, plan(need, need, domain=Domain("gpu0"), ram=2, device="gpu0")),
    )
    crowd, view = Crowd.of(ledger, asked(rng, ledger)), views(ledger)
    early = attrs.evolve(crowd, first=lambda host: rng.choice((crowd.first(host), crowd.first(host) and FIRST)))
    quick = plan_eviction(ledger, tries, early, since_ms=Millis(9), seen=view, now_ms=NOW)
    slow = plan_eviction(ledger, tuple(tries), crowd, since_ms=Millis(9), seen=view, now_ms=NOW)
    assert told(quick) == told(slow)
    if isinstance(quick, Eviction) and quick.exact:  # M16: none can be spared
        for spared in quick.owners:
            fewer = ledger
            for one in quick.owners:
                fewer = fewer if one == spared else fewer.assuming(one, None)
            assert not isinstance(propose(fewer, quick.ask, plenty(ledger.hosts[quick.host]), NOW), Proposal)


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_a_parked_instance_wakes_nowhere_but_where_it_parked(seed):
    rng = random.Random(seed)
    ledger = fleet(rng)
    for name, held in ledger.rows():
        if held.phase is Phase.PARKED:
            ask = ask_step(ledger, name, Phase.WAKE)
            found = plan_eviction(
                ledger, [ask], Crowd.of(ledger, asked(rng, ledger)), since_ms=Millis(9), seen=views(ledger), now_ms=NOW
            )
            assert ask.host == held.host
            if isinstance(found, Eviction):
                assert {ledger.held_by(one).host for one in found.owners} <= {held.host}
                assert all(victim.way is Way.STOP for victim in found.victims if victim.parked)


def test_a_message_names_the_first_of_many_hosts_and_the_details_all_of_them():
    ledger = ledger_of(*(card_host(10, host=HostId(f"h{number:02}")) for number in range(20)))
    one = plan(40, 40, domain=Domain("gpu0"), device="gpu0")
    answer = place(
        ledger, candidates(ledger, owner("t"), [Seat(host=host, plan=one) for host in ledger.hosts]), views(ledger), NOW
    )
    assert isinstance(answer, Nowhere)
    assert answer.message().count("needs") == 3
    assert answer.message().endswith("17 more hosts have no room either.")
    assert len(answer.details()["hosts"]) == 20


@pytest.mark.parametrize("count", [3, 40])
def test_starts_are_made_only_as_they_are_tried(count, monkeypatch):
    ledger = ledger_of(*(card_host(50, 50, host=HostId(f"h{number:02}")) for number in range(count)))
    one = plan(40, 40, domain=Domain("gpu0"), device="gpu0")
    made = []
    ask = Tries.ask
    monkeypatch.setattr(Tries, "ask", lambda tries, spot: made.append(spot) or ask(tries, spot))
    tries = candidates(ledger, owner("t"), [Seat(host=host, plan=one) for host in ledger.hosts])
    assert isinstance(place(ledger, tries, views(ledger), NOW), Proposal)
    assert len(made) == 1
    assert attrs.asdict(made[0])["left_bytes"] == 10
