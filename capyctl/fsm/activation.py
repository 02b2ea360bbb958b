"""From STOPPED to the first proof that the model answers, and what a failed start leaves.

Planned and held starts hold nothing; an armed one holds its cold peak until the model is proven
usable or the launch is proven gone. What is neither goes to cleanup with its charge.
Lifecycle 4.3; decisions 7, 16, 17.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from capyctl.fsm import facts as f
from capyctl.fsm.effects import (
    AttemptFailed,
    BecameReady,
    BecameUncertain,
    KeepLarger,
    RaiseCharge,
    ReadyReached,
    ReleaseCharge,
    RunUncertain,
    SendLaunch,
    SettleDown,
    StartEnded,
    StopDue,
    StopEnded,
)
from capyctl.fsm.gate import Closure, ReadyProven, ReasonAdded
from capyctl.fsm.proofs import GoneProof, NeverLaunched
from capyctl.fsm.run import (
    ATTEMPTS_MAX,
    CLOSING,
    YIELDING,
    HoldCause,
    Problem,
    Run,
    Step,
    Stop,
    blank,
    cooldown_ms,
    later,
    made_ready,
    pause_ms,
    shows_gone,
    stronger,
)
from capyctl.fsm.table import Machine, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import Millis, Origin, Phase, StopKind

# --- phases ---------------------------------------------------------------------------------------


class ActivationPhase(enum.Enum):
    """Where a start is."""

    STOPPED = "stopped"  # nothing runs, nothing is charged
    PLANNED = "planned"  # wants a place; waits for memory, an effect slot, a switch
    HELD = "held"  # would fit, or may be tried again, later
    ARMED = "armed"  # charged; the launch may have left
    LAUNCHING = "launching"  # the launch has left
    PROBING = "probing"  # its processes are recorded; it loads
    FAILED = "failed"  # the last operation failed, or the engine exited; proven gone


P = ActivationPhase

NO_ROOM = frozenset({"insufficient_memory", "insufficient_device_memory", "device_unobserved", "stale_observation"})
"""What a host refuses a launch with when it sees other memory, right before it, than was known when it was charged."""

# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class State:
    """A start. `waits_for` says in figures why it has no place yet; times are Unix milliseconds."""

    phase: ActivationPhase = ActivationPhase.STOPPED
    run: Run
    hold: HoldCause | None = None
    hold_ends_at_ms: Millis | None = None
    waits_for: Problem | None = None


# --- guards ---------------------------------------------------------------------------------------


def _closed_to(run: Run, origin: Origin) -> bool:
    if run.stopped is None or run.stopped.kind not in CLOSING:
        return False
    return run.stopped.kind is StopKind.DELETE or origin is not Origin.OPERATOR


def may_start(state: State, event: f.Activated) -> bool:
    """no stop keeps this origin from starting it"""
    return not _closed_to(state.run, event.origin)


def is_closed(state: State, event: f.Activated) -> bool:
    """an operator stopped it, and it is not an operator who asks; or it is being deleted"""
    return _closed_to(state.run, event.origin)


def may_retry(state: State, event: f.Activated) -> bool:
    """an operator asks, or the time for the next try has come"""
    retry_at = state.run.retry_at_ms
    return event.origin is Origin.OPERATOR or retry_at is None or event.now_ms >= retry_at


def too_soon(state: State, event: f.Activated) -> bool:
    """a request asks before the time for the next try"""
    return not may_retry(state, event)


def yields(state: State, event: f.StopRequested) -> bool:
    """nobody insists on this stop: pressure, idleness, reclaim, growth, a cut request, a failed park"""
    return event.stop.kind in YIELDING


def insists(state: State, event: f.StopRequested) -> bool:
    """an operator, a new revision, a host's drain or a fault asks"""
    return not yields(state, event)


def is_operators_stop(state: State, event: f.Reopened) -> bool:
    """it is stopped because an operator stopped the deployment"""
    return state.run.stopped is not None and state.run.stopped.kind is StopKind.OPERATOR


def is_another_stop(state: State, event: f.Reopened) -> bool:
    """it is not stopped by an operator's stop of the deployment"""
    return not is_operators_stop(state, event)


