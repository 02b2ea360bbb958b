"""Placement: which hosts and cards are tried, in which order, and what is said when nothing fits. Memory 11."""

from __future__ import annotations

import pytest
from ledger_values import (
    GPU0,
    GPU1,
    HOST,
    NOW,
    SYSTEM,
    card_host,
    ledger_of,
    owner,
    plan,
    plenty,
    pool_host,
    ready,
    start,
)

from capyctl.fsm.types import Device, Domain, HostId, Phase
from capyctl.ledger import Ask, Hold, Nowhere, Proposal, Seat, Strategy, candidates, place
from capyctl.ledger.cards import on_cards
from capyctl.ledger.types import card_index

SMALL = plan(20, 20)


def seat(host: HostId, instances: int = 0, **more) -> Seat:
    return Seat(host=host, plan=more.pop("plan", SMALL), instances=instances, **more)


def hosts(asks: tuple[Ask, ...]) -> list[str]:
    return [ask.host for ask in asks]


def try_all(ledger, asks, views=None):
    views = views if views is not None else {host: plenty(policy) for host, policy in ledger.hosts.items()}
    return place(ledger, asks, views, NOW)


def three_hosts():
    """Room: a 100, b 60, c 100."""
    ledger = ledger_of(*(pool_host(100, host=HostId(name)) for name in "abc"))
    return ready(ledger, "x", plan(40, 40), host=HostId("b"))


def test_spread_takes_fewest_instances_then_most_headroom_then_the_host_id():
    ledger = three_hosts()
    even = [seat(HostId(name)) for name in "cba"]
    assert hosts(candidates(ledger, owner("t"), even)) == ["a", "c", "b"]
    uneven = [seat(HostId("a"), 1), seat(HostId("b"), 0), seat(HostId("c"), 1)]
    assert hosts(candidates(ledger, owner("t"), uneven)) == ["b", "a", "c"]


def test_pack_takes_most_instances_then_least_headroom_that_fits():
    ledger = three_hosts()
    even = [seat(HostId(name)) for name in "cba"]
    assert hosts(candidates(ledger, owner("t"), even, strategy=Strategy.PACK)) == ["b", "a", "c"]
    uneven = [seat(HostId("a"), 1), seat(HostId("b"), 0), seat(HostId("c"), 2)]
    packed = candidates(ledger, owner("t"), uneven, strategy=Strategy.PACK)
    assert hosts(packed) == ["c", "a", "b"]
    full = [one._replace(plan=plan(70, 70)) for one in even]
    packed = candidates(ledger, owner("t"), full, strategy=Strategy.PACK)
    assert hosts(packed)[0] == "b"  # least headroom, but it does not fit there
    answer = try_all(ledger, packed)
    assert isinstance(answer, Proposal)
    assert answer.ask.host == "a"


def test_a_stopped_instance_goes_back_to_its_host_and_may_move():
    ledger = three_hosts()
    seats = [seat(HostId("a")), seat(HostId("b"), 3, previous=True), seat(HostId("c"))]
    assert hosts(candidates(ledger, owner("t"), seats))[0] == "b"
    moved = try_all(ledger, candidates(ledger, owner("t"), [one._replace(plan=plan(61, 61)) for one in seats]))
    assert isinstance(moved, Proposal)
    assert moved.ask.host == "a"


def test_no_host_gets_more_instances_than_it_may_and_none_outside_the_seats():  # invariant 16
    ledger = three_hosts()
    seats = [seat(HostId("a"), 2), seat(HostId("b"), 1), seat(HostId("nowhere"))]
    assert hosts(candidates(ledger, owner("t"), seats, max_per_host=2)) == ["b"]
    assert hosts(candidates(ledger, owner("t"), seats)) == ["b", "a"]
    assert not candidates(ledger, owner("t"), seats, max_per_host=1)


