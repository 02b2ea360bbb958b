"""Residency: total, true to its promises in every park and wake, and telling the stories of lifecycle 4.4."""

from __future__ import annotations

from typing import Any

import attrs
import lives
import pytest
from explore import assert_total, explore, play
from lives import EARLY, READY, SWITCH, TRAITS, Alone, everything
from promises import keeps_its_promises

from capyctl.errors import InvariantBroken
from capyctl.fsm import effects as x
from capyctl.fsm import facts as f
from capyctl.fsm import residency as m
from capyctl.fsm.gate import Closure, LeftReady, ReadyProven, ReasonAdded, ReasonRemoved
from capyctl.fsm.residency import ResidencyPhase
from capyctl.fsm.table import Refused
from capyctl.fsm.types import Millis, Origin, Phase, Residency, Role, StopKind, Token

MACHINE = Alone(m.RESIDENCY)
STARTS = (
    m.State(run=READY),
    m.State(run=attrs.evolve(READY, needs_canary=False)),
    m.State(run=attrs.evolve(READY, tier=Residency.RESTART_ONLY)),
)
FIRST, SECOND = Token(READY.token + 1), Token(READY.token + 2)


def alphabet(state: m.State) -> list[f.Fact]:
    return list(everything(state.run, TRAITS))


# --- exploration ----------------------------------------------------------------------------------


def test_every_event_is_decided_once_in_every_reachable_state_and_every_row_fires():
    assert_total(MACHINE, STARTS, alphabet)


def test_every_step_of_every_park_and_wake_keeps_its_promises():
    for step in explore(MACHINE, STARTS, alphabet):
        taken = m.RESIDENCY.take(step.state, step.event)
        keeps_its_promises(step.state, step.event, taken.state, taken.orders)


# --- stories --------------------------------------------------------------------------------------


def park(now: int, origin: Origin = Origin.OPERATOR, **more: Any) -> f.ParkRequested:
    return f.ParkRequested(now_ms=Millis(now), origin=origin, drain_ends_at_ms=Millis(now + 30_000), **more)


def by_switch(now: int, **more: Any) -> f.ParkRequested:
    return park(now, Origin.SWITCH, switch=SWITCH, for_name="mistral", **more)


def drained(now: int) -> f.GateDrained:
    return f.GateDrained(now_ms=Millis(now), quiet=lives.quiet(READY, read_at_ms=Millis(now)))


def admitted(now: int) -> f.ParkAdmitted:
    return f.ParkAdmitted(now_ms=Millis(now), token=FIRST, deadline_ms=Millis(now + 60_000))


def confirmed(now: int) -> f.ParkConfirmed:
    return f.ParkConfirmed(
        now_ms=Millis(now),
        token=FIRST,
        quiet=lives.quiet(READY, read_at_ms=Millis(now)),
        same=lives.same(READY),
        resident=lives.resident(READY),
    )


def woken(now: int, canary: bool = True) -> f.WakeConfirmed:
    return f.WakeConfirmed(
        now_ms=Millis(now),
        token=SECOND,
        back=lives.back(READY),
        usable=lives.usable(READY),
        canary=lives.canary(READY) if canary else None,
        same=lives.same(READY),
    )


def parked() -> m.State:
    story: list[tuple[f.Fact, list[Any]]] = [
        (park(0), [ReasonAdded(now_ms=Millis(0), reason=Closure.PARK)]),
        (drained(5_000), []),
        (admitted(5_100), [x.RaiseCharge(phase=Phase.PARKING), x.SendRelease]),
        (f.Sent(now_ms=Millis(5_200), token=FIRST), []),
        (confirmed(8_000), [x.SettleDown, LeftReady, x.ParkEnded(code=None, origin=Origin.OPERATOR)]),
    ]
    return play(m.RESIDENCY, m.State(run=READY), story, ends=ResidencyPhase.PARKED)


def waking() -> m.State:
    story: list[tuple[f.Fact, list[Any]]] = [
        (f.Activated(now_ms=Millis(9_000), origin=Origin.REQUEST, wait_ends_at_ms=Millis(99_000)), []),
        (
            f.WakeAdmitted(now_ms=Millis(9_100), token=SECOND, deadline_ms=Millis(69_100)),
            [x.RaiseCharge(phase=Phase.WAKE), x.SendRestore],
        ),
        (f.Sent(now_ms=Millis(9_200), token=SECOND), []),
        (f.Restored(now_ms=Millis(9_900), token=SECOND), []),
    ]
    return play(m.RESIDENCY, parked(), story, ends=ResidencyPhase.VERIFYING)


def test_an_operators_park_drains_raises_releases_proves_and_lowers():
    state = parked()
    assert state.run.charged is Phase.PARKED
    assert state.run.generation == READY.generation
    assert state.run.processes == READY.processes


