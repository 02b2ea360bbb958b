"""The end of a run, and the state in which nobody knows: what may be signalled, and what frees a charge.

A charge is freed by a gone proof alone, in any phase and whoever brings it. An unknown launch, park or
wake is looked at first and adopted if the missing proof is there; otherwise it is ended. Nothing here
gives up: it looks again, ever more rarely, with everything kept. Lifecycle 4.5, 18.5, 18.6, 20.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from capyctl.fsm import facts as f
from capyctl.fsm.effects import (
    Adopted,
    AdoptedParked,
    AdoptedWoken,
    AttemptFailed,
    HandOver,
    ReadyReached,
    ReleaseCharge,
    RunGone,
    RunUncertain,
    SendAwaitIdle,
    SendProbe,
    SendTerminate,
    SettledFailed,
    SettleDown,
    SettledStopped,
    SettledToRestart,
    SettledToRetry,
    StartEnded,
    StopEnded,
)
from capyctl.fsm.gate import Closure, LeftReady, ReadyProven, ReasonAdded
from capyctl.fsm.proofs import GoneProof
from capyctl.fsm.run import (
    ATTEMPTS_MAX,
    COOLDOWN_MS,
    IDLE_GATE_MS,
    PROBE_MS,
    TERMINATE_MS,
    YIELDING,
    Problem,
    Run,
    Step,
    Stop,
    blank,
    cooldown_ms,
    made_ready,
    ran_well,
    shows_gone,
    stronger,
)
from capyctl.fsm.table import Machine, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import Millis, Phase, Role, StopKind

# --- phases ---------------------------------------------------------------------------------------


class CleanupPhase(enum.Enum):
    """How far a run's end is."""

    PLANNED = "planned"  # wants its turn
    IDLE_GATE = "idle_gate"  # the engine is asked whether it is idle; nothing is signalled
    ARMED = "armed"  # the terminate may have left
    TERMINATING = "terminating"  # the terminate has left
    RECONCILING = "reconciling"  # nobody knows; everything is kept, and looked at again


P = CleanupPhase

# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class State:
    """A run's end. Without a `stop` it is not to end yet: it is only unknown what `lost` left."""

    phase: CleanupPhase = CleanupPhase.PLANNED
    run: Run
    stop: Stop | None = None
    lost: Step | None = None  # the step whose outcome is unknown
    asked_idle: bool = False  # the idle gate was tried; it is not tried twice
    looks: int = 0  # in vain, so far
    look_at_ms: Millis | None = None  # not again before this


ANY = any_of(P)
ENDING = at(P.PLANNED, P.IDLE_GATE, P.ARMED, P.TERMINATING)
SIGNALLED = at(P.ARMED, P.TERMINATING)

_UNKNOWN_KIND = {Step.LAUNCH: StopKind.FAILED_START, Step.PARK: StopKind.FAILED_PARK, Step.WAKE: StopKind.FAILED_WAKE}
_EXIT_KIND = _UNKNOWN_KIND | {Step.PARK: StopKind.EXIT}
"""What an unknown step amounts to when its engine ended by itself: whoever waits for a start or a wake still does."""
_RETRIES = frozenset({StopKind.FAILED_START, StopKind.FAILED_WAKE})

# --- guards: demands and turns ----------------------------------------------------------------------


def outranks(state: State, event: f.StopRequested) -> bool:
    """it asks for more than the present stop"""
    return state.stop is not None and event.stop.rank > state.stop.rank


def adds_nothing(state: State, event: f.StopRequested) -> bool:
    """it asks for no more than the present stop"""
    return not outranks(state, event)


def yields(state: State, event: f.StopRequested) -> bool:
    """nobody insists on this stop: pressure, idleness, reclaim, growth, a cut request, a failed park"""
    return event.stop.kind in YIELDING


def insists(state: State, event: f.StopRequested) -> bool:
    """an operator, a new revision, a host's drain or a fault asks"""
    return not yields(state, event)


def _fresh(state: State, event: f.Turn) -> bool:
    return event.token > (state.run.token or 0)


def _may_be_busy(state: State) -> bool:
    loaded = state.run.charged in (Phase.READY, Phase.PARKING)
    exited = state.stop is not None and state.stop.kind is StopKind.EXIT
    return state.run.waits_idle and loaded and not exited and not state.asked_idle


def asks_idle_first(state: State, event: f.Turn) -> bool:
    """the token is fresh, and a loaded engine without park control can say whether it is idle"""
    return _fresh(state, event) and _may_be_busy(state)


def signals_at_once(state: State, event: f.Turn) -> bool:
    """the token is fresh, and there is nothing to ask: no such signal, not loaded, exited, or asked before"""
    return _fresh(state, event) and not _may_be_busy(state)