def drawn_fresh(state: State, event: f.Placed) -> bool:
    """generation and token are newer than any this instance has had"""
    run = state.run
    return event.generation > (run.generation or 0) and event.token > (run.token or 0)


def drawn_before(state: State, event: f.Placed) -> bool:
    """generation or token is not newer than one it has had"""
    return not drawn_fresh(state, event)


def is_final(state: State, event: f.NotPlaced) -> bool:
    """waiting cannot change the verdict"""
    return event.final


def may_change(state: State, event: f.NotPlaced) -> bool:
    """memory may come free"""
    return not event.final


def cools_down(state: State, event: f.Fact) -> bool:
    """it is held by the cooldown of a failed attempt"""
    return state.hold is HoldCause.COOLDOWN


def waits_for_others(state: State, event: f.Fact) -> bool:
    """it is held for something other than a cooldown"""
    return state.hold is not HoldCause.COOLDOWN


def _wait_over(state: State, event: f.Fact) -> bool:
    return state.run.wait_ends_at_ms is not None and event.now_ms >= state.run.wait_ends_at_ms


def _hold_over(state: State, event: f.Fact) -> bool:
    return state.hold_ends_at_ms is not None and event.now_ms >= state.hold_ends_at_ms


def waited_in_vain(state: State, event: f.Ticked) -> bool:
    """the wait is over, and nothing was tried"""
    return _wait_over(state, event) and state.run.attempts == 0


def tried_in_vain(state: State, event: f.Ticked) -> bool:
    """the wait is over, and a launch of this operation has failed"""
    return _wait_over(state, event) and state.run.attempts > 0


def wait_goes_on(state: State, event: f.Ticked) -> bool:
    """it may still wait"""
    return not _wait_over(state, event)


def hold_is_over(state: State, event: f.Ticked) -> bool:
    """it may still wait, and the hold is over"""
    return not _wait_over(state, event) and _hold_over(state, event)


def hold_goes_on(state: State, event: f.Ticked) -> bool:
    """it may still wait, and the hold goes on"""
    return not _wait_over(state, event) and not _hold_over(state, event)


def answer_overdue(state: State, event: f.Ticked) -> bool:
    """the launch is not answered, its bound and the grace are over, and no stop waits"""
    return f.overdue(state.run, event) and state.run.pending is None


def answer_overdue_and_stopped(state: State, event: f.Ticked) -> bool:
    """the launch is not answered, its bound and the grace are over, and a stop waits"""
    return f.overdue(state.run, event) and state.run.pending is not None


def answer_may_come(state: State, event: f.Ticked) -> bool:
    """the launch may still be answered"""
    return not f.overdue(state.run, event)


def is_answer(state: State, event: f.Outcome) -> bool:
    """it answers the launch in flight"""
    return f.of_order(state.run, event)


def is_stale(state: State, event: f.Outcome) -> bool:
    """it answers another order"""
    return not is_answer(state, event)


def is_lost(state: State, event: f.OrderLost) -> bool:
    """it tells of the launch in flight, and no stop waits"""
    return is_answer(state, event) and state.run.pending is None


def is_lost_and_stopped(state: State, event: f.OrderLost) -> bool:
    """it tells of the launch in flight, and a stop waits"""
    return is_answer(state, event) and state.run.pending is not None


def _proves_ready(state: State, event: f.LaunchReady) -> bool:
    return is_answer(state, event) and event.usable.incarnation == state.run.incarnation


def is_usable(state: State, event: f.LaunchReady) -> bool:
    """it answers the launch in flight with P-READY of this run, and no stop waits"""
    return _proves_ready(state, event) and state.run.pending is None


def is_usable_and_stopped(state: State, event: f.LaunchReady) -> bool:
    """it answers the launch in flight with P-READY of this run, and a stop waits"""
    return _proves_ready(state, event) and state.run.pending is not None


def is_not_usable(state: State, event: f.LaunchReady) -> bool:
    """it answers another order, or proves another run"""
    return not _proves_ready(state, event)


