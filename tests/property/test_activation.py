"""Activation: total, true to its promises on every start, and telling the reference's stories (lifecycle 4.3)."""

from __future__ import annotations

from typing import Any

import attrs
import lives
import pytest
from explore import assert_total, explore, play
from lives import API, EARLY, HELPER, HOST, LANE, PROCESSES, SOON, TRAITS, Alone, everything
from promises import keeps_its_promises

from capyctl.errors import InvariantBroken
from capyctl.fsm import activation as m
from capyctl.fsm import effects as x
from capyctl.fsm import facts as f
from capyctl.fsm.activation import ActivationPhase
from capyctl.fsm.gate import ReadyProven, ReasonAdded
from capyctl.fsm.run import HoldCause, Problem, Run
from capyctl.fsm.table import Refused
from capyctl.fsm.types import Generation, Millis, Origin, Phase, StopKind, Token

MACHINE = Alone(m.ACTIVATION)
STARTS = (
    m.State(run=lives.NEW),
    m.State(  # as a failed wake leaves it
        phase=ActivationPhase.PLANNED,
        run=attrs.evolve(lives.NEW, attempts=1, wait_ends_at_ms=SOON, generation=Generation(5), token=Token(5)),
    ),
)


def alphabet(state: m.State) -> list[f.Fact]:
    return list(everything(state.run, TRAITS))


# --- exploration ----------------------------------------------------------------------------------


def test_every_event_is_decided_once_in_every_reachable_state_and_every_row_fires():
    assert_total(MACHINE, STARTS, alphabet)


def test_every_step_of_every_start_keeps_its_promises():
    for step in explore(MACHINE, STARTS, alphabet):
        taken = m.ACTIVATION.take(step.state, step.event)
        keeps_its_promises(step.state, step.event, taken.state, taken.orders)


# --- stories --------------------------------------------------------------------------------------


def activated(now: int, origin: Origin = Origin.REQUEST, ends: int | None = None) -> f.Activated:
    return f.Activated(now_ms=Millis(now), origin=origin, wait_ends_at_ms=None if ends is None else Millis(ends))


def placed(now: int, number: int) -> f.Placed:
    return f.Placed(
        now_ms=Millis(now),
        host=HOST,
        generation=Generation(number),
        token=Token(number),
        deadline_ms=Millis(now + 120_000),
    )


def failed(now: int, number: int, *, transient: bool, code: str = "launch_failed") -> f.LaunchFailed:
    run = Run(lane=LANE, generation=Generation(number))
    return f.LaunchFailed(
        now_ms=Millis(now),
        token=Token(number),
        code=code,
        reason="exit 1: no such file",
        proof=lives.never(run),
        transient=transient,
    )


def ready(now: int, number: int) -> f.LaunchReady:
    run = Run(lane=LANE, generation=Generation(number))
    return f.LaunchReady(
        now_ms=Millis(now), token=Token(number), processes=PROCESSES, usable=lives.usable(run), canary="42"
    )


def born() -> m.State:
    return m.State(run=Run(lane=LANE))


def test_a_start_is_planned_armed_sent_recorded_and_proven():
    story: list[tuple[f.Fact, list[Any]]] = [
        (activated(0), []),
        (placed(10, 1), [x.RaiseCharge(phase=Phase.COLD), x.SendLaunch]),
        (f.Sent(now_ms=Millis(11), token=Token(1)), []),
        (f.Spawned(now_ms=Millis(12), token=Token(1), processes=PROCESSES), []),
        (ready(900, 1), [x.SettleDown, ReadyProven, x.ReadyReached, x.BecameReady]),
    ]
    state = play(m.ACTIVATION, born(), story, ends=ActivationPhase.PROBING)
    _, orders = m.ACTIVATION.step(state, ready(900, 1))
    run = orders[-1].run
    assert (run.charged, run.canary, run.ready_at_ms, run.attempts, run.deadline_ms) == (
        Phase.READY,
        "42",
        900,
        0,
        None,
    )


