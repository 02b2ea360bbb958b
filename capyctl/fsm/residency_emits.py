"""What a row of residency orders: of the gate, the ledger and the host, and whom it tells or hands over to."""

from __future__ import annotations

import attrs

from capyctl.fsm import facts as f
from capyctl.fsm.effects import (
    BecameUncertain,
    KeepLarger,
    ParkBecameStop,
    ParkEnded,
    RaiseCharge,
    ReadyReached,
    RunUncertain,
    SendRelease,
    SendRestore,
    SettleDown,
    StartEnded,
    StopDue,
    StopWithdrawn,
)
from capyctl.fsm.gate import Closure, LeftReady, ReadyProven, ReasonAdded, ReasonRemoved
from capyctl.fsm.residency_changes import PARK_AS_STOP, exit_stop, last_words, parked, stop_instead, woken
from capyctl.fsm.residency_state import NO_ROOM_TO_PARK, PARKING, State
from capyctl.fsm.run import YIELDING, Problem, Run, Step, Stop, stronger
from capyctl.fsm.types import Origin, Phase, StopKind, SwitchId

# --- emits: gate ------------------------------------------------------------------------------------


def _reason(ask_by_switch: bool) -> Closure:
    return Closure.SWITCH if ask_by_switch else Closure.PARK


def close_for_park(state: State, event: f.ParkRequested) -> ReasonAdded:
    """gate: switch or park, as it was asked"""
    return ReasonAdded(now_ms=event.now_ms, reason=_reason(event.origin is Origin.SWITCH))


def close_for_stop_instead(state: State, event: f.ParkRequested) -> ReasonAdded:
    """gate: switch or park while the stop may be called off, else stop"""
    stop = stop_instead(event)
    reason = _reason(event.origin is Origin.SWITCH) if stop.kind in YIELDING else Closure.STOP
    return ReasonAdded(now_ms=event.now_ms, reason=reason)


def close_for_stop(state: State, event: f.StopRequested) -> ReasonAdded:
    """gate: switch or park while the stop may be called off, else stop"""
    yielding = event.stop.kind in YIELDING
    return ReasonAdded(now_ms=event.now_ms, reason=_reason(event.stop.switch is not None) if yielding else Closure.STOP)


def gate_stop(state: State, event: f.Fact) -> ReasonAdded:
    """gate: stop"""
    return ReasonAdded(now_ms=event.now_ms, reason=Closure.STOP)


def gate_exit(state: State, event: f.Fact) -> ReasonAdded:
    """gate: engine exit"""
    return ReasonAdded(now_ms=event.now_ms, reason=Closure.ENGINE_EXIT)


def unpark(state: State, event: f.Fact) -> ReasonRemoved:
    """gate: no park"""
    return ReasonRemoved(now_ms=event.now_ms, reason=Closure.PARK)


def unswitch(state: State, event: f.Fact) -> ReasonRemoved:
    """gate: no switch"""
    return ReasonRemoved(now_ms=event.now_ms, reason=Closure.SWITCH)


def gate_left(state: State, event: f.Fact) -> LeftReady:
    """gate: not READY"""
    return LeftReady(now_ms=event.now_ms)


def gate_proven(state: State, event: f.WakeConfirmed) -> ReadyProven:
    """gate: READY is proven"""
    return ReadyProven(
        now_ms=event.now_ms, generation=state.run.incarnation.generation, probed_at_ms=event.usable.probed_at_ms
    )


# --- emits: ledger and host -------------------------------------------------------------------------


def raise_parking(state: State, event: f.ParkAdmitted) -> RaiseCharge:
    """charge the larger of ready and parking"""
    return RaiseCharge(phase=Phase.PARKING)


def send_release(state: State, event: f.ParkAdmitted) -> SendRelease:
    """release, once"""
    run = state.run
    assert state.drain_began_at_ms is not None  # an invariant of PARK_PLANNED
    return SendRelease(
        incarnation=run.incarnation,
        token=event.token,
        host=run.placed_on,
        tier=run.tier,
        processes=run.processes,
        gate_closed_at_ms=state.drain_began_at_ms,
        deadline_ms=event.deadline_ms,
    )


def settle_parked(state: State, event: f.ParkConfirmed) -> SettleDown:
    """parking → parked, by P-RESID"""
    return SettleDown(phase=Phase.PARKED, proof=event.resident)


