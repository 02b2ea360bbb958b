"""One deployment's record: what is wanted, which revision counts, and whether its checkpoint may be used.

The record never says whether an engine runs; that is the instances' own. It says who may start them:
an operator stop is lifted by an operator start alone. (Reference: lifecycle 3, 15.)
"""

from __future__ import annotations

import enum

import attrs

from capyctl.errors import CODES
from capyctl.fsm.table import Emit, Machine, Refused, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import Activation, DeploymentId, Millis, StopKind


class Phase(enum.Enum):
    """Where a deployment's record is."""

    ABSENT = "absent"  # no record
    ACCEPTED = "accepted"  # durable; the checkpoint of the current revision is not measured
    ACTIVE = "active"  # measured, and it resolves on at least one allowed host
    UNUSABLE = "unusable"  # measured, and it does not resolve or is not the declared one
    REVISING = "revising"  # a newer revision is accepted, instances of the old one still settle
    DELETING = "deleting"  # delete accepted, instances still settle
    DELETED = "deleted"  # record and route are gone


class Gate(enum.Enum):
    """The checkpoint gate (lifecycle 15): activation waits for it or is refused by it."""

    PENDING = "pending"
    MEASURED = "measured"
    MISMATCH = "mismatch"  # not the declared or recorded digest
    UNUSABLE = "unusable"  # does not resolve with the measured weights
    UNMEASURABLE = "unmeasurable"  # cannot be read, for a reason that does not clear itself


# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Wanted:
    """What one revision wants, as far as the record decides by it. `parks`: its residency is not restart_only."""

    instances: int = 1
    parks: bool = False
    activation: Activation = Activation.ON_DEMAND
    warm: bool = False


@attrs.frozen(kw_only=True)
class State:
    """What is recorded of one deployment.

    `suspended`: an operator stopped it. `stopped`: indices that an operator stopped one by one.
    `resume`: start the new revision once the old instances are gone.
    """

    phase: Phase = Phase.ABSENT
    deployment: DeploymentId
    revision: int = 0
    wanted: Wanted = Wanted()
    suspended: bool = False
    stopped: frozenset[int] = frozenset()
    gate: Gate = Gate.PENDING
    gate_code: str | None = None
    gate_reason: str = ""
    resume: bool = False


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Event:
    """A fact about one deployment, and when it was seen."""

    now_ms: Millis


@attrs.frozen(kw_only=True)
class DeployAsked(Event):
    """A create. `published`: some allowed host publishes the profile. `free`: name and routes are free."""

    wanted: Wanted
    published: bool = True
    free: bool = True


@attrs.frozen(kw_only=True)
class ReviseAsked(Event):
    """A change.

    `count_only`: only the number of instances differs. `live`: some instance of it is not settled.
    `resume`: it ran or was starting, so the new revision is wanted running too.
    """

    expected_revision: int
    wanted: Wanted
    count_only: bool = False
    live: bool = False
    resume: bool = False


@attrs.frozen(kw_only=True)
class StartAsked(Event):
    """An operator starts every instance. `expected_revision` None does not care."""

    expected_revision: int | None = None


@attrs.frozen(kw_only=True)
class StopAsked(Event):
    """An operator stops every instance."""

    expected_revision: int | None = None


@attrs.frozen(kw_only=True)
class InstanceStartAsked(Event):
    """An operator starts one instance."""

    index: int


@attrs.frozen(kw_only=True)
class InstanceStopAsked(Event):
    """An operator stops one instance."""

    index: int


@attrs.frozen(kw_only=True)
class ParkAsked(Event):
    """An operator parks every READY instance. `resident`: some instance serves, is parked, or is about to be."""

    expected_revision: int | None = None
    resident: bool = False


@attrs.frozen(kw_only=True)
class DeleteAsked(Event):
    """`stop`: end what runs first. `live`: some runtime, charge, lease or open operation is left."""

    stop: bool = False
    live: bool = False


@attrs.frozen(kw_only=True)
class RevisionResolved(Event):
    """The checkpoint was measured, and the revision resolves on at least one allowed host.

    `parks`: whether the residency that the hardware and the model settled does; None leaves it as it was wanted.
    """

    revision: int
    parks: bool | None = None