def _proves_clean(state: State, event: f.LaunchFailed) -> bool:
    if not is_answer(state, event):
        return False
    if isinstance(event.proof, GoneProof):
        return shows_gone(state.run, event.proof)
    return event.proof.incarnation == state.run.incarnation and not state.run.processes


def _may_try_again(state: State, event: f.LaunchFailed) -> bool:
    return event.transient and state.run.attempts + 1 < ATTEMPTS_MAX


def failed_and_stopped(state: State, event: f.LaunchFailed) -> bool:
    """the launch is proven gone or unsent, and a stop waits"""
    return _proves_clean(state, event) and state.run.pending is not None


def failed_for_now(state: State, event: f.LaunchFailed) -> bool:
    """the launch is proven gone or unsent, the reason is transient, and attempts are left"""
    return _proves_clean(state, event) and state.run.pending is None and _may_try_again(state, event)


def failed_for_good(state: State, event: f.LaunchFailed) -> bool:
    """the launch is proven gone or unsent, and the reason is lasting or the attempts are spent"""
    return _proves_clean(state, event) and state.run.pending is None and not _may_try_again(state, event)


def failed_unproven(state: State, event: f.LaunchFailed) -> bool:
    """it answers another order, or its proof does not cover what is recorded of this run"""
    return not _proves_clean(state, event)


# --- changes --------------------------------------------------------------------------------------


def _run(state: State, **changes: Any) -> State:  # Any: attrs checks the names, mypy cannot see their types
    return attrs.evolve(state, run=attrs.evolve(state.run, **changes))


def begin(state: State, event: f.Activated) -> State:
    """a fresh operation with a fresh attempt budget"""
    run = attrs.evolve(
        blank(state.run),
        wait_ends_at_ms=event.wait_ends_at_ms,
        retry_at_ms=None,
        stopped=None,
    )
    return State(phase=state.phase, run=run)


def join(state: State, event: f.Activated) -> State:
    """it waits as long as whoever waits longest"""
    return _run(state, wait_ends_at_ms=later(state.run.wait_ends_at_ms, event.wait_ends_at_ms))


def note_stop(state: State, event: f.StopRequested) -> State:
    """the strongest stop is remembered"""
    return State(phase=state.phase, run=attrs.evolve(blank(state.run), stopped=stronger(state.run.stopped, event.stop)))


def note_pending(state: State, event: f.StopRequested) -> State:
    """the strongest stop waits for the launch's outcome"""
    return _run(state, pending=stronger(state.run.pending, event.stop))


def reopen(state: State, event: f.Reopened) -> State:
    """requests may start it again"""
    return _run(state, stopped=None)


def forget_failures(state: State, event: f.Revised) -> State:
    """no failed operation is remembered"""
    return _run(state, failures=0, retry_at_ms=None, last_error=None)


def arm(state: State, event: f.Placed) -> State:
    """host, generation, token and the engine's facts are set; the start's bound runs from here"""
    return State(
        phase=state.phase,
        run=attrs.evolve(
            state.run,
            host=event.host,
            generation=event.generation,
            token=event.token,
            deadline_ms=event.deadline_ms,
            charged=Phase.COLD,
            tier=event.tier,
            waits_idle=event.waits_idle,
            needs_canary=event.needs_canary,
        ),
    )


def note_shortage(state: State, event: f.NotPlaced) -> State:
    """what it waits for, in figures"""
    return attrs.evolve(state, waits_for=Problem(code=event.code, reason=event.reason))


def give_up_unplaced(state: State, event: f.NotPlaced) -> State:
    """the verdict is the last error"""
    return State(
        phase=state.phase,
        run=attrs.evolve(blank(state.run), last_error=Problem(code=event.code, reason=event.reason)),
    )


def hold(state: State, event: f.Held) -> State:
    """held until then"""
    return attrs.evolve(state, hold=event.cause, hold_ends_at_ms=event.until_ms)


def end_hold(state: State, event: f.Fact) -> State:
    """held no more"""
    return attrs.evolve(state, hold=None, hold_ends_at_ms=None)


def _timed_out(state: State) -> Problem:
    return (
        state.run.last_error
        if state.run.attempts and state.run.last_error
        else (state.waits_for or Problem(code="activation_timeout", reason="no memory came free in time"))
    )