def is_old_turn(state: State, event: f.Turn) -> bool:
    """the token is not newer than one it has had"""
    return not _fresh(state, event)


def _may_look(state: State, event: f.Turn) -> bool:
    return _fresh(state, event) and (state.look_at_ms is None or event.now_ms >= state.look_at_ms)


def looks(state: State, event: f.Turn) -> bool:
    """it is time, the token is fresh, and nobody wants it ended"""
    return _may_look(state, event) and state.stop is None


def tries_again(state: State, event: f.Turn) -> bool:
    """it is time, the token is fresh, and it is to end"""
    return _may_look(state, event) and state.stop is not None


def too_early(state: State, event: f.Turn) -> bool:
    """the pause is not over, or the token is not fresh"""
    return not _may_look(state, event)


# --- guards: outcomes -------------------------------------------------------------------------------


def is_answer(state: State, event: f.Outcome) -> bool:
    """it answers the order in flight"""
    return f.of_order(state.run, event)


def is_stale(state: State, event: f.Outcome) -> bool:
    """it answers another order"""
    return not is_answer(state, event)


def gate_is_answered(state: State, event: f.IdleGateEnded) -> bool:
    """it answers the idle gate, and the next token is fresh"""
    return is_answer(state, event) and event.next_token > event.token


def gate_is_not_answered(state: State, event: f.IdleGateEnded) -> bool:
    """it answers another order, or brings no fresh token"""
    return not gate_is_answered(state, event)


def _proof(event: f.Terminated | f.LaunchFailed | f.Probed) -> object:
    return event.gone if isinstance(event, f.Probed) else event.proof


def _kind(state: State) -> StopKind:
    """Why it ends: the stop, or what the unknown step amounts to now that it is gone and nobody ended it."""
    if state.stop is not None:
        return state.stop.kind
    assert state.lost is not None  # an invariant of what has no stop
    return _EXIT_KIND[state.lost]


def _has_attempts(state: State) -> bool:
    return state.run.attempts + 1 < ATTEMPTS_MAX


def _is_gone(state: State, event: f.Terminated | f.LaunchFailed | f.Probed) -> bool:
    return shows_gone(state.run, _proof(event))


def gone_to_retry(state: State, event: f.Terminated | f.LaunchFailed | f.Probed) -> bool:
    """gone, covering everything recorded; a start whose outcome was lost, and attempts are left"""
    return _is_gone(state, event) and _kind(state) is StopKind.FAILED_START and _has_attempts(state)


def gone_to_restart(state: State, event: f.Terminated | f.LaunchFailed | f.Probed) -> bool:
    """gone, covering everything recorded; its places were stuck, or a wake failed and attempts are left"""
    kind = _kind(state)
    again = kind is StopKind.SATURATION or (kind is StopKind.FAILED_WAKE and _has_attempts(state))
    return _is_gone(state, event) and again


def gone_to_failed(state: State, event: f.Terminated | f.LaunchFailed | f.Probed) -> bool:
    """gone, covering everything recorded; the engine exited, or the attempts are spent"""
    kind = _kind(state)
    return _is_gone(state, event) and (kind is StopKind.EXIT or (kind in _RETRIES and not _has_attempts(state)))


def gone_to_stopped(state: State, event: f.Terminated | f.LaunchFailed | f.Probed) -> bool:
    """gone, covering everything recorded; somebody wanted it stopped, or what was left of it was no use"""
    kind = _kind(state)
    return _is_gone(state, event) and kind not in _RETRIES | {StopKind.EXIT, StopKind.SATURATION}


def not_shown_gone(state: State, event: f.Terminated | f.LaunchFailed) -> bool:
    """no gone proof of this run, or one that misses a recorded process"""
    return not _is_gone(state, event)


def _looked(state: State, event: f.Probed) -> bool:
    return is_answer(state, event) and state.stop is None and not _is_gone(state, event)


def _same(state: State, event: f.Probed) -> bool:
    if event.same is None or event.same.incarnation != state.run.incarnation:
        return False
    engines = {process for process in state.run.processes if process.role is not Role.HELPER}
    return engines <= set(event.same.recorded)


def _usable(state: State, event: f.Probed) -> bool:
    return event.usable is not None and event.usable.incarnation == state.run.incarnation


def _resident(state: State, event: f.Probed) -> bool:
    run = state.run.incarnation
    return bool(event.resident) and all(sample.incarnation == run for sample in (event.resident or {}).values())


def _canary(state: State, event: f.Probed) -> bool:
    if event.canary is None:
        return not state.run.needs_canary
    return event.canary.incarnation == state.run.incarnation


