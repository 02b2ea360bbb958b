"""Engines of several ranks: a card for each, all equal, of one machine, and every claim at once. Memory 11; M8."""

from __future__ import annotations

from math import comb

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_values import HOST, NOW, SYSTEM, card_host, ledger_of, owner, plan, plenty, ready

from capyctl.errors import InvariantBroken
from capyctl.fsm.types import Bytes, Device, Domain, Phase
from capyctl.ledger import Allocation, Claim, HostPolicy, Ledger, Plan, Proposal, Seat, candidates, place
from capyctl.ledger.cards import SETS_MAX, alike, cards_of, choice, on_cards, sets, too_few
from capyctl.ledger.placement import Nowhere
from capyctl.ledger.types import card_index

SIZES = st.lists(st.sampled_from([30, 40, 50]), min_size=1, max_size=6)


def card(number: int) -> Domain:
    return Domain(f"gpu{number}")


def ranks(count: int, share: int, *, ram: int = 0, exclusive: bool = False) -> Plan:
    """So much on each of the first cards, as a checkpoint is sized."""
    cards = {card(i): Bytes(share) for i in range(count)}
    claims = tuple(Claim(device=Device(f"gpu{i}"), exclusive=exclusive) for i in range(count))
    held = Allocation(bytes={**cards, **({SYSTEM: Bytes(ram)} if ram else {})}, claims=claims)
    return attrs.evolve(plan(share, share), phases={Phase.COLD: held, Phase.READY: held})


def of_models(policy: HostPolicy, *models: str) -> HostPolicy:
    """The same host, whose cards have these names."""
    named = {card(i): attrs.evolve(policy.domains[card(i)], model=model) for i, model in enumerate(models)}
    return attrs.evolve(policy, domains={**policy.domains, **named})


def placed(ledger: Ledger, one: Plan, **more) -> Proposal | Nowhere:
    tries = candidates(ledger, owner("t"), [Seat(host=HOST, plan=one, **more)])
    answer = place(ledger, tries, {HOST: plenty(ledger.hosts[HOST])}, NOW)
    assert isinstance(answer, Proposal | Nowhere)
    return answer


def taken(answer: Proposal | Nowhere) -> list[str]:
    assert isinstance(answer, Proposal)
    return sorted((one for one in answer.charge.bytes if one != SYSTEM), key=card_index)


def test_every_rank_gets_a_card_of_its_own_and_all_claims_are_made_at_once():
    answer = placed(ledger_of(card_host(40, 40, 40)), ranks(2, 30, ram=5))
    assert taken(answer) == ["gpu0", "gpu1"]
    assert answer.charge.bytes == {"gpu0": 30, "gpu1": 30, SYSTEM: 5}
    assert [claim.device for claim in answer.charge.claims] == ["gpu0", "gpu1"]


def test_the_cards_with_most_room_are_taken_and_the_last_ones_when_they_fit():
    busy = ready(ledger_of(card_host(40, 40, 40, 40)), "x", plan(9, 9, domain=card(0)))
    busy = ready(busy, "y", plan(5, 5, domain=card(2)))
    assert taken(placed(busy, ranks(2, 30))) == ["gpu1", "gpu3"]
    before = on_cards(ranks(2, 30), busy.hosts[HOST], (card(0), card(2)))
    assert taken(placed(busy, ranks(2, 30), last=before, previous=True)) == ["gpu0", "gpu2"]
    assert taken(placed(busy, ranks(2, 32), last=before, previous=True)) == ["gpu1", "gpu3"]


def test_only_equal_cards_share_one_engine():
    sizes = ledger_of(card_host(60, 40, 60, 40))
    assert taken(placed(sizes, ranks(2, 35))) == ["gpu0", "gpu2"]
    assert taken(placed(ready(sizes, "x", plan(50, 50, domain=card(2))), ranks(2, 35))) == ["gpu1", "gpu3"]
    models = ledger_of(of_models(card_host(40, 40, 40, 40), "A", "B", "B", "A"))
    assert taken(placed(ready(models, "x", plan(9, 9, domain=card(1))), ranks(2, 35))) == ["gpu0", "gpu3"]


def test_too_few_equal_cards_are_refused_in_figures():
    policy = of_models(card_host(40, 40, 60), "A", "B", "A")
    assert not candidates(ledger_of(policy), owner("t"), [Seat(host=HOST, plan=ranks(2, 5))])
    why = too_few(policy, (card(0), card(1), card(2)), 2)
    assert why is not None
    assert why.startswith("2 ranks need 2 equal cards of one machine; host-a-name has 1 of A")
    assert "1 of B" in why
    assert too_few(card_host(40, 40), (card(0), card(1)), 2) is None