def test_a_taken_port_is_tried_three_times_with_growing_pauses_and_then_it_is_failed():
    state = born()
    story: list[tuple[f.Fact, list[Any]]] = [
        (activated(0), []),
        (placed(0, 1), [x.RaiseCharge, x.SendLaunch]),
        (failed(100, 1, transient=True), [x.ReleaseCharge, x.AttemptFailed]),
        (f.Ticked(now_ms=Millis(30_099)), []),
        (f.Ticked(now_ms=Millis(30_100)), []),
        (placed(30_100, 2), [x.RaiseCharge, x.SendLaunch]),
        (failed(30_200, 2, transient=True), [x.ReleaseCharge, x.AttemptFailed]),
        (f.Ticked(now_ms=Millis(90_199)), []),
        (f.Ticked(now_ms=Millis(90_200)), []),
        (placed(90_200, 3), [x.RaiseCharge, x.SendLaunch]),
        (
            failed(90_300, 3, transient=True),
            [
                x.ReleaseCharge,
                x.StartEnded(code="launch_failed", reason="exit 1: no such file", retry_at_ms=Millis(120_300)),
            ],
        ),
    ]
    state = play(m.ACTIVATION, state, story, ends=ActivationPhase.FAILED)
    assert state.run.charged is Phase.NONE
    assert state.run.last_error == Problem(code="launch_failed", reason="exit 1: no such file")


def test_a_start_that_its_host_found_no_room_for_looks_again_at_once_and_then_waits_for_the_memory_itself():
    """What was free when it was charged was taken before it was launched; whoever waits is not held half a minute."""
    short = "insufficient_device_memory"
    story: list[tuple[f.Fact, list[Any]]] = [
        (activated(0), []),
        (placed(0, 1), [x.RaiseCharge, x.SendLaunch]),
        (failed(100, 1, transient=True, code=short), [x.ReleaseCharge, x.AttemptFailed]),
        (f.Ticked(now_ms=Millis(2_099)), []),
        (f.Ticked(now_ms=Millis(2_100)), []),
        (f.NotPlaced(now_ms=Millis(2_100), code=short, reason="needs 14.0 GiB", final=False), []),
        (placed(9_000, 2), [x.RaiseCharge, x.SendLaunch]),
        (failed(9_100, 2, transient=True, code=short), [x.ReleaseCharge, x.AttemptFailed]),
        (f.Ticked(now_ms=Millis(39_099)), []),
    ]
    state = play(m.ACTIVATION, born(), story, ends=ActivationPhase.HELD)
    assert state.hold_ends_at_ms == 39_100


def test_an_exit_before_ready_ends_the_operation_and_the_pause_doubles_up_to_ten_minutes():
    """Decision 7: 30 s · 2^(k-1) after the k-th failed operation in a row."""
    state, now, pauses = born(), 0, []
    for number in range(1, 8):
        for event in (activated(now), placed(now, number), failed(now, number, transient=False)):
            state, _ = m.ACTIVATION.step(state, event)
        assert state.phase is ActivationPhase.FAILED
        assert state.run.retry_at_ms is not None
        pauses.append(state.run.retry_at_ms - now)
        early = activated(state.run.retry_at_ms - 1)
        assert m.ACTIVATION.step(state, early) == (state, (Refused(code="activation_failed", event="Activated"),))
        now = state.run.retry_at_ms
    assert pauses == [30_000, 60_000, 120_000, 240_000, 480_000, 600_000, 600_000]


def test_an_operator_starts_a_failed_model_at_once_and_a_new_revision_forgets_its_failures():
    state = born()
    for event in (activated(0), placed(0, 1), failed(0, 1, transient=False)):
        state, _ = m.ACTIVATION.step(state, event)
    by_hand, _ = m.ACTIVATION.step(state, activated(1, Origin.OPERATOR))
    assert by_hand.phase is ActivationPhase.PLANNED
    assert by_hand.run.failures == 1
    revised, _ = m.ACTIVATION.step(state, f.Revised(now_ms=Millis(1)))
    assert revised.phase is ActivationPhase.STOPPED
    assert (revised.run.failures, revised.run.retry_at_ms, revised.run.last_error) == (0, None, None)


def test_a_stop_while_planned_is_complete_at_once_and_while_launching_it_waits_for_the_outcome():
    """P-NONE-WAITING, and lifecycle 4.3: accepted, and run after this lane's task has classified its outcome."""
    asked = f.StopRequested(now_ms=Millis(5), stop=lives.stop(StopKind.OPERATOR, Millis(5)))
    play(
        m.ACTIVATION,
        born(),
        [(activated(0), []), (asked, [x.StartEnded, x.StopEnded])],
        ends=ActivationPhase.STOPPED,
    )
    launching: list[tuple[f.Fact, list[Any]]] = [
        (activated(0), []),
        (placed(0, 1), [x.RaiseCharge, x.SendLaunch]),
        (asked, []),
    ]
    state = play(m.ACTIVATION, born(), launching, ends=ActivationPhase.ARMED)
    play(
        m.ACTIVATION,
        state,
        [(failed(9, 1, transient=True), [x.ReleaseCharge, x.StartEnded, x.StopEnded])],
        ends=ActivationPhase.STOPPED,
    )
    _, orders = m.ACTIVATION.step(state, ready(9, 1))
    assert [type(order) for order in orders] == [x.SettleDown, ReasonAdded, x.StopDue]
    assert orders[-1].stop == asked.stop


