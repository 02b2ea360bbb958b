"""What one step of an instance's life promises, whatever its tables say. Written from the reference, by hand.

`keeps_its_promises` is asked about every explored step of activation, residency and cleanup. It reads the
state before, the fact, the state after (of the next machine, after a hand-over) and the orders; no row, no guard.
"""

from __future__ import annotations

from typing import Any

import lives
from lives import EARLY, PROCESSES

from capyctl.fsm import activation, cleanup, residency
from capyctl.fsm import effects as x
from capyctl.fsm import facts as f
from capyctl.fsm import gate as g
from capyctl.fsm.activation import ActivationPhase as A
from capyctl.fsm.cleanup import CleanupPhase as C
from capyctl.fsm.instance import Life, heir
from capyctl.fsm.proofs import Gone, NeverLaunched, Rebooted, Unsent
from capyctl.fsm.residency import ResidencyPhase as R
from capyctl.fsm.run import HoldCause, Run, Step, Stop
from capyctl.fsm.table import Refused
from capyctl.fsm.types import Incarnation, Origin, Phase, Role, StopKind

STARTING = {A.PLANNED, A.HELD, A.ARMED, A.LAUNCHING, A.PROBING}
LAUNCHED = {A.ARMED, A.LAUNCHING, A.PROBING}
RELEASED = {R.PARK_ARMED, R.RELEASING}
WOKEN = {R.WAKE_ARMED, R.RESTORING, R.VERIFYING}
DRAINING = {R.DRAINING_TO_PARK, R.DRAINING_TO_STOP}
GIVING = {R.DRAINING_TO_PARK, R.PARK_PLANNED}
ENDING = {C.PLANNED, C.IDLE_GATE, C.ARMED, C.TERMINATING}
GENTLE = {
    StopKind.PRESSURE,
    StopKind.IDLE,
    StopKind.RECLAIM,
    StopKind.GROWTH,
    StopKind.CUT_REQUEST,
    StopKind.FAILED_PARK,
}
SHUT = {StopKind.OPERATOR, StopKind.INSTANCE, StopKind.DELETE}


class Told:
    """One step, with the questions that promises ask."""

    def __init__(self, before: Life, event: f.Fact, state: Life, orders: tuple[Any, ...]) -> None:
        self.before, self.event, self.orders = before, event, orders
        over = [order for order in orders if isinstance(order, x.HandOver)]
        assert len(over) <= 1, "a run is handed to one machine"
        self.after: Life = heir(over[0]) if over else state
        self.nothing = self.after == before and not orders
        self.refused = self.after == before and len(orders) == 1 and isinstance(orders[0], Refused)
        self.still = self.nothing or self.refused

    def ordered(self, kind: type[Any]) -> list[Any]:
        return [order for order in self.orders if isinstance(order, kind)]


def keeps_its_promises(before: Life, event: f.Fact, state: Life, orders: tuple[Any, ...]) -> None:
    """Raise AssertionError, naming the promise, if this step breaks one."""
    told = Told(before, event, state, orders)
    for promise in PROMISES:
        assert promise(told), f"{promise.__name__}: {promise.__doc__}\n{before}\n{event}\n{told.after}\n{orders}"


def wanted(life: Life) -> Stop | None:
    """The stop that is remembered: why it is down, why it goes down, or what waits."""
    match life:
        case activation.State(run=run):
            return run.stopped or run.pending
        case residency.State(run=run, stop=stop):
            return stop or run.pending
        case cleanup.State(stop=stop):
            return stop


def covers(run: Run, proof: object) -> bool:
    """P-GONE of this run: every recorded process, or none was ever recorded, or all of them are of the other boot."""
    if not isinstance(proof, Gone | NeverLaunched | Rebooted) or run.generation is None:
        return False
    if proof.incarnation != Incarnation(run.lane, run.generation):
        return False
    match proof:
        case Gone(absent=absent):
            return all(process in absent for process in run.processes)
        case NeverLaunched():
            return run.processes == ()
        case Rebooted(recorded_boot_id=boot):
            return {process.boot_id for process in run.processes} <= {boot}


def gone_in(told: Told) -> bool:
    """Whether the fact brings a gone proof that counts for this run."""
    proof = getattr(told.event, "proof", None) or getattr(told.event, "gone", None)
    return covers(told.before.run, proof)


# --- identities -----------------------------------------------------------------------------------


def stale_answers_change_nothing(told: Told) -> bool:
    """20: an answer to another order changes nothing, unless it proves a run gone that is being ended."""
    event = told.event
    if not isinstance(event, f.Outcome) or event.token == told.before.run.token:
        return True
    return told.nothing or (isinstance(told.before, cleanup.State) and gone_in(told))