def test_a_wake_keeps_its_generation_and_is_ready_with_the_canary_s_answer():
    """Decision 16, invariant 44."""
    after = play(
        m.RESIDENCY,
        waking(),
        [(woken(10_500), [x.SettleDown, ReadyProven, x.ReadyReached])],
        ends=ResidencyPhase.READY,
    )
    assert (after.run.generation, after.run.ready_at_ms, after.run.charged) == (READY.generation, 10_500, Phase.READY)


def test_an_unanswered_canary_is_unknown_and_a_different_answer_is_a_stop():
    """Invariant 44."""
    _, orders = m.RESIDENCY.step(waking(), woken(10_500, canary=False))
    assert [type(order) for order in orders] == [x.KeepLarger, x.RunUncertain, LeftReady, x.BecameUncertain]
    differs = f.WakeFailed(
        now_ms=Millis(10_500), token=SECOND, code="operation_failed", reason="42 became 43", mismatch=True
    )
    _, orders = m.RESIDENCY.step(waking(), differs)
    assert [type(order) for order in orders] == [ReasonAdded, x.StopDue]
    assert orders[-1].stop.kind is StopKind.MISMATCH
    assert orders[-1].run.last_error.code == "wake_mismatch"
    assert orders[-1].run.charged is Phase.WAKE, "the wake's charge stays until it is proven gone"


def test_a_park_without_room_stays_loaded_for_an_operator_and_is_a_stop_for_a_switch():
    """Lifecycle 4.4 and 12.4: released: stopped (no room to park)."""
    full = f.ParkNotAdmitted(now_ms=Millis(6_000), code="parked_capacity", reason="2 GiB over the limit")
    play(
        m.RESIDENCY,
        m.State(run=READY),
        [
            (park(0), [ReasonAdded]),
            (drained(5_000), []),
            (full, [ReasonRemoved, ReasonRemoved, x.ParkEnded(code="parked_capacity", reason="2 GiB over the limit")]),
        ],
        ends=ResidencyPhase.READY,
    )
    state = play(
        m.RESIDENCY,
        m.State(run=READY),
        [(by_switch(0), [ReasonAdded(now_ms=Millis(0), reason=Closure.SWITCH)]), (drained(5_000), [])],
        ends=ResidencyPhase.PARK_PLANNED,
    )
    _, orders = m.RESIDENCY.step(state, full)
    assert [type(order) for order in orders] == [ReasonAdded, x.ParkBecameStop, x.StopDue]
    assert orders[1].reason == "no room to park"
    assert (orders[2].stop.kind, orders[2].stop.for_name, orders[2].stop.switch) == (
        StopKind.PRESSURE,
        "mistral",
        SWITCH,
    )


def test_a_refused_park_of_which_nothing_was_sent_is_charged_as_ready_again():
    state = play(
        m.RESIDENCY,
        m.State(run=READY),
        [(park(0), [ReasonAdded]), (drained(5_000), []), (admitted(5_100), [x.RaiseCharge, x.SendRelease])],
        ends=ResidencyPhase.PARK_ARMED,
    )
    refused = f.ParkRefused(now_ms=Millis(5_300), token=FIRST, code="unavailable", reason="not quiescent")
    loaded, orders = m.RESIDENCY.step(state, refused)
    assert loaded.run.charged is Phase.PARKING, "invariant 3: a refusal is no proof"
    assert x.SettleDown not in {type(order) for order in orders}
    loaded, orders = m.RESIDENCY.step(state, attrs.evolve(refused, unsent=lives.unsent(READY)))
    assert loaded.run.charged is Phase.READY
    assert orders[0] == x.SettleDown(phase=Phase.READY, proof=lives.unsent(READY))


def test_what_cannot_park_is_refused_to_an_operator_and_stopped_for_a_switch_or_a_timer():
    state = m.State(run=attrs.evolve(READY, tier=Residency.RESTART_ONLY))
    assert m.RESIDENCY.step(state, park(0)) == (state, (Refused(code="unsupported_capability", event="ParkRequested"),))
    for event, kind in ((by_switch(0), StopKind.PRESSURE), (park(0, Origin.IDLE), StopKind.IDLE)):
        after, orders = m.RESIDENCY.step(state, event)
        assert after.phase is ResidencyPhase.DRAINING_TO_STOP
        assert after.stop is not None
        assert after.stop.kind is kind
        assert [type(order) for order in orders] == [ReasonAdded, x.ParkBecameStop]


@pytest.mark.parametrize(
    ("more", "kind"),
    [({"settle_at_stop": True}, StopKind.CUT_REQUEST), ({"outgrown": True}, StopKind.GROWTH)],
)
def test_a_park_that_must_be_a_stop_keeps_on_demand_activation(more: dict[str, bool], kind: StopKind):
    """Lifecycle 4.4, invariant 36; none of these kinds closes on-demand activation (20)."""
    after, _ = m.RESIDENCY.step(m.State(run=READY), park(0, **more))
    assert after.stop is not None
    assert after.stop.kind is kind
    assert after.phase is ResidencyPhase.DRAINING_TO_STOP