def _completes(state: State, event: f.Probed) -> bool:
    match state.lost:
        case Step.LAUNCH:
            return _same(state, event) and _usable(state, event)
        case Step.PARK:
            return _same(state, event) and _resident(state, event)
        case Step.WAKE:
            return _same(state, event) and _usable(state, event) and _canary(state, event)
        case _:
            return False


def was_launched(state: State, event: f.Probed) -> bool:
    """the launch is unknown, and the look brought P-SAME and P-READY of this run"""
    return _looked(state, event) and state.lost is Step.LAUNCH and _completes(state, event)


def was_parked(state: State, event: f.Probed) -> bool:
    """the park is unknown, and the look brought P-SAME and P-RESID of this run"""
    return _looked(state, event) and state.lost is Step.PARK and _completes(state, event)


def was_woken(state: State, event: f.Probed) -> bool:
    """the wake is unknown, and the look brought P-SAME, P-READY and, where one is kept, P-CANARY of this run"""
    return _looked(state, event) and state.lost is Step.WAKE and _completes(state, event)


def _hopeless(state: State, event: f.Probed) -> bool:
    if state.lost is Step.LAUNCH:  # it may still be loading, until its bound
        return state.run.deadline_ms is None or event.now_ms >= state.run.deadline_ms
    return _same(state, event)


def cannot_complete(state: State, event: f.Probed) -> bool:
    """the engine is there without the missing proof; for a launch, past its bound"""
    return _looked(state, event) and not _completes(state, event) and _hopeless(state, event)


def is_still_unknown(state: State, event: f.Probed) -> bool:
    """the look proved nothing, or a launch may still be loading"""
    return _looked(state, event) and not _completes(state, event) and not _hopeless(state, event)


def tells_nothing(state: State, event: f.Probed) -> bool:
    """it answers another order, and shows nothing gone"""
    return not _looked(state, event) and not _is_gone(state, event)


def shows_nothing_gone(state: State, event: f.Probed) -> bool:
    """no gone proof of this run, or one that misses a recorded process"""
    return not _is_gone(state, event)


# --- guards: processes and clock --------------------------------------------------------------------


def answer_overdue(state: State, event: f.Ticked) -> bool:
    """the order is not answered, and its bound and the grace are over"""
    return f.overdue(state.run, event)


def answer_may_come(state: State, event: f.Ticked) -> bool:
    """the order may still be answered"""
    return not f.overdue(state.run, event)


def engine_exited(state: State, event: f.EngineExited) -> bool:
    """an api or worker process of this run"""
    return event.generation == state.run.generation and event.role is not Role.HELPER


def exit_ends_the_doubt(state: State, event: f.EngineExited) -> bool:
    """an api or worker process of this run, and nobody wants it ended yet"""
    return engine_exited(state, event) and state.stop is None


def exit_while_ending(state: State, event: f.EngineExited) -> bool:
    """an api or worker process of this run, and it is to end"""
    return engine_exited(state, event) and state.stop is not None


def no_engine_exited(state: State, event: f.EngineExited) -> bool:
    """a helper, or a process of another run"""
    return not engine_exited(state, event)


# --- changes --------------------------------------------------------------------------------------


def _run(state: State, **changes: Any) -> State:  # Any: attrs checks the names, mypy cannot see their types
    return attrs.evolve(state, run=attrs.evolve(state.run, **changes))


def take_stronger(state: State, event: f.StopRequested) -> State:
    """the stronger stop is kept"""
    return attrs.evolve(state, stop=event.stop)


def end_it(state: State, event: f.StopRequested) -> State:
    """it is to end now, whatever the unknown step left"""
    return State(
        phase=state.phase,
        run=attrs.evolve(state.run, deadline_ms=None),
        stop=stronger(state.stop, event.stop),
        lost=state.lost,
        asked_idle=state.asked_idle,
    )


def ask_idle(state: State, event: f.Turn) -> State:
    """the idle gate, under this token"""
    return attrs.evolve(
        state,
        asked_idle=True,
        run=attrs.evolve(state.run, token=event.token, deadline_ms=Millis(event.now_ms + IDLE_GATE_MS)),
    )


def arm(state: State, event: f.Turn) -> State:
    """the terminate, under this token"""
    run = attrs.evolve(state.run, token=event.token, deadline_ms=Millis(event.now_ms + TERMINATE_MS))
    return attrs.evolve(state, run=run, look_at_ms=None)


def arm_after_gate(state: State, event: f.IdleGateEnded) -> State:
    """the terminate, under the next token"""
    return _run(state, token=event.next_token, deadline_ms=Millis(event.now_ms + TERMINATE_MS))