def stale_news_changes_nothing(told: Told) -> bool:
    """20, 22: helpers, and processes and requests of another run, change nothing."""
    match told.event:
        case f.EngineExited(generation=generation, role=role):
            return (generation == told.before.run.generation and role is not Role.HELPER) or told.still
        case f.RequestsEnded(generation=generation):
            return generation == told.before.run.generation or told.still
        case f.GateDrained(quiet=proof):
            return proof.incarnation.generation == told.before.run.generation or told.still
    return True


def tokens_fence(told: Told) -> bool:
    """20, 27: every order has a token newer than any before, and the run waits for that one alone."""
    sent = told.ordered(x.HostOrder)
    if not sent:
        return isinstance(told.event, f.Placed) or told.after.run.token == told.before.run.token
    (order,) = sent
    return order.token > (told.before.run.token or 0) and told.after.run.token == order.token


def generations_are_drawn_once(told: Told) -> bool:
    """19: the generation changes with a launch alone, and rises."""
    old, new = told.before.run.generation, told.after.run.generation
    return bool(new == old) != bool(told.ordered(x.SendLaunch)) and (new == old or (new or 0) > (old or 0))


# --- memory ---------------------------------------------------------------------------------------


def charges_move_by_orders(told: Told) -> bool:
    """3, 4: the charge changes by one ledger step, up before the order that needs it, down on a proof of this run."""
    old, new = told.before.run.charged, told.after.run.charged
    moves = told.ordered(x.RaiseCharge) + told.ordered(x.SettleDown) + told.ordered(x.ReleaseCharge)
    if not moves:
        return old is new and not told.ordered(x.SendLaunch | x.SendRelease | x.SendRestore)
    (move,) = moves
    run = told.before.run
    match move:
        case x.RaiseCharge(phase=phase):
            needs = {Phase.COLD: x.SendLaunch, Phase.PARKING: x.SendRelease, Phase.WAKE: x.SendRestore}
            return new is phase and len(told.ordered(needs[phase])) == 1
        case x.SettleDown(phase=phase, proof=proof):
            proofs = proof.values() if isinstance(proof, dict) else (proof,)
            return new is phase and bool(proofs) and all(one.incarnation == run.incarnation for one in proofs)
        case x.ReleaseCharge(proof=proof):
            clean = covers(run, proof) or (isinstance(proof, Unsent) and not run.processes)
            return new is Phase.NONE and proof.incarnation == run.incarnation and clean
    return False


def the_unknown_keeps_everything(told: Told) -> bool:
    """12: what becomes unknown keeps the larger charge, and its processes."""
    if not told.ordered(x.RunUncertain):
        return True
    kept = told.after.run.charged is told.before.run.charged and told.after.run.processes == told.before.run.processes
    return kept and (isinstance(told.before, cleanup.State) or bool(told.ordered(x.KeepLarger)))


# --- who may start it -----------------------------------------------------------------------------


def starts_are_asked_for(told: Told) -> bool:
    """7, 38: what is stopped or failed starts when somebody may start it, and not otherwise."""
    before, event, after = told.before, told.event, told.after
    if not isinstance(before, activation.State) or before.phase not in (A.STOPPED, A.FAILED):
        return True
    if not isinstance(event, f.Activated):
        return after.phase in (A.STOPPED, A.FAILED)
    by_hand, run = event.origin is Origin.OPERATOR, before.run
    if before.phase is A.FAILED:
        allowed = by_hand or run.retry_at_ms is None or event.now_ms >= run.retry_at_ms
    else:
        kind = run.stopped.kind if run.stopped else None
        allowed = kind not in SHUT or (by_hand and kind is not StopKind.DELETE)
    return (after.phase is A.PLANNED and after.run.attempts == 0) if allowed else told.refused


def nothing_starts_over_what_runs(told: Told) -> bool:
    """50: a second activation of what runs, ends or is unknown starts nothing."""
    if not isinstance(told.event, f.Activated) or isinstance(told.before, activation.State):
        return True
    if isinstance(told.before, cleanup.State):
        return told.refused
    match told.before.phase:
        case R.PARKED:
            return told.after.phase is R.WAKE_PLANNED
        case R.DRAINING_TO_PARK | R.PARK_PLANNED | R.DRAINING_TO_STOP:
            idle = (told.before.ask is not None and told.before.ask.origin is Origin.IDLE) or (
                told.before.stop is not None and told.before.stop.kind is StopKind.IDLE
            )
            return told.after.phase is R.READY if idle else told.nothing
        case R.WAKE_PLANNED | R.WAKE_ARMED | R.RESTORING | R.VERIFYING:
            return told.after.phase is told.before.phase
    return told.nothing


