"""Settlement: a charge falls with a proof of its own run and its own step, and with nothing else. Memory 16."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_values import (
    GPU0,
    HOST,
    NOW,
    OTHER_HOST,
    POOL,
    SYSTEM,
    canary,
    card_host,
    gone,
    ledger_of,
    never,
    owner,
    parked,
    plan,
    plenty,
    pool_host,
    put_policy,
    ready,
    rebooted,
    resident,
    start,
    step,
    unsent,
    usable,
)

from capyctl.errors import InvariantBroken
from capyctl.fsm.types import Bytes, Phase
from capyctl.ledger import (
    Ledger,
    Proposal,
    Shortfall,
    ask_start,
    ask_step,
    keep_larger,
    propose,
    release,
    remeasure,
    set_policy,
    settle_down,
)
from capyctl.ledger.charges import Shelf, checked
from capyctl.ledger.settlement import SETTLES
from capyctl.session.kinds import SESSION

PARKS = plan(30, 20, 5)


def at(phase: Phase) -> Ledger:
    """One owner `a` whose present phase this is."""
    ledger = ledger_of(pool_host())
    match phase:
        case Phase.COLD:
            return start(ledger, "a", PARKS)
        case Phase.READY:
            return ready(ledger, "a", PARKS)
        case Phase.PARKING:
            return step(ready(ledger, "a", PARKS), "a", Phase.PARKING)
        case Phase.PARKED:
            return parked(ledger, "a", PARKS)
        case _:
            return step(parked(ledger, "a", PARKS), "a", Phase.WAKE)


PHASES = (Phase.COLD, Phase.READY, Phase.PARKING, Phase.PARKED, Phase.WAKE)
PROOFS = {
    "usable": usable("a"),
    "canary": canary("a"),
    "resident": {POOL: resident("a", 4, 5)},
    "unsent": unsent("a"),
    "gone": gone("a"),
    "never": never("a"),
    "rebooted": rebooted("a"),
}

# Written by hand, not read from the table: (present phase, proof) -> the phases it may settle to.
MAY_SETTLE = {
    (Phase.COLD, "usable"): {Phase.READY},
    (Phase.READY, "usable"): {Phase.READY},
    (Phase.PARKING, "usable"): {Phase.READY},
    (Phase.PARKING, "canary"): {Phase.READY},
    (Phase.PARKING, "resident"): {Phase.PARKED},
    (Phase.PARKING, "unsent"): {Phase.READY},
    (Phase.PARKED, "resident"): {Phase.PARKED},
    (Phase.WAKE, "usable"): {Phase.READY},
    (Phase.WAKE, "canary"): {Phase.READY},
    (Phase.WAKE, "resident"): {Phase.PARKED},
    (Phase.WAKE, "unsent"): {Phase.PARKED},
}


@pytest.mark.parametrize("present", PHASES, ids=lambda phase: phase.value)
@pytest.mark.parametrize("proof", PROOFS)
def test_a_proof_settles_its_own_steps_and_no_other(present, proof):
    ledger = at(present)
    for phase in Phase:
        if phase in MAY_SETTLE.get((present, proof), set()):
            after = settle_down(ledger, owner("a"), phase, PROOFS[proof])
            held = after.held_by(owner("a"))
            assert (held.phase, held.allocation.bytes) == (phase, PARKS.phases[phase].bytes)
            assert after.epoch == ledger.epoch + 1
        else:
            with pytest.raises(InvariantBroken):
                settle_down(ledger, owner("a"), phase, PROOFS[proof])


@pytest.mark.parametrize("present", PHASES, ids=lambda phase: phase.value)
@pytest.mark.parametrize("proof", ["gone", "never", "rebooted", "unsent"])
def test_only_the_end_of_a_run_frees_its_charge(present, proof):
    ledger = at(present)
    if proof == "unsent" and present is not Phase.COLD:
        with pytest.raises(InvariantBroken, match="frees"):
            release(ledger, owner("a"), PROOFS[proof])
        return
    after = release(ledger, owner("a"), PROOFS[proof])
    assert after.holding(owner("a")) is None  # invariant 13: no charge and no claim is left
    assert after.charged(HOST, POOL) == 0
    assert after.epoch == ledger.epoch + 1


OTHER_RUNS = [usable("a", 2), usable("b"), usable("a", 0)]


@pytest.mark.parametrize("wrong", OTHER_RUNS)
def test_a_proof_of_another_run_lowers_nothing(wrong):  # M7, invariant 20
    ledger = at(Phase.COLD)
    with pytest.raises(InvariantBroken, match="proof is of the run"):
        settle_down(ledger, owner("a"), Phase.READY, wrong)
    with pytest.raises(InvariantBroken, match="proof is of the run"):
        release(ledger, owner("a"), attrs.evolve(gone("a"), incarnation=wrong.incarnation))


def test_a_parked_model_is_not_ready_because_it_answers():
    """Even where ready costs no more than parked: the way back is a wake, which takes the device again."""
    ledger = parked(ledger_of(pool_host()), "a", plan(20, 5, 5))
    with pytest.raises(InvariantBroken, match="settles parked to ready"):
        settle_down(ledger, owner("a"), Phase.READY, usable("a"))


def test_a_lowered_row_names_its_proof():  # M7
    ledger = at(Phase.PARKED)
    assert ledger.held_by(owner("a")).lowered_by == "Resident a/0@1"
    assert step(ledger, "a", Phase.WAKE).held_by(owner("a")).lowered_by == "Resident a/0@1"


def test_a_park_shows_what_is_left_in_every_domain_that_it_empties():
    policy = card_host(100, 100)
    one = plan(20, 20, 5, domain=GPU0, ram=9)
    copy = {GPU0: Bytes(5), SYSTEM: Bytes(3)}
    one = attrs.evolve(one, phases={**one.phases, Phase.PARKED: attrs.evolve(one.phases[Phase.PARKED], bytes=copy)})
    ledger = step(ready(ledger_of(policy), "a", one), "a", Phase.PARKING)
    card, ram = resident("a", 5), resident("a", 3)
    for lacking in ({GPU0: card}, {SYSTEM: ram}, card, {GPU0: card, SYSTEM: resident("a", 4)}):
        with pytest.raises(InvariantBroken, match="what is left"):
            settle_down(ledger, owner("a"), Phase.PARKED, lacking)
    with pytest.raises(InvariantBroken, match="falls with a proof"):
        settle_down(ledger, owner("a"), Phase.PARKED, {})
    after = settle_down(ledger, owner("a"), Phase.PARKED, {GPU0: card, SYSTEM: ram})
    assert after.held_by(owner("a")).allocation.bytes == copy


def test_one_sample_is_enough_where_one_domain_is_emptied():
    ledger = step(ready(ledger_of(pool_host()), "a", PARKS), "a", Phase.PARKING)
    assert settle_down(ledger, owner("a"), Phase.PARKED, resident("a", 5)).charged(HOST, POOL) == 5
    with pytest.raises(InvariantBroken, match="what is left"):
        settle_down(ledger, owner("a"), Phase.PARKED, resident("a", 6))


# --- nobody knows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "around", "bytes_"),
    [
        (Phase.COLD, (Phase.COLD, Phase.READY), 30),
        (Phase.PARKING, (Phase.READY, Phase.PARKING, Phase.PARKED), 20),
        (Phase.WAKE, (Phase.PARKED, Phase.WAKE), 20),
        (Phase.READY, (Phase.READY,), 20),
        (Phase.PARKED, (Phase.PARKED,), 5),
    ],
)
def test_an_unknown_step_keeps_the_larger_charge_and_its_claims(present, around, bytes_):  # invariant 12
    ledger = at(present)
    claims = ledger.held_by(owner("a")).claims
    after = keep_larger(ledger, owner("a"), around)
    held = after.held_by(owner("a"))
    assert (held.uncertain, held.claims, held.on(POOL)) == (True, claims, bytes_)
    assert keep_larger(after, owner("a"), around).held_by(owner("a")) == held
    for phase in (Phase.COLD, Phase.PARKING, Phase.WAKE):
        short = propose(after, attrs.evolve(ask_start(owner=owner("a"), host=HOST, plan=PARKS), phase=phase), {}, NOW)
        assert isinstance(short, Shortfall)
        assert short.code == "unreconciled"
    assert release(after, owner("a"), gone("a")).charged(HOST, POOL) == 0


def test_an_unknown_step_is_settled_by_a_proof_of_either_side():
    lost = keep_larger(at(Phase.PARKING), owner("a"), (Phase.READY, Phase.PARKING, Phase.PARKED))
    for phase, proof in ((Phase.READY, usable("a")), (Phase.PARKED, {POOL: resident("a", 5)})):
        held = settle_down(lost, owner("a"), phase, proof).held_by(owner("a"))
        assert (held.phase, held.uncertain) == (phase, False)
    launch = keep_larger(at(Phase.COLD), owner("a"), (Phase.COLD, Phase.READY))
    with pytest.raises(InvariantBroken):  # a launch that may have happened was not unsent
        release(launch, owner("a"), unsent("a"))
    with pytest.raises(InvariantBroken):
        settle_down(launch, owner("a"), Phase.PARKED, {POOL: resident("a", 1)})
    with pytest.raises(InvariantBroken, match="between phases"):
        keep_larger(at(Phase.COLD), owner("a"), ())


def test_uncertain_owners_count_in_the_parked_set():  # memory 15
    ledger = ledger_of(pool_host(100, max_parked=1))
    ledger = keep_larger(parked(ledger, "a", PARKS), owner("a"), (Phase.PARKED,))
    ledger = ready(ledger, "b", PARKS)
    short = propose(ledger, ask_step(ledger, owner("b"), Phase.PARKING), {}, NOW)
    assert isinstance(short, Shortfall)
    assert short.code == "parked_capacity"
    assert ledger.parked(HOST, POOL) == 5


def test_lowering_needs_no_observation_at_all():  # M13
    ledger = at(Phase.COLD)
    assert settle_down(ledger, owner("a"), Phase.READY, usable("a")).charged(HOST, POOL) == 20
    assert release(ledger, owner("a"), gone("a")).charged(HOST, POOL) == 0


# --- a measured residue ------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(0, 40))
@settings(derandomize=True, max_examples=80, deadline=None)
def test_a_measured_residue_stays_between_placeholder_and_ready_and_never_falls(first, second):  # M6
    ledger = at(Phase.PARKED)
    once = remeasure(ledger, [owner("a")], POOL, Bytes(first))
    twice = remeasure(once, [owner("a")], POOL, Bytes(second))
    charges = [one.charged(HOST, POOL) for one in (ledger, once, twice)]
    assert charges == sorted(charges)
    assert charges[1:] == [min(max(first, 5), 20), min(max(first, second, 5), 20)]
    assert (once.epoch, twice.epoch) == (ledger.epoch + 1, ledger.epoch + 2)


def test_a_measured_residue_may_pass_the_limit_and_then_nothing_is_admitted():  # M1, invariant 1 (a)
    ledger = ledger_of(pool_host(50, parked=20))
    ledger = parked(parked(ledger, "a", PARKS), "b", plan(20, 20, 5))
    ledger = ready(ledger, "c", plan(35, 35))
    ledger = remeasure(ledger, [owner("a"), owner("b")], POOL, Bytes(12))
    assert ledger.charged(HOST, POOL) == 59
    short = propose(ledger, ask_start(owner=owner("d"), host=HOST, plan=plan(0, 0)), plenty(pool_host()), NOW)
    assert isinstance(short, Shortfall)
    assert short.code == "insufficient_resources"
    ledger = release(ledger, owner("c"), gone("c"))
    assert isinstance(
        propose(ledger, ask_start(owner=owner("d"), host=HOST, plan=plan(26, 26)), plenty(pool_host()), NOW), Proposal
    )


def test_who_is_not_parked_learns_the_residue_for_the_next_park():
    ledger = remeasure(at(Phase.READY), [owner("a")], POOL, Bytes(9))
    assert ledger.charged(HOST, POOL) == 20
    ledger = step(ledger, "a", Phase.PARKING)
    assert settle_down(ledger, owner("a"), Phase.PARKED, {POOL: resident("a", 9)}).charged(HOST, POOL) == 9


def test_an_uncertain_parked_owner_can_still_settle_after_a_measurement():
    ledger = keep_larger(at(Phase.PARKED), owner("a"), (Phase.PARKED,))
    ledger = remeasure(ledger, [owner("a")], POOL, Bytes(9))
    assert ledger.charged(HOST, POOL) == 9
    assert settle_down(ledger, owner("a"), Phase.PARKED, {POOL: resident("a", 9)}).charged(HOST, POOL) == 9


# --- limits ------------------------------------------------------------------------------------------------------


def test_limits_below_what_is_charged_are_refused_and_nothing_is_ended():  # memory 2.2
    ledger = at(Phase.READY)
    short = set_policy(ledger, pool_host(19))
    assert isinstance(short, Shortfall)
    assert (short.code, short.domain, short.needs_bytes, short.limit_bytes) == ("insufficient_resources", POOL, 20, 19)
    assert short.message({owner("a"): "chat"}).endswith(" is charged to chat (20 B); at most 19 B may be.")
    short = set_policy(ledger, pool_host(100, capacity=100, reserve=81))
    assert isinstance(short, Shortfall)
    after = set_policy(ledger, pool_host(20))
    assert isinstance(after, Ledger)
    assert (after.epoch, after.charged(HOST, POOL)) == (ledger.epoch + 1, 20)
    gone_ = set_policy(ledger, card_host(100))
    assert isinstance(gone_, Shortfall)
    assert gone_.code == "device_policy_mismatch"


def test_uncertain_charges_are_kept_past_lowered_limits_and_nothing_is_admitted():  # invariant 1 (b)
    ledger = keep_larger(at(Phase.READY), owner("a"), (Phase.READY,))
    ledger = put_policy(ledger, pool_host(19))
    assert ledger.charged(HOST, POOL) == 20
    short = propose(ledger, ask_start(owner=owner("b"), host=HOST, plan=plan(0, 0)), plenty(pool_host()), NOW)
    assert isinstance(short, Shortfall)
    assert short.code == "insufficient_resources"


@pytest.mark.parametrize(
    "wrong",
    [
        attrs.evolve(pool_host(), domains={}),
        attrs.evolve(pool_host(), domains={**pool_host().domains, GPU0: card_host(5).domains[GPU0]}),
        attrs.evolve(card_host(5), domains={GPU0: card_host(5).domains[GPU0]}),
        pool_host(10, parked=11),
        pool_host(10, host_kv=11),
        pool_host(-1),
        pool_host(2**63),
        attrs.evolve(
            card_host(5), domains={**card_host(5).domains, GPU0: attrs.evolve(card_host(5).domains[GPU0], device=None)}
        ),
    ],
)
def test_limits_that_cannot_be_are_our_bug(wrong):
    with pytest.raises(InvariantBroken):
        set_policy(Ledger.empty(), wrong)


# --- stored and loaded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
def test_a_ledger_is_loaded_as_it_was_stored(phase):
    ledger = keep_larger(at(phase), owner("a"), (phase,))
    rows = {name: SESSION.loads(SESSION.dumps(held), type(held)) for name, held in ledger.rows()}
    assert Ledger.load(epoch=ledger.epoch, hosts=ledger.hosts.values(), holdings=rows) == ledger


def test_rows_that_cannot_be_of_one_ledger_are_not_loaded():
    ledger = at(Phase.READY)
    with pytest.raises(InvariantBroken, match="published its limits"):
        Ledger.load(epoch=1, hosts=(), holdings=dict(ledger.rows()))
    alone = start(ledger_of(pool_host()), "b", plan(100, 5, whole_host=True))
    both = {**dict(ledger.rows()), **dict(alone.rows())}
    with pytest.raises(InvariantBroken, match="whole host"):
        Ledger.load(epoch=1, hosts=ledger.hosts.values(), holdings=both)
    policy = card_host(100)
    mine, theirs = (
        ready(ledger_of(policy), name, plan(1, 1, domain=GPU0, device="gpu0", exclusive=True)) for name in "cd"
    )
    with pytest.raises(InvariantBroken, match="exclusively"):
        Ledger.load(epoch=1, hosts=[policy], holdings={**dict(mine.rows()), **dict(theirs.rows())})


def test_the_table_of_proofs_says_why():
    assert all(row.why.endswith(".") for row in SETTLES)


# --- what is kept beside the rows --------------------------------------------------------------------------------


def test_sums_that_are_not_those_of_the_rows_are_noticed():  # M3
    ledger = at(Phase.READY)
    (host,) = ledger.hosts
    wrong = attrs.evolve(ledger.shelf(host), charged={POOL: Bytes(1)})
    with pytest.raises(InvariantBroken, match="sum up to"):
        checked(attrs.evolve(ledger, shelves={host: wrong}), host)
    with pytest.raises(InvariantBroken, match="sum up to"):
        checked(attrs.evolve(ledger, shelves={host: attrs.evolve(ledger.shelf(host), card_room=1)}), host)


def test_a_row_that_would_not_be_found_is_noticed():  # M4
    ledger = at(Phase.READY)
    (host,) = ledger.hosts
    with pytest.raises(InvariantBroken, match="found by its owner"):
        checked(attrs.evolve(ledger, homes={}), host)
    elsewhere = attrs.evolve(ledger.held_by(owner("a")), host="elsewhere")
    moved = Shelf.of(ledger.hosts[host], {owner("a"): elsewhere})
    with pytest.raises(InvariantBroken, match="found by its owner"):
        checked(attrs.evolve(ledger, shelves={host: moved}), host)


def test_an_owner_that_is_gone_is_looked_for_nowhere():
    ledger = at(Phase.READY)
    after = release(ledger, owner("a"), gone("a"))
    assert (after.holding(owner("a")), dict(after.homes), list(after.rows())) == (None, {}, [])


def test_what_is_assumed_of_one_host_leaves_every_other_shelf_as_it_is():  # M14
    ledger = ready(ledger_of(pool_host(), pool_host(host=OTHER_HOST)), "a", plan(5, 5))
    other = ledger.shelf(OTHER_HOST)
    held = ledger.held_by(owner("a"))
    assumed = ledger.assuming(owner("b"), attrs.evolve(held, host=HOST))
    assert assumed.charged(HOST, POOL) == 10
    assert assumed.shelf(OTHER_HOST) is other
    assert (ledger.charged(HOST, POOL), assumed.epoch) == (5, ledger.epoch)
    moved = ledger.assuming(owner("a"), attrs.evolve(held, host=OTHER_HOST))
    assert (moved.charged(HOST, POOL), moved.charged(OTHER_HOST, POOL)) == (0, 5)