def settle_refused(state: State, event: f.ParkRefused) -> SettleDown:
    """parking → ready, by P-UNSENT"""
    assert event.unsent is not None  # the row's guard asked
    return SettleDown(phase=Phase.READY, proof=event.unsent)


def raise_wake(state: State, event: f.WakeAdmitted) -> RaiseCharge:
    """charge the wake's peak in place of the parked bytes"""
    return RaiseCharge(phase=Phase.WAKE)


def send_restore(state: State, event: f.WakeAdmitted) -> SendRestore:
    """restore, once"""
    run = state.run
    return SendRestore(
        incarnation=run.incarnation,
        token=event.token,
        host=run.placed_on,
        tier=run.tier,
        processes=run.processes,
        canary=run.canary,
        deadline_ms=event.deadline_ms,
    )


def settle_woken(state: State, event: f.WakeConfirmed) -> SettleDown:
    """wake → ready, by P-CANARY or else P-READY"""
    return SettleDown(phase=Phase.READY, proof=event.canary or event.usable)


def settle_unwoken(state: State, event: f.WakeFailed) -> SettleDown:
    """wake → parked, by P-UNSENT"""
    assert event.unsent is not None  # the row's guard asked
    return SettleDown(phase=Phase.PARKED, proof=event.unsent)


def keep_larger(state: State, event: f.Fact) -> KeepLarger:
    """keep the largest of the phases around the unknown step"""
    if state.phase in PARKING:
        return KeepLarger(phases=(Phase.READY, Phase.PARKING, Phase.PARKED))
    return KeepLarger(phases=(Phase.PARKED, Phase.WAKE, Phase.READY))


# --- emits: notices ---------------------------------------------------------------------------------


def ready_reached(state: State, event: f.WakeConfirmed) -> ReadyReached:
    """the wake succeeded"""
    return ReadyReached(incarnation=state.run.incarnation)


def _asked_by(state: State) -> SwitchId | None:
    return state.ask.switch if state.ask is not None else None


def park_ended(state: State, event: f.Fact) -> ParkEnded:
    """the park succeeded"""
    ask = state.ask
    if ask is None:
        return ParkEnded(code=None)
    return ParkEnded(code=None, switch=ask.switch, origin=ask.origin, for_name=ask.for_name)


def park_refused(state: State, event: f.ParkRefused | f.ParkNotAdmitted) -> ParkEnded:
    """the park ended: the refusal"""
    return ParkEnded(code=event.code, reason=event.reason, switch=_asked_by(state))


def park_undrained(state: State, event: f.Fact) -> ParkEnded:
    """the park ended: requests did not end in time"""
    return ParkEnded(code="operation_failed", reason="running requests did not end in time", switch=_asked_by(state))


def park_called_off(state: State, event: f.Fact) -> ParkEnded:
    """the park ended: it was called off"""
    return ParkEnded(code="lifecycle_conflict", reason="it was called off", switch=_asked_by(state))


def park_became_stop(state: State, event: f.ParkRequested) -> ParkBecameStop:
    """the park became a stop"""
    if event.outgrown:
        reason = "its parked copy outgrew the bound"
    elif event.settle_at_stop:
        reason = "a cut request ends only with the engine"
    else:
        reason = "its tier does not park"
    return ParkBecameStop(stop=stop_instead(event), reason=reason)


def park_overtaken(state: State, event: f.StopRequested) -> ParkBecameStop:
    """the park became a stop"""
    return ParkBecameStop(stop=event.stop, reason="it was stopped meanwhile")


def park_lost_its_engine(state: State, event: f.EngineExited) -> ParkBecameStop:
    """the park became a stop"""
    return ParkBecameStop(stop=exit_stop(event), reason=event.reason)


def _pressure(state: State, event: f.ParkNotAdmitted) -> Stop:
    ask = state.ask
    assert ask is not None  # the row's guard asked
    return Stop(kind=PARK_AS_STOP[ask.origin], asked_at_ms=event.now_ms, for_name=ask.for_name, switch=ask.switch)


def no_room_to_park(state: State, event: f.ParkNotAdmitted) -> ParkBecameStop:
    """the park became a stop: no room to park"""
    return ParkBecameStop(stop=_pressure(state, event), reason=NO_ROOM_TO_PARK)


def pending_took_over(state: State, event: f.Fact) -> ParkBecameStop:
    """the park became the stop that waited"""
    return ParkBecameStop(stop=_pending(state), reason="it was stopped meanwhile")


