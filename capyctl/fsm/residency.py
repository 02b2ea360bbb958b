"""From READY to PARKED and back: who may take the memory, when, and on which proof.

A drain may be called off, an armed step may not: it is classified first, and a stop that came
meanwhile runs after it. A charge falls on a sample taken after the release, or on a model that
answers as it did before. What nobody knows goes to cleanup with the larger charge.
Lifecycle 4.4; decisions 1, 10, 16.
"""

from __future__ import annotations

import enum
from typing import Any

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
from capyctl.fsm.run import ABRUPT, YIELDING, Problem, Run, Step, Stop, later, made_ready, stronger
from capyctl.fsm.table import Machine, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import Millis, Origin, Phase, Role, StopKind, SwitchId

# --- phases ---------------------------------------------------------------------------------------


class ResidencyPhase(enum.Enum):
    """Where the model's memory is, and where it is going."""

    READY = "ready"  # serving, unless the gate says otherwise
    DRAINING_TO_PARK = "draining_to_park"  # gate closed, requests still running
    DRAINING_TO_STOP = "draining_to_stop"  # the same, and it will end
    PARK_PLANNED = "park_planned"  # quiet; wants room for the parked copy
    PARK_ARMED = "park_armed"  # the peak is charged; the release may have left
    RELEASING = "releasing"  # the release has left
    PARKED = "parked"  # memory proven released, processes kept
    WAKE_PLANNED = "wake_planned"  # wants room for the wake, on its host
    WAKE_ARMED = "wake_armed"  # the peak is charged; the restore may have left
    RESTORING = "restoring"  # the restore has left
    VERIFYING = "verifying"  # the memory is back; the checks run


P = ResidencyPhase

# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Ask:
    """Who wants it parked, and for whom."""

    origin: Origin
    switch: SwitchId | None = None
    for_name: str | None = None


@attrs.frozen(kw_only=True)
class State:
    """A resident run. `ask` while it goes to its park, `stop` while it drains to its end; times are Unix ms."""

    phase: ResidencyPhase = ResidencyPhase.READY
    run: Run
    ask: Ask | None = None
    stop: Stop | None = None
    drain_began_at_ms: Millis | None = None  # an idle reading must not be older than this
    drain_ends_at_ms: Millis | None = None
    waits_for: Problem | None = None  # why a planned park or wake has no room, in figures


ANY = any_of(P)
TO_PARK = at(P.DRAINING_TO_PARK, P.PARK_PLANNED)
DRAINING = at(P.DRAINING_TO_PARK, P.DRAINING_TO_STOP)
PARKING = at(P.PARK_ARMED, P.RELEASING)
WAKING = at(P.WAKE_ARMED, P.RESTORING, P.VERIFYING)
ARMED = PARKING | WAKING
CALM = ANY - ARMED
"""Nothing is in flight at the host."""

NO_ROOM_TO_PARK = "no room to park"

# --- guards: demands --------------------------------------------------------------------------------

_INSISTENCE = {Origin.OPERATOR: 3, Origin.DRAIN: 3, Origin.COUNT: 3, Origin.SWITCH: 2, Origin.PREINIT: 1}
_HANDS = frozenset({Origin.OPERATOR, Origin.PREINIT})
_EVICTS = frozenset({Origin.SWITCH, Origin.DRAIN, Origin.COUNT})


def can_park(state: State, event: f.ParkRequested) -> bool:
    """its tier parks, every request can settle without the engine's end, and the copy did not outgrow its bound"""
    return state.run.tier.parks and not event.settle_at_stop and not event.outgrown


def cannot_park(state: State, event: f.ParkRequested) -> bool:
    """its tier does not park, and an operator asks for a park"""
    return not state.run.tier.parks and event.origin in _HANDS


def must_stop(state: State, event: f.ParkRequested) -> bool:
    """the memory is wanted, and a park cannot give it: tier, outgrown copy, or a request that ends with the engine"""
    return not can_park(state, event) and not cannot_park(state, event)


def insists_more(state: State, event: f.ParkRequested) -> bool:
    """it can park, and whoever asks insists more than whoever asked before"""
    present = _INSISTENCE.get(state.ask.origin, 0) if state.ask else 0
    return can_park(state, event) and _INSISTENCE.get(event.origin, 0) > present


def insists_no_more(state: State, event: f.ParkRequested) -> bool:
    """it can park, and whoever asks insists no more than whoever asked before"""
    return can_park(state, event) and not insists_more(state, event)


def only_idle(state: State, event: f.Activated) -> bool:
    """nothing but an idle timer wanted it gone"""
    if state.stop is not None:
        return state.stop.kind is StopKind.IDLE
    return state.ask is not None and state.ask.origin is Origin.IDLE


def wanted_gone(state: State, event: f.Activated) -> bool:
    """somebody wants its memory or its end"""
    return not only_idle(state, event)


def waits_for_none(state: State, event: f.StopRequested) -> bool:
    """the stop waits for no running request"""
    return event.stop.kind in ABRUPT or event.drain_ends_at_ms is None


def drains_first(state: State, event: f.StopRequested) -> bool:
    """the stop waits for running requests"""
    return not waits_for_none(state, event)


def drains_for_more(state: State, event: f.StopRequested) -> bool:
    """it waits for running requests, and asks for more than the present stop"""
    return drains_first(state, event) and (state.stop is None or event.stop.rank > state.stop.rank)


def drains_for_less(state: State, event: f.StopRequested) -> bool:
    """it waits for running requests, and asks for no more than the present stop"""
    return drains_first(state, event) and not drains_for_more(state, event)


def yields(state: State, event: f.StopRequested) -> bool:
    """nobody insists on this stop: pressure, idleness, reclaim, growth, a failed park"""
    return event.stop.kind in YIELDING


def insists(state: State, event: f.StopRequested) -> bool:
    """an operator, a new revision, a host's drain or a fault asks"""
    return not yields(state, event)