def an_operators_stop_is_cleared_by_hand(told: Told) -> bool:
    """38: only the operator's start of the deployment clears the operator's stop of it; other stops stay."""
    if not isinstance(told.event, f.Reopened):
        return True
    stopped = told.before.run.stopped
    if told.before.phase is A.STOPPED and stopped is not None and stopped.kind is StopKind.OPERATOR:
        return told.after.run.stopped is None
    return told.nothing


# --- stops ----------------------------------------------------------------------------------------


def accepted_stops_are_kept(told: Told) -> bool:
    """62: whoever insists is heard in every phase; the strongest stop is the one that is remembered."""
    if not isinstance(told.event, f.StopRequested) or told.event.stop.kind in GENTLE:
        return True
    remembered = wanted(told.after)
    earlier = wanted(told.before)
    floor = max(told.event.stop.rank, earlier.rank if earlier else 0)
    return remembered is not None and remembered.rank >= floor and not told.refused


def gentle_stops_take_nothing_wanted(told: Told) -> bool:
    """Nobody loses what they are starting or waking to a switch or a timer, and the unknown is no victim."""
    if not isinstance(told.event, f.StopRequested) or told.event.stop.kind not in GENTLE:
        return True
    busy = STARTING | WOKEN | {R.WAKE_PLANNED, C.RECONCILING}
    if told.before.phase in busy:
        return told.refused
    return told.nothing if told.before.phase is A.FAILED else not told.refused


def stops_of_what_runs_drain_first(told: Told) -> bool:
    """A stop that may wait drains; one that may not, or that has nothing to drain, is due at once."""
    event, phase = told.event, told.before.phase
    if not isinstance(event, f.StopRequested) or not isinstance(told.before, residency.State):
        return True
    if phase in RELEASED | WOKEN:
        return told.refused or told.after.phase is phase
    waits = event.drain_ends_at_ms is not None and event.stop.kind is not StopKind.SATURATION
    if phase in {R.READY, R.DRAINING_TO_PARK} and waits:
        return told.after.phase is R.DRAINING_TO_STOP
    if phase is R.DRAINING_TO_STOP and waits:
        assert told.before.stop is not None
        more = event.stop.rank > told.before.stop.rank
        return told.after.phase is phase and (told.after.stop == event.stop if more else told.nothing)
    return told.refused or told.after.phase is C.PLANNED


def pending_stops_run_after_the_outcome(told: Told) -> bool:
    """A stop that waited for an outcome runs when there is one, whatever it is."""
    pending = told.before.run.pending
    if pending is None or told.after.phase is told.before.phase:
        return True
    progress = {A.LAUNCHING, A.PROBING, R.RELEASING, R.RESTORING, R.VERIFYING}
    if told.after.phase in progress:
        return told.after.run.pending == pending
    remembered = wanted(told.after)
    return told.after.phase in {A.STOPPED, C.PLANNED} and remembered is not None and remembered.rank >= pending.rank


# --- activation -----------------------------------------------------------------------------------


def launches_end_as_they_are_proven(told: Told) -> bool:
    """13: a launch proven gone or unsent leaves nothing; what was transient is tried three times, the rest is not."""
    before, event, after = told.before, told.event, told.after
    if before.phase not in LAUNCHED or not isinstance(event, f.LaunchFailed):
        return True
    run = before.run
    clean = covers(run, event.proof) or (
        isinstance(event.proof, Unsent) and event.proof.incarnation == run.incarnation and not run.processes
    )
    if event.token != run.token or not clean:
        return told.nothing
    if run.pending:
        return after.phase is A.STOPPED
    if event.transient and run.attempts < 2:
        assert isinstance(after, activation.State)
        pause = {0: 30_000, 1: 60_000}[run.attempts]
        cooled = after.hold is HoldCause.COOLDOWN and after.hold_ends_at_ms == event.now_ms + pause
        return after.phase is A.HELD and cooled and after.run.attempts == run.attempts + 1
    pause = min(30_000 * 2**run.failures, 600_000)
    spent = after.run.failures == run.failures + 1 and after.run.retry_at_ms == event.now_ms + pause
    return after.phase is A.FAILED and spent