@attrs.frozen(kw_only=True)
class RevisionUnusable(Event):
    """Measured, and it cannot be used. `gate` is MISMATCH or UNUSABLE."""

    revision: int
    gate: Gate
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class RevisionUnmeasurable(Event):
    """It cannot be measured, for a reason that does not clear itself."""

    revision: int
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class InstancesSettled(Event):
    """The last instance that a revision or a delete waits for is proven gone."""


@attrs.frozen(kw_only=True)
class InstanceUncertain(Event):
    """An instance that a revision or a delete waits for cannot be proven gone."""

    index: int
    reason: str


# --- effects --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Effect:
    """An order about one deployment."""

    deployment: DeploymentId


@attrs.frozen(kw_only=True)
class MeasureCheckpoint(Effect):
    """Digest the checkpoint and resolve this revision. Answer: RevisionResolved, -Unusable or -Unmeasurable."""

    revision: int


@attrs.frozen(kw_only=True)
class PlanStart(Effect):
    """Plan an activation (origin operator) of these instances."""

    indices: tuple[int, ...]


@attrs.frozen(kw_only=True)
class PlanStop(Effect):
    """Plan a stop of these instances; `kind` is OPERATOR, INSTANCE, REVISION or DELETE."""

    indices: tuple[int, ...]
    kind: StopKind


@attrs.frozen(kw_only=True)
class PlanPark(Effect):
    """Plan a park of every READY instance."""


@attrs.frozen(kw_only=True)
class SetCount(Effect):
    """Add stopped indices, or retire the surplus in the order of lifecycle 3.5."""

    instances: int