def _switch_of(state: State) -> SwitchId | None:
    if state.stop is not None:
        return state.stop.switch if state.stop.kind in YIELDING else None
    return state.ask.switch if state.ask is not None and state.ask.origin is Origin.SWITCH else None


def was_for_it(state: State, event: f.Withdrawn) -> bool:
    """it leaves for this switch alone"""
    return _switch_of(state) == event.switch


def was_for_others(state: State, event: f.Withdrawn) -> bool:
    """it leaves for something else too"""
    return not was_for_it(state, event)


def was_for_a_switch(state: State, event: f.SessionBegan) -> bool:
    """it leaves for a switch alone"""
    return _switch_of(state) is not None


def was_for_no_switch(state: State, event: f.SessionBegan) -> bool:
    """it leaves for something else"""
    return not was_for_a_switch(state, event)


# --- guards: verdicts -------------------------------------------------------------------------------


def is_fresh(state: State, event: f.ParkAdmitted | f.WakeAdmitted) -> bool:
    """the token is newer than any this instance has had"""
    return event.token > (state.run.token or 0)


def is_old(state: State, event: f.ParkAdmitted | f.WakeAdmitted) -> bool:
    """the token is not newer than one it has had"""
    return not is_fresh(state, event)


def must_leave(state: State, event: f.ParkNotAdmitted) -> bool:
    """a switch, a host's drain or a lower count needs its memory"""
    return state.ask is not None and state.ask.origin in _EVICTS


def may_stay(state: State, event: f.ParkNotAdmitted) -> bool:
    """an operator or an idle timer asked"""
    return not must_leave(state, event)


# --- guards: outcomes -------------------------------------------------------------------------------


def is_answer(state: State, event: f.Outcome) -> bool:
    """it answers the order in flight"""
    return f.of_order(state.run, event)


def is_stale(state: State, event: f.Outcome) -> bool:
    """it answers another order"""
    return not is_answer(state, event)


def _stopped(state: State) -> bool:
    return state.run.pending is not None


def is_lost(state: State, event: f.OrderLost) -> bool:
    """it tells of the order in flight, and no stop waits"""
    return is_answer(state, event) and not _stopped(state)


def is_lost_and_stopped(state: State, event: f.OrderLost) -> bool:
    """it tells of the order in flight, and a stop waits"""
    return is_answer(state, event) and _stopped(state)


def answer_overdue(state: State, event: f.Ticked) -> bool:
    """the order is not answered, its bound and the grace are over, and no stop waits"""
    return f.overdue(state.run, event) and not _stopped(state)


def answer_overdue_and_stopped(state: State, event: f.Ticked) -> bool:
    """the order is not answered, its bound and the grace are over, and a stop waits"""
    return f.overdue(state.run, event) and _stopped(state)


def answer_may_come(state: State, event: f.Ticked) -> bool:
    """the order may still be answered"""
    return not f.overdue(state.run, event)


def _proves_park(state: State, event: f.ParkConfirmed) -> bool:
    run = state.run.incarnation
    began = state.drain_began_at_ms
    ours = event.quiet.incarnation == run and event.same.incarnation == run
    released = bool(event.resident) and all(sample.incarnation == run for sample in event.resident.values())
    return is_answer(state, event) and ours and released and began is not None and event.quiet.read_at_ms >= began


def is_released(state: State, event: f.ParkConfirmed) -> bool:
    """it answers the release with P-QUIET since the drain, P-SAME and P-RESID of this run, and no stop waits"""
    return _proves_park(state, event) and not _stopped(state)


def is_released_and_stopped(state: State, event: f.ParkConfirmed) -> bool:
    """it answers the release with P-QUIET since the drain, P-SAME and P-RESID of this run, and a stop waits"""
    return _proves_park(state, event) and _stopped(state)


def is_not_released(state: State, event: f.ParkConfirmed) -> bool:
    """it answers another order, or a proof is missing, of another run or older than the drain"""
    return not _proves_park(state, event)


def _shows_unsent(state: State, event: f.ParkRefused) -> bool:
    return event.unsent is not None and event.unsent.incarnation == state.run.incarnation


def refused_unsent(state: State, event: f.ParkRefused) -> bool:
    """it answers the release with P-UNSENT, and no stop waits"""
    return is_answer(state, event) and not _stopped(state) and _shows_unsent(state, event)


def refused_unproven(state: State, event: f.ParkRefused) -> bool:
    """it answers the release without P-UNSENT, and no stop waits"""
    return is_answer(state, event) and not _stopped(state) and not _shows_unsent(state, event)


def refused_and_stopped(state: State, event: f.ParkRefused) -> bool:
    """it answers the release, and a stop waits"""
    return is_answer(state, event) and _stopped(state)


def _proves_wake(state: State, event: f.WakeConfirmed) -> bool:
    run = state.run.incarnation
    ours = event.back.incarnation == run and event.usable.incarnation == run and event.same.incarnation == run
    return is_answer(state, event) and ours and (event.canary is None or event.canary.incarnation == run)


def _checked(state: State, event: f.WakeConfirmed) -> bool:
    return event.canary is not None or not state.run.needs_canary


def is_woken(state: State, event: f.WakeConfirmed) -> bool:
    """it answers the restore with P-BACK, P-READY, P-SAME and, where one is kept, P-CANARY; no stop waits"""
    return _proves_wake(state, event) and _checked(state, event) and not _stopped(state)


def is_woken_and_stopped(state: State, event: f.WakeConfirmed) -> bool:
    """it answers the restore with every proof, and a stop waits"""
    return _proves_wake(state, event) and _checked(state, event) and _stopped(state)


def canary_unanswered(state: State, event: f.WakeConfirmed) -> bool:
    """it answers the restore, the canary did not, and no stop waits"""
    return _proves_wake(state, event) and not _checked(state, event) and not _stopped(state)


def canary_unanswered_and_stopped(state: State, event: f.WakeConfirmed) -> bool:
    """it answers the restore, the canary did not, and a stop waits"""
    return _proves_wake(state, event) and not _checked(state, event) and _stopped(state)