def readiness_is_proven(told: Told) -> bool:
    """28, 36, 44: READY takes every proof that a launch, a wake or a look needs; else somebody gave way."""
    before, event, after = told.before, told.event, told.after
    if after.phase is not R.READY or before.phase is R.READY:
        return True
    run, proven = before.run, told.ordered(g.ReadyProven)
    if before.phase in GIVING | RELEASED | {R.DRAINING_TO_STOP}:
        return not proven
    canary = getattr(event, "canary", None)
    checked = before.phase in LAUNCHED or canary is not None or not run.needs_canary
    if isinstance(before, cleanup.State):
        checked = checked or before.lost is Step.LAUNCH
        same = event.same is not None and event.same.incarnation == run.incarnation
        checked = checked and same and before.stop is None and before.lost in (Step.LAUNCH, Step.WAKE)
    usable = event.usable is not None and event.usable.incarnation == run.incarnation
    back = not isinstance(event, f.WakeConfirmed) or event.back.incarnation == run.incarnation
    return bool(proven) and checked and usable and back and event.token == run.token and run.pending is None


def ready_launches_are_taken(told: Told) -> bool:
    """A launch that is proven usable is classified at once: to READY, or to the stop that waited."""
    before, event = told.before, told.event
    if before.phase not in LAUNCHED or not isinstance(event, f.LaunchReady):
        return True
    if event.token != before.run.token or event.usable.incarnation != before.run.incarnation:
        return told.nothing
    return told.after.phase is (C.PLANNED if before.run.pending else R.READY)


def lost_orders_are_unknown(told: Told) -> bool:
    """12: a lost answer is neither success nor failure."""
    before, event, after = told.before, told.event, told.after
    armed = LAUNCHED | RELEASED | WOKEN | {C.ARMED, C.TERMINATING}
    late = isinstance(event, f.Ticked) and event.now_ms > EARLY and before.run.deadline_ms is not None
    lost = isinstance(event, f.OrderLost) and event.token == before.run.token
    if before.phase is C.RECONCILING and lost:  # a look: repeated after a pause
        assert isinstance(before, cleanup.State)
        assert isinstance(after, cleanup.State)
        return after.phase is C.RECONCILING and after.looks == before.looks + 1
    if before.phase not in armed or not (late or lost):
        return True
    return after.phase is (C.PLANNED if before.run.pending else C.RECONCILING) and bool(told.ordered(x.RunUncertain))


def places_are_given_to_who_wants_them(told: Told) -> bool:
    """2, 19: a place arms a planned start, if its numbers are fresh; a hold and a verdict tell it why not."""
    before, event, after = told.before, told.event, told.after
    run = before.run
    if before.phase is not A.PLANNED:
        return not isinstance(event, f.Placed) or told.nothing
    match event:
        case f.Placed(generation=generation, token=token):
            fresh = generation > (run.generation or 0) and token > (run.token or 0)
            return after.phase is A.ARMED if fresh else told.refused
        case f.NotPlaced(final=final):
            return after.phase is (A.STOPPED if final else A.PLANNED)
        case f.Held(until_ms=until_ms):
            return after.phase is A.HELD and after.hold_ends_at_ms == until_ms
    return True


def holds_end_by_their_cause(told: Told) -> bool:
    """64: only time ends a cooldown; any other hold ends when it is lifted."""
    before = told.before
    if before.phase is not A.HELD or not isinstance(told.event, f.Held | f.HoldLifted):
        return True
    assert isinstance(before, activation.State)
    if before.hold is HoldCause.COOLDOWN:
        return told.nothing
    if isinstance(told.event, f.HoldLifted):
        return told.after.phase is A.PLANNED
    assert isinstance(told.after, activation.State)
    return (told.after.phase, told.after.hold) == (A.HELD, told.event.cause)


def waits_end(told: Told) -> bool:
    """17, 64: a start waits as long as it may; one that failed before reads failed, or each request would launch."""
    before, event, after = told.before, told.event, told.after
    if before.phase not in (A.PLANNED, A.HELD) or not isinstance(event, f.Ticked):
        return True
    assert isinstance(before, activation.State)
    ends = before.run.wait_ends_at_ms
    if ends is not None and event.now_ms >= ends:
        ended = told.ordered(x.StartEnded)
        return after.phase is (A.FAILED if before.run.attempts else A.STOPPED) and len(ended) == 1
    if before.hold_ends_at_ms is not None and event.now_ms >= before.hold_ends_at_ms:
        return after.phase is A.PLANNED
    return told.nothing


# --- residency ------------------------------------------------------------------------------------