def plan_again(state: State, event: f.Fact) -> State:
    """the idle gate is over without an answer"""
    return _run(state, deadline_ms=None)


def _pause(state: State, event: f.Fact, reason: str, **changes: Any) -> State:  # Any: as in _run
    looks_in_vain = state.looks + 1
    return attrs.evolve(
        state,
        looks=min(looks_in_vain, LOOKS_COUNTED),
        look_at_ms=Millis(event.now_ms + cooldown_ms(looks_in_vain)),
        run=attrs.evolve(state.run, last_error=Problem(code="unreconciled", reason=reason), **changes),
    )


def keep_unproven(state: State, event: f.TerminateUnproven | f.OrderLost | f.Ticked) -> State:
    """everything is kept; it is tried again after a pause"""
    return attrs.evolve(_pause(state, event, _lost_reason(event), deadline_ms=None), lost=Step.TERMINATE)


def look(state: State, event: f.Turn) -> State:
    """looking, under this token; not again before the look's own bound"""
    return attrs.evolve(
        state, run=attrs.evolve(state.run, token=event.token), look_at_ms=Millis(event.now_ms + PROBE_MS)
    )


def look_later(state: State, event: f.Probed) -> State:
    """looked in vain; again after a pause, a short one while a launch may still be loading"""
    after = _pause(state, event, event.reason or "the look proved nothing")
    if state.lost is not Step.LAUNCH:
        return after
    # Whoever waits for it is to wait no more than twice as long as it loads.
    return attrs.evolve(after, look_at_ms=Millis(event.now_ms + min(LOADING_MS * 2**state.looks, COOLDOWN_MS)))


def look_lost(state: State, event: f.OrderLost) -> State:
    """the answer was lost; again after a pause"""
    return _pause(state, event, event.reason)


def look_now(state: State, event: f.Fact) -> State:
    """there may be news: look now"""
    return attrs.evolve(state, look_at_ms=event.now_ms)


def give_it_up(state: State, event: f.Probed) -> State:
    """it is to end: a failed start, park or wake"""
    assert state.lost is not None  # an invariant of what has no stop
    stop = Stop(kind=_UNKNOWN_KIND[state.lost], asked_at_ms=event.now_ms)
    return State(phase=state.phase, run=attrs.evolve(state.run, deadline_ms=None), stop=stop, lost=state.lost)


def give_up_exited(state: State, event: f.EngineExited) -> State:
    """it is to end: a failed start or wake, or an engine that exited while it was parked"""
    stop = Stop(kind=_kind(state), asked_at_ms=event.now_ms, unseen=event.unseen)
    run = attrs.evolve(state.run, deadline_ms=None, last_error=_last_words(state, event.reason))
    return State(phase=state.phase, run=run, stop=stop, lost=state.lost)


def _last_words(state: State, reason: str) -> Problem:
    return Problem(code="launch_failed" if state.lost is Step.LAUNCH else "engine_error", reason=reason)


# --- emits: orders ----------------------------------------------------------------------------------


def send_await_idle(state: State, event: f.Turn) -> SendAwaitIdle:
    """wait for idle, thirty seconds at most"""
    run = state.run
    return SendAwaitIdle(incarnation=run.incarnation, token=event.token, host=run.placed_on, limit_ms=IDLE_GATE_MS)


def send_terminate(state: State, event: f.Turn | f.IdleGateEnded) -> SendTerminate:
    """end it: upstreams, SIGTERM, SIGKILL, and look"""
    run = state.run
    return SendTerminate(
        incarnation=run.incarnation,
        token=event.token if isinstance(event, f.Turn) else event.next_token,
        host=run.placed_on,
        processes=run.processes,
        limit_ms=TERMINATE_MS,
    )


def send_probe(state: State, event: f.Turn) -> SendProbe:
    """look at what the unknown step left"""
    run = state.run
    assert state.lost is not None  # an invariant of what has no stop
    return SendProbe(
        incarnation=run.incarnation,
        token=event.token,
        host=run.placed_on,
        processes=run.processes,
        canary=run.canary,
        lost=state.lost,
    )


def gate_stop(state: State, event: f.Fact) -> ReasonAdded:
    """gate: stop"""
    return ReasonAdded(now_ms=event.now_ms, reason=Closure.STOP)


def gate_left(state: State, event: f.Fact) -> LeftReady:
    """gate: not READY"""
    return LeftReady(now_ms=event.now_ms)


def gate_proven(state: State, event: f.Probed) -> ReadyProven:
    """gate: READY is proven"""
    assert event.usable is not None  # the row's guard asked
    return ReadyProven(
        now_ms=event.now_ms, generation=state.run.incarnation.generation, probed_at_ms=event.usable.probed_at_ms
    )