def is_not_woken(state: State, event: f.WakeConfirmed) -> bool:
    """it answers another order, or proves another run"""
    return not _proves_wake(state, event)


def _wake_unsent(state: State, event: f.WakeFailed) -> bool:
    return is_answer(state, event) and event.unsent is not None and event.unsent.incarnation == state.run.incarnation


def wake_refused_unsent(state: State, event: f.WakeFailed) -> bool:
    """it answers the restore with P-UNSENT, and no stop waits"""
    return _wake_unsent(state, event) and not _stopped(state)


def wake_refused_unsent_and_stopped(state: State, event: f.WakeFailed) -> bool:
    """it answers the restore with P-UNSENT, and a stop waits"""
    return _wake_unsent(state, event) and _stopped(state)


def wake_failed(state: State, event: f.WakeFailed) -> bool:
    """it answers the restore, which may have been asked for"""
    return is_answer(state, event) and not _wake_unsent(state, event)


# --- guards: processes, requests, clock -------------------------------------------------------------


def engine_exited(state: State, event: f.EngineExited) -> bool:
    """an api or worker process of this run"""
    return event.generation == state.run.generation and event.role is not Role.HELPER


def no_engine_exited(state: State, event: f.EngineExited) -> bool:
    """a helper, or a process of another run"""
    return not engine_exited(state, event)


def is_quiet(state: State, event: f.GateDrained) -> bool:
    """P-QUIET of this run, read since the drain began"""
    began = state.drain_began_at_ms
    return event.quiet.incarnation == state.run.incarnation and began is not None and event.quiet.read_at_ms >= began


def is_not_quiet(state: State, event: f.GateDrained) -> bool:
    """a reading of another run, or from before the drain"""
    return not is_quiet(state, event)


def of_this_run(state: State, event: f.RequestsEnded) -> bool:
    """it tells of this run"""
    return event.generation == state.run.generation


def of_another_run(state: State, event: f.RequestsEnded) -> bool:
    """it tells of another run"""
    return not of_this_run(state, event)


def drain_is_over(state: State, event: f.Ticked) -> bool:
    """the drain's bound is over"""
    return state.drain_ends_at_ms is not None and event.now_ms >= state.drain_ends_at_ms


def drain_goes_on(state: State, event: f.Ticked) -> bool:
    """the drain's bound is ahead"""
    return not drain_is_over(state, event)


def _stop_yields(state: State) -> bool:
    return state.stop is not None and state.stop.kind in YIELDING


def drain_over_and_yields(state: State, event: f.Ticked) -> bool:
    """the drain's bound is over, and nobody insists on the stop"""
    return drain_is_over(state, event) and _stop_yields(state)


def drain_over_and_insists(state: State, event: f.Ticked) -> bool:
    """the drain's bound is over, and somebody insists on the stop"""
    return drain_is_over(state, event) and not _stop_yields(state)


def is_final(state: State, event: f.WakeNotAdmitted) -> bool:
    """waiting cannot change the verdict"""
    return event.final


def may_change(state: State, event: f.WakeNotAdmitted) -> bool:
    """memory may come free"""
    return not event.final


def wait_is_over(state: State, event: f.Ticked) -> bool:
    """whoever waited longest for the wake waits no more"""
    return state.run.wait_ends_at_ms is not None and event.now_ms >= state.run.wait_ends_at_ms


def wait_goes_on(state: State, event: f.Ticked) -> bool:
    """somebody may still wait for the wake"""
    return not wait_is_over(state, event)


# --- changes --------------------------------------------------------------------------------------


def _run(state: State, **changes: Any) -> State:  # Any: attrs checks the names, mypy cannot see their types
    return attrs.evolve(state, run=attrs.evolve(state.run, **changes))


def start_drain(state: State, event: f.ParkRequested) -> State:
    """who asked, and the drain's bound"""
    return State(
        phase=state.phase,
        run=state.run,
        ask=Ask(origin=event.origin, switch=event.switch, for_name=event.for_name),
        drain_began_at_ms=state.drain_began_at_ms if state.drain_began_at_ms is not None else event.now_ms,
        drain_ends_at_ms=event.drain_ends_at_ms,
    )


def take_over(state: State, event: f.ParkRequested) -> State:
    """who asked; it is quiet already"""
    return attrs.evolve(state, ask=Ask(origin=event.origin, switch=event.switch, for_name=event.for_name))


_PARK_AS_STOP = {
    Origin.SWITCH: StopKind.PRESSURE,
    Origin.IDLE: StopKind.IDLE,
    Origin.DRAIN: StopKind.DRAIN,
    Origin.COUNT: StopKind.REVISION,
}


def _stop_instead(event: f.ParkRequested) -> Stop:
    """The stop that gives the memory when a park cannot; no kind of it closes on-demand activation."""
    kind = StopKind.GROWTH if event.outgrown else _PARK_AS_STOP.get(event.origin, StopKind.FAILED_PARK)
    return Stop(kind=kind, asked_at_ms=event.now_ms, for_name=event.for_name, switch=event.switch)


def drain_to_stop_instead(state: State, event: f.ParkRequested) -> State:
    """it drains to its end"""
    return State(
        phase=state.phase,
        run=state.run,
        stop=_stop_instead(event),
        drain_began_at_ms=event.now_ms,
        drain_ends_at_ms=event.drain_ends_at_ms,
    )


def drain_to_stop(state: State, event: f.StopRequested) -> State:
    """it drains to its end: the stronger stop, and the newer bound"""
    return State(
        phase=state.phase,
        run=state.run,
        stop=stronger(state.stop, event.stop),
        drain_began_at_ms=event.now_ms,
        drain_ends_at_ms=event.drain_ends_at_ms,
    )


def note_pending(state: State, event: f.StopRequested) -> State:
    """the strongest stop waits for the order's outcome"""
    return _run(state, pending=stronger(state.run.pending, event.stop))