def parks_are_possible_or_stops(told: Told) -> bool:
    """36: what cannot park, or has a request that ends only with the engine, is stopped; an operator is refused."""
    before, event, after = told.before, told.event, told.after
    if not isinstance(event, f.ParkRequested) or before.phase not in {R.READY} | GIVING:
        return True
    assert isinstance(before, residency.State)
    assert isinstance(after, residency.State | cleanup.State)
    if not before.run.tier.parks and event.origin is Origin.OPERATOR:
        return told.refused
    if not before.run.tier.parks or event.settle_at_stop or event.outgrown:
        assert after.stop is not None
        due = C.PLANNED if before.phase is R.PARK_PLANNED else R.DRAINING_TO_STOP
        return after.phase is due and bool(told.ordered(x.ParkBecameStop)) and after.stop.kind not in SHUT
    assert isinstance(after, residency.State)
    insistence = [Origin.IDLE, Origin.SWITCH, Origin.OPERATOR]
    if before.ask is not None and insistence.index(event.origin) <= insistence.index(before.ask.origin):
        return told.nothing
    assert after.ask is not None
    closes = g.Closure.SWITCH if event.origin is Origin.SWITCH else g.Closure.PARK
    closed = [order.reason for order in told.ordered(g.ReasonAdded)] == [closes]
    to = R.DRAINING_TO_PARK if before.phase is R.READY else before.phase
    return after.phase is to and after.ask.origin is event.origin and closed


def parked_means_released(told: Told) -> bool:
    """36: PARKED takes a quiet engine since the drain began, the same engine, and a sample of what it still holds."""
    before, event, after = told.before, told.event, told.after
    run = before.run
    if before.phase in RELEASED and isinstance(event, f.ParkConfirmed):
        ours = all(
            proof.incarnation == run.incarnation for proof in (event.quiet, event.same, *event.resident.values())
        )
        if event.token != run.token or not event.resident or not ours or event.quiet.read_at_ms < EARLY:
            return told.nothing
        return after.phase is (C.PLANNED if run.pending else R.PARKED) and after.run.charged is Phase.PARKED
    adopted = isinstance(event, f.Probed) and event.resident is not None and event.same is not None
    never_asked = isinstance(event, f.WakeFailed) and event.unsent is not None and event.token == run.token
    return after.phase is not R.PARKED or before.phase in {R.PARKED, R.WAKE_PLANNED} or adopted or never_asked


def a_refused_park_changes_nothing(told: Told) -> bool:
    """3: it stays loaded; without P-UNSENT the peak stays charged."""
    before, event, after = told.before, told.event, told.after
    if before.phase not in RELEASED or not isinstance(event, f.ParkRefused) or event.token != before.run.token:
        return True
    if before.run.pending:
        return after.phase is C.PLANNED and after.run.charged is Phase.PARKING
    return after.phase is R.READY and after.run.charged is (Phase.READY if event.unsent else Phase.PARKING)


def room_is_given_to_who_wants_it(told: Told) -> bool:
    """4: room to park or to wake arms the step that waits for it, if the token is fresh."""
    before, event, after = told.before, told.event, told.after
    wants = {f.ParkAdmitted: (R.PARK_PLANNED, R.PARK_ARMED), f.WakeAdmitted: (R.WAKE_PLANNED, R.WAKE_ARMED)}
    if type(event) not in wants:
        return True
    waits, armed = wants[type(event)]  # type: ignore[index]
    if before.phase is not waits:
        return told.nothing
    fresh = event.token > (before.run.token or 0)  # type: ignore[attr-defined]
    return after.phase is armed if fresh else told.refused


def without_room_the_insistent_stop_it(told: Told) -> bool:
    """12.4: who needs the memory gets it by a stop; who only tidies up leaves it loaded."""
    before = told.before
    if before.phase is not R.PARK_PLANNED or not isinstance(told.event, f.ParkNotAdmitted):
        return True
    assert isinstance(before, residency.State)
    assert before.ask is not None
    if before.ask.origin is Origin.SWITCH:
        (became,) = told.ordered(x.ParkBecameStop)
        return told.after.phase is C.PLANNED and became.stop.kind is StopKind.PRESSURE
    return told.after.phase is R.READY and told.ordered(x.ParkEnded)[0].code == "parked_capacity"


def without_room_a_wake_waits_or_sleeps_on(told: Told) -> bool:
    """4.4, 15: no room yet is waited for, with its figures; a verdict that stands leaves the copy, and is told."""
    before, event, after = told.before, told.event, told.after
    if not isinstance(event, f.WakeNotAdmitted) or not isinstance(before, residency.State):
        return True
    if before.phase is not R.WAKE_PLANNED:
        return told.nothing
    assert isinstance(after, residency.State)
    if not event.final:
        figures = after.waits_for is not None and (after.waits_for.code, after.waits_for.reason) == (
            event.code,
            event.reason,
        )
        return after.phase is R.WAKE_PLANNED and figures and not told.orders and after.run == before.run
    ended = [(order.code, order.reason) for order in told.ordered(x.StartEnded)]
    return after.phase is R.PARKED and after.run.wait_ends_at_ms is None and ended == [(event.code, event.reason)]