def stop_called_off(state: State, event: f.Fact) -> StopWithdrawn:
    """the stop is called off"""
    assert state.stop is not None  # an invariant of DRAINING_TO_STOP
    return StopWithdrawn(stop=state.stop, code="lifecycle_conflict", reason="it was called off")


def stop_undrained(state: State, event: f.Fact) -> StopWithdrawn:
    """the stop is called off: requests did not end in time"""
    assert state.stop is not None  # an invariant of DRAINING_TO_STOP
    return StopWithdrawn(stop=state.stop, code="operation_failed", reason="running requests did not end in time")


def wake_refused(state: State, event: f.WakeNotAdmitted) -> StartEnded:
    """the wake ended: the verdict"""
    return StartEnded(code=event.code, reason=event.reason)


def wake_not_begun(state: State, event: f.WakeFailed) -> StartEnded:
    """the wake ended: the refusal"""
    return StartEnded(code=event.code, reason=event.reason)


def wake_expired(state: State, event: f.Ticked) -> StartEnded:
    """the wake ended: `activation_timeout`"""
    reason = state.waits_for.reason if state.waits_for else "no memory came free in time"
    return StartEnded(code="activation_timeout", reason=reason)


def _lost_reason(event: f.Fact) -> str:
    match event:
        case f.OrderLost():
            return event.reason
        case f.WakeConfirmed():
            return "the canary did not answer"
        case _:
            return "the order was not answered in time"


def run_uncertain(state: State, event: f.Fact) -> RunUncertain:
    """nobody knows what the step left"""
    return RunUncertain(incarnation=state.run.incarnation, step=_step(state), reason=_lost_reason(event))


def _step(state: State) -> Step:
    return Step.PARK if state.phase in PARKING else Step.WAKE


# --- emits: hand-overs ------------------------------------------------------------------------------


def _pending(state: State) -> Stop:
    assert state.run.pending is not None  # the row's guard asked
    return state.run.pending


def _due(run: Run, stop: Stop, problem: Problem | None = None) -> StopDue:
    return StopDue(
        run=attrs.evolve(run, pending=None, deadline_ms=None, last_error=problem or run.last_error), stop=stop
    )


def stop_due_asked(state: State, event: f.StopRequested) -> StopDue:
    """to cleanup: the stronger stop"""
    return _due(state.run, stronger(state.stop, event.stop))


def stop_due_instead(state: State, event: f.ParkRequested) -> StopDue:
    """to cleanup: the stop instead of the park"""
    return _due(state.run, stop_instead(event))


def stop_due_drained(state: State, event: f.Fact) -> StopDue:
    """to cleanup: the stop it drained for"""
    assert state.stop is not None  # an invariant of DRAINING_TO_STOP
    return _due(state.run, state.stop)


def stop_due_exit(state: State, event: f.EngineExited) -> StopDue:
    """to cleanup: exit, or the stronger stop it drained for"""
    return _due(state.run, stronger(state.stop, exit_stop(event)), last_words(event))


def stop_due_no_room(state: State, event: f.ParkNotAdmitted) -> StopDue:
    """to cleanup: the stop for whoever needs the memory"""
    return _due(state.run, _pressure(state, event))


def stop_due_pending(state: State, event: f.Fact) -> StopDue:
    """to cleanup: the stop that waited, with the charge kept"""
    return _due(state.run, _pending(state))


def stop_due_pending_parked(state: State, event: f.ParkConfirmed | f.WakeFailed) -> StopDue:
    """to cleanup: the stop that waited, charged as parked"""
    return _due(parked(state), _pending(state))


def stop_due_pending_woken(state: State, event: f.WakeConfirmed) -> StopDue:
    """to cleanup: the stop that waited, charged as ready"""
    return _due(woken(state, event), _pending(state))


def stop_due_failed_wake(state: State, event: f.WakeFailed) -> StopDue:
    """to cleanup: the stop that waited, else mismatch, else failed wake"""
    kind = StopKind.MISMATCH if event.mismatch else StopKind.FAILED_WAKE
    problem = Problem(code="wake_mismatch" if event.mismatch else event.code, reason=event.reason)
    return _due(state.run, stronger(state.run.pending, Stop(kind=kind, asked_at_ms=event.now_ms)), problem)


def became_uncertain(state: State, event: f.Fact) -> BecameUncertain:
    """to cleanup: RECONCILING, with the step that is unknown"""
    problem = Problem(code="unreconciled", reason=_lost_reason(event))
    return BecameUncertain(run=attrs.evolve(state.run, last_error=problem), step=_step(state), now_ms=event.now_ms)