def _exit_stop(event: f.EngineExited) -> Stop:
    return Stop(kind=StopKind.EXIT, asked_at_ms=event.now_ms, unseen=event.unseen)


def _last_words(event: f.EngineExited) -> Problem:
    return Problem(code="engine_error", reason=event.reason)


def note_exit(state: State, event: f.EngineExited) -> State:
    """the exit is a stop that waits for the order's outcome; in a wake it is a failed wake"""
    kind = StopKind.FAILED_WAKE if state.phase in WAKING else StopKind.EXIT  # somebody waits for a wake
    stop = attrs.evolve(_exit_stop(event), kind=kind)
    return _run(state, pending=stronger(state.run.pending, stop), last_error=_last_words(event))


def serve_again(state: State, event: f.Fact) -> State:
    """nobody wants its memory any more"""
    return State(phase=state.phase, run=state.run)


def plan_park(state: State, event: f.GateDrained) -> State:
    """quiet; the drain has no bound any more"""
    return attrs.evolve(state, drain_ends_at_ms=None)


def arm_park(state: State, event: f.ParkAdmitted) -> State:
    """the peak is charged, under this token and bound"""
    return attrs.evolve(
        state,
        waits_for=None,
        run=attrs.evolve(state.run, token=event.token, deadline_ms=event.deadline_ms, charged=Phase.PARKING),
    )


def _parked(state: State) -> Run:
    return attrs.evolve(state.run, charged=Phase.PARKED, deadline_ms=None)


def park(state: State, event: f.ParkConfirmed) -> State:
    """parked"""
    return State(phase=state.phase, run=_parked(state))


def stay_loaded_unsent(state: State, event: f.ParkRefused) -> State:
    """it stays loaded, charged as ready again"""
    run = attrs.evolve(state.run, charged=Phase.READY, deadline_ms=None, last_error=_refusal(event))
    return State(phase=state.phase, run=run)


def stay_loaded(state: State, event: f.ParkRefused) -> State:
    """it stays loaded, and charged with the peak"""
    run = attrs.evolve(state.run, deadline_ms=None, last_error=_refusal(event))
    return State(phase=state.phase, run=run)


def stay_parked(state: State, event: f.WakeFailed) -> State:
    """it is parked as it was, charged as parked again"""
    run = attrs.evolve(_parked(state), wait_ends_at_ms=None, last_error=Problem(code=event.code, reason=event.reason))
    return State(phase=state.phase, run=run)


def _refusal(event: f.ParkRefused | f.ParkNotAdmitted) -> Problem:
    return Problem(code=event.code, reason=event.reason)


def plan_wake(state: State, event: f.Activated) -> State:
    """wanted, for as long as whoever asks waits"""
    return State(phase=state.phase, run=attrs.evolve(state.run, wait_ends_at_ms=event.wait_ends_at_ms))


def join(state: State, event: f.Activated) -> State:
    """it waits as long as whoever waits longest"""
    return _run(state, wait_ends_at_ms=later(state.run.wait_ends_at_ms, event.wait_ends_at_ms))


def note_shortage(state: State, event: f.WakeNotAdmitted) -> State:
    """what it waits for, in figures"""
    return attrs.evolve(state, waits_for=Problem(code=event.code, reason=event.reason))


def sleep_on_refused(state: State, event: f.WakeNotAdmitted) -> State:
    """the verdict is the last error"""
    problem = Problem(code=event.code, reason=event.reason)
    return State(phase=state.phase, run=attrs.evolve(state.run, wait_ends_at_ms=None, last_error=problem))


def sleep_on(state: State, event: f.Ticked) -> State:
    """nobody waits for it any more"""
    return State(phase=state.phase, run=attrs.evolve(state.run, wait_ends_at_ms=None))


def arm_wake(state: State, event: f.WakeAdmitted) -> State:
    """the peak is charged, under this token and bound"""
    return State(
        phase=state.phase,
        run=attrs.evolve(state.run, token=event.token, deadline_ms=event.deadline_ms, charged=Phase.WAKE),
    )


def _woken(state: State, event: f.WakeConfirmed) -> Run:
    return made_ready(state.run, event.now_ms, processes=state.run.processes, canary=state.run.canary)


def wake(state: State, event: f.WakeConfirmed) -> State:
    """READY again"""
    return State(phase=state.phase, run=_woken(state, event))


# --- emits: gate ------------------------------------------------------------------------------------


def _reason(ask_by_switch: bool) -> Closure:
    return Closure.SWITCH if ask_by_switch else Closure.PARK


def close_for_park(state: State, event: f.ParkRequested) -> ReasonAdded:
    """gate: switch or park, as it was asked"""
    return ReasonAdded(now_ms=event.now_ms, reason=_reason(event.origin is Origin.SWITCH))


def close_for_stop_instead(state: State, event: f.ParkRequested) -> ReasonAdded:
    """gate: switch or park while the stop may be called off, else stop"""
    stop = _stop_instead(event)
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
    return ParkBecameStop(stop=_stop_instead(event), reason=reason)


def park_overtaken(state: State, event: f.StopRequested) -> ParkBecameStop:
    """the park became a stop"""
    return ParkBecameStop(stop=event.stop, reason="it was stopped meanwhile")


def park_lost_its_engine(state: State, event: f.EngineExited) -> ParkBecameStop:
    """the park became a stop"""
    return ParkBecameStop(stop=_exit_stop(event), reason=event.reason)


def _pressure(state: State, event: f.ParkNotAdmitted) -> Stop:
    ask = state.ask
    assert ask is not None  # the row's guard asked
    return Stop(kind=_PARK_AS_STOP[ask.origin], asked_at_ms=event.now_ms, for_name=ask.for_name, switch=ask.switch)


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
    return _due(state.run, _stop_instead(event))


def stop_due_drained(state: State, event: f.Fact) -> StopDue:
    """to cleanup: the stop it drained for"""
    assert state.stop is not None  # an invariant of DRAINING_TO_STOP
    return _due(state.run, state.stop)