def expire(state: State, event: f.Ticked) -> State:
    """the start is over"""
    return State(phase=state.phase, run=attrs.evolve(blank(state.run), last_error=_timed_out(state)))


def expire_failed(state: State, event: f.Ticked) -> State:
    """one more failed operation"""
    return State(phase=state.phase, run=_failed(blank(state.run), event.now_ms, _timed_out(state)))


def _failed(run: Run, now_ms: Millis, problem: Problem) -> Run:
    failures = run.failures + 1
    return attrs.evolve(run, failures=failures, retry_at_ms=Millis(now_ms + cooldown_ms(failures)), last_error=problem)


def record_processes(state: State, event: f.Spawned) -> State:
    """the processes are recorded"""
    return _run(state, processes=event.processes)


def spend_attempt(state: State, event: f.LaunchFailed) -> State:
    """one attempt is spent; the next waits out a cooldown, or a look where the host only found no room"""
    attempts = state.run.attempts + 1
    found_no_room = isinstance(event.proof, NeverLaunched) and event.code in NO_ROOM
    return State(
        phase=state.phase,
        hold=HoldCause.COOLDOWN,
        hold_ends_at_ms=Millis(event.now_ms + pause_ms(attempts, found_no_room=found_no_room)),
        run=attrs.evolve(
            blank(state.run),
            wait_ends_at_ms=state.run.wait_ends_at_ms,
            attempts=attempts,
            last_error=Problem(code=event.code, reason=event.reason),
        ),
    )


def fail(state: State, event: f.LaunchFailed) -> State:
    """one more failed operation; requests are answered with the reason for a while"""
    problem = Problem(code=event.code, reason=event.reason)
    return State(phase=state.phase, run=_failed(blank(state.run), event.now_ms, problem))


def end_stopped(state: State, event: f.LaunchFailed) -> State:
    """stopped, for the reason that waited"""
    problem = Problem(code=event.code, reason=event.reason)
    return State(phase=state.phase, run=attrs.evolve(blank(state.run), stopped=state.run.pending, last_error=problem))


# --- emits ----------------------------------------------------------------------------------------


def raise_cold(state: State, event: f.Placed) -> RaiseCharge:
    """charge the cold peak"""
    return RaiseCharge(phase=Phase.COLD)


def send_launch(state: State, event: f.Placed) -> SendLaunch:
    """launch"""
    run = arm(state, event).run
    return SendLaunch(incarnation=run.incarnation, token=event.token, host=event.host, deadline_ms=event.deadline_ms)


def settle_ready(state: State, event: f.LaunchReady) -> SettleDown:
    """cold → ready, by P-READY"""
    return SettleDown(phase=Phase.READY, proof=event.usable)


def _ready(state: State, event: f.LaunchReady) -> Run:
    return made_ready(state.run, event.now_ms, processes=event.processes, canary=event.canary)


def became_ready(state: State, event: f.LaunchReady) -> BecameReady:
    """to residency: READY"""
    return BecameReady(run=_ready(state, event))


def ready_reached(state: State, event: f.LaunchReady) -> ReadyReached:
    """the start succeeded"""
    return ReadyReached(incarnation=state.run.incarnation)


def gate_proven(state: State, event: f.LaunchReady) -> ReadyProven:
    """gate: READY is proven"""
    return ReadyProven(
        now_ms=event.now_ms, generation=state.run.incarnation.generation, probed_at_ms=event.usable.probed_at_ms
    )


def gate_stop(state: State, event: f.Fact) -> ReasonAdded:
    """gate: stop"""
    return ReasonAdded(now_ms=event.now_ms, reason=Closure.STOP)


def _pending(state: State) -> Stop:
    assert state.run.pending is not None  # the row's guard asked
    return state.run.pending


def stop_due_ready(state: State, event: f.LaunchReady) -> StopDue:
    """to cleanup: the stop that waited"""
    return StopDue(run=attrs.evolve(_ready(state, event), pending=None), stop=_pending(state))