def _lost_reason(event: f.TerminateUnproven | f.OrderLost | f.Ticked) -> str:
    return "the terminate was not answered in time" if isinstance(event, f.Ticked) else event.reason


def run_uncertain(state: State, event: f.TerminateUnproven | f.OrderLost | f.Ticked) -> RunUncertain:
    """nobody knows whether it ended"""
    return RunUncertain(incarnation=state.run.incarnation, step=Step.TERMINATE, reason=_lost_reason(event))


# --- emits: what a gone proof frees -----------------------------------------------------------------


def _gone(event: f.Terminated | f.LaunchFailed | f.Probed) -> GoneProof:
    proof = _proof(event)
    assert isinstance(proof, GoneProof)  # the row's guard asked
    return proof


def release_charge(state: State, event: f.Terminated | f.LaunchFailed | f.Probed) -> ReleaseCharge:
    """free charge, claims and port"""
    return ReleaseCharge(proof=_gone(event))


def run_gone(state: State, event: f.Terminated | f.LaunchFailed | f.Probed) -> RunGone:
    """settle what hung on this run"""
    return RunGone(incarnation=state.run.incarnation, proof=_gone(event))


def _ended(state: State, event: f.Fact) -> Stop:
    return state.stop or Stop(kind=_kind(state), asked_at_ms=event.now_ms, unseen=not _story(event))


def _story(event: f.Fact) -> str:
    """How it ended by itself, from a host that watched it."""
    return event.reason if isinstance(event, f.Probed) else ""


def _gone_run(state: State, event: f.Fact) -> Run:
    """The run with what is known of its end: an exit that a look was first to see is told as any other."""
    if state.stop is None and _story(event):
        return attrs.evolve(state.run, last_error=_last_words(state, _story(event)))
    return state.run


def stop_ended(state: State, event: f.Fact) -> StopEnded:
    """the stop is complete"""
    return StopEnded(stop=_ended(state, event))


def _left(state: State, event: f.Fact) -> Run:
    """What outlives the run; failures before one that ran well are forgotten."""
    run = attrs.evolve(blank(_gone_run(state, event)), stopped=_ended(state, event))
    return attrs.evolve(run, failures=0) if ran_well(state.run, run.stopped) else run


def settled_stopped(state: State, event: f.Fact) -> SettledStopped:
    """to activation: STOPPED"""
    return SettledStopped(run=_left(state, event))


def _failed(state: State, event: f.Fact) -> Run:
    """An exit long after READY, or out of a park, is no failed operation; everything else here is one more."""
    run = _left(state, event)
    if _kind(state) is StopKind.EXIT and ran_well(state.run, run.stopped):
        return run
    failures = run.failures + 1
    return attrs.evolve(run, failures=failures, retry_at_ms=Millis(event.now_ms + cooldown_ms(failures)))


def settled_failed(state: State, event: f.Fact) -> SettledFailed:
    """to activation: FAILED"""
    return SettledFailed(run=_failed(state, event))


def _problem(state: State, event: f.Fact) -> Problem:
    return _gone_run(state, event).last_error or Problem(code="operation_failed", reason="its outcome was lost")


def start_failed(state: State, event: f.Fact) -> StartEnded:
    """whoever waited for it hears the last error, unless it ran well and may be started again at once"""
    problem, retry_at_ms = _problem(state, event), _failed(state, event).retry_at_ms
    at_once = _kind(state) is StopKind.EXIT and retry_at_ms is None
    return StartEnded(code=problem.code, reason=problem.reason, retry_at_ms=retry_at_ms, at_once=at_once)


def _again(state: State, event: f.Fact) -> Run:
    run = _gone_run(state, event)
    return attrs.evolve(blank(run), wait_ends_at_ms=run.wait_ends_at_ms, attempts=run.attempts + 1)


def settled_to_retry(state: State, event: f.Fact) -> SettledToRetry:
    """to activation: HELD, one attempt spent; the first time it is tried again at once"""
    run = _again(state, event)
    # What was lost is the answer, as when the controller is killed: that is held against no engine, until it recurs.
    pause_ms = cooldown_ms(run.attempts - 1) if run.attempts > 1 else 0
    return SettledToRetry(run=run, until_ms=Millis(event.now_ms + pause_ms))


def attempt_failed(state: State, event: f.Fact) -> AttemptFailed:
    """one attempt failed"""
    after, problem = settled_to_retry(state, event), _problem(state, event)
    return AttemptFailed(
        code=problem.code, reason=problem.reason, attempt=after.run.attempts, again_at_ms=after.until_ms
    )