def stop_due_exit(state: State, event: f.EngineExited) -> StopDue:
    """to cleanup: exit, or the stronger stop it drained for"""
    return _due(state.run, stronger(state.stop, _exit_stop(event)), _last_words(event))


def stop_due_no_room(state: State, event: f.ParkNotAdmitted) -> StopDue:
    """to cleanup: the stop for whoever needs the memory"""
    return _due(state.run, _pressure(state, event))


def stop_due_pending(state: State, event: f.Fact) -> StopDue:
    """to cleanup: the stop that waited, with the charge kept"""
    return _due(state.run, _pending(state))


def stop_due_pending_parked(state: State, event: f.ParkConfirmed | f.WakeFailed) -> StopDue:
    """to cleanup: the stop that waited, charged as parked"""
    return _due(_parked(state), _pending(state))


def stop_due_pending_woken(state: State, event: f.WakeConfirmed) -> StopDue:
    """to cleanup: the stop that waited, charged as ready"""
    return _due(_woken(state, event), _pending(state))


def stop_due_failed_wake(state: State, event: f.WakeFailed) -> StopDue:
    """to cleanup: the stop that waited, else mismatch, else failed wake"""
    kind = StopKind.MISMATCH if event.mismatch else StopKind.FAILED_WAKE
    problem = Problem(code="wake_mismatch" if event.mismatch else event.code, reason=event.reason)
    return _due(state.run, stronger(state.run.pending, Stop(kind=kind, asked_at_ms=event.now_ms)), problem)


def became_uncertain(state: State, event: f.Fact) -> BecameUncertain:
    """to cleanup: RECONCILING, with the step that is unknown"""
    problem = Problem(code="unreconciled", reason=_lost_reason(event))
    return BecameUncertain(run=attrs.evolve(state.run, last_error=problem), step=_step(state), now_ms=event.now_ms)


# --- invariants -----------------------------------------------------------------------------------


def charge_matches_phase(state: State) -> bool:
    """3, 4: The charge is that of the phase: the peak while armed, parked while parked, else ready or more."""
    if state.phase in WAKING:
        return state.run.charged is Phase.WAKE
    if state.phase in (P.PARKED, P.WAKE_PLANNED):
        return state.run.charged is Phase.PARKED
    if state.phase in PARKING:
        return state.run.charged is Phase.PARKING
    return state.run.charged in (Phase.READY, Phase.PARKING)


def is_a_recorded_run(state: State) -> bool:
    """17, 20: A resident run has a host, a generation, a token and recorded processes."""
    run = state.run
    return None not in (run.host, run.generation, run.token) and bool(run.processes)


def exactly_armed_has_a_bound(state: State) -> bool:
    """Exactly an armed step has a bound for its answer."""
    return (state.phase in ARMED) == (state.run.deadline_ms is not None)


def only_armed_waits_with_a_stop(state: State) -> bool:
    """Only an armed step has a stop that waits for its outcome."""
    return state.run.pending is None or state.phase in ARMED


def exactly_leaving_knows_why(state: State) -> bool:
    """36: Exactly a drain or park has a time since which it must read idle, and either an ask or a stop."""
    leaving = state.phase in TO_PARK | PARKING | at(P.DRAINING_TO_STOP)
    return (
        (state.phase in TO_PARK | PARKING) == (state.ask is not None)
        and (state.phase is P.DRAINING_TO_STOP) == (state.stop is not None)
        and leaving == (state.drain_began_at_ms is not None)
    )


def exactly_a_drain_has_an_end(state: State) -> bool:
    """62: Exactly a drain has a bound."""
    return (state.phase in DRAINING) == (state.drain_ends_at_ms is not None)


def only_a_parking_tier_parks(state: State) -> bool:
    """A run whose tier does not park is never on the way to a park, nor parked."""
    return state.run.tier.parks or state.phase in (P.READY, P.DRAINING_TO_STOP)


def a_resident_run_is_not_stopped(state: State) -> bool:
    """38: Only what does not run remembers why it was stopped."""
    return state.run.stopped is None


# --- table ----------------------------------------------------------------------------------------

_NOT_OURS = (f.Spawned, f.LaunchReady, f.LaunchFailed, f.IdleGateEnded, f.Terminated, f.TerminateUnproven,
             f.Probed)  # fmt: skip