def test_the_card_with_most_headroom_is_taken_then_the_lowest_index_and_the_last_card_when_it_fits():
    policy = card_host(30, 40, 40)
    one = plan(20, 20, domain=GPU0, ram=5, device="gpu0")

    def order(ledger, **more) -> list[str]:
        asks = candidates(ledger, owner("t"), [Seat(host=HOST, plan=one, **more)])
        return [next(d for d in ask.phases[Phase.COLD].bytes if d != SYSTEM) for ask in asks]

    ledger = ledger_of(policy)
    assert order(ledger) == ["gpu1", "gpu2", "gpu0"]
    assert order(ready(ledger, "x", plan(5, 5, domain=GPU1))) == ["gpu2", "gpu1", "gpu0"]
    assert order(ledger, last=one) == ["gpu0", "gpu1", "gpu2"]
    pinned = candidates(ledger, owner("t"), [Seat(host=HOST, plan=one, named=(Device("gpu0"),))])
    assert [set(ask.phases[Phase.COLD].bytes) for ask in pinned] == [{GPU0, SYSTEM}]
    full = ready(ledger, "x", plan(20, 20, domain=GPU0))
    answer = try_all(full, candidates(full, owner("t"), [Seat(host=HOST, plan=one, last=one)]))
    assert isinstance(answer, Proposal)
    assert set(answer.charge.bytes) == {GPU1, SYSTEM}
    assert [claim.device for claim in answer.charge.claims] == ["gpu1"]


def test_a_plan_moves_to_another_card_with_its_claim_and_leaves_ram_alone():
    policy = card_host(30, 40)
    one = plan(20, 15, 3, domain=GPU0, ram=5, device="gpu0", exclusive=True)
    moved = on_cards(one, policy, (GPU1,))
    assert moved.phases[Phase.COLD].bytes == {GPU1: 20, SYSTEM: 5}
    assert moved.phases[Phase.PARKED].bytes == {GPU1: 3, SYSTEM: 5}
    (claim,) = moved.phases[Phase.READY].claims
    assert (claim.device, claim.exclusive) == (Device("gpu1"), True)
    assert moved.phases[Phase.PARKED].claims == ()


def test_cards_are_counted_not_spelled():
    assert sorted([Domain("gpu10"), Domain("gpu2"), Domain("gpu0")], key=card_index) == ["gpu0", "gpu2", "gpu10"]


def test_headroom_is_where_the_engine_runs():
    ledger = ledger_of(card_host(30, system=7))
    tries = candidates(ledger, owner("t"), [Seat(host=HOST, plan=plan(20, 20, domain=GPU0, ram=5))])
    (spot,) = tries.spots()
    assert (spot.left_bytes, spot.fits) == (10, True)


def test_a_card_that_fits_now_is_taken_before_one_that_will():
    policy = card_host(30, 25)
    ledger = start(ledger_of(policy), "peer", plan(20, 5, domain=GPU0, device="gpu0"))
    one = plan(20, 20, domain=GPU0, device="gpu0")
    asks = candidates(ledger, owner("t"), [Seat(host=HOST, plan=one, last=one)])
    answer = try_all(ledger, asks)
    assert isinstance(answer, Proposal)
    assert set(answer.charge.bytes) == {GPU1}


def test_a_loading_peer_is_judged_at_what_it_will_settle_to():  # memory 11 (fit), 13
    ledger = ledger_of(pool_host(100, host=HostId("a")), pool_host(100, host=HostId("b")))
    ledger = start(ledger, "peer", plan(90, 30), host=HostId("a"))
    asks = candidates(ledger, owner("t"), [seat(HostId("a"), previous=True), seat(HostId("b"))])
    answer = try_all(ledger, asks)
    assert isinstance(answer, Hold)
    assert (answer.ask.host, answer.peers) == ("a", (owner("peer"),))


@pytest.mark.parametrize(
    ("sizes", "code", "never"),
    [((61, 61), "insufficient_resources", False), ((101, 101), "insufficient_resources", True)],
)
def test_nowhere_says_what_every_host_lacks(sizes, code, never):
    ledger = ledger_of(pool_host(100, host=HostId("a")), pool_host(100, host=HostId("b")))
    for name in "ab":
        ledger = ready(ledger, f"x{name}", plan(40, 40), host=HostId(name))
    asks = candidates(ledger, owner("t"), [seat(HostId(name), plan=plan(*sizes)) for name in "ab"])
    answer = try_all(ledger, asks)
    assert isinstance(answer, Nowhere)
    assert (answer.code, answer.never) == (code, never)
    assert "a-name" in answer.message()
    assert "b-name" in answer.message()
    assert [one["host"] for one in answer.details()["hosts"]] == ["a", "b"]
    assert "\n" not in answer.message()


def test_a_host_that_may_free_memory_gives_the_code_rather_than_one_that_never_can():
    ledger = ledger_of(pool_host(10, host=HostId("a")), pool_host(100, host=HostId("b")))
    asks = candidates(ledger, owner("t"), [seat(HostId("a"), previous=True), seat(HostId("b"))])
    answer = try_all(ledger, asks, {})
    assert isinstance(answer, Nowhere)
    assert (answer.code, answer.never) == ("stale_observation", False)
