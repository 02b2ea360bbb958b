"""Cleanup: total, true to its promises, freeing nothing without P-GONE, and telling lifecycle 4.5 and 18.5."""

from __future__ import annotations

from typing import Any

import attrs
import lives
import pytest
from explore import assert_total, explore, play
from lives import API, EARLY, READY, TRAITS, Alone, everything, starts_of_cleanup, unknown
from promises import keeps_its_promises

from capyctl.errors import InvariantBroken
from capyctl.fsm import cleanup as m
from capyctl.fsm import effects as x
from capyctl.fsm import facts as f
from capyctl.fsm.cleanup import CleanupPhase
from capyctl.fsm.gate import Closure, LeftReady, ReasonAdded
from capyctl.fsm.run import Step
from capyctl.fsm.table import Refused, first_line
from capyctl.fsm.types import Millis, Origin, Phase, Role, StopKind, Token

MACHINE = Alone(m.CLEANUP)
FIRST, SECOND = Token(READY.token + 1), Token(READY.token + 2)
NEVER = {
    f"IDLE_GATE {on} [{first_line(guard)}]": "a start is charged cold, a wake as a wake, and an exit is not asked"
    for on in ("Terminated", "LaunchFailed", "Probed")
    for guard in (m.gone_to_retry, m.gone_to_failed)
}


def alphabet(state: m.State) -> list[f.Fact]:
    return list(everything(state.run, TRAITS))


# --- exploration ----------------------------------------------------------------------------------


def test_every_event_is_decided_once_in_every_reachable_state_and_every_row_fires():
    assert_total(MACHINE, starts_of_cleanup(), alphabet, never=NEVER)


def test_every_step_of_every_end_keeps_its_promises():
    for step in explore(MACHINE, starts_of_cleanup(), alphabet):
        taken = m.CLEANUP.take(step.state, step.event)
        keeps_its_promises(step.state, step.event, taken.state, taken.orders)


# --- stories --------------------------------------------------------------------------------------


def due(kind: StopKind, **run: Any) -> m.State:
    return m.State(run=attrs.evolve(READY, **run), stop=lives.stop(kind, EARLY))


def turn(now: int, token: int = FIRST) -> f.Turn:
    return f.Turn(now_ms=Millis(now), token=Token(token))


def terminated(now: int, token: int = FIRST) -> f.Terminated:
    return f.Terminated(now_ms=Millis(now), token=Token(token), proof=lives.gone(READY))


def test_an_engine_that_reads_idle_is_asked_first_and_signalled_whatever_it_answers():
    """Decision 6."""
    for verdict in ("idle", "busy", "gone", "silent"):
        answered = f.IdleGateEnded(now_ms=Millis(31_000), token=FIRST, verdict=verdict, next_token=SECOND)
        story: list[tuple[f.Fact, list[Any]]] = [
            (turn(1_000), [x.SendAwaitIdle]),
            (answered, [x.SendTerminate]),
            (f.Sent(now_ms=Millis(31_001), token=SECOND), []),
        ]
        state = play(m.CLEANUP, due(StopKind.OPERATOR), story, ends=CleanupPhase.TERMINATING)
        _, orders = m.CLEANUP.step(state, terminated(32_000, SECOND))
        assert [type(order) for order in orders] == [
            x.ReleaseCharge,
            x.RunGone,
            LeftReady,
            x.StopEnded,
            x.SettledStopped,
        ]
        assert orders[-1].run.stopped.kind is StopKind.OPERATOR


def test_an_engine_with_park_control_or_one_that_exited_is_signalled_at_once():
    for state in (due(StopKind.OPERATOR, waits_idle=False), due(StopKind.EXIT)):
        play(m.CLEANUP, state, [(turn(1_000), [x.SendTerminate])], ends=CleanupPhase.ARMED)


@pytest.mark.parametrize(("after_ms", "failures", "retry"), [(59_999, 3, 120_000), (60_000, 0, None)])
def test_a_crash_within_a_minute_of_ready_is_a_failed_operation_and_a_later_one_is_not(
    after_ms: int, failures: int, retry: int | None
):
    """Decision 8."""
    stop = lives.stop(StopKind.EXIT, Millis(EARLY + after_ms))
    state = m.State(run=attrs.evolve(READY, failures=2), stop=stop)
    _, orders = m.CLEANUP.step(state, terminated(100_000))
    run = orders[-1].run
    assert isinstance(orders[-1], x.SettledFailed)
    assert run.failures == failures
    assert run.retry_at_ms == (None if retry is None else 100_000 + retry)