@attrs.frozen(kw_only=True)
class EndWaiters(Effect):
    """End every request that waits for this deployment with this code."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class ReportPending(Effect):
    """Show that a delete or a revision still waits for this instance, and why."""

    index: int
    reason: str


@attrs.frozen(kw_only=True)
class DropRecord(Effect):
    """Remove the record and its routes; the name is free, model files are untouched."""


# --- guards ---------------------------------------------------------------------------------------

KEPT = at(Phase.ACCEPTED, Phase.ACTIVE, Phase.UNUSABLE, Phase.REVISING)
"""A record that operators may change."""

NOWHERE = at(Phase.ABSENT, Phase.DELETED)

ANY = any_of(Phase)

BAD = (Gate.MISMATCH, Gate.UNUSABLE)

ByRevision = StartAsked | StopAsked | ParkAsked


def may_be_created(state: State, event: DeployAsked) -> bool:
    """some allowed host publishes the profile, and name and routes are free"""
    return event.published and event.free


def published_nowhere(state: State, event: DeployAsked) -> bool:
    """no allowed host publishes the profile"""
    return not event.published


def name_is_taken(state: State, event: DeployAsked) -> bool:
    """the profile is published, but its name or a route is taken"""
    return event.published and not event.free


def _current(state: State, expected: int | None) -> bool:
    return expected is None or expected == state.revision


def is_current(state: State, event: ByRevision | ReviseAsked) -> bool:
    """it names the current revision, or none"""
    return _current(state, event.expected_revision)


def is_stale(state: State, event: ByRevision | ReviseAsked) -> bool:
    """it names another revision than the current one"""
    return not is_current(state, event)


def changes_the_count(state: State, event: ReviseAsked) -> bool:
    """current; only the number of instances differs"""
    return is_current(state, event) and event.count_only


def changes_more_live(state: State, event: ReviseAsked) -> bool:
    """current; more than the count differs, and some instance is not settled"""
    return is_current(state, event) and not event.count_only and event.live


def changes_more_settled(state: State, event: ReviseAsked) -> bool:
    """current; more than the count differs, and every instance is settled"""
    return is_current(state, event) and not event.count_only and not event.live


def current_live(state: State, event: ReviseAsked) -> bool:
    """current, and some instance is not settled"""
    return is_current(state, event) and event.live


def current_settled(state: State, event: ReviseAsked) -> bool:
    """current, and every instance is settled"""
    return is_current(state, event) and not event.live


def start_may_wait(state: State, event: StartAsked) -> bool:
    """current, and the checkpoint is being measured"""
    return is_current(state, event) and state.gate is Gate.PENDING


def start_is_hopeless(state: State, event: StartAsked) -> bool:
    """current, and the checkpoint cannot be measured"""
    return is_current(state, event) and state.gate is not Gate.PENDING


def can_park(state: State, event: ParkAsked) -> bool:
    """current, its residency parks, and an instance of it serves or is parked"""
    return is_current(state, event) and state.wanted.parks and event.resident


def nothing_to_park(state: State, event: ParkAsked) -> bool:
    """current, its residency parks, and no instance of it serves or is parked"""
    return is_current(state, event) and state.wanted.parks and not event.resident


def cannot_park(state: State, event: ParkAsked) -> bool:
    """current, and its residency is restart_only"""
    return is_current(state, event) and not state.wanted.parks


def _exists(state: State, index: int) -> bool:
    return 0 <= index < state.wanted.instances


def instance_exists(state: State, event: InstanceStartAsked) -> bool:
    """the index is one of its instances"""
    return _exists(state, event.index)


def no_such_instance(state: State, event: InstanceStartAsked | InstanceStopAsked) -> bool:
    """the index is none of its instances"""
    return not _exists(state, event.index)


def instance_may_wait(state: State, event: InstanceStartAsked) -> bool:
    """the index is one of its instances, and the checkpoint is being measured"""
    return _exists(state, event.index) and state.gate is Gate.PENDING


def instance_is_hopeless(state: State, event: InstanceStartAsked) -> bool:
    """the index is one of its instances, and the checkpoint cannot be measured"""
    return _exists(state, event.index) and state.gate is not Gate.PENDING


def others_may_run(state: State, event: InstanceStopAsked) -> bool:
    """the index is one of its instances, and an operator left another one alone"""
    return _exists(state, event.index) and not _all_stopped(_stopped_with(state, event))


def it_is_the_last(state: State, event: InstanceStopAsked) -> bool:
    """the index is one of its instances, and every other one is stopped by an operator"""
    return _exists(state, event.index) and _all_stopped(_stopped_with(state, event))


def _stopped_with(state: State, event: InstanceStopAsked) -> State:
    return attrs.evolve(state, stopped=state.stopped | {event.index})


def _all_stopped(state: State) -> bool:
    return state.suspended or len(state.stopped) == state.wanted.instances


def delete_needs_stop(state: State, event: DeleteAsked) -> bool:
    """something of it is left, and the command does not stop it"""
    return event.live and not event.stop


def delete_stops(state: State, event: DeleteAsked) -> bool:
    """something of it is left, and the command stops it"""
    return event.live and event.stop


def nothing_left(state: State, event: DeleteAsked) -> bool:
    """nothing of it is left"""
    return not event.live


def of_this_revision(state: State, event: RevisionResolved | RevisionUnusable | RevisionUnmeasurable) -> bool:
    """it is of the current revision"""
    return event.revision == state.revision


def of_another_revision(state: State, event: RevisionResolved | RevisionUnusable | RevisionUnmeasurable) -> bool:
    """it is of another revision"""
    return not of_this_revision(state, event)


def files_are_back(state: State, event: RevisionResolved) -> bool:
    """it is of the current revision, whose files had changed"""
    return of_this_revision(state, event) and state.gate is Gate.MISMATCH


def still_unusable(state: State, event: RevisionResolved) -> bool:
    """it is of another revision, or the current one does not resolve whatever its files are"""
    return not files_are_back(state, event)


def measured_and_wanted(state: State, event: InstancesSettled) -> bool:
    """the new revision is measured, and is wanted running"""
    return state.gate is Gate.MEASURED and state.resume


def measured_unwanted(state: State, event: InstancesSettled) -> bool:
    """the new revision is measured, and nobody wants it running now"""
    return state.gate is Gate.MEASURED and not state.resume


def pending_and_wanted(state: State, event: InstancesSettled) -> bool:
    """the new revision is being measured, and is wanted running"""
    return state.gate is Gate.PENDING and state.resume


def pending_unwanted(state: State, event: InstancesSettled) -> bool:
    """the new revision is being measured and nobody wants it running now, or it cannot be measured"""
    return state.gate is Gate.UNMEASURABLE or (state.gate is Gate.PENDING and not state.resume)


def measured_bad(state: State, event: InstancesSettled) -> bool:
    """the new revision cannot be used"""
    return state.gate in BAD


# --- changes --------------------------------------------------------------------------------------


def created(state: State, event: DeployAsked) -> State:
    """revision 1"""
    return attrs.evolve(state, revision=1, wanted=event.wanted)


def recounted(state: State, event: ReviseAsked) -> State:
    """next revision; the measured checkpoint stands"""
    stopped = frozenset(index for index in state.stopped if index < event.wanted.instances)
    return attrs.evolve(state, revision=state.revision + 1, wanted=event.wanted, stopped=stopped)


def revised(state: State, event: ReviseAsked) -> State:
    """next revision, to be measured; wanted running if it was and no operator stopped it"""
    after = recounted(state, event)
    return attrs.evolve(
        after,
        gate=Gate.PENDING,
        gate_code=None,
        gate_reason="",
        resume=(event.resume or state.resume) and not _all_stopped(after),
    )


def revised_settled(state: State, event: ReviseAsked) -> State:
    """next revision, to be measured"""
    return attrs.evolve(revised(state, event), resume=False)


def started(state: State, event: StartAsked) -> State:
    """no operator stop is left"""
    return attrs.evolve(state, suspended=False, stopped=frozenset())


def started_later(state: State, event: StartAsked) -> State:
    """no operator stop is left; the new revision is wanted running"""
    return attrs.evolve(started(state, event), resume=True)


def suspended(state: State, event: StopAsked) -> State:
    """stopped by an operator"""
    return attrs.evolve(state, suspended=True, resume=False)


def instance_started(state: State, event: InstanceStartAsked) -> State:
    """lift this instance's stop; the others of a stopped deployment stay stopped one by one"""
    stopped = frozenset(range(state.wanted.instances)) if state.suspended else state.stopped
    return attrs.evolve(state, suspended=False, stopped=stopped - {event.index})