def switches_give_back_what_they_took(told: Told) -> bool:
    """48: what leaves for a switch alone serves again when the switch ends, and nothing else does."""
    before, event = told.before, told.event
    if before.phase not in DRAINING | GIVING or not isinstance(event, f.Withdrawn | f.SessionBegan):
        return True
    assert isinstance(before, residency.State)
    asked = before.ask.switch if before.ask is not None and before.ask.origin is Origin.SWITCH else None
    if before.stop is not None:
        asked = before.stop.switch if before.stop.kind in GENTLE else None
    back = asked is not None and (isinstance(event, f.SessionBegan) or asked == event.switch)
    return told.after.phase is (R.READY if back else before.phase)


def drains_end(told: Told) -> bool:
    """62: a drain ends when it is quiet or at its bound: in its goal, or in serving again if nobody insists."""
    before, event, after = told.before, told.event, told.after
    if before.phase not in DRAINING:
        return True
    assert isinstance(before, residency.State)
    stops = before.phase is R.DRAINING_TO_STOP
    match event:
        case f.Ticked(now_ms=now_ms):
            assert before.drain_ends_at_ms is not None
            if now_ms < before.drain_ends_at_ms:
                return told.nothing
            gentle = before.stop is None or before.stop.kind in GENTLE
            return after.phase is (R.READY if gentle else C.PLANNED)
        case f.RequestsEnded(generation=generation):
            mine = generation == before.run.generation
            return after.phase is C.PLANNED if stops and mine else told.nothing
        case f.GateDrained(quiet=proof):
            if proof.incarnation != before.run.incarnation or proof.read_at_ms < EARLY:
                return told.nothing
            return after.phase is (C.PLANNED if stops else R.PARK_PLANNED)
    return True


def wakes_end_as_they_are_proven(told: Told) -> bool:
    """44: a wake ends READY with every proof, unknown without the canary's answer, and in a stop when it failed."""
    before, event, after = told.before, told.event, told.after
    if before.phase not in WOKEN:
        return True
    run = before.run
    match event:
        case f.WakeConfirmed(token=token, back=back, usable=usable, canary=canary, same=same):
            ours = all(p.incarnation == run.incarnation for p in (back, usable, same, *((canary,) if canary else ())))
            if token != run.token or not ours:
                return told.nothing
            checked = canary is not None or not run.needs_canary
            if run.pending:
                return after.phase is C.PLANNED and after.run.charged is (Phase.READY if checked else Phase.WAKE)
            return after.phase is (R.READY if checked else C.RECONCILING)
        case f.WakeFailed(token=token, unsent=unsent) if token == run.token and unsent is not None:
            if unsent.incarnation == run.incarnation:
                return after.phase is (C.PLANNED if run.pending else R.PARKED) and after.run.charged is Phase.PARKED
            return after.phase is C.PLANNED
        case f.WakeFailed(token=token, mismatch=mismatch) if token == run.token:
            assert isinstance(after, cleanup.State)
            assert after.stop is not None
            kind = StopKind.MISMATCH if mismatch else StopKind.FAILED_WAKE
            return after.phase is C.PLANNED and (run.pending is not None or after.stop.kind is kind)
    return True


def a_wake_nobody_waits_for_is_not_tried(told: Told) -> bool:
    """17: waiting for room to wake is bounded by whoever waits."""
    before, event = told.before, told.event
    if before.phase is not R.WAKE_PLANNED or not isinstance(event, f.Ticked):
        return True
    ends = before.run.wait_ends_at_ms
    return told.after.phase is R.PARKED if ends is not None and event.now_ms >= ends else told.nothing


def exits_end_the_run(told: Told) -> bool:
    """An exit of the engine ends whatever is resident: at once, or once the order in flight is classified. In a wake,
    for which somebody waits, it is a failed wake."""
    before, event, after = told.before, told.event, told.after
    if not isinstance(before, residency.State) or not isinstance(event, f.EngineExited):
        return True
    if event.generation != before.run.generation or event.role is Role.HELPER:
        return told.nothing
    closes = g.Closure.ENGINE_EXIT in {order.reason for order in told.ordered(g.ReasonAdded)}
    if before.phase in RELEASED | WOKEN:
        kind = StopKind.FAILED_WAKE if before.phase in WOKEN else StopKind.EXIT
        pending = after.run.pending
        noted = pending is not None and (before.run.pending is not None or pending.kind is kind)
        return closes and noted and after.phase is before.phase
    assert isinstance(after, cleanup.State)
    assert after.stop is not None
    kept = before.stop is not None and before.stop.kind not in GENTLE and before.stop.rank > 1
    return (
        closes
        and after.phase is C.PLANNED
        and after.stop.kind is (before.stop.kind if kept and before.stop else StopKind.EXIT)
    )