def test_an_unproven_end_keeps_everything_and_is_tried_again_ever_more_rarely():
    """62, 63, 71; and the kind of the stop is not forgotten on the way."""
    state, now, token, pauses = due(StopKind.PRESSURE, waits_idle=False), 0, int(READY.token), []
    for _ in range(8):
        token += 1
        state, orders = m.CLEANUP.step(state, turn(now, token))
        assert [type(order) for order in orders] == [x.SendTerminate]
        unproven = f.TerminateUnproven(now_ms=Millis(now), token=Token(token), reason="1 of 2 alive")
        state, orders = m.CLEANUP.step(state, unproven)
        assert [type(order) for order in orders] == [x.RunUncertain]
        assert state.run.charged is Phase.READY
        assert state.look_at_ms is not None
        assert m.CLEANUP.step(state, turn(state.look_at_ms - 1, token + 1)) == (state, ())
        pauses.append(state.look_at_ms - now)
        now = state.look_at_ms
    assert pauses == [30_000, 60_000, 120_000, 240_000, 480_000, 600_000, 600_000, 600_000]
    _, orders = m.CLEANUP.step(state, terminated(now, token - 3))
    assert orders[-1].run.stopped.kind is StopKind.PRESSURE, "gone is gone, even by an old answer"


def test_a_helper_that_is_alive_keeps_the_charge():
    """Invariant 23."""
    state, _ = m.CLEANUP.step(due(StopKind.OPERATOR, waits_idle=False), turn(0))
    partial = f.Terminated(now_ms=EARLY, token=FIRST, proof=lives.gone(READY, absent=(API,)))
    assert m.CLEANUP.step(state, partial) == (state, ())


def probed(now: int = 20_000, **proofs: Any) -> f.Probed:
    return f.Probed(now_ms=Millis(now), token=FIRST, **proofs)


LAUNCH = unknown(Step.LAUNCH, attrs.evolve(READY, charged=Phase.COLD, processes=(), needs_canary=False))
PARK = unknown(Step.PARK, attrs.evolve(READY, charged=Phase.PARKING))
WAKE = unknown(Step.WAKE, attrs.evolve(READY, charged=Phase.WAKE))
HERE = {"same": lives.same(READY)}
USABLE = {**HERE, "usable": lives.usable(READY)}
GONE = {"gone": lives.gone(READY)}


@pytest.mark.parametrize(
    ("lost", "seen", "outcome"),
    [
        pytest.param(LAUNCH, probed(**USABLE), x.Adopted, id="launch: ready, identities match: adopted"),
        pytest.param(
            LAUNCH, probed(**HERE), CleanupPhase.RECONCILING, id="launch: alive, not ready: wait to the bound"
        ),
        pytest.param(LAUNCH, probed(60_000, **HERE), CleanupPhase.PLANNED, id="launch: past the bound: stop"),
        pytest.param(LAUNCH, probed(**GONE), x.SettledToRetry, id="launch: gone: a failed attempt, released"),
        pytest.param(LAUNCH, probed(), CleanupPhase.RECONCILING, id="launch: unknown: charged"),
        pytest.param(
            PARK, probed(**HERE, resident=lives.resident(READY)), x.AdoptedParked, id="park: released: parked"
        ),
        pytest.param(PARK, probed(**USABLE), CleanupPhase.PLANNED, id="park: still resident: stop, no second release"),
        pytest.param(PARK, probed(), CleanupPhase.RECONCILING, id="park: unknown: charged"),
        pytest.param(PARK, probed(**GONE), x.SettledFailed, id="park: gone: it exited"),
        pytest.param(WAKE, probed(**USABLE, canary=lives.canary(READY)), x.AdoptedWoken, id="wake: canary: ready"),
        pytest.param(WAKE, probed(**USABLE), CleanupPhase.PLANNED, id="wake: ready without the canary: stop"),
        pytest.param(WAKE, probed(), CleanupPhase.RECONCILING, id="wake: unknown: charged"),
        pytest.param(WAKE, probed(**GONE), x.SettledToRestart, id="wake: gone: a clean restart"),
    ],
)
def test_a_look_classifies_the_unknown_as_the_reference_says(lost: m.State, seen: f.Probed, outcome: Any):
    """Lifecycle 18.5, row by row."""
    looking, orders = m.CLEANUP.step(lost, turn(EARLY))
    assert [type(order) for order in orders] == [x.SendProbe], "never the lost step again"
    after, orders = m.CLEANUP.step(looking, seen)
    if isinstance(outcome, CleanupPhase):
        assert after.phase is outcome
        assert after.run.charged is lost.run.charged
        assert not [order for order in orders if isinstance(order, x.HandOver)]
    else:
        assert type(orders[-1]) is outcome


@pytest.mark.parametrize(("attempts", "pause_ms"), [(0, 0), (1, 30_000)])
def test_a_launch_whose_answer_was_lost_is_tried_again_at_once_but_not_time_after_time(attempts: int, pause_ms: int):
    """A controller that was killed is no fault of the engine's; an answer that is lost again may be."""
    lost = attrs.evolve(LAUNCH, run=attrs.evolve(LAUNCH.run, attempts=attempts))
    looking, _ = m.CLEANUP.step(lost, turn(EARLY))
    _, orders = m.CLEANUP.step(looking, probed(20_000, **GONE))
    retry = orders[-1]
    assert isinstance(retry, x.SettledToRetry)
    assert (retry.run.attempts, retry.until_ms) == (attempts + 1, 20_000 + pause_ms)


