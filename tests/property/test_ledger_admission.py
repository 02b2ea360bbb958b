"""Admission: every check refuses its own case and nothing else, with figures. Memory 10, 13, 14; lifecycle 23, 1-16."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_values import (
    G1,
    G2,
    GIB,
    GPU0,
    GPU1,
    HOST,
    NOW,
    POOL,
    SYSTEM,
    armed,
    card_host,
    ledger_of,
    limits,
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

from capyctl.errors import CODES, InvariantBroken
from capyctl.fsm.types import Bytes, Domain, HostId, Millis, Phase
from capyctl.ledger import (
    CHECKS,
    Ask,
    Hold,
    Ledger,
    Outdated,
    Proposal,
    Seen,
    Shortfall,
    arm,
    ask_start,
    ask_step,
    gate,
    judge,
    keep_larger,
    propose,
    settle_down,
)
from capyctl.ledger.shortfall import listed
from capyctl.ledger.types import DomainKind

# --- each check, alone -----------------------------------------------------------------------------------


def _ask(name: str, plan_, host: HostId = HOST) -> Ask:
    return ask_start(owner=owner(name), host=host, plan=plan_)


def _host() -> tuple[Ledger, Ask, Seen]:
    return ledger_of(pool_host()), _ask("new", plan(1, 1), HostId("nobody")), {}


def _run() -> tuple[Ledger, Ask, Seen]:
    ledger = ready(ledger_of(pool_host()), "new", plan(5, 5, 1))
    ask = ask_step(ledger, owner("new"), Phase.PARKING)
    return keep_larger(ledger, owner("new"), (Phase.READY,)), ask, PLENTY_POOL


def _domains() -> tuple[Ledger, Ask, Seen]:
    return ledger_of(pool_host()), _ask("new", plan(1, 1, domain=GPU0)), PLENTY_POOL


def _device_names() -> tuple[Ledger, Ask, Seen]:
    return ledger_of(card_host(10)), _ask("new", plan(1, 1, domain=GPU0, device="gpu7")), plenty(card_host(10))


def _sample_names() -> tuple[Ledger, Ask, Seen]:
    return ledger_of(pool_host()), _ask("new", plan(1, 1)), seen({POOL: 50, GPU0: 50})


def _card_seen() -> tuple[Ledger, Ask, Seen]:
    return ledger_of(card_host(10)), _ask("new", plan(1, 1, domain=GPU0)), seen({SYSTEM: 50})


def _pool_seen() -> tuple[Ledger, Ask, Seen]:
    return ledger_of(card_host(10)), _ask("new", plan(1, 1, domain=GPU0, ram=1)), seen({GPU0: 50})


def _sample_age() -> tuple[Ledger, Ask, Seen]:
    return ledger_of(pool_host()), _ask("new", plan(1, 1)), seen(50, at=NOW - 60_001)


def _sample_sums() -> tuple[Ledger, Ask, Seen]:
    return ledger_of(pool_host()), _ask("new", plan(1, 1)), seen(50, capacity=49)


def _stands_alone() -> tuple[Ledger, Ask, Seen]:
    policy = card_host(100, 100)
    ledger = ready(ledger_of(policy), "old", plan(1, 1, domain=GPU1))
    return ledger, _ask("new", plan(100, 50, domain=GPU0, whole_host=True)), plenty(policy)


def _whole_host_taken() -> tuple[Ledger, Ask, Seen]:
    policy = card_host(100, 100)
    ledger = start(ledger_of(policy), "old", plan(100, 50, domain=GPU0, whole_host=True))
    return ledger, _ask("new", plan(1, 1, domain=GPU1)), plenty(policy)


def _managed_limit() -> tuple[Ledger, Ask, Seen]:
    ledger = ready(ledger_of(pool_host(100, capacity=1000)), "old", plan(60, 60))
    return ledger, _ask("new", plan(41, 30)), PLENTY_POOL


def _capacity() -> tuple[Ledger, Ask, Seen]:
    ledger = ready(ledger_of(pool_host(100, capacity=100, reserve=20)), "old", plan(60, 60))
    return ledger, _ask("new", plan(21, 10)), PLENTY_POOL


def _free_memory() -> tuple[Ledger, Ask, Seen]:
    ledger = ready(ledger_of(pool_host(100, reserve=20)), "old", plan(60, 60))
    return ledger, _ask("new", plan(30, 30)), seen(59, residents={owner("old"): 50})


def _free_card_memory() -> tuple[Ledger, Ask, Seen]:
    policy = card_host(100, reserve=10)
    view = {**seen({SYSTEM: 100}), **seen({GPU0: 34}, capacity=110, residents={owner("old"): 70})}
    return ready(ledger_of(policy), "old", plan(60, 60, domain=GPU0)), _ask("new", plan(31, 31, domain=GPU0)), view


def _parked_copies() -> tuple[Ledger, Ask, Seen]:
    ledger = parked(ledger_of(pool_host(100, parked=10)), "old", plan(20, 20, 6))
    ledger = ready(ledger, "new", plan(20, 20, 5))
    return ledger, ask_step(ledger, owner("new"), Phase.PARKING), PLENTY_POOL


def _parked_count() -> tuple[Ledger, Ask, Seen]:
    ledger = parked(ledger_of(pool_host(100, max_parked=1)), "old", plan(20, 20, 1))
    ledger = ready(ledger, "new", plan(20, 20, 1))
    return ledger, ask_step(ledger, owner("new"), Phase.PARKING), PLENTY_POOL


def _host_kv() -> tuple[Ledger, Ask, Seen]:
    ledger = ready(ledger_of(pool_host(100, host_kv=10)), "old", plan(20, 20, host_kv=6))
    return ledger, _ask("new", plan(20, 20, host_kv=5)), PLENTY_POOL


def _devices() -> tuple[Ledger, Ask, Seen]:
    policy = card_host(100)
    ledger = ready(ledger_of(policy), "old", plan(10, 10, domain=GPU0, device="gpu0"))
    return ledger, _ask("new", plan(10, 10, domain=GPU0, device="gpu0", exclusive=True)), plenty(policy)


PLENTY_POOL = seen(10**6)
ALONE = {
    name.removeprefix("_"): make
    for name, make in globals().copy().items()
    if name.startswith("_") and name.removeprefix("_") in {row.name for row in CHECKS}
}


def refuses_alone(row) -> None:
    ledger, ask, view = ALONE[row.name]()
    answer = propose(ledger, ask, view, NOW)
    assert isinstance(answer, Shortfall)
    assert (answer.check, answer.code) == (row.name, row.code)
    assert "\n" not in answer.message()
    assert answer.message().endswith(".")
    assert answer.details()["check"] == row.name


@pytest.mark.parametrize("row", CHECKS, ids=lambda row: row.name)
def test_each_check_refuses_a_case_that_no_other_check_refuses(row, monkeypatch):
    refuses_alone(row)
    ledger, ask, view = ALONE[row.name]()
    if row.name in ("host", "domains"):
        return  # without them there is nothing for the others to look at
    monkeypatch.setattr("capyctl.ledger.checks.CHECKS", tuple(one for one in CHECKS if one is not row))
    if row.name in ("card_seen", "pool_seen"):
        with pytest.raises(KeyError):  # the others would look at a sample that is not there
            propose(ledger, ask, view, NOW)
    elif row.name == "run":
        assert judge(ledger, ask, view, NOW) is None
    else:
        assert isinstance(propose(ledger, ask, view, NOW), Proposal)


def test_every_check_has_a_case_a_closed_code_and_a_reason():
    assert set(ALONE) == {row.name for row in CHECKS}
    assert len({row.name for row in CHECKS}) == len(CHECKS)
    for row in CHECKS:
        assert row.code in CODES
        assert row.why.endswith(".")
        assert row.requires.__doc__
        assert row.scope.value


@pytest.mark.parametrize("row", CHECKS, ids=lambda row: row.name)
def test_a_refusal_changes_nothing_and_can_be_asked_again(row):  # M15
    ledger, ask, view = ALONE[row.name]()
    before = attrs.asdict(ledger)
    assert propose(ledger, ask, view, NOW) == propose(ledger, ask, view, NOW)
    assert attrs.asdict(ledger) == before


# --- one byte to either side ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "fits", "figures"),
    [
        ("managed_limit", plan(40, 30), {"needs_bytes": 41, "free_bytes": 40, "limit_bytes": 100, "short_bytes": 1}),
        ("capacity", plan(20, 10), {"needs_bytes": 21, "free_bytes": 40, "reserve_bytes": 20, "short_bytes": 1}),
        (
            "free_memory",
            plan(29, 29),
            {"needs_bytes": 30, "free_bytes": 59, "reserve_bytes": 20, "unbacked_bytes": 10, "short_bytes": 1},
        ),
        # foreign on the card: 110 - 34 free - 70 of `old` = 6, out of the reserve of 10
        ("free_card_memory", plan(30, 30, domain=GPU0), {"free_bytes": 34, "reserve_bytes": 4, "short_bytes": 1}),
    ],
)
def test_a_limit_holds_to_the_byte_and_says_by_how_much(check, fits, figures):
    ledger, ask, view = ALONE[check]()
    answer = propose(ledger, ask, view, NOW)
    assert isinstance(answer, Shortfall)
    assert figures.items() <= answer.details().items()
    assert isinstance(propose(ledger, _ask("new", fits), view, NOW), Proposal)


def test_parked_limit_host_kv_limit_and_count_hold_to_the_byte():
    ledger = parked(ledger_of(pool_host(100, parked=10)), "old", plan(20, 20, 6))
    ledger = ready(ledger, "new", plan(20, 20, 4))
    assert isinstance(propose(ledger, ask_step(ledger, owner("new"), Phase.PARKING), PLENTY_POOL, NOW), Proposal)
    ledger = ready(ledger_of(pool_host(100, host_kv=10)), "old", plan(20, 20, host_kv=6))
    assert isinstance(propose(ledger, _ask("new", plan(20, 20, host_kv=4)), PLENTY_POOL, NOW), Proposal)


def test_the_first_check_in_the_order_of_the_page_gives_the_refusal():
    ledger = ready(ledger_of(pool_host(100, reserve=10)), "old", plan(60, 60))
    answer = propose(ledger, _ask("new", plan(60, 60)), seen(5, at=NOW - 10**6), NOW)
    assert isinstance(answer, Shortfall)
    assert answer.code == "stale_observation"  # before any arithmetic
    answer = propose(ledger, _ask("new", plan(60, 60)), seen(5), NOW)
    assert isinstance(answer, Shortfall)
    assert answer.code == "insufficient_resources"  # capacity before free memory


# --- observations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [NOW - 60_001, NOW + 1])
def test_old_and_future_observations_admit_nothing_that_rises(at):  # invariant 9, M13
    answer = propose(ledger_of(pool_host()), _ask("new", plan(1, 1)), seen(50, at=at), NOW)
    assert isinstance(answer, Shortfall)
    assert (answer.code, answer.domain) == ("stale_observation", POOL)


@pytest.mark.parametrize("at", [NOW - 60_000, NOW])
def test_an_observation_of_exactly_the_ttl_is_still_good(at):
    assert isinstance(propose(ledger_of(pool_host()), _ask("new", plan(1, 1)), seen(50, at=at), NOW), Proposal)


def test_a_missing_card_closes_its_own_domain_alone():
    ledger = ledger_of(card_host(10, 10))
    view = seen({SYSTEM: 50, GPU1: 50})
    closed = propose(ledger, _ask("new", plan(1, 1, domain=GPU0)), view, NOW)
    assert isinstance(closed, Shortfall)
    assert (closed.code, closed.domain) == ("device_unobserved", GPU0)
    assert isinstance(propose(ledger, _ask("new", plan(1, 1, domain=GPU1)), view, NOW), Proposal)


def test_a_step_that_raises_nothing_is_not_judged_on_what_was_seen():
    """M13: parking costs no more than being ready, so it needs no observation to begin."""
    ledger = ready(ledger_of(pool_host()), "new", plan(20, 20, 2))
    answer = propose(ledger, ask_step(ledger, owner("new"), Phase.PARKING), {}, NOW)
    assert isinstance(answer, Proposal)
    assert answer.expires_at_ms is None


def test_resident_memory_is_counted_once_and_promised_memory_is_kept_free():
    """Memory 10: available less what others were promised and do not hold yet."""
    ledger = ready(ledger_of(pool_host(100, reserve=20)), "old", plan(50, 50))
    loaded, loading = {owner("old"): 50}, {owner("old"): 10}
    assert isinstance(propose(ledger, _ask("new", plan(30, 30)), seen(50, residents=loaded), NOW), Proposal)
    short = propose(ledger, _ask("new", plan(30, 30)), seen(50, residents=loading), NOW)
    assert isinstance(short, Shortfall)
    assert (short.code, short.unbacked_bytes, short.others) == ("insufficient_memory", 40, ((owner("old"), 40),))


def test_residents_of_strangers_are_credited_to_nobody():
    ledger = ready(ledger_of(pool_host(100, reserve=20)), "old", plan(50, 50))
    short = propose(ledger, _ask("new", plan(30, 30)), seen(50, residents={"deployment:x/instance:0": 50}), NOW)
    assert isinstance(short, Shortfall)
    assert short.unbacked_bytes == 50


def test_a_parked_owners_residue_is_credited_to_its_wake():
    ledger = parked(ledger_of(pool_host(100)), "old", plan(50, 50, 10))
    ask = ask_step(ledger, owner("old"), Phase.WAKE)
    assert isinstance(propose(ledger, ask, seen(40, residents={owner("old"): 10}), NOW), Proposal)
    short = propose(ledger, ask, seen(39, residents={owner("old"): 10}), NOW)
    assert isinstance(short, Shortfall)
    assert (short.needs_bytes, short.free_bytes) == (40, 39)


@given(st.integers(0, 200), st.integers(0, 60))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_foreign_memory_on_a_card_comes_out_of_its_reserve_first(foreign, needs):
    """Memory 3.1, with the figures written down a second time. M20: no charge moves."""
    policy = card_host(200, reserve=20)
    ledger = ledger_of(policy)
    free = 220 - foreign
    view = {**seen({SYSTEM: 100}), **seen({GPU0: free}, capacity=220)}
    answer = propose(ledger, _ask("new", plan(needs, needs, domain=GPU0)), view, NOW)
    # Foreign memory up to the reserve takes nothing from models; beyond it, only what is free counts.
    room = 200 if foreign <= 20 else free
    assert isinstance(answer, Proposal) == (needs <= room)
    assert not list(ledger.rows())


def test_foreign_memory_in_ram_leaves_the_reserve_whole():
    ledger = ledger_of(pool_host(100, reserve=20))
    short = propose(ledger, _ask("new", plan(50, 50)), seen(69, capacity=120), NOW)
    assert isinstance(short, Shortfall)
    assert short.reserve_bytes == 20


# --- arming --------------------------------------------------------------------------------------------------


def test_of_two_proposals_of_one_epoch_one_is_armed():  # invariant 11
    ledger = ledger_of(pool_host(100))
    one, two = (propose(ledger, _ask(name, plan(60, 60)), PLENTY_POOL, NOW) for name in ("one", "two"))
    assert isinstance(one, Proposal)
    assert isinstance(two, Proposal)
    ledger = armed(ledger, one, 1)
    late = arm(ledger, two, now_ms=NOW, generation=G1)
    assert isinstance(late, Outdated)
    assert (late.proposed_at_epoch, late.epoch) == (1, 2)
    assert ledger.charged(HOST, POOL) == 60
    again = propose(ledger, two.ask, PLENTY_POOL, NOW)
    assert isinstance(again, Shortfall)
    assert again.code == "insufficient_resources"


def test_a_proposal_lives_no_longer_than_its_oldest_observation():
    ledger = ledger_of(pool_host(100))
    proposal = propose(ledger, _ask("new", plan(1, 1)), seen(50, at=NOW - 1_000), NOW)
    assert isinstance(proposal, Proposal)
    assert proposal.expires_at_ms == NOW + 59_000
    late = arm(ledger, proposal, now_ms=Millis(NOW + 59_001), generation=G1)
    assert isinstance(late, Outdated)
    assert late.code == "stale_observation"
    assert isinstance(arm(ledger, proposal, now_ms=Millis(NOW + 59_000), generation=G1), Ledger)


def test_another_runs_step_is_not_armed():
    ledger = ready(ledger_of(pool_host()), "new", plan(5, 5, 1))
    proposal = propose(ledger, ask_step(ledger, owner("new"), Phase.PARKING), PLENTY_POOL, NOW)
    assert isinstance(proposal, Proposal)
    assert isinstance(arm(ledger, proposal, now_ms=NOW, generation=G2), Outdated)


def test_arming_raises_to_the_peak_of_the_step_and_lowers_nothing():  # invariants 4 and 5
    ledger = ledger_of(card_host(100, system=100))
    one = plan(30, 40, 5, domain=GPU0, ram=7, parking=45, wake=35, device="gpu0")
    ledger = start(ledger, "new", one)
    assert ledger.held_by(owner("new")).allocation.bytes == {GPU0: 40, SYSTEM: 7}  # READY costs more than COLD here
    ledger = settle_down(ledger, owner("new"), Phase.READY, usable("new"))
    ledger = step(ledger, "new", Phase.PARKING)
    assert ledger.charged(HOST, GPU0) == 45
    samples = {GPU0: resident("new", 3, 5)}
    ledger = settle_down(ledger, owner("new"), Phase.PARKED, samples)
    assert (ledger.charged(HOST, GPU0), ledger.held_by(owner("new")).claims) == (5, ())  # invariant 7
    ledger = step(ledger, "new", Phase.WAKE)
    assert ledger.charged(HOST, GPU0) == 40
    assert [claim.device for claim in ledger.held_by(owner("new")).claims] == ["gpu0"]


def test_steps_begin_from_the_phase_that_they_leave():
    ledger = ready(ledger_of(pool_host()), "new", plan(5, 5, 1))
    for ask in (_ask("new", plan(5, 5)), ask_step(ledger, owner("new"), Phase.WAKE)):
        with pytest.raises(InvariantBroken, match="may go from ready"):
            propose(ledger, ask, PLENTY_POOL, NOW)
    with pytest.raises(InvariantBroken, match="holds something"):
        ask_step(ledger, owner("nobody"), Phase.PARKING)


def test_a_parked_model_reacquires_its_device_or_waits():  # invariant 7
    policy = card_host(100)
    alone = plan(10, 10, 1, domain=GPU0, device="gpu0", exclusive=True)
    ledger = parked(ledger_of(policy), "old", alone)
    ledger = ready(ledger, "new", plan(10, 10, domain=GPU0, device="gpu0"))
    short = propose(ledger, ask_step(ledger, owner("old"), Phase.WAKE), plenty(policy), NOW)
    assert isinstance(short, Shortfall)
    assert (short.code, short.device, short.others) == ("device_conflict", "gpu0", ((owner("new"), 0),))


def test_shared_claims_live_beside_each_other():  # M8, invariant 6
    policy = card_host(100)
    shared = plan(10, 10, domain=GPU0, device="gpu0")
    ledger = ready(ready(ledger_of(policy), "one", shared), "two", shared)
    assert ledger.charged(HOST, GPU0) == 20


def test_negative_and_oversized_figures_cannot_be_asked():  # invariant 10
    for amount in (-1, 2**63):
        with pytest.raises(InvariantBroken, match="64-bit"):
            plan(amount, 1)
    huge = plan(2**63 - 1, 1)
    ledger = ready(ledger_of(pool_host(100)), "old", plan(1, 1))
    short = propose(ledger, _ask("new", huge), seen(2**63 - 1, capacity=2**63 - 1), NOW)
    assert isinstance(short, Shortfall)  # the sum passes 64 bits and no limit does
    assert short.never


def test_host_kv_and_parked_bytes_are_parts_of_the_charge():  # invariant 15, M4
    with pytest.raises(InvariantBroken, match="part of its domain"):
        attrs.evolve(plan(5, 5).phases[Phase.COLD], host_kv={POOL: Bytes(6)})
    ledger = ready(ledger_of(pool_host(100, host_kv=10)), "one", plan(20, 20, host_kv=6))
    assert (ledger.charged(HOST, POOL), ledger.host_kv(HOST, POOL)) == (20, 6)
    ledger = parked(ledger, "two", plan(20, 20, 8))
    assert (ledger.charged(HOST, POOL), ledger.parked(HOST, POOL)) == (28, 8)


# --- whole-host first start, and the start gate --------------------------------------------------------------


def test_a_whole_host_start_takes_the_limit_until_it_is_ready():  # M12, memory 14
    ledger = start(ledger_of(pool_host(100)), "big", plan(100, 60, whole_host=True))
    assert ledger.charged(HOST, POOL) == 100
    for tiny in (plan(0, 0), plan(1, 1)):
        short = propose(ledger, _ask("new", tiny), PLENTY_POOL, NOW)
        assert isinstance(short, Shortfall)
        assert short.code == "insufficient_resources"
    ledger = settle_down(ledger, owner("big"), Phase.READY, usable("big"))
    assert isinstance(propose(ledger, _ask("new", plan(40, 40)), PLENTY_POOL, NOW), Proposal)


def test_a_start_that_fits_beside_settled_peers_is_held_and_one_that_does_not_is_refused():  # memory 13
    ledger = start(ledger_of(pool_host(100)), "peer", plan(60, 35))
    held = gate(ledger, _ask("new", plan(60, 35)), PLENTY_POOL, NOW)
    assert isinstance(held, Hold)
    assert held.peers == (owner("peer"),)
    assert "peer" in held.message({owner("peer"): "peer"})
    refused = gate(ledger, _ask("new", plan(66, 35)), PLENTY_POOL, NOW)
    assert isinstance(refused, Shortfall)
    assert isinstance(gate(ledger, _ask("new", plan(40, 35)), PLENTY_POOL, NOW), Proposal)
    ledger = settle_down(ledger, owner("peer"), Phase.READY, usable("peer"))
    assert isinstance(gate(ledger, _ask("new", plan(60, 35)), PLENTY_POOL, NOW), Proposal)


def test_memory_that_a_loading_peer_will_give_back_counts_for_the_hold():
    ledger = start(ledger_of(pool_host(1000, reserve=20)), "peer", plan(60, 35))
    view = seen(70, capacity=140, residents={owner("peer"): 60})
    held = gate(ledger, _ask("new", plan(75, 35)), view, NOW)
    assert isinstance(held, Hold)  # 70 + (60 - 35) - 75 = 20
    assert isinstance(gate(ledger, _ask("new", plan(76, 35)), view, NOW), Shortfall)


def test_nobody_waits_for_a_peer_whose_state_nobody_knows():
    ledger = start(ledger_of(pool_host(100)), "peer", plan(60, 35))
    ledger = keep_larger(ledger, owner("peer"), (Phase.COLD, Phase.READY))
    assert isinstance(gate(ledger, _ask("new", plan(60, 35)), PLENTY_POOL, NOW), Shortfall)


# --- words -----------------------------------------------------------------------------------------------------


def test_a_refusal_reads_like_the_page():
    policy = attrs.evolve(card_host(64 * GIB, reserve=2 * GIB), name="box")
    ledger = ready(ledger_of(policy), "llama", plan(30 * GIB, 24 * GIB, domain=GPU0))
    view = {**seen({SYSTEM: 1}), **seen({GPU0: 40 * GIB}, capacity=66 * GIB, residents={owner("llama"): 22 * GIB})}
    view[GPU0] = attrs.evolve(view[GPU0], capacity_bytes=Bytes(62 * GIB))
    short = propose(ledger, _ask("qwen", plan(39 * GIB, 39 * GIB, domain=GPU0)), view, NOW)
    assert isinstance(short, Shortfall)
    assert short.code == "insufficient_device_memory"
    assert short.retryable
    assert short.message({owner("llama"): "llama-70b"}) == (
        "needs 39.0 GiB on gpu0 of box; 40.0 GiB free, 2.0 GiB reserved, "
        "2.0 GiB still to be filled by llama-70b (2.0 GiB)."
    )
    full = propose(ledger, _ask("qwen", plan(41 * GIB, 41 * GIB, domain=GPU0)), view, NOW)
    assert isinstance(full, Shortfall)
    assert full.message({owner("llama"): "llama-70b"}) == (
        "needs 41.0 GiB on gpu0 of box; 40.0 GiB of its 64.0 GiB free; charged to llama-70b (24.0 GiB)."
    )
    assert full.details()["charged"] == {owner("llama"): 24 * GIB}


def test_a_need_above_the_limit_itself_is_never_retryable():
    short = propose(ledger_of(pool_host(100)), _ask("new", plan(101, 50)), PLENTY_POOL, NOW)
    assert isinstance(short, Shortfall)
    assert short.never
    assert not short.retryable


def test_a_message_names_a_few_owners_and_counts_the_rest():
    ledger = ledger_of(pool_host(100))
    for name in "abcde":
        ledger = ready(ledger, name, plan(20, 20))
    short = propose(ledger, _ask("new", plan(1, 1)), PLENTY_POOL, NOW)
    assert isinstance(short, Shortfall)
    assert short.message().endswith("and 2 more.")
    assert len(short.details()["charged"]) == 5


def test_kinds_decide_the_code_and_names_do_not():  # memory 1
    domains = {
        Domain("x"): limits(9, kind=DomainKind.DEVICE, device="d"),
        Domain("gpu0"): limits(100, kind=DomainKind.DISTINCT),
    }
    ledger = ledger_of(attrs.evolve(card_host(100), domains=domains))
    view = seen(dict.fromkeys(domains, 0), capacity=100)
    for name, code in ((Domain("x"), "insufficient_device_memory"), (Domain("gpu0"), "insufficient_memory")):
        short = propose(ledger, _ask("new", plan(5, 5, domain=name)), view, NOW)
        assert isinstance(short, Shortfall)
        assert short.code == code


def test_instances_of_one_deployment_are_named_once_with_what_they_hold_together() -> None:
    others = (("a/0", Bytes(3 * GIB)), ("b/0", Bytes(2 * GIB)), ("b/1", Bytes(2 * GIB)), ("c/0", Bytes(GIB)))
    names = {"a/0": "a", "b/0": "b", "b/1": "b", "c/0": "c"}
    assert listed(others, names) == "b (4.0 GiB), a (3.0 GiB), c (1.0 GiB)"
    assert listed(tuple((f"{n}", Bytes(GIB)) for n in range(5)), {}).endswith("2 (1.0 GiB) and 2 more")
