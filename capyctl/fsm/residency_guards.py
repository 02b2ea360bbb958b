"""When a row of residency applies: demands, verdicts, outcomes, processes, requests and the clock.

Guards of one pair of phase and event exclude each other; the table is in `residency`.
"""

from __future__ import annotations

from capyctl.fsm import facts as f
from capyctl.fsm.residency_state import State
from capyctl.fsm.run import ABRUPT, YIELDING
from capyctl.fsm.types import Origin, Role, StopKind, SwitchId

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
    """nobody insists on this stop: pressure, idleness, reclaim, growth, a cut request, a failed park"""
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