def stop_due(state: State, event: f.Fact) -> StopDue:
    """to cleanup: the stop that waited, with the cold charge kept"""
    return StopDue(run=attrs.evolve(state.run, pending=None), stop=_pending(state))


def _lost_reason(event: f.Fact) -> str:
    return event.reason if isinstance(event, f.OrderLost) else "the launch was not answered in time"


def became_uncertain(state: State, event: f.Fact) -> BecameUncertain:
    """to cleanup: RECONCILING, launch"""
    problem = Problem(code="unreconciled", reason=_lost_reason(event))
    return BecameUncertain(run=attrs.evolve(state.run, last_error=problem), step=Step.LAUNCH, now_ms=event.now_ms)


def run_uncertain(state: State, event: f.Fact) -> RunUncertain:
    """nobody knows what the launch left"""
    return RunUncertain(incarnation=state.run.incarnation, step=Step.LAUNCH, reason=_lost_reason(event))


def keep_larger(state: State, event: f.Fact) -> KeepLarger:
    """keep the larger of cold and ready"""
    return KeepLarger(phases=(Phase.COLD, Phase.READY))


def release_charge(state: State, event: f.LaunchFailed) -> ReleaseCharge:
    """free everything, by the gone proof or because nothing was sent"""
    return ReleaseCharge(proof=event.proof)


def start_failed(state: State, event: f.LaunchFailed) -> StartEnded:
    """the start ended: the launch's reason"""
    return StartEnded(code=event.code, reason=event.reason, retry_at_ms=fail(state, event).run.retry_at_ms)


def attempt_failed(state: State, event: f.LaunchFailed) -> AttemptFailed:
    """one attempt failed"""
    after = spend_attempt(state, event)
    assert after.hold_ends_at_ms is not None  # just set
    return AttemptFailed(
        code=event.code, reason=event.reason, attempt=after.run.attempts, again_at_ms=after.hold_ends_at_ms
    )


def start_unplaced(state: State, event: f.NotPlaced) -> StartEnded:
    """the start ended: the verdict"""
    return StartEnded(code=event.code, reason=event.reason)


def start_expired(state: State, event: f.Ticked) -> StartEnded:
    """the start ended: `activation_timeout`"""
    return StartEnded(code="activation_timeout", reason=_timed_out(state).reason)


def start_expired_failed(state: State, event: f.Ticked) -> StartEnded:
    """the start ended: the last attempt's reason"""
    problem = _timed_out(state)
    return StartEnded(code=problem.code, reason=problem.reason, retry_at_ms=expire_failed(state, event).run.retry_at_ms)


def start_stopped(state: State, event: f.Fact) -> StartEnded:
    """the start ended: it was stopped"""
    return StartEnded(code="deployment_stopped", reason="it was stopped while it started")


def stop_ended(state: State, event: f.StopRequested) -> StopEnded:
    """the stop is complete"""
    return StopEnded(stop=event.stop)


def pending_stop_ended(state: State, event: f.LaunchFailed) -> StopEnded:
    """the stop that waited is complete"""
    return StopEnded(stop=_pending(state))


# --- invariants -----------------------------------------------------------------------------------

ANY = any_of(P)
WAITING = at(P.PLANNED, P.HELD)
IN_FLIGHT = at(P.ARMED, P.LAUNCHING, P.PROBING)
ENDED = at(P.STOPPED, P.FAILED)


def exactly_in_flight_is_charged(state: State) -> bool:
    """4, 13: Exactly an armed start is charged, and with its cold peak."""
    return state.run.charged is (Phase.COLD if state.phase in IN_FLIGHT else Phase.NONE)


def in_flight_is_fenced(state: State) -> bool:
    """19, 20: An armed start has a host, a generation, a token and a bound."""
    run = state.run
    known = None not in (run.host, run.generation, run.token, run.deadline_ms)
    return known if state.phase in IN_FLIGHT else run.host is None and run.deadline_ms is None


def only_probing_is_recorded(state: State) -> bool:
    """Exactly a probing start has recorded processes."""
    return (state.phase is P.PROBING) == bool(state.run.processes)