def test_a_drain_that_does_not_end_serves_again_but_an_operators_stop_ends_anyway():
    back = [ReasonRemoved, ReasonRemoved, x.ParkEnded]
    play(
        m.RESIDENCY,
        m.State(run=READY),
        [(by_switch(0), [ReasonAdded]), (f.Ticked(now_ms=Millis(29_999)), []), (f.Ticked(now_ms=Millis(30_000)), back)],
        ends=ResidencyPhase.READY,
    )
    asked = f.StopRequested(
        now_ms=Millis(1_000), stop=lives.stop(StopKind.OPERATOR, Millis(1_000)), drain_ends_at_ms=Millis(31_000)
    )
    state = play(
        m.RESIDENCY,
        m.State(run=READY),
        [
            (by_switch(0), [ReasonAdded]),
            (asked, [ReasonAdded, x.ParkBecameStop]),
            (f.Ticked(now_ms=Millis(30_500)), []),
        ],
        ends=ResidencyPhase.DRAINING_TO_STOP,
    )
    _, orders = m.RESIDENCY.step(state, f.Ticked(now_ms=Millis(31_000)))
    assert [type(order) for order in orders] == [ReasonAdded, x.StopDue]
    assert orders[-1].stop.kind is StopKind.OPERATOR


def test_an_operators_park_outlives_the_switch_that_wanted_it_first():
    """48 for the switch, and the operator's word stands."""
    story: list[tuple[f.Fact, list[Any]]] = [
        (by_switch(0), [ReasonAdded(now_ms=Millis(0), reason=Closure.SWITCH)]),
        (park(1), [ReasonAdded(now_ms=Millis(1), reason=Closure.PARK)]),
        (f.Withdrawn(now_ms=Millis(2), switch=SWITCH), [ReasonRemoved(now_ms=Millis(2), reason=Closure.SWITCH)]),
    ]
    state = play(m.RESIDENCY, m.State(run=READY), story, ends=ResidencyPhase.DRAINING_TO_PARK)
    assert state.ask is not None
    assert state.ask.origin is Origin.OPERATOR


def test_an_idle_timer_gives_way_to_a_request_and_a_switch_does_not():
    """Decision 1: a request for a model that drains for a switch is queued, and served by the next one."""
    wanted = f.Activated(now_ms=Millis(2), origin=Origin.REQUEST, wait_ends_at_ms=Millis(9_000))
    idle, _ = m.RESIDENCY.step(m.State(run=READY), park(0, Origin.IDLE))
    assert m.RESIDENCY.step(idle, wanted)[0].phase is ResidencyPhase.READY
    switched, _ = m.RESIDENCY.step(m.State(run=READY), by_switch(0))
    assert m.RESIDENCY.step(switched, wanted) == (switched, ())


def test_an_engine_that_exits_ends_and_a_helper_that_exits_does_not():
    """Invariant 22."""
    for role in (Role.API, Role.WORKER):
        exited = f.EngineExited(now_ms=EARLY, generation=READY.generation, role=role, reason="segfault")
        _, orders = m.RESIDENCY.step(m.State(run=READY), exited)
        assert orders[0] == ReasonAdded(now_ms=EARLY, reason=Closure.ENGINE_EXIT)
        assert orders[1].stop.kind is StopKind.EXIT
        assert orders[1].run.last_error.reason == "segfault"
    helper = f.EngineExited(now_ms=EARLY, generation=READY.generation, role=Role.HELPER, reason="done")
    assert m.RESIDENCY.step(m.State(run=READY), helper) == (m.State(run=READY), ())


def test_a_lost_release_keeps_the_peak_and_is_not_sent_again():
    """Invariants 12 and 27."""
    state = play(
        m.RESIDENCY,
        m.State(run=READY),
        [(park(0), [ReasonAdded]), (drained(5_000), []), (admitted(5_100), [x.RaiseCharge, x.SendRelease])],
        ends=ResidencyPhase.PARK_ARMED,
    )
    _, orders = m.RESIDENCY.step(state, f.OrderLost(now_ms=Millis(6_000), token=FIRST, reason="session lost"))
    assert orders[0] == x.KeepLarger(phases=(Phase.READY, Phase.PARKING, Phase.PARKED))
    assert orders[-1].run.charged is Phase.PARKING


def test_a_state_that_cannot_be_stops_the_machine():
    blind = m.State(phase=ResidencyPhase.RELEASING, run=READY)
    with pytest.raises(InvariantBroken):
        m.RESIDENCY.step(blind, f.StopRequested(now_ms=EARLY, stop=lives.stop(StopKind.OPERATOR, EARLY)))