# --- cleanup --------------------------------------------------------------------------------------


def turns_do_the_next_thing(told: Told) -> bool:
    """6, 71: the next order of an end, once: the idle gate for what may be busy, a look for what is only unknown."""
    before, event, after = told.before, told.event, told.after
    if not isinstance(event, f.Turn) or not isinstance(before, cleanup.State):
        return not isinstance(event, f.Turn) or told.nothing
    run = before.run
    early = before.look_at_ms is not None and event.now_ms < before.look_at_ms
    if event.token <= (run.token or 0) or before.phase not in {C.PLANNED, C.RECONCILING} or early:
        return told.nothing
    if before.phase is C.RECONCILING:
        sent = x.SendTerminate if before.stop else x.SendProbe
        return after.phase is (C.ARMED if before.stop else C.RECONCILING) and len(told.ordered(sent)) == 1
    assert before.stop is not None
    busy = run.waits_idle and run.charged in (Phase.READY, Phase.PARKING) and before.stop.kind is not StopKind.EXIT
    asks = busy and not before.asked_idle
    sent = x.SendAwaitIdle if asks else x.SendTerminate
    return after.phase is (C.IDLE_GATE if asks else C.ARMED) and len(told.ordered(sent)) == 1


def idle_gates_end_in_a_signal(told: Told) -> bool:
    """6: whatever the idle gate answered, the engine is signalled next; without an answer it is not asked again."""
    before, event, after = told.before, told.event, told.after
    if before.phase is not C.IDLE_GATE:
        return not isinstance(event, f.IdleGateEnded) or told.nothing
    match event:
        case f.IdleGateEnded(token=token, next_token=next_token):
            answered = token == before.run.token and next_token > token
            return after.phase is C.ARMED if answered else told.nothing
        case f.OrderLost(token=token) if token == before.run.token:
            return after.phase is C.PLANNED and after.asked_idle
        case f.Ticked(now_ms=now_ms):
            return (after.phase is C.PLANNED and after.asked_idle) if now_ms > lives.SOON else told.nothing
    return True


_RETRIED = {StopKind.FAILED_START: A.HELD, StopKind.FAILED_WAKE: A.PLANNED}
_LOST = {Step.LAUNCH: StopKind.FAILED_START, Step.PARK: StopKind.EXIT, Step.WAKE: StopKind.FAILED_WAKE}


def gone_is_gone(told: Told) -> bool:
    """12, 13, 23: a gone proof that covers everything ends the run and frees it; the stop says what follows."""
    before, event, after = told.before, told.event, told.after
    if not isinstance(before, cleanup.State) or not isinstance(event, f.Terminated | f.LaunchFailed | f.Probed):
        return not isinstance(before, cleanup.State) or isinstance(after, cleanup.State)
    if not gone_in(told):
        return not told.ordered(x.ReleaseCharge) and (isinstance(event, f.Probed) or told.nothing)
    kind = before.stop.kind if before.stop else _LOST[before.lost]  # type: ignore[index]
    if kind in _RETRIED:
        to = _RETRIED[kind] if before.run.attempts < 2 else A.FAILED
    else:
        to = {StopKind.EXIT: A.FAILED, StopKind.SATURATION: A.PLANNED}.get(kind, A.STOPPED)
    freed = len(told.ordered(x.ReleaseCharge)) == len(told.ordered(x.RunGone)) == 1
    return after.phase is to and freed and after.run.processes == ()


def looks_classify_the_unknown(told: Told) -> bool:
    """18.5: the missing proof adopts; an engine that is there without it is ended; nothing proven, nothing done."""
    before, event, after = told.before, told.event, told.after
    if not isinstance(before, cleanup.State) or not isinstance(event, f.Probed) or gone_in(told):
        return True
    run = before.run
    if before.phase is not C.RECONCILING or before.stop is not None or event.token != run.token:
        return told.nothing
    same = event.same is not None and event.same.incarnation == run.incarnation
    usable = event.usable is not None and event.usable.incarnation == run.incarnation
    checked = event.canary is not None or not run.needs_canary
    over = run.deadline_ms is None or event.now_ms >= run.deadline_ms
    match before.lost:
        case Step.LAUNCH:
            to = R.READY if same and usable else C.PLANNED if over else C.RECONCILING
        case Step.PARK:
            to = R.PARKED if same and event.resident else C.PLANNED if same else C.RECONCILING
        case _:
            to = R.READY if same and usable and checked else C.PLANNED if same else C.RECONCILING
    later = not isinstance(after, cleanup.State) or after.look_at_ms is None or after.look_at_ms > event.now_ms
    recorded = after.phase is not R.READY or after.run.processes == PROCESSES
    return after.phase is to and later and recorded