def settled_to_restart(state: State, event: f.Fact) -> SettledToRestart:
    """to activation: PLANNED; a failed wake is one attempt spent"""
    run = _again(state, event) if _kind(state) is StopKind.FAILED_WAKE else blank(state.run)
    return SettledToRestart(run=run)


# --- emits: what a look adopts ----------------------------------------------------------------------


def settle_ready(state: State, event: f.Probed) -> SettleDown:
    """to ready, by P-CANARY or else P-READY"""
    proof = event.canary or event.usable
    assert proof is not None  # the row's guard asked
    return SettleDown(phase=Phase.READY, proof=proof)


def settle_parked(state: State, event: f.Probed) -> SettleDown:
    """to parked, by P-RESID"""
    return SettleDown(phase=Phase.PARKED, proof=event.resident or {})


def ready_reached(state: State, event: f.Probed) -> ReadyReached:
    """the start or wake succeeded"""
    return ReadyReached(incarnation=state.run.incarnation)


def _adopted(state: State, event: f.Probed) -> Run:
    assert event.same is not None  # the row's guard asked
    return made_ready(state.run, event.now_ms, processes=event.same.recorded, canary=state.run.canary)


def adopted(state: State, event: f.Probed) -> HandOver:
    """to residency: READY"""
    return Adopted(run=_adopted(state, event))


def adopted_woken(state: State, event: f.Probed) -> HandOver:
    """to residency: READY"""
    return AdoptedWoken(run=_adopted(state, event))


def adopted_parked(state: State, event: f.Probed) -> HandOver:
    """to residency: PARKED"""
    run = attrs.evolve(state.run, charged=Phase.PARKED, deadline_ms=None, last_error=None)
    return AdoptedParked(run=run)


# --- invariants -----------------------------------------------------------------------------------

LOADING_MS = Millis(1_000)  # the first pause between two looks at a launch that may still be loading; it doubles
LOOKS_COUNTED = 6
"""From here on the pause is ten minutes; counting further would tell nothing."""


def keeps_its_charge(state: State) -> bool:
    """12, 25: Whatever is not proven gone is charged."""
    return state.run.charged is not Phase.NONE


def is_an_armed_run(state: State) -> bool:
    """20, 21: It has a host, a generation and a token."""
    return None not in (state.run.host, state.run.generation, state.run.token)


def what_ends_has_a_stop(state: State) -> bool:
    """62: Whatever is on its way to its end has a reason, and whatever has none is unknown."""
    return state.stop is not None or (state.phase is P.RECONCILING and state.lost in _UNKNOWN_KIND)


def exactly_in_flight_has_a_bound(state: State) -> bool:
    """An idle gate and a terminate have a bound; what waits for its turn has none."""
    if state.phase is P.PLANNED:
        return state.run.deadline_ms is None
    return state.phase is P.RECONCILING or state.run.deadline_ms is not None


def the_unknown_is_looked_at(state: State) -> bool:
    """63: Exactly what is unknown has a time for the next look."""
    return (state.phase is P.RECONCILING) == (state.look_at_ms is not None)


def no_stop_waits(state: State) -> bool:
    """A stop is run here, never put off."""
    return state.run.pending is None


# --- table ----------------------------------------------------------------------------------------

_NOT_OURS = (f.Spawned, f.LaunchReady, f.ParkConfirmed, f.ParkRefused, f.Restored, f.WakeConfirmed,
             f.WakeFailed)  # fmt: skip
_VERDICTS = (f.Placed, f.NotPlaced, f.Held, f.HoldLifted, f.ParkAdmitted, f.ParkNotAdmitted, f.WakeAdmitted,
             f.WakeNotAdmitted)  # fmt: skip


def _settled(when: frozenset[Any], on: type[Any], why: str) -> tuple[Row, ...]:
    """The four ends that a gone proof can bring, for one of the events that carry one."""
    free = (release_charge, run_gone, gate_left)
    return (
        Row(when=when, on=on, given=gone_to_stopped, emits=(*free, stop_ended, settled_stopped), why=why),
        Row(when=when, on=on, given=gone_to_failed, emits=(*free, stop_ended, start_failed, settled_failed),
            why="It reads failed, admission stays open, and the next start is a fresh run."),
        Row(when=when, on=on, given=gone_to_retry, emits=(*free, attempt_failed, settled_to_retry),
            why="18.5: a launch that is gone is one failed attempt of its operation."),
        Row(when=when, on=on, given=gone_to_restart, emits=(*free, stop_ended, settled_to_restart),
            why="68: somebody waits for it; a clean restart needs no new request."),
    )  # fmt: skip