def instance_stopped(state: State, event: InstanceStopAsked) -> State:
    """this instance is stopped by an operator"""
    return _stopped_with(state, event)


def measured(state: State, event: RevisionResolved) -> State:
    """the checkpoint is measured, and with it whether this parks"""
    parks = state.wanted.parks if event.parks is None else event.parks
    wanted = attrs.evolve(state.wanted, parks=parks)
    return attrs.evolve(state, gate=Gate.MEASURED, gate_code=None, gate_reason="", wanted=wanted)


def found_bad(state: State, event: RevisionUnusable) -> State:
    """note why the checkpoint cannot be used"""
    return attrs.evolve(state, gate=event.gate, gate_code=event.code, gate_reason=event.reason)


def found_unmeasurable(state: State, event: RevisionUnmeasurable) -> State:
    """note why the checkpoint cannot be measured"""
    return attrs.evolve(state, gate=Gate.UNMEASURABLE, gate_code=event.code, gate_reason=event.reason)


def old_gone(state: State, event: InstancesSettled) -> State:
    """nothing of the old revision is left"""
    return attrs.evolve(state, resume=False)


def leaving(state: State, event: DeleteAsked) -> State:
    """it is not wanted any more"""
    return attrs.evolve(state, resume=False)


# --- emits ----------------------------------------------------------------------------------------


def measure_first(state: State, event: DeployAsked) -> Effect:
    """MeasureCheckpoint"""
    return MeasureCheckpoint(deployment=state.deployment, revision=1)


def measure_next(state: State, event: ReviseAsked) -> Effect:
    """MeasureCheckpoint"""
    return MeasureCheckpoint(deployment=state.deployment, revision=state.revision + 1)


def set_count(state: State, event: ReviseAsked) -> Effect:
    """SetCount"""
    return SetCount(deployment=state.deployment, instances=event.wanted.instances)


def plan_start(state: State, event: StartAsked | InstancesSettled) -> Effect:
    """PlanStart(every instance that no operator stopped)"""
    lifted = isinstance(event, StartAsked)  # an operator's start lifts every stop in this same step
    indices = tuple(index for index in range(state.wanted.instances) if lifted or index not in state.stopped)
    return PlanStart(deployment=state.deployment, indices=indices)


def plan_instance_start(state: State, event: InstanceStartAsked) -> Effect:
    """PlanStart(this instance)"""
    return PlanStart(deployment=state.deployment, indices=(event.index,))


