"""From READY to PARKED and back: who may take the memory, when, and on which proof.

A drain may be called off, an armed step may not: it is classified first, and a stop that came
meanwhile runs after it. A charge falls on a sample taken after the release, or on a model that
answers as it did before. What nobody knows goes to cleanup with the larger charge.
Lifecycle 4.4; decisions 1, 10, 16.
"""

from __future__ import annotations

from capyctl.fsm import facts as f
from capyctl.fsm.residency_changes import (
    arm_park,
    arm_wake,
    drain_to_stop,
    drain_to_stop_instead,
    join,
    note_exit,
    note_pending,
    note_shortage,
    park,
    plan_park,
    plan_wake,
    serve_again,
    sleep_on,
    sleep_on_refused,
    start_drain,
    stay_loaded,
    stay_loaded_unsent,
    stay_parked,
    take_over,
    wake,
)
from capyctl.fsm.residency_emits import (
    became_uncertain,
    close_for_park,
    close_for_stop,
    close_for_stop_instead,
    gate_exit,
    gate_left,
    gate_proven,
    gate_stop,
    keep_larger,
    no_room_to_park,
    park_became_stop,
    park_called_off,
    park_ended,
    park_lost_its_engine,
    park_overtaken,
    park_refused,
    park_undrained,
    pending_took_over,
    raise_parking,
    raise_wake,
    ready_reached,
    run_uncertain,
    send_release,
    send_restore,
    settle_parked,
    settle_refused,
    settle_unwoken,
    settle_woken,
    stop_called_off,
    stop_due_asked,
    stop_due_drained,
    stop_due_exit,
    stop_due_failed_wake,
    stop_due_instead,
    stop_due_no_room,
    stop_due_pending,
    stop_due_pending_parked,
    stop_due_pending_woken,
    stop_undrained,
    unpark,
    unswitch,
    wake_expired,
    wake_not_begun,
    wake_refused,
)
from capyctl.fsm.residency_guards import (
    answer_may_come,
    answer_overdue,
    answer_overdue_and_stopped,
    can_park,
    canary_unanswered,
    canary_unanswered_and_stopped,
    cannot_park,
    drain_goes_on,
    drain_is_over,
    drain_over_and_insists,
    drain_over_and_yields,
    drains_first,
    drains_for_less,
    drains_for_more,
    engine_exited,
    insists,
    insists_more,
    insists_no_more,
    is_answer,
    is_final,
    is_fresh,
    is_lost,
    is_lost_and_stopped,
    is_not_quiet,
    is_not_released,
    is_not_woken,
    is_old,
    is_quiet,
    is_released,
    is_released_and_stopped,
    is_stale,
    is_woken,
    is_woken_and_stopped,
    may_change,
    may_stay,
    must_leave,
    must_stop,
    no_engine_exited,
    of_another_run,
    of_this_run,
    only_idle,
    refused_and_stopped,
    refused_unproven,
    refused_unsent,
    wait_goes_on,
    wait_is_over,
    waits_for_none,
    wake_failed,
    wake_refused_unsent,
    wake_refused_unsent_and_stopped,
    wanted_gone,
    was_for_a_switch,
    was_for_it,
    was_for_no_switch,
    was_for_others,
    yields,
)
from capyctl.fsm.residency_state import (
    ANY,
    ARMED,
    CALM,
    DRAINING,
    NO_ROOM_TO_PARK,
    PARKING,
    TO_PARK,
    WAKING,
    Ask,
    P,
    ResidencyPhase,
    State,
)
from capyctl.fsm.table import Machine, Row, at, ignore, refuse
from capyctl.fsm.types import Phase

__all__ = [
    "ANY",
    "ARMED",
    "CALM",
    "DRAINING",
    "NO_ROOM_TO_PARK",
    "PARKING",
    "RESIDENCY",
    "TO_PARK",
    "WAKING",
    "Ask",
    "ResidencyPhase",
    "State",
]
"""The machine, and of `residency_state` what others read; guards, changes and emits are the table's alone."""

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