def unproven_ends_are_tried_again(told: Told) -> bool:
    """62, 63: an end without its proof is unknown, kept whole, and tried again after a pause."""
    before, event, after = told.before, told.event, told.after
    if before.phase not in {C.ARMED, C.TERMINATING} or not isinstance(event, f.TerminateUnproven):
        return True
    if event.token != before.run.token:
        return told.nothing
    assert isinstance(after, cleanup.State)
    paused = after.look_at_ms is not None and after.look_at_ms > event.now_ms
    return after.phase is C.RECONCILING and paused and after.run.charged is before.run.charged


def news_makes_the_unknown_look_at_once(told: Told) -> bool:
    """62, 63: a host that is back, or an exit, is a reason to look now; an exit ends a step that nobody knows of."""
    before, event, after = told.before, told.event, told.after
    if before.phase is not C.RECONCILING or not isinstance(event, f.EngineExited | f.HostReturned):
        return True
    if isinstance(event, f.EngineExited) and not (
        event.generation == before.run.generation and event.role is not Role.HELPER
    ):
        return told.nothing
    assert isinstance(before, cleanup.State)
    assert isinstance(after, cleanup.State)
    if isinstance(event, f.EngineExited) and before.stop is None:
        assert after.stop is not None
        ends_as_it_would_when_found_gone = after.stop.kind is _LOST[before.lost]  # type: ignore[index]
        kept = after.run.charged is before.run.charged
        return after.phase is C.PLANNED and ends_as_it_would_when_found_gone and kept
    return after.phase is C.RECONCILING and after.look_at_ms == event.now_ms


def progress_is_progress(told: Told) -> bool:
    """A sent order, recorded processes and restored memory move the step on; they decide nothing."""
    before, event, after = told.before, told.event, told.after
    steps = {
        (f.Sent, A.ARMED): A.LAUNCHING,
        (f.Sent, R.PARK_ARMED): R.RELEASING,
        (f.Sent, R.WAKE_ARMED): R.RESTORING,
        (f.Sent, C.ARMED): C.TERMINATING,
        (f.Spawned, A.ARMED): A.PROBING,
        (f.Spawned, A.LAUNCHING): A.PROBING,
        (f.Restored, R.WAKE_ARMED): R.VERIFYING,
        (f.Restored, R.RESTORING): R.VERIFYING,
    }
    if not isinstance(event, f.Sent | f.Spawned | f.Restored):
        return True
    to = steps.get((type(event), before.phase)) if event.token == before.run.token else None  # type: ignore[call-overload]
    return told.nothing if to is None else after.phase is to and not told.orders


def time_alone_changes_what_is_due(told: Told) -> bool:
    """71: a tick before every bound changes nothing."""
    return not isinstance(told.event, f.Ticked) or told.event.now_ms > EARLY or told.nothing or _something_over(told)


def _something_over(told: Told) -> bool:
    bounds = [told.before.run.wait_ends_at_ms, told.before.run.deadline_ms]
    bounds += [getattr(told.before, name, None) for name in ("hold_ends_at_ms", "drain_ends_at_ms")]
    return any(bound is not None and bound <= told.event.now_ms for bound in bounds)


PROMISES = (
    stale_answers_change_nothing,
    stale_news_changes_nothing,
    tokens_fence,
    generations_are_drawn_once,
    charges_move_by_orders,
    the_unknown_keeps_everything,
    starts_are_asked_for,
    nothing_starts_over_what_runs,
    an_operators_stop_is_cleared_by_hand,
    accepted_stops_are_kept,
    gentle_stops_take_nothing_wanted,
    stops_of_what_runs_drain_first,
    pending_stops_run_after_the_outcome,
    launches_end_as_they_are_proven,
    readiness_is_proven,
    ready_launches_are_taken,
    lost_orders_are_unknown,
    places_are_given_to_who_wants_them,
    holds_end_by_their_cause,
    waits_end,
    parks_are_possible_or_stops,
    parked_means_released,
    a_refused_park_changes_nothing,
    room_is_given_to_who_wants_it,
    without_room_the_insistent_stop_it,
    without_room_a_wake_waits_or_sleeps_on,
    switches_give_back_what_they_took,
    drains_end,
    wakes_end_as_they_are_proven,
    a_wake_nobody_waits_for_is_not_tried,
    exits_end_the_run,
    turns_do_the_next_thing,
    idle_gates_end_in_a_signal,
    gone_is_gone,
    looks_classify_the_unknown,
    unproven_ends_are_tried_again,
    news_makes_the_unknown_look_at_once,
    progress_is_progress,
    time_alone_changes_what_is_due,
)