def test_after_an_operators_stop_only_an_operator_starts_it():
    """Invariant 38."""
    state, _ = m.ACTIVATION.step(
        born(), f.StopRequested(now_ms=Millis(0), stop=lives.stop(StopKind.OPERATOR, Millis(0)))
    )
    for origin in Origin:
        after, orders = m.ACTIVATION.step(state, activated(1, origin))
        if origin is Origin.OPERATOR:
            assert after.phase is ActivationPhase.PLANNED
        else:
            assert orders == (Refused(code="deployment_stopped", event="Activated"),)
    reopened, _ = m.ACTIVATION.step(state, f.Reopened(now_ms=Millis(2)))
    assert m.ACTIVATION.step(reopened, activated(3))[0].phase is ActivationPhase.PLANNED


def test_waiting_for_memory_says_why_and_ends_with_whoever_waits_longest():
    """Decision 17."""
    short = f.NotPlaced(now_ms=Millis(1), code="insufficient_memory", reason="needs 2 GiB, 1 GiB free")
    story: list[tuple[f.Fact, list[Any]]] = [
        (activated(0, ends=1_000), []),
        (short, []),
        (activated(500, ends=2_000), []),
        (f.Ticked(now_ms=Millis(1_999)), []),
        (
            f.Ticked(now_ms=Millis(2_000)),
            [x.StartEnded(code="activation_timeout", reason="needs 2 GiB, 1 GiB free")],
        ),
    ]
    state = play(m.ACTIVATION, born(), story, ends=ActivationPhase.STOPPED)
    assert state.run.last_error == Problem(code="insufficient_memory", reason="needs 2 GiB, 1 GiB free")


def test_the_bound_of_a_start_counts_from_its_arm_and_silence_past_the_grace_is_unknown():
    """Decision 17; the host ends the launch at 120 s and has 30 s to say so."""
    state = born()
    for event in (activated(0), placed(1_000_000, 1)):
        state, _ = m.ACTIVATION.step(state, event)
    due = 1_000_000 + 120_000 + 30_000
    assert m.ACTIVATION.step(state, f.Ticked(now_ms=Millis(due - 1))) == (state, ())
    _, orders = m.ACTIVATION.step(state, f.Ticked(now_ms=Millis(due)))
    assert [type(order) for order in orders] == [x.KeepLarger, x.RunUncertain, x.BecameUncertain]
    _, late = m.ACTIVATION.step(state, ready(due - 1, 1))
    assert x.BecameReady in {type(order) for order in late}, "time proves nothing against P-READY"


def test_a_start_held_for_a_neighbour_goes_on_when_the_neighbour_is_ready():
    held = f.Held(now_ms=Millis(1), until_ms=Millis(60_000), cause=HoldCause.PEER_STARTUP)
    play(
        m.ACTIVATION,
        born(),
        [(activated(0), []), (held, []), (f.HoldLifted(now_ms=Millis(2)), [])],
        ends=ActivationPhase.PLANNED,
    )


@pytest.mark.parametrize("process", [API, HELPER])
def test_a_gone_proof_that_misses_a_process_frees_nothing(process: Any):
    """Invariant 23: helpers too."""
    state = born()
    for event in (activated(0), placed(0, 1), f.Spawned(now_ms=EARLY, token=Token(1), processes=PROCESSES)):
        state, _ = m.ACTIVATION.step(state, event)
    run = state.run
    partial = f.LaunchFailed(
        now_ms=EARLY, token=Token(1), code="launch_failed", reason="exit", proof=lives.gone(run, absent=(process,))
    )
    assert m.ACTIVATION.step(state, partial) == (state, ())


def test_a_state_that_cannot_be_stops_the_machine():
    unfenced = m.State(phase=ActivationPhase.LAUNCHING, run=attrs.evolve(lives.NEW, charged=Phase.COLD))
    with pytest.raises(InvariantBroken):
        m.ACTIVATION.step(unfenced, f.StopRequested(now_ms=EARLY, stop=lives.stop(StopKind.OPERATOR, EARLY)))