CLEANUP: Machine[State] = Machine(
    name="cleanup",
    doc=__doc__,
    phases=P,
    events=f.FACTS,
    invariants=(
        keeps_its_charge,
        is_an_armed_run,
        what_ends_has_a_stop,
        exactly_in_flight_has_a_bound,
        the_unknown_is_looked_at,
        no_stop_waits,
    ),
    rows=(
        # demands
        refuse(ENDING, f.Activated, "still_stopping", why="A new run starts once the old one is proven gone."),
        refuse(at(P.RECONCILING), f.Activated, "unreconciled", why="Nobody knows what runs already."),
        refuse(ENDING, f.ParkRequested, "still_stopping", why="It gives up more than was asked."),
        refuse(at(P.RECONCILING), f.ParkRequested, "unreconciled", why="Nobody knows what runs."),
        Row(when=ENDING, on=f.StopRequested, given=outranks, change=take_stronger,
            why="38: the stronger stop is kept: it decides whether a request may start it again."),
        ignore(ENDING, f.StopRequested, given=adds_nothing, why="It ends already."),
        Row(when=at(P.RECONCILING), on=f.StopRequested, given=insists, to=P.PLANNED, change=end_it, emits=(gate_stop,),
            why="Ending it answers the question, and whoever insists waits for no pause."),
        refuse(at(P.RECONCILING), f.StopRequested, "unreconciled", given=yields,
               why="What nobody knows is no victim: its memory may not come back."),
        ignore(ANY, f.Withdrawn, why="An accepted end is not taken back."),
        ignore(ANY, f.Reopened, why="It is not stopped yet; a start is refused until it is."),
        ignore(ANY, f.Revised, why="The old revision's run ends as it would have."),
        # turns
        Row(when=at(P.PLANNED), on=f.Turn, given=asks_idle_first, to=P.IDLE_GATE, change=ask_idle,
            emits=(send_await_idle,), why="An engine that only reads idle is given a moment before it is signalled."),
        Row(when=at(P.PLANNED), on=f.Turn, given=signals_at_once, to=P.ARMED, change=arm, emits=(send_terminate,),
            why="W11: the host journals the terminate before it signals."),
        ignore(at(P.PLANNED), f.Turn, given=is_old_turn, why="A token fences one step."),
        ignore(at(P.IDLE_GATE, P.ARMED, P.TERMINATING), f.Turn, why="An order is in flight."),
        Row(when=at(P.RECONCILING), on=f.Turn, given=looks, change=look, emits=(send_probe,),
            why="18.5: the unknown step is classified by fresh evidence, never sent again."),
        Row(when=at(P.RECONCILING), on=f.Turn, given=tries_again, to=P.ARMED, change=arm, emits=(send_terminate,),
            why="The same cleanup again: same run, same identities, a new token."),
        ignore(at(P.RECONCILING), f.Turn, given=too_early, why="71: the pause doubles, so nothing is tried endlessly."),
        *(ignore(ANY, event, why="It wants no memory; nothing was charged for the verdict.") for event in _VERDICTS),
        # outcomes
        ignore(at(P.PLANNED), f.IdleGateEnded, why="Of an idle gate that was given up."),
        Row(when=at(P.IDLE_GATE), on=f.IdleGateEnded, given=gate_is_answered, to=P.ARMED, change=arm_after_gate,
            emits=(send_terminate,),
            why="Idle, gone, silent, or busy to the last: the upstreams are closed and it is signalled."),
        ignore(at(P.IDLE_GATE), f.IdleGateEnded, given=gate_is_not_answered, why="Of another order."),
        ignore(SIGNALLED | at(P.RECONCILING), f.IdleGateEnded, why="Of an idle gate that is over."),
        Row(when=at(P.ARMED), on=f.Sent, given=is_answer, to=P.TERMINATING, why="Progress for people."),
        ignore(at(P.ARMED), f.Sent, given=is_stale, why="Another order left."),
        ignore(ANY - at(P.ARMED), f.Sent, why="Nothing hangs on when it left."),
        *_settled(ANY, f.Terminated, "W12: the proof frees the charge and settles every request, in one step."),
        ignore(ANY, f.Terminated, given=not_shown_gone, why="23: a proof that misses a recorded process is none."),
        *_settled(ANY, f.LaunchFailed, "A late answer whose proof shows that nothing is left."),
        ignore(ANY, f.LaunchFailed, given=not_shown_gone, why="23: a proof that misses a recorded process is none."),
        Row(when=SIGNALLED, on=f.TerminateUnproven, given=is_answer, to=P.RECONCILING, change=keep_unproven,
            emits=(run_uncertain,), why="Something may be left, so everything is kept."),
        ignore(SIGNALLED, f.TerminateUnproven, given=is_stale, why="Of an older attempt."),
        ignore(ANY - SIGNALLED, f.TerminateUnproven, why="Of an older attempt."),
        ignore(at(P.PLANNED), f.OrderLost, why="Nothing is in flight."),
        Row(when=at(P.IDLE_GATE), on=f.OrderLost, given=is_answer, to=P.PLANNED, change=plan_again,
            why="A reading changed nothing; it is not asked twice."),
        ignore(at(P.IDLE_GATE), f.OrderLost, given=is_stale, why="Of an older order."),
        Row(when=SIGNALLED, on=f.OrderLost, given=is_answer, to=P.RECONCILING, change=keep_unproven,
            emits=(run_uncertain,), why="Unknown is not ended: everything is kept."),
        ignore(SIGNALLED, f.OrderLost, given=is_stale, why="Of an older order."),
        Row(when=at(P.RECONCILING), on=f.OrderLost, given=is_answer, change=look_lost,
            why="The look told nothing; it is repeated, for looking changes nothing."),
        ignore(at(P.RECONCILING), f.OrderLost, given=is_stale, why="Of an older order."),
        *_settled(ANY, f.Probed, "18.5: gone is gone, whoever saw it."),
        Row(when=at(P.RECONCILING), on=f.Probed, given=was_launched,
            emits=(settle_ready, gate_proven, ready_reached, adopted),
            why="18.5: P-READY and the recorded group complete the launch."),
        Row(when=at(P.RECONCILING), on=f.Probed, given=was_parked, emits=(settle_parked, adopted_parked),
            why="18.5: P-RESID and P-SAME complete the park."),
        Row(when=at(P.RECONCILING), on=f.Probed, given=was_woken,
            emits=(settle_ready, gate_proven, ready_reached, adopted_woken),
            why="18.5, 44: usable and answering as before completes the wake."),
        Row(when=at(P.RECONCILING), on=f.Probed, given=cannot_complete, to=P.PLANNED, change=give_it_up,
            emits=(gate_stop,), why="18.5: a failed park or wake is not tried twice; a launch has its whole bound."),
        Row(when=at(P.RECONCILING), on=f.Probed, given=is_still_unknown, change=look_later,
            why="18.6: time proves nothing; everything is kept and looked at again."),
        ignore(at(P.RECONCILING), f.Probed, given=tells_nothing, why="Of an older look."),
        ignore(ENDING, f.Probed, given=shows_nothing_gone, why="It is to end, whatever the look saw."),
        *(ignore(ANY, event, why="A late answer of a step that is lost; a look with fresh proofs classifies it.")
          for event in _NOT_OURS),
        # processes, requests, clock, hosts
        Row(when=at(P.RECONCILING), on=f.EngineExited, given=exit_ends_the_doubt, to=P.PLANNED, change=give_up_exited,
            emits=(gate_stop,),
            why="An exit is no P-GONE, but what has lost a process completes no step: what is left of it is ended."),
        Row(when=at(P.RECONCILING), on=f.EngineExited, given=exit_while_ending, change=look_now,
            why="An exit is no P-GONE, but a reason to try again at once."),
        ignore(at(P.RECONCILING), f.EngineExited, given=no_engine_exited, why="22: helpers come and go."),
        ignore(ENDING, f.EngineExited, why="That is what it is for; the proof follows."),
        ignore(ANY, f.RequestsEnded, why="The drain is over."),
        ignore(ANY, f.GateDrained, why="The drain is over."),
        ignore(at(P.PLANNED, P.RECONCILING), f.Ticked, why="Its turn brings the time."),
        Row(when=at(P.IDLE_GATE), on=f.Ticked, given=answer_overdue, to=P.PLANNED, change=plan_again,
            why="The idle gate is bounded even when its answer is lost."),
        Row(when=SIGNALLED, on=f.Ticked, given=answer_overdue, to=P.RECONCILING, change=keep_unproven,
            emits=(run_uncertain,), why="Silence past the bound and the grace: everything is kept."),
        ignore(at(P.IDLE_GATE) | SIGNALLED, f.Ticked, given=answer_may_come, why="The bound is ahead."),
        Row(when=at(P.RECONCILING), on=f.HostReturned, change=look_now,
            why="63: a host that is back can say what is left."),
        ignore(ENDING, f.HostReturned, why="Its turn comes; an outcome follows for what is in flight."),
        ignore(ANY, f.SessionBegan, why="Orders in flight are told lost one by one."),
    ),
)  # fmt: skip