RESIDENCY: Machine[State] = Machine(
    name="residency",
    doc=__doc__,
    phases=P,
    events=f.FACTS,
    invariants=(
        charge_matches_phase,
        is_a_recorded_run,
        exactly_armed_has_a_bound,
        only_armed_waits_with_a_stop,
        exactly_leaving_knows_why,
        exactly_a_drain_has_an_end,
        only_a_parking_tier_parks,
        a_resident_run_is_not_stopped,
    ),
    rows=(
        # somebody wants it to serve
        ignore(at(P.READY), f.Activated, why="50: it serves; the activation is done."),
        Row(when=TO_PARK, on=f.Activated, given=only_idle, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, park_called_off), why="An idle timer gives way to demand while nothing is armed."),
        ignore(TO_PARK, f.Activated, given=wanted_gone,
               why="It waits: whoever wants the memory goes first, and the next switch wakes it."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.Activated, given=only_idle, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, stop_called_off), why="An idle timer gives way to demand while nothing is armed."),
        ignore(at(P.DRAINING_TO_STOP), f.Activated, given=wanted_gone, why="It waits for the stop and starts afresh."),
        ignore(PARKING, f.Activated, why="It waits for the park's outcome and wakes it."),
        Row(when=at(P.PARKED), on=f.Activated, to=P.WAKE_PLANNED, change=plan_wake,
            why="A wake is planned on its host; the processes and the endpoint are there."),
        Row(when=at(P.WAKE_PLANNED) | WAKING, on=f.Activated, change=join,
            why="50: whoever comes later joins the wake."),
        # somebody wants its memory
        Row(when=at(P.READY), on=f.ParkRequested, given=can_park, to=P.DRAINING_TO_PARK, change=start_drain,
            emits=(close_for_park,), why="No new work reaches an engine that is about to give its memory back."),
        refuse(at(P.READY), f.ParkRequested, "unsupported_capability", given=cannot_park,
               why="An operator who says park does not mean stop."),
        Row(when=at(P.READY), on=f.ParkRequested, given=must_stop, to=P.DRAINING_TO_STOP, change=drain_to_stop_instead,
            emits=(close_for_stop_instead, park_became_stop),
            why="36: the memory is wanted, and only the engine's end gives it."),
        Row(when=at(P.DRAINING_TO_PARK), on=f.ParkRequested, given=insists_more, change=start_drain,
            emits=(close_for_park,), why="Whoever insists more must not lose it when the other gives up."),
        Row(when=at(P.PARK_PLANNED), on=f.ParkRequested, given=insists_more, change=take_over,
            emits=(close_for_park,), why="Whoever insists more must not lose it when the other gives up."),
        ignore(TO_PARK, f.ParkRequested, given=insists_no_more, why="It is on its way."),
        Row(when=at(P.DRAINING_TO_PARK), on=f.ParkRequested, given=must_stop, to=P.DRAINING_TO_STOP,
            change=drain_to_stop_instead, emits=(close_for_stop_instead, park_became_stop),
            why="36: a request that ends only with the engine came up while it drained."),
        Row(when=at(P.PARK_PLANNED), on=f.ParkRequested, given=must_stop,
            emits=(gate_stop, park_became_stop, stop_due_instead), why="36: it is drained; the stop is due."),
        ignore(at(P.DRAINING_TO_STOP), f.ParkRequested, why="It gives up more than was asked."),
        ignore(PARKING, f.ParkRequested, why="It is on its way."),
        Row(when=at(P.PARKED), on=f.ParkRequested, emits=(park_ended,), why="It is parked; nothing is left to do."),
        refuse(at(P.WAKE_PLANNED) | WAKING, f.ParkRequested, "lifecycle_conflict", why="Somebody is waking it."),
        # it is to end
        Row(when=at(P.READY), on=f.StopRequested, given=drains_first, to=P.DRAINING_TO_STOP, change=drain_to_stop,
            emits=(close_for_stop,), why="Running requests may end by themselves; new ones go elsewhere."),
        Row(when=at(P.READY), on=f.StopRequested, given=waits_for_none, emits=(gate_stop, stop_due_asked),
            why="Nothing is waited for: the places are stuck, or whoever asks does not want to wait."),
        Row(when=at(P.DRAINING_TO_PARK), on=f.StopRequested, given=drains_first, to=P.DRAINING_TO_STOP,
            change=drain_to_stop, emits=(close_for_stop, park_overtaken),
            why="A stop while draining changes the goal, not the drain."),
        Row(when=at(P.DRAINING_TO_PARK), on=f.StopRequested, given=waits_for_none,
            emits=(gate_stop, park_overtaken, stop_due_asked), why="A stop while draining changes the goal."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.StopRequested, given=drains_for_more, change=drain_to_stop,
            emits=(close_for_stop,), why="The stronger stop is kept: it may close on-demand activation."),
        ignore(at(P.DRAINING_TO_STOP), f.StopRequested, given=drains_for_less, why="It ends already."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.StopRequested, given=waits_for_none, emits=(gate_stop, stop_due_asked),
            why="The drain is cut short; the stronger of the two stops is kept."),
        Row(when=at(P.PARK_PLANNED), on=f.StopRequested, emits=(gate_stop, park_overtaken, stop_due_asked),
            why="It is drained and nothing is armed: the stop is due."),
        Row(when=PARKING, on=f.StopRequested, change=note_pending,
            why="Accepted; it runs once the release is classified, for a half-released engine has no known charge."),
        Row(when=at(P.PARKED), on=f.StopRequested, emits=(gate_stop, stop_due_asked), why="Nothing runs in it."),
        refuse(at(P.WAKE_PLANNED) | WAKING, f.StopRequested, "lifecycle_conflict", given=yields,
               why="A switch or a timer never takes what somebody is waking."),
        Row(when=at(P.WAKE_PLANNED), on=f.StopRequested, given=insists, emits=(gate_stop, stop_due_asked),
            why="Nothing is armed: the stop is due."),
        Row(when=WAKING, on=f.StopRequested, given=insists, change=note_pending,
            why="Accepted; it runs once the wake is classified."),
        # a switch gives up, a controller session begins, a deployment changes
        Row(when=TO_PARK, on=f.Withdrawn, given=was_for_it, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, park_called_off), why="48: a failed switch leaves its victims serving."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.Withdrawn, given=was_for_it, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, stop_called_off), why="48: a failed switch leaves its victims serving."),
        Row(when=TO_PARK | at(P.DRAINING_TO_STOP), on=f.Withdrawn, given=was_for_others, emits=(unswitch,),
            why="Only the switch's own reason goes; whoever else wants it gone still does."),
        ignore(ANY - TO_PARK - at(P.DRAINING_TO_STOP), f.Withdrawn,
               why="It serves, or it is given up already, or an armed step is classified first."),
        Row(when=TO_PARK, on=f.SessionBegan, given=was_for_a_switch, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, park_called_off), why="No switch survives its controller session."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.SessionBegan, given=was_for_a_switch, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, stop_called_off), why="No switch survives its controller session."),
        ignore(TO_PARK | at(P.DRAINING_TO_STOP), f.SessionBegan, given=was_for_no_switch,
               why="What was asked is still asked."),
        ignore(ANY - TO_PARK - at(P.DRAINING_TO_STOP), f.SessionBegan,
               why="The gate doubts by itself; orders in flight are told lost one by one."),
        ignore(ANY, f.Reopened, why="It is not stopped."),
        ignore(ANY, f.Revised, why="Whoever revises also stops what runs with the old revision."),
        # verdicts
        Row(when=at(P.PARK_PLANNED), on=f.ParkAdmitted, given=is_fresh, to=P.PARK_ARMED, change=arm_park,
            emits=(raise_parking, send_release),
            why="W8, 4: the peak is charged in this step, before the call that can reach it is sent."),
        refuse(at(P.PARK_PLANNED), f.ParkAdmitted, "lifecycle_conflict", given=is_old, why="A token fences one step."),
        ignore(ANY - at(P.PARK_PLANNED), f.ParkAdmitted, why="It wants no room to park; nothing was charged."),
        Row(when=at(P.PARK_PLANNED), on=f.ParkNotAdmitted, given=may_stay, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, park_refused), why="It stays loaded rather than be lost."),
        Row(when=at(P.PARK_PLANNED), on=f.ParkNotAdmitted, given=must_leave,
            emits=(gate_stop, no_room_to_park, stop_due_no_room),
            why="12.4: somebody needs the memory, so it is stopped: no room to park."),
        ignore(ANY - at(P.PARK_PLANNED), f.ParkNotAdmitted, why="It wants no room to park."),
        Row(when=at(P.WAKE_PLANNED), on=f.WakeAdmitted, given=is_fresh, to=P.WAKE_ARMED, change=arm_wake,
            emits=(raise_wake, send_restore), why="W10, 4: the peak is charged in this step; the generation is kept."),
        refuse(at(P.WAKE_PLANNED), f.WakeAdmitted, "lifecycle_conflict", given=is_old, why="A token fences one step."),
        ignore(ANY - at(P.WAKE_PLANNED), f.WakeAdmitted, why="It wants no room to wake; nothing was charged."),
        Row(when=at(P.WAKE_PLANNED), on=f.WakeNotAdmitted, given=may_change, change=note_shortage,
            why="It waits for a switch on its own host; status shows the figures."),
        Row(when=at(P.WAKE_PLANNED), on=f.WakeNotAdmitted, given=is_final, to=P.PARKED, change=sleep_on_refused,
            emits=(wake_refused,), why="15: its files changed since they were measured; nobody gives way for it."),
        ignore(ANY - at(P.WAKE_PLANNED), f.WakeNotAdmitted, why="It wants no room to wake."),
        ignore(ANY, f.Placed, why="It has its place."),
        ignore(ANY, f.NotPlaced, why="It has its place."),
        ignore(ANY, f.Held, why="A wake waits for its own room alone."),
        ignore(ANY, f.HoldLifted, why="It is not held."),
        ignore(ANY, f.Turn, why="Its steps come with room to park or to wake."),
        # outcomes
        Row(when=at(P.PARK_ARMED), on=f.Sent, given=is_answer, to=P.RELEASING, why="Progress for people."),
        Row(when=at(P.WAKE_ARMED), on=f.Sent, given=is_answer, to=P.RESTORING, why="Progress for people."),
        ignore(at(P.PARK_ARMED, P.WAKE_ARMED), f.Sent, given=is_stale, why="Another order left."),
        ignore(ANY - at(P.PARK_ARMED, P.WAKE_ARMED), f.Sent, why="It left before, or it is another's."),
        Row(when=PARKING, on=f.ParkConfirmed, given=is_released, to=P.PARKED, change=park,
            emits=(settle_parked, gate_left, park_ended), why="W9, 3: only samples after the call lower the charge."),
        Row(when=PARKING, on=f.ParkConfirmed, given=is_released_and_stopped,
            emits=(settle_parked, gate_stop, pending_took_over, stop_due_pending_parked),
            why="The release is classified; the stop that waited runs now."),
        ignore(PARKING, f.ParkConfirmed, given=is_not_released,
               why="Of an older release; or a proof is missing, and then the answer is still due."),
        ignore(ANY - PARKING, f.ParkConfirmed, why="Of an older release, which is classified."),
        Row(when=PARKING, on=f.ParkRefused, given=refused_unsent, to=P.READY, change=stay_loaded_unsent,
            emits=(settle_refused, unpark, unswitch, park_refused),
            why="Nothing was sent, so it is as it was; the gate opens unless something else holds it."),
        Row(when=PARKING, on=f.ParkRefused, given=refused_unproven, to=P.READY, change=stay_loaded,
            emits=(unpark, unswitch, park_refused),
            why="3: a refusal is no proof, so the peak stays charged; the engine answers as before."),
        Row(when=PARKING, on=f.ParkRefused, given=refused_and_stopped,
            emits=(gate_stop, pending_took_over, stop_due_pending),
            why="The release is classified; the stop that waited runs now."),
        ignore(PARKING, f.ParkRefused, given=is_stale, why="Of an older release."),
        ignore(ANY - PARKING, f.ParkRefused, why="Of an older release, which is classified."),
        Row(when=at(P.WAKE_ARMED, P.RESTORING), on=f.Restored, given=is_answer, to=P.VERIFYING,
            why="Progress for people."),
        ignore(at(P.WAKE_ARMED, P.RESTORING), f.Restored, given=is_stale, why="Of an older wake."),
        ignore(ANY - at(P.WAKE_ARMED, P.RESTORING), f.Restored, why="Told before, or of an older wake."),
        Row(when=WAKING, on=f.WakeConfirmed, given=is_woken, to=P.READY, change=wake,
            emits=(settle_woken, gate_proven, ready_reached),
            why="44: resident again, usable, the same engine, and answering as it did at its first start."),
        Row(when=WAKING, on=f.WakeConfirmed, given=is_woken_and_stopped,
            emits=(settle_woken, gate_stop, stop_due_pending_woken),
            why="The wake is classified; the stop that waited runs now, and the gate stays closed."),
        Row(when=WAKING, on=f.WakeConfirmed, given=canary_unanswered,
            emits=(keep_larger, run_uncertain, gate_left, became_uncertain),
            why="44: an unanswered canary is not a passed one."),
        Row(when=WAKING, on=f.WakeConfirmed, given=canary_unanswered_and_stopped,
            emits=(keep_larger, gate_stop, stop_due_pending), why="It is to end anyway; the charge stays."),
        ignore(WAKING, f.WakeConfirmed, given=is_not_woken, why="Of an older wake, or proof of another run."),
        ignore(ANY - WAKING, f.WakeConfirmed, why="Of an older wake, which is classified."),
        Row(when=WAKING, on=f.WakeFailed, given=wake_failed, emits=(gate_stop, stop_due_failed_wake),
            why="44: what did not come back as it was is ended with proof; this step accepts the internal stop."),
        Row(when=WAKING, on=f.WakeFailed, given=wake_refused_unsent, to=P.PARKED, change=stay_parked,
            emits=(settle_unwoken, wake_not_begun),
            why="Nothing was asked of it: its copy is whole, and the next one who wants it tries again."),
        Row(when=WAKING, on=f.WakeFailed, given=wake_refused_unsent_and_stopped,
            emits=(settle_unwoken, gate_stop, stop_due_pending_parked),
            why="Nothing was asked of it; the stop that waited runs now."),
        ignore(WAKING, f.WakeFailed, given=is_stale, why="Of an older wake."),
        ignore(ANY - WAKING, f.WakeFailed, why="Of an older wake, which is classified."),
        Row(when=ARMED, on=f.OrderLost, given=is_lost, emits=(keep_larger, run_uncertain, gate_left, became_uncertain),
            why="12: unknown is not failed; the release or restore is never sent again."),
        Row(when=ARMED, on=f.OrderLost, given=is_lost_and_stopped,
            emits=(keep_larger, run_uncertain, gate_stop, stop_due_pending),
            why="Unknown, and it is to end anyway: ending it also answers the question."),
        ignore(ARMED, f.OrderLost, given=is_stale, why="Of an older order, which is classified."),
        ignore(CALM, f.OrderLost, why="Nothing is in flight."),
        *(ignore(ANY, event, why="Answers an order of another run, or of this run's start, which is classified.")
          for event in _NOT_OURS),
        # processes and requests
        Row(when=at(P.READY, P.PARKED, P.WAKE_PLANNED), on=f.EngineExited, given=engine_exited,
            emits=(gate_exit, stop_due_exit),
            why="What is left of the engine is ended with proof; requests in flight fail honestly."),
        Row(when=TO_PARK, on=f.EngineExited, given=engine_exited,
            emits=(gate_exit, park_lost_its_engine, stop_due_exit), why="There is nothing left to park."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.EngineExited, given=engine_exited, emits=(gate_exit, stop_due_exit),
            why="Nothing is left to wait for; a stop that somebody insists on keeps its kind."),
        Row(when=ARMED, on=f.EngineExited, given=engine_exited, change=note_exit, emits=(gate_exit,),
            why="The order in flight is classified first; it cannot succeed any more."),
        ignore(ANY, f.EngineExited, given=no_engine_exited, why="22: helpers come and go; older runs are settled."),
        Row(when=at(P.DRAINING_TO_PARK), on=f.GateDrained, given=is_quiet, to=P.PARK_PLANNED, change=plan_park,
            why="36: nothing in flight in the router, and the engine read idle after the gate closed."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.GateDrained, given=is_quiet, emits=(gate_stop, stop_due_drained),
            why="More than a stop waits for."),
        ignore(DRAINING, f.GateDrained, given=is_not_quiet, why="A reading from before the drain proves nothing."),
        ignore(ANY - DRAINING, f.GateDrained, why="It does not drain."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.RequestsEnded, given=of_this_run, emits=(gate_stop, stop_due_drained),
            why="Requests that end only with the engine are not waited for; the idle gate follows in cleanup."),
        ignore(at(P.DRAINING_TO_STOP), f.RequestsEnded, given=of_another_run, why="Of another run."),
        ignore(ANY - at(P.DRAINING_TO_STOP), f.RequestsEnded, why="A park needs the engine's own reading."),
        # clock and hosts
        Row(when=at(P.DRAINING_TO_PARK), on=f.Ticked, given=drain_is_over, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, park_undrained), why="A drain that does not end is called off: nothing was done."),
        ignore(at(P.DRAINING_TO_PARK), f.Ticked, given=drain_goes_on, why="Requests may still end."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.Ticked, given=drain_over_and_yields, to=P.READY, change=serve_again,
            emits=(unpark, unswitch, stop_undrained), why="48: nobody insists, so it serves again."),
        Row(when=at(P.DRAINING_TO_STOP), on=f.Ticked, given=drain_over_and_insists, emits=(gate_stop, stop_due_drained),
            why="62: an accepted stop ends; what still runs is cut."),
        ignore(at(P.DRAINING_TO_STOP), f.Ticked, given=drain_goes_on, why="Requests may still end."),
        Row(when=at(P.WAKE_PLANNED), on=f.Ticked, given=wait_is_over, to=P.PARKED, change=sleep_on,
            emits=(wake_expired,), why="17: waiting is bounded by the oldest waiter; nothing was armed."),
        ignore(at(P.WAKE_PLANNED), f.Ticked, given=wait_goes_on, why="Somebody waits."),
        Row(when=ARMED, on=f.Ticked, given=answer_overdue,
            emits=(keep_larger, run_uncertain, gate_left, became_uncertain),
            why="Silence past the bound and the grace is a lost answer, not a failure."),
        Row(when=ARMED, on=f.Ticked, given=answer_overdue_and_stopped,
            emits=(keep_larger, run_uncertain, gate_stop, stop_due_pending), why="Lost, and it is to end anyway."),
        ignore(ARMED, f.Ticked, given=answer_may_come, why="The bound is ahead."),
        ignore(at(P.READY, P.PARK_PLANNED, P.PARKED), f.Ticked, why="Time alone parks, stops and wakes nothing."),
        ignore(ANY, f.HostReturned, why="The gate asks for fresh proofs; charges were kept."),
    ),
)  # fmt: skip