def plan_instance_stop(state: State, event: InstanceStopAsked) -> Effect:
    """PlanStop(this instance)"""
    return PlanStop(deployment=state.deployment, indices=(event.index,), kind=StopKind.INSTANCE)


def _plan_stop(kind: StopKind) -> Emit:
    def plan_stop(state: State, event: Event) -> Effect:
        return PlanStop(deployment=state.deployment, indices=tuple(range(state.wanted.instances)), kind=kind)

    plan_stop.__doc__ = f"PlanStop(every instance, {kind.value})"
    return plan_stop


def plan_park(state: State, event: ParkAsked) -> Effect:
    """PlanPark"""
    return PlanPark(deployment=state.deployment)


def end_waiters_stopped(state: State, event: Event) -> Effect:
    """EndWaiters(deployment_stopped)"""
    return EndWaiters(deployment=state.deployment, code="deployment_stopped", reason="an operator stopped it")


def end_waiters_deleted(state: State, event: Event) -> Effect:
    """EndWaiters(not_found)"""
    return EndWaiters(deployment=state.deployment, code="not_found", reason="it was deleted")


def end_waiters_as_told(state: State, event: RevisionUnusable | RevisionUnmeasurable) -> Effect:
    """EndWaiters(the event's code)"""
    return EndWaiters(deployment=state.deployment, code=event.code, reason=event.reason)


def refuse_by_gate(state: State, event: StartAsked | InstanceStartAsked) -> Refused:
    """Refused(the gate's code)"""
    assert state.gate_code is not None
    return Refused(code=state.gate_code, event=type(event).__name__)


def report_pending(state: State, event: InstanceUncertain) -> Effect:
    """ReportPending"""
    return ReportPending(deployment=state.deployment, index=event.index, reason=event.reason)


def drop_record(state: State, event: Event) -> Effect:
    """DropRecord"""
    return DropRecord(deployment=state.deployment)


# --- invariants -----------------------------------------------------------------------------------


def the_phase_agrees_with_the_gate(state: State) -> bool:
    """ACTIVE is measured, UNUSABLE is measured and bad, ACCEPTED is not measured."""
    match state.phase:
        case Phase.ACTIVE:
            return state.gate is Gate.MEASURED
        case Phase.UNUSABLE:
            return state.gate in BAD
        case Phase.ACCEPTED:
            return state.gate in (Gate.PENDING, Gate.UNMEASURABLE)
    return True


def a_shut_gate_says_why(state: State) -> bool:
    """A gate that refuses has a code of the closed list, and one that does not has none."""
    shut = state.gate in (*BAD, Gate.UNMEASURABLE)
    return (state.gate_code is not None and state.gate_code.partition(":")[0] in CODES) == shut


def a_record_has_a_revision(state: State) -> bool:
    """Exactly what was never accepted has no revision."""
    return (state.phase is Phase.ABSENT) == (state.revision == 0)


def stopped_instances_exist(state: State) -> bool:
    """Only instances of the current count are marked as stopped by an operator."""
    return all(_exists(state, index) for index in state.stopped)


def only_a_revising_record_resumes(state: State) -> bool:
    """Only a record that waits for its old instances will start by itself, and never against an operator (38)."""
    return not state.resume or (state.phase is Phase.REVISING and not _all_stopped(state))


# --- table ----------------------------------------------------------------------------------------

EVENTS = (
    DeployAsked,
    ReviseAsked,
    StartAsked,
    StopAsked,
    InstanceStartAsked,
    InstanceStopAsked,
    ParkAsked,
    DeleteAsked,
    RevisionResolved,
    RevisionUnusable,
    RevisionUnmeasurable,
    InstancesSettled,
    InstanceUncertain,
)

ABSENT, ACCEPTED, ACTIVE, UNUSABLE = Phase.ABSENT, Phase.ACCEPTED, Phase.ACTIVE, Phase.UNUSABLE
REVISING, DELETING, DELETED = Phase.REVISING, Phase.DELETING, Phase.DELETED