def test_named_devices_are_the_only_ones_and_have_to_be_equal_too():
    policy = card_host(40, 40, 40, 60)
    named = tuple(Device(f"gpu{i}") for i in (1, 2))
    assert taken(placed(ledger_of(policy), ranks(2, 30), named=named)) == ["gpu1", "gpu2"]
    unequal = tuple(Device(f"gpu{i}") for i in (2, 3))
    assert not candidates(ledger_of(policy), owner("t"), [Seat(host=HOST, plan=ranks(2, 30), named=unequal)])
    assert choice(ranks(1, 5), policy, (Device("gpu2"),)) == ()


def test_a_device_that_somebody_has_alone_is_passed_by_and_one_that_is_wanted_alone_is_free():  # M8
    alone = plan(1, 1, domain=card(0), device="gpu0", exclusive=True)
    ledger = ready(ledger_of(card_host(40, 40, 40)), "x", alone)
    assert taken(placed(ledger, ranks(2, 30))) == ["gpu1", "gpu2"]
    shared = ready(ledger_of(card_host(40, 40, 40)), "x", plan(1, 1, domain=card(1), device="gpu1"))
    assert taken(placed(shared, ranks(2, 30, exclusive=True))) == ["gpu0", "gpu2"]
    answer = placed(ledger, ranks(3, 30))
    assert isinstance(answer, Nowhere)
    assert answer.code == "device_conflict"


def test_what_all_sets_of_cards_lack_is_said_once():
    full = ledger_of(card_host(40, 40, 40, 40))
    for number in range(4):
        full = ready(full, f"x{number}", plan(20, 20, domain=card(number)))
    answer = placed(full, ranks(2, 30))
    assert isinstance(answer, Nowhere)
    assert sorted(short.domain for short in answer.shortfalls) == ["gpu0", "gpu1", "gpu2"]


def test_ranks_lie_on_their_cards_in_the_order_of_the_numbers():
    policy = card_host(*[40] * 12)
    moved = on_cards(ranks(3, 7), policy, (card(2), card(9), card(11)))
    assert cards_of(moved, policy) == ("gpu2", "gpu9", "gpu11")
    with pytest.raises(InvariantBroken, match="card of its own"):
        on_cards(ranks(2, 7), policy, (card(2), card(2)))
    with pytest.raises(InvariantBroken, match="is a card"):
        on_cards(ranks(1, 7), policy, (SYSTEM,))


@given(SIZES, st.integers(1, 4))
def test_every_set_of_equal_cards_is_looked_at_and_no_other(sizes: list[int], count: int):
    policy = card_host(*sizes)
    cards = [card(i) for i in range(len(sizes))]
    found = list(sets(policy, cards, count))
    assert len(found) == len(set(found)) == sum(comb(len(group), count) for group in alike(policy, cards))
    for one in found:
        assert list(one) == sorted(set(one), key=card_index)
        assert len({policy.domains[each].capacity_bytes for each in one}) == 1
    assert (too_few(policy, cards, count) is None) == bool(found)


def test_of_very_many_sets_neighbours_by_room_are_looked_at():
    policy = card_host(*[40] * 16)
    cards = [card(i) for i in reversed(range(16))]
    assert comb(16, 8) > SETS_MAX
    found = list(sets(policy, cards, 8))
    assert len(found) == 9
    assert found[0] == tuple(card(i) for i in range(8, 16))


@given(SIZES, st.lists(st.integers(0, 45), min_size=6, max_size=6), st.integers(1, 4), st.integers(1, 50))
def test_ranks_are_placed_exactly_where_some_set_of_equal_cards_has_room_for_all(
    sizes: list[int], used: list[int], count: int, share: int
):
    ledger = ledger_of(card_host(*sizes))
    for number, (size, amount) in enumerate(zip(sizes, used, strict=False)):
        if 0 < amount <= size:
            ledger = ready(ledger, f"x{number}", plan(amount, amount, domain=card(number)))
    free = [size - (amount if amount <= size else 0) for size, amount in zip(sizes, used, strict=False)]
    enough = any(
        sum(room >= share for room, size in zip(free, sizes, strict=True) if size == kind) >= count
        for kind in set(sizes)
    )
    if count > len(sizes):
        return  # a plan that names more cards than there are was refused when it was made
    tries = candidates(ledger, owner("t"), [Seat(host=HOST, plan=ranks(count, share))])
    if not tries:
        assert all(sizes.count(kind) < count for kind in sizes)
        return
    answer = place(ledger, tries, {HOST: plenty(ledger.hosts[HOST])}, NOW)
    assert isinstance(answer, Proposal) == enough