def test_an_operators_stop_ends_the_unknown_without_waiting_for_a_pause():
    state = attrs.evolve(PARK, look_at_ms=Millis(10**9))
    story: list[tuple[f.Fact, list[Any]]] = [
        (
            f.StopRequested(now_ms=EARLY, stop=lives.stop(StopKind.OPERATOR, EARLY)),
            [ReasonAdded(now_ms=EARLY, reason=Closure.STOP)],
        ),
        (turn(EARLY), [x.SendAwaitIdle]),
        (f.OrderLost(now_ms=EARLY, token=FIRST, reason="lost"), []),
        (turn(EARLY, SECOND), [x.SendTerminate]),
    ]
    play(m.CLEANUP, state, story, ends=CleanupPhase.ARMED)


def test_a_start_while_it_ends_or_is_unknown_is_refused():
    wanted = f.Activated(now_ms=EARLY, origin=Origin.OPERATOR)
    assert m.CLEANUP.step(due(StopKind.IDLE), wanted)[1] == (Refused(code="still_stopping", event="Activated"),)
    assert m.CLEANUP.step(PARK, wanted)[1] == (Refused(code="unreconciled", event="Activated"),)


def test_stuck_places_restart_by_themselves_and_a_third_failed_attempt_does_not():
    """68, and the attempt budget."""
    _, orders = m.CLEANUP.step(due(StopKind.SATURATION), terminated(1_000))
    assert isinstance(orders[-1], x.SettledToRestart)
    for attempts, ends in ((0, x.SettledToRestart), (1, x.SettledToRestart), (2, x.SettledFailed)):
        state = due(StopKind.FAILED_WAKE, charged=Phase.WAKE, attempts=attempts)
        _, orders = m.CLEANUP.step(state, terminated(1_000))
        assert type(orders[-1]) is ends


def test_news_while_unknown_are_a_reason_to_look_at_once():
    exited = f.EngineExited(now_ms=EARLY, generation=READY.generation, role=Role.API, reason="gone")
    ending = attrs.evolve(PARK, look_at_ms=Millis(10**9), stop=lives.stop(StopKind.EXIT, EARLY))
    unknown = attrs.evolve(PARK, look_at_ms=Millis(10**9))
    for state, news in ((unknown, f.HostReturned(now_ms=EARLY)), (ending, exited)):
        after, orders = m.CLEANUP.step(state, news)
        assert (after.look_at_ms, orders) == (EARLY, ())


def test_an_exit_seen_while_unknown_ends_what_is_left_of_the_engine():
    """Its front was killed in the middle of a park or a wake; its workers live on and would never look right."""
    exited = f.EngineExited(now_ms=EARLY, generation=READY.generation, role=Role.API, reason="gone")
    for lost, kind in (
        (Step.LAUNCH, StopKind.FAILED_START),
        (Step.PARK, StopKind.EXIT),
        (Step.WAKE, StopKind.FAILED_WAKE),
    ):
        after, _ = m.CLEANUP.step(attrs.evolve(PARK, lost=lost, look_at_ms=Millis(10**9)), exited)
        assert (after.phase, after.stop.kind, after.run.charged) == (m.P.PLANNED, kind, PARK.run.charged)
        assert after.run.last_error.reason == "gone"


def test_an_engine_that_died_while_it_was_parked_reads_failed_whoever_saw_it_first():
    """The exit, or a look that finds it gone: one death has one end, with the same words."""
    exited = f.EngineExited(now_ms=EARLY, generation=READY.generation, role=Role.API, reason="killed")
    ending, _ = m.CLEANUP.step(attrs.evolve(PARK, look_at_ms=Millis(10**9)), exited)
    _, by_exit = m.CLEANUP.step(ending, terminated(1_000))
    _, by_look = m.CLEANUP.step(PARK, found_gone("killed"))
    for orders in (by_exit, by_look):
        assert [type(order) for order in orders[-3:]] == [x.StopEnded, x.StartEnded, x.SettledFailed]
        assert orders[-3].stop.kind is StopKind.EXIT
        run = orders[-1].run
        assert (run.last_error.reason, run.failures, run.stopped.unseen) == ("killed", 1, False)


def test_an_engine_that_died_in_a_park_while_nobody_watched_is_held_against_no_start():
    _, orders = m.CLEANUP.step(PARK, found_gone(""))
    assert isinstance(orders[-1], x.SettledFailed)
    assert (orders[-1].run.failures, orders[-1].run.retry_at_ms) == (0, None)


def found_gone(story: str) -> f.Probed:
    return f.Probed(now_ms=EARLY, token=PARK.run.token, gone=lives.gone(PARK.run), reason=story)


def test_a_state_that_cannot_be_stops_the_machine():
    free = m.State(run=attrs.evolve(READY, charged=Phase.NONE), stop=lives.stop(StopKind.IDLE, EARLY))
    with pytest.raises(InvariantBroken):
        m.CLEANUP.step(free, turn(1_000))