DEPLOYMENT: Machine[State] = Machine(
    name="deployment",
    doc=__doc__,
    phases=Phase,
    events=EVENTS,
    invariants=(
        the_phase_agrees_with_the_gate,
        a_shut_gate_says_why,
        a_record_has_a_revision,
        stopped_instances_exist,
        only_a_revising_record_resumes,
    ),
    rows=(
        # create
        Row(when=at(ABSENT), on=DeployAsked, given=may_be_created, to=ACCEPTED, change=created,
            emits=(measure_first,), why="Durable before its id is returned (W1)."),
        refuse(at(ABSENT), DeployAsked, "profile_not_published", given=published_nowhere,
               why="Nothing is stored for what no host can run."),
        refuse(at(ABSENT), DeployAsked, "route_conflict", given=name_is_taken, why="One name, one deployment."),
        refuse(KEPT, DeployAsked, "revision_conflict", why="It exists; a change names the revision that it changes."),
        refuse(at(DELETING), DeployAsked, "lifecycle_conflict", why="Its name is free once it is gone."),
        # revise
        refuse(KEPT, ReviseAsked, "revision_conflict", given=is_stale, why="Somebody changed it meanwhile (55)."),
        Row(when=at(ACTIVE), on=ReviseAsked, given=changes_the_count, change=recounted, emits=(set_count,),
            why="Nothing that runs is restarted for a count."),
        Row(when=at(ACTIVE), on=ReviseAsked, given=changes_more_live, to=REVISING, change=revised,
            emits=(_plan_stop(StopKind.REVISION), measure_next),
            why="The old instances are proven gone before the new revision starts."),
        Row(when=at(ACTIVE), on=ReviseAsked, given=changes_more_settled, to=ACCEPTED, change=revised_settled,
            emits=(measure_next,), why="Nothing of the old revision runs."),
        Row(when=at(UNUSABLE), on=ReviseAsked, given=current_live, to=REVISING, change=revised,
            emits=(_plan_stop(StopKind.REVISION), measure_next), why="What started on the old files ends first."),
        Row(when=at(UNUSABLE), on=ReviseAsked, given=current_settled, to=ACCEPTED, change=revised_settled,
            emits=(measure_next,), why="Measured again, attempts are fresh."),
        Row(when=at(ACCEPTED), on=ReviseAsked, given=is_current, change=revised_settled, emits=(measure_next,),
            why="The measurement under way is of a revision that counts no more."),
        Row(when=at(REVISING), on=ReviseAsked, given=is_current, change=revised, emits=(measure_next,),
            why="The old instances end as before; the newest revision follows."),
        # start
        refuse(KEPT, StartAsked, "revision_conflict", given=is_stale, why="Somebody changed it meanwhile (55)."),
        Row(when=at(ACTIVE), on=StartAsked, given=is_current, change=started, emits=(plan_start,),
            why="Only an operator's start lifts an operator's stop (38)."),
        Row(when=at(ACCEPTED), on=StartAsked, given=start_may_wait, change=started, emits=(plan_start,),
            why="The activation waits for the measurement."),
        Row(when=at(ACCEPTED), on=StartAsked, given=start_is_hopeless, emits=(refuse_by_gate,),
            why="The reason does not clear itself."),
        Row(when=at(UNUSABLE), on=StartAsked, given=is_current, emits=(refuse_by_gate,),
            why="No retry changes what was measured."),
        Row(when=at(REVISING), on=StartAsked, given=is_current, change=started_later,
            why="It starts when the old instances are gone."),
        Row(when=at(ACTIVE), on=InstanceStartAsked, given=instance_exists, change=instance_started,
            emits=(plan_instance_start,), why="The others stay as the operator left them."),
        Row(when=at(ACCEPTED), on=InstanceStartAsked, given=instance_may_wait, change=instance_started,
            emits=(plan_instance_start,), why="The activation waits for the measurement."),
        Row(when=at(ACCEPTED), on=InstanceStartAsked, given=instance_is_hopeless, emits=(refuse_by_gate,),
            why="The reason does not clear itself."),
        Row(when=at(UNUSABLE), on=InstanceStartAsked, given=instance_exists, emits=(refuse_by_gate,),
            why="No retry changes what was measured."),
        refuse(at(ACCEPTED, ACTIVE, UNUSABLE), InstanceStartAsked, "not_found", given=no_such_instance,
               why="Indices are dense from 0."),
        # stop, park
        refuse(KEPT, StopAsked, "revision_conflict", given=is_stale, why="Somebody changed it meanwhile (55)."),
        Row(when=KEPT, on=StopAsked, given=is_current, change=suspended,
            emits=(_plan_stop(StopKind.OPERATOR), end_waiters_stopped),
            why="From here on no request, timer, switch or recovery starts it (38)."),
        Row(when=at(ACCEPTED, ACTIVE, UNUSABLE), on=InstanceStopAsked, given=others_may_run, change=instance_stopped,
            emits=(plan_instance_stop,), why="The other instances serve on."),
        Row(when=at(ACCEPTED, ACTIVE, UNUSABLE), on=InstanceStopAsked, given=it_is_the_last, change=instance_stopped,
            emits=(plan_instance_stop, end_waiters_stopped), why="Every instance stopped is the deployment stopped."),
        refuse(at(ACCEPTED, ACTIVE, UNUSABLE), InstanceStopAsked, "not_found", given=no_such_instance,
               why="Indices are dense from 0."),
        refuse(at(ACTIVE, UNUSABLE), ParkAsked, "revision_conflict", given=is_stale,
               why="Somebody changed it meanwhile (55)."),
        Row(when=at(ACTIVE, UNUSABLE), on=ParkAsked, given=can_park, emits=(plan_park,),
            why="Also what started before its files changed may give memory back."),
        refuse(at(ACTIVE, UNUSABLE), ParkAsked, "lifecycle_conflict", given=nothing_to_park,
               why="What does not run holds no memory to give back: an operator is told, not congratulated."),
        refuse(at(ACTIVE, UNUSABLE), ParkAsked, "unsupported_capability", given=cannot_park,
               why="A restart-only deployment has nothing to park into."),
        refuse(at(ACCEPTED, REVISING), ParkAsked, "lifecycle_conflict",
               why="It has no READY instance of its revision."),
        refuse(at(REVISING), InstanceStartAsked, "lifecycle_conflict", why="Its instances are being replaced."),
        refuse(at(REVISING), InstanceStopAsked, "lifecycle_conflict", why="Its instances are being replaced."),
        # delete
        refuse(KEPT | at(DELETING), DeleteAsked, "delete_requires_cleanup", given=delete_needs_stop,
               why="A record is not dropped over something that runs or is charged (56)."),
        Row(when=KEPT, on=DeleteAsked, given=delete_stops, to=DELETING, change=leaving,
            emits=(_plan_stop(StopKind.DELETE), end_waiters_deleted), why="It waits for proof of every instance."),
        Row(when=KEPT, on=DeleteAsked, given=nothing_left, to=DELETED, change=leaving,
            emits=(end_waiters_deleted, drop_record), why="Model files are untouched."),
        Row(when=at(DELETING), on=DeleteAsked, given=delete_stops, emits=(_plan_stop(StopKind.DELETE),),
            why="Asking again resumes the pending delete."),
        Row(when=at(DELETING), on=DeleteAsked, given=nothing_left, to=DELETED, emits=(drop_record,),
            why="Everything was settled meanwhile."),
        *(refuse(at(DELETING), event, "lifecycle_conflict", why="It is being deleted.")
          for event in (ReviseAsked, StartAsked, StopAsked, InstanceStartAsked, InstanceStopAsked, ParkAsked)),
        # the checkpoint
        Row(when=at(ACCEPTED), on=RevisionResolved, given=of_this_revision, to=ACTIVE, change=measured,
            why="Activations that waited go on."),
        Row(when=at(UNUSABLE), on=RevisionResolved, given=files_are_back, to=ACTIVE, change=measured,
            why="The recorded files are back."),
        ignore(at(UNUSABLE), RevisionResolved, given=still_unusable, why="Only a new revision changes what is asked."),
        Row(when=at(REVISING), on=RevisionResolved, given=of_this_revision, change=measured,
            why="The old instances still have to go."),
        ignore(at(ACTIVE), RevisionResolved, why="It is measured."),
        Row(when=at(ACCEPTED, ACTIVE), on=RevisionUnusable, given=of_this_revision, to=UNUSABLE, change=found_bad,
            emits=(end_waiters_as_told,), why="Starts are refused with the reason; what runs is not touched."),
        Row(when=at(UNUSABLE, REVISING), on=RevisionUnusable, given=of_this_revision, change=found_bad,
            emits=(end_waiters_as_told,), why="The newest reason is shown."),
        ignore(KEPT, RevisionUnusable, given=of_another_revision, why="That revision counts no more."),
        Row(when=at(ACCEPTED, REVISING), on=RevisionUnmeasurable, given=of_this_revision, change=found_unmeasurable,
            emits=(end_waiters_as_told,), why="Waiters end at once: the reason does not clear itself."),
        ignore(at(ACCEPTED, REVISING), RevisionUnmeasurable, given=of_another_revision,
               why="That revision counts no more."),
        ignore(at(ACTIVE, UNUSABLE), RevisionUnmeasurable,
               why="It was measured; a launch that cannot read it is refused by itself."),
        ignore(at(ACCEPTED, REVISING), RevisionResolved, given=of_another_revision,
               why="That revision counts no more."),
        # settling
        Row(when=at(REVISING), on=InstancesSettled, given=measured_and_wanted, to=ACTIVE, change=old_gone,
            emits=(plan_start,), why="The new revision takes its place, attempts are fresh."),
        Row(when=at(REVISING), on=InstancesSettled, given=measured_unwanted, to=ACTIVE, change=old_gone,
            why="The next request or operator starts it."),
        Row(when=at(REVISING), on=InstancesSettled, given=pending_and_wanted, to=ACCEPTED, change=old_gone,
            emits=(plan_start,), why="The activation waits for the measurement."),
        Row(when=at(REVISING), on=InstancesSettled, given=pending_unwanted, to=ACCEPTED, change=old_gone,
            why="Nothing starts before it is measured."),
        Row(when=at(REVISING), on=InstancesSettled, given=measured_bad, to=UNUSABLE, change=old_gone,
            why="The reason was told when it was found."),
        Row(when=at(DELETING), on=InstancesSettled, to=DELETED, emits=(drop_record,),
            why="The last proof is in; the name is free."),
        Row(when=at(REVISING, DELETING), on=InstanceUncertain, emits=(report_pending,),
            why="The deployment stays intact, its charge is kept, and status says why (16, 56)."),
        # what does not concern it
        ignore(at(ABSENT, ACCEPTED, ACTIVE, UNUSABLE, DELETED), InstancesSettled, why="Nothing waits for it."),
        ignore(at(ABSENT, ACCEPTED, ACTIVE, UNUSABLE, DELETED), InstanceUncertain, why="Nothing waits for it."),
        *(ignore(NOWHERE | at(DELETING), event, why="No revision of it counts.")
          for event in (RevisionResolved, RevisionUnusable, RevisionUnmeasurable)),
        refuse(at(DELETED), DeployAsked, "not_found", why="An id is never used again."),
        *(refuse(NOWHERE, event, "not_found", why="There is no such deployment.")
          for event in (ReviseAsked, StartAsked, StopAsked, InstanceStartAsked, InstanceStopAsked, ParkAsked,
                        DeleteAsked)),
    ),
)  # fmt: skip


