"""What is measured takes an estimate's place: by domain, never below ready, and undone with its installation."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st
from ledger_values import GPU0, POOL, SYSTEM, card_host, plan, pool_host

from capyctl.fsm.types import Bytes, Domain, Phase
from capyctl.ledger.asks import ask_start
from capyctl.ledger.estimates import MEASURABLE, as_estimated, as_seen_by, carried_over, laid_out, source, with_measured
from capyctl.ledger.types import HostPolicy, Measured, Plan

GPU1 = Domain("gpu1")
POLICY = pool_host(100, capacity=110, reserve=20)  # at most 90 may be charged
CARDS = card_host(100, 100)
ON_CARD = attrs.evolve(
    plan(60, 50, 10, domain=GPU0, device="gpu0", ram=4),
    provenance={Phase.COLD: "derived", Phase.READY: "derived", Phase.PARKED: "placeholder"},
)


def after(made: Plan, phase: Phase, *seen: int, policy: HostPolicy = POLICY, domain: Domain = POOL) -> int:
    for amount in seen:
        made = with_measured(made, policy, phase, {domain: Bytes(amount)})
    return made.at(phase).on(domain)


def test_a_peak_takes_the_estimates_place_whether_it_is_larger_or_smaller() -> None:
    assert after(plan(60, 50), Phase.COLD, 55) == 55
    assert after(plan(60, 50), Phase.COLD, 75) == 75


def test_the_largest_peak_is_kept() -> None:
    assert after(plan(60, 50), Phase.COLD, 58, 52, 55) == 58


def test_a_start_is_planned_with_at_least_ready_and_with_no_more_than_may_be_charged_at_all() -> None:
    small = with_measured(plan(60, 50), POLICY, Phase.COLD, {POOL: Bytes(7)})
    assert small.at(Phase.COLD).on(POOL) == 50
    assert small.measured[Phase.COLD][POOL] == Measured(seen_bytes=Bytes(7), planned_bytes=Bytes(60))
    assert after(plan(60, 50), Phase.COLD, 105) == 90


def test_what_a_park_left_only_raises_the_placeholder_and_at_most_to_ready() -> None:
    assert after(plan(60, 50, 10), Phase.PARKED, 4) == 10
    assert after(plan(60, 50, 10), Phase.PARKED, 14, 12) == 14
    assert after(plan(60, 50, 10), Phase.PARKED, 70) == 50


def test_each_domain_is_measured_by_itself() -> None:
    made = with_measured(ON_CARD, CARDS, Phase.COLD, {SYSTEM: Bytes(6)})
    assert made.at(Phase.COLD).bytes == {GPU0: 60, SYSTEM: 6}
    assert [source(made, CARDS, Phase.COLD, one) for one in (GPU0, SYSTEM)] == ["derived", "measured"]
    assert [source(made, CARDS, Phase.PARKED, one) for one in (GPU0, SYSTEM)] == ["placeholder", "derived"]


def test_what_a_document_states_stays() -> None:
    stated = attrs.evolve(plan(60, 50, 10), stated=True)
    assert with_measured(stated, POLICY, Phase.COLD, {POOL: Bytes(80)}) is stated
    startup = attrs.evolve(ON_CARD, provenance={**ON_CARD.provenance, Phase.COLD: "declared"})
    made = with_measured(startup, CARDS, Phase.COLD, {GPU0: Bytes(80), SYSTEM: Bytes(6)})
    assert made.at(Phase.COLD).bytes == {GPU0: 60, SYSTEM: 6}, "its startup says nothing of the RAM beside the card"


def test_a_first_start_takes_the_whole_host_until_one_was_measured() -> None:
    whole = plan(90, 50, whole_host=True)
    assert ask_start(owner="o", host=POLICY.host, plan=whole).whole_host
    made = with_measured(whole, POLICY, Phase.COLD, {POOL: Bytes(61)})
    assert not ask_start(owner="o", host=POLICY.host, plan=made).whole_host
    assert made.at(Phase.COLD).on(POOL) == 61
    assert as_estimated(made).whole_host


def test_ram_beside_a_card_sizes_no_first_start() -> None:
    whole = attrs.evolve(ON_CARD, provenance={**ON_CARD.provenance, Phase.COLD: "whole_host"})
    assert with_measured(whole, CARDS, Phase.COLD, {SYSTEM: Bytes(6)}).whole_host
    assert not with_measured(whole, CARDS, Phase.COLD, {GPU0: Bytes(55)}).whole_host


def test_what_was_measured_on_one_card_counts_on_every_card() -> None:
    run = plan(60, 50, 10, domain=GPU1, device="gpu1", ram=4)
    seen = {GPU1: Bytes(55), SYSTEM: Bytes(5)}
    assert as_seen_by(ON_CARD, CARDS, Phase.COLD, seen) == {GPU0: 55, SYSTEM: 5}
    made = with_measured(ON_CARD, CARDS, Phase.COLD, {GPU0: Bytes(55)})
    placed = laid_out(made, CARDS, run.phases)
    assert placed.measured == {Phase.COLD: {GPU1: made.measured[Phase.COLD][GPU0]}}
    assert as_seen_by(placed, CARDS, Phase.COLD, {GPU0: Bytes(57)}) == {GPU1: 57}
    assert laid_out(ON_CARD, CARDS, run.phases).measured == {}


figures = st.tuples(st.sampled_from(MEASURABLE), st.integers(0, 150))


@given(st.lists(figures, max_size=8), st.integers(50, 80), st.integers(0, 50))
def test_measured_plans_are_ordered_and_can_be_taken_back(
    seen: list[tuple[Phase, int]], cold: int, parked: int
) -> None:
    made = first = plan(cold, 50, parked)
    for phase, amount in seen:
        made = with_measured(made, POLICY, phase, {POOL: Bytes(amount)})
    ready = made.at(Phase.READY).on(POOL)
    assert ready == 50, "what it is charged when it is ready is nobody's to measure"
    assert ready <= made.at(Phase.COLD).on(POOL) <= 90  # M5
    assert parked <= made.at(Phase.PARKED).on(POOL) <= ready  # M6
    assert as_estimated(made) == first
    assert carried_over(made, first, POLICY) == made  # M10: resolved again, it is the same