def only_in_flight_waits_with_a_stop(state: State) -> bool:
    """Only an armed start has a stop that waits for its outcome."""
    return state.run.pending is None or state.phase in IN_FLIGHT


def exactly_held_has_an_end(state: State) -> bool:
    """64: Exactly a held start has a cause and an end of its hold."""
    return (state.phase is P.HELD) == (state.hold is not None) == (state.hold_ends_at_ms is not None)


def attempts_are_bounded(state: State) -> bool:
    """67: A start operation has fewer failed launches behind it than it has attempts."""
    return 0 <= state.run.attempts < ATTEMPTS_MAX


def a_start_is_not_stopped(state: State) -> bool:
    """38: Only what does not start remembers why it was stopped."""
    return state.run.stopped is None or state.phase in ENDED


# --- table ----------------------------------------------------------------------------------------

_NOT_OURS = (f.ParkConfirmed, f.ParkRefused, f.Restored, f.WakeConfirmed, f.WakeFailed,
             f.IdleGateEnded, f.Terminated, f.TerminateUnproven, f.Probed)  # fmt: skip

ACTIVATION: Machine[State] = Machine(
    name="activation",
    doc=__doc__,
    phases=P,
    events=f.FACTS,
    invariants=(
        exactly_in_flight_is_charged,
        in_flight_is_fenced,
        only_probing_is_recorded,
        only_in_flight_waits_with_a_stop,
        exactly_held_has_an_end,
        attempts_are_bounded,
        a_start_is_not_stopped,
    ),
    rows=(
        # demands
        Row(when=at(P.STOPPED), on=f.Activated, given=may_start, to=P.PLANNED, change=begin,
            why="A fresh operation: the attempt budget belongs to it."),
        refuse(at(P.STOPPED), f.Activated, "deployment_stopped", given=is_closed,
               why="38: only an operator's start undoes an operator's stop."),
        Row(when=at(P.FAILED), on=f.Activated, given=may_retry, to=P.PLANNED, change=begin,
            why="A failed start never closes admission: the first request after the pause opens a new operation."),
        refuse(at(P.FAILED), f.Activated, "activation_failed", given=too_soon,
               why="Until then a request hears the engine's last words at once instead of waiting for the same end."),
        Row(when=WAITING | IN_FLIGHT, on=f.Activated, change=join,
            why="50: one activation per instance; whoever comes later joins it."),
        refuse(ANY, f.ParkRequested, "lifecycle_conflict", why="What is not READY has nothing to park."),
        Row(when=at(P.STOPPED), on=f.StopRequested, change=note_stop, emits=(stop_ended,),
            why="Stopping what is stopped succeeds, and an operator's stop is remembered."),
        ignore(at(P.FAILED), f.StopRequested, given=yields, why="Nothing of it is charged: there is nothing to take."),
        Row(when=at(P.FAILED), on=f.StopRequested, given=insists, to=P.STOPPED, change=note_stop, emits=(stop_ended,),
            why="It is proven gone already; what changes is whether a request may start it."),
        refuse(WAITING | IN_FLIGHT, f.StopRequested, "lifecycle_conflict", given=yields,
               why="A switch or a timer never takes what somebody is starting."),
        Row(when=WAITING, on=f.StopRequested, given=insists, to=P.STOPPED, change=note_stop,
            emits=(start_stopped, stop_ended), why="P-NONE-WAITING: no step was armed; the stop is complete."),
        Row(when=IN_FLIGHT, on=f.StopRequested, given=insists, change=note_pending,
            why="Accepted; it runs once the launch's outcome is classified, so that nothing is ended blindly."),
        ignore(ANY, f.Withdrawn, why="No switch wanted anything of what is not READY."),
        Row(when=at(P.STOPPED), on=f.Reopened, given=is_operators_stop, change=reopen,
            why="38: the operator's start of the deployment clears the operator's stop."),
        ignore(at(P.STOPPED), f.Reopened, given=is_another_stop,
               why="An instance stopped by its own number waits for a start of its own; other stops close nothing."),
        ignore(ANY - at(P.STOPPED), f.Reopened, why="It is not stopped."),
        Row(when=at(P.FAILED), on=f.Revised, to=P.STOPPED, change=forget_failures,
            why="Failures of an older revision say nothing about this one."),
        Row(when=at(P.STOPPED), on=f.Revised, change=forget_failures,
            why="Failures of an older revision say nothing about this one."),
        ignore(WAITING | IN_FLIGHT, f.Revised, why="Whoever revises also stops what starts with the old revision."),
        # verdicts
        Row(when=at(P.PLANNED), on=f.Placed, given=drawn_fresh, to=P.ARMED, change=arm,
            emits=(raise_cold, send_launch),
            why="W2, 4: the peak is charged in this step; the launch leaves once the step is durable."),
        refuse(at(P.PLANNED), f.Placed, "lifecycle_conflict", given=drawn_before,
               why="19: a generation is drawn once and only rises."),
        ignore(ANY - at(P.PLANNED), f.Placed, why="It wants no place now; nothing was charged for the verdict."),
        Row(when=at(P.PLANNED), on=f.NotPlaced, given=may_change, change=note_shortage,
            why="It waits for memory, a switch or an empty host; status shows the figures."),
        Row(when=at(P.PLANNED), on=f.NotPlaced, given=is_final, to=P.STOPPED, change=give_up_unplaced,
            emits=(start_unplaced,), why="Nothing was launched, so nothing failed: the next start may ask at once."),
        ignore(ANY - at(P.PLANNED), f.NotPlaced, why="It wants no place now."),
        Row(when=at(P.PLANNED), on=f.Held, to=P.HELD, change=hold,
            why="It would fit once a neighbour has left its peak: evicting for it would be waste."),
        Row(when=at(P.HELD), on=f.Held, given=waits_for_others, change=hold, why="The newer verdict counts."),
        ignore(at(P.HELD), f.Held, given=cools_down, why="A cooldown is not shortened or stretched by a neighbour."),
        ignore(ANY - WAITING, f.Held, why="It wants no place now."),
        Row(when=at(P.HELD), on=f.HoldLifted, given=waits_for_others, to=P.PLANNED, change=end_hold,
            why="What it was held for is over; the ledger decides anew."),
        ignore(at(P.HELD), f.HoldLifted, given=cools_down, why="Only time ends a cooldown."),
        ignore(ANY - at(P.HELD), f.HoldLifted, why="It is not held."),
        ignore(ANY, f.ParkAdmitted, why="It parks nothing."),
        ignore(ANY, f.ParkNotAdmitted, why="It parks nothing."),
        ignore(ANY, f.WakeAdmitted, why="It wakes nothing."),
        ignore(ANY, f.WakeNotAdmitted, why="It wakes nothing."),
        ignore(ANY, f.Turn, why="A start takes its turn with a place."),
        # outcomes of the launch
        Row(when=at(P.ARMED), on=f.Sent, given=is_answer, to=P.LAUNCHING, why="Progress for people."),
        ignore(at(P.ARMED), f.Sent, given=is_stale, why="Another order left."),
        ignore(ANY - at(P.ARMED), f.Sent, why="It left before, or it is another's."),
        Row(when=at(P.ARMED, P.LAUNCHING), on=f.Spawned, given=is_answer, to=P.PROBING, change=record_processes,
            why="W4: from here on P-GONE must cover these processes."),
        ignore(at(P.ARMED, P.LAUNCHING), f.Spawned, given=is_stale, why="Of an older launch, which is settled."),
        ignore(ANY - at(P.ARMED, P.LAUNCHING), f.Spawned, why="Told before, or of an older launch, which is settled."),
        Row(when=IN_FLIGHT, on=f.LaunchReady, given=is_usable,
            emits=(settle_ready, gate_proven, ready_reached, became_ready),
            why="W5: the proof lowers cold to ready. It counts even past the bound: time proves nothing against it."),
        Row(when=IN_FLIGHT, on=f.LaunchReady, given=is_usable_and_stopped,
            emits=(settle_ready, gate_stop, stop_due_ready),
            why="The launch is classified; the stop that waited runs now, and the gate never opened."),
        ignore(IN_FLIGHT, f.LaunchReady, given=is_not_usable, why="Of an older launch, or proof of another run."),
        ignore(ANY - IN_FLIGHT, f.LaunchReady, why="Of an older launch, which is settled."),
        Row(when=IN_FLIGHT, on=f.LaunchFailed, given=failed_for_now, to=P.HELD, change=spend_attempt,
            emits=(release_charge, attempt_failed),
            why="13: proven gone, so nothing stays charged. A port may come free: 30, 60 s; memory: 2, 30 s."),
        Row(when=IN_FLIGHT, on=f.LaunchFailed, given=failed_for_good, to=P.FAILED, change=fail,
            emits=(release_charge, start_failed),
            why="An exit before ready would be the same again: the operation ends, admission stays open."),
        Row(when=IN_FLIGHT, on=f.LaunchFailed, given=failed_and_stopped, to=P.STOPPED, change=end_stopped,
            emits=(release_charge, start_stopped, pending_stop_ended),
            why="The launch ended by itself; the stop that waited has nothing left to do."),
        ignore(IN_FLIGHT, f.LaunchFailed, given=failed_unproven,
               why="Of an older launch; or a proof that misses a recorded process, which is none."),
        ignore(ANY - IN_FLIGHT, f.LaunchFailed, why="Of an older launch, which is settled."),
        Row(when=IN_FLIGHT, on=f.OrderLost, given=is_lost, emits=(keep_larger, run_uncertain, became_uncertain),
            why="12: unknown is not failed; the charge stays until a proof says."),
        Row(when=IN_FLIGHT, on=f.OrderLost, given=is_lost_and_stopped,
            emits=(keep_larger, run_uncertain, gate_stop, stop_due),
            why="Unknown, and it is to end anyway: ending it also answers the question."),
        ignore(IN_FLIGHT, f.OrderLost, given=is_stale, why="Of an older order, which is settled."),
        ignore(ANY - IN_FLIGHT, f.OrderLost, why="Nothing is in flight."),
        *(ignore(ANY, event, why="Answers an order of an older run, which is settled.") for event in _NOT_OURS),
        # processes, requests, clock, hosts
        ignore(ANY, f.EngineExited, why="An exit is no P-GONE: the launch's own outcome follows and brings the proof."),
        ignore(ANY, f.RequestsEnded, why="No request runs on what is not READY."),
        ignore(ANY, f.GateDrained, why="The gate was never open."),
        Row(when=WAITING, on=f.Ticked, given=waited_in_vain, to=P.STOPPED, change=expire, emits=(start_expired,),
            why="17: waiting is bounded by the oldest waiter or the operator's limit; nothing was armed."),
        Row(when=WAITING, on=f.Ticked, given=tried_in_vain, to=P.FAILED, change=expire_failed,
            emits=(start_expired_failed,),
            why="A launch failed and nobody waits for the next: a failed operation, or each request would launch."),
        ignore(at(P.PLANNED), f.Ticked, given=wait_goes_on, why="It may still wait."),
        Row(when=at(P.HELD), on=f.Ticked, given=hold_is_over, to=P.PLANNED, change=end_hold,
            why="64: a held start runs, is stopped, or expires."),
        ignore(at(P.HELD), f.Ticked, given=hold_goes_on, why="It is too early."),
        Row(when=IN_FLIGHT, on=f.Ticked, given=answer_overdue, emits=(keep_larger, run_uncertain, became_uncertain),
            why="The host ends a launch at its bound and says so. Silence past the grace is a lost answer."),
        Row(when=IN_FLIGHT, on=f.Ticked, given=answer_overdue_and_stopped,
            emits=(keep_larger, run_uncertain, gate_stop, stop_due),
            why="A lost answer, and it is to end anyway."),
        ignore(IN_FLIGHT, f.Ticked, given=answer_may_come, why="The bound counts from the arm, and it is ahead."),
        ignore(ENDED, f.Ticked, why="Time alone starts nothing."),
        ignore(ANY, f.HostReturned, why="Control gives places; an outcome follows for what is in flight."),
        ignore(ANY, f.SessionBegan, why="Nothing is open; orders in flight are told lost one by one."),
    ),
)  # fmt: skip