def operator_stopped(state: State) -> bool:
    """Whether an operator stopped the deployment, or every one of its instances (lifecycle 3.6)."""
    return _all_stopped(state)


def may_start(state: State, index: int, *, by_operator: bool) -> bool:
    """Whether an instance may be activated now: by a request, a switch or recovery, or by an operator (38, 39)."""
    if state.phase is not Phase.ACTIVE:
        return False
    if by_operator:
        return True
    on_demand = state.wanted.activation is Activation.ON_DEMAND
    return on_demand and not state.suspended and index not in state.stopped


def unavailable_reason(state: State, *, served: bool) -> str | None:
    """Why a request is refused at once with nothing queued, or None if it is served or waits.

    Args:
      served: an instance is READY, or an operator's start or wake of one is in progress.
    Returns: `not_found`, `deployment_stopped`, the gate's own code, or `deployment_inactive`.
    Source: lifecycle 3.6, 15.
    """
    if state.phase not in KEPT:
        return "not_found"
    if operator_stopped(state):
        return "deployment_stopped"
    if served:
        return None
    if state.gate_code is not None:
        return state.gate_code
    return "deployment_inactive" if state.wanted.activation is Activation.EXPLICIT else None


def step(state: State, event: Event) -> tuple[State, tuple[Effect | Refused, ...]]:
    """Decide one event. Pure: the same state and event always give the same answer."""
    return DEPLOYMENT.step(state, event)
