"""What a row of residency remembers: each builds the state after it, the table sets its phase."""

from __future__ import annotations

from typing import Any

import attrs

from capyctl.fsm import facts as f
from capyctl.fsm.residency_state import WAKING, Ask, State
from capyctl.fsm.run import Problem, Run, Stop, later, made_ready, stronger
from capyctl.fsm.types import Origin, Phase, StopKind

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


PARK_AS_STOP = {
    Origin.SWITCH: StopKind.PRESSURE,
    Origin.IDLE: StopKind.IDLE,
    Origin.DRAIN: StopKind.DRAIN,
    Origin.COUNT: StopKind.REVISION,
}


def stop_instead(event: f.ParkRequested) -> Stop:
    """The stop that gives the memory when a park cannot; no kind of it closes on-demand activation."""
    kind = StopKind.GROWTH if event.outgrown else PARK_AS_STOP.get(event.origin, StopKind.CUT_REQUEST)
    return Stop(kind=kind, asked_at_ms=event.now_ms, for_name=event.for_name, switch=event.switch)


def drain_to_stop_instead(state: State, event: f.ParkRequested) -> State:
    """it drains to its end"""
    return State(
        phase=state.phase,
        run=state.run,
        stop=stop_instead(event),
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


def exit_stop(event: f.EngineExited) -> Stop:
    return Stop(kind=StopKind.EXIT, asked_at_ms=event.now_ms, unseen=event.unseen)


def last_words(event: f.EngineExited) -> Problem:
    return Problem(code="engine_error", reason=event.reason)


def note_exit(state: State, event: f.EngineExited) -> State:
    """the exit is a stop that waits for the order's outcome; in a wake it is a failed wake"""
    kind = StopKind.FAILED_WAKE if state.phase in WAKING else StopKind.EXIT  # somebody waits for a wake
    stop = attrs.evolve(exit_stop(event), kind=kind)
    return _run(state, pending=stronger(state.run.pending, stop), last_error=last_words(event))


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


def parked(state: State) -> Run:
    return attrs.evolve(state.run, charged=Phase.PARKED, deadline_ms=None)


def park(state: State, event: f.ParkConfirmed) -> State:
    """parked"""
    return State(phase=state.phase, run=parked(state))


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
    run = attrs.evolve(parked(state), wait_ends_at_ms=None, last_error=Problem(code=event.code, reason=event.reason))
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


def woken(state: State, event: f.WakeConfirmed) -> Run:
    return made_ready(state.run, event.now_ms, processes=state.run.processes, canary=state.run.canary)


def wake(state: State, event: f.WakeConfirmed) -> State:
    """READY again"""
    return State(phase=state.phase, run=woken(state, event))
