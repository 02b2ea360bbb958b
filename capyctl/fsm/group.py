"""One model across machines: a plan, its members, and the steps they take together, through the head.

A group serves through its head alone and stands or falls as one: after the first failure of a member
its route never opens again for that generation, and nothing new starts before every member is
settled. What a member holds is its own machine's. (Reference: lifecycle 5.1, groups 5-10.)
"""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.proofs import Canary, Quiet, Usable
from capyctl.fsm.table import Emit, Machine, Refused, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import DeploymentId, Generation, Millis, StopKind


class Phase(enum.Enum):
    """Where a group is."""

    IDLE = "idle"  # no plan in force, every old member settled
    MATERIALIZING = "materializing"  # sources on every host, digests being compared
    RESERVED = "reserved"  # plan, reservations and rendezvous port in one transaction
    PREPARING = "preparing"  # prepare is outstanding: no process effect
    LAUNCHING = "launching"  # launch is outstanding on all members at once
    READY = "ready"  # the head proved ready, its route is open
    DRAINING = "draining"  # route closed before a park, requests still run
    PARKING = "parking"  # one collective release through the head
    PARKED = "parked"  # every member proven released
    WAKING = "waking"  # one collective wake through the head
    STOPPING = "stopping"  # terminate is outstanding on every member
    SETTLING = "settling"  # some member is not settled
    FAILED = "failed"  # every member settled, the run failed for good


# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class State:
    """`size` members, rank 0 the head. `done`: ranks that finished the step in progress. `settled`: ranks proven gone.

    `proven`: the head answered. `code`: why this generation ended. `attempts_left`: relaunches that recovery may do.
    """

    phase: Phase = Phase.IDLE
    deployment: DeploymentId
    size: int
    parks: bool
    generation: Generation | None = None
    port: int | None = None
    done: frozenset[int] = frozenset()
    settled: frozenset[int] = frozenset()
    uncertain: frozenset[int] = frozenset()
    proven: bool = False
    attempts_left: int = 0
    code: str | None = None
    reason: str = ""
    stop: StopKind | None = None


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Event:
    """A fact about one group, and when it was seen."""

    now_ms: Millis


@attrs.frozen(kw_only=True)
class Activated(Event):
    """It is wanted. `attempts`: relaunches that recovery may do after failures."""

    attempts: int


@attrs.frozen(kw_only=True)
class DigestsCompared(Event):
    """Every host has the source. `equal`: all digests are; paths too where the engine needs it."""

    equal: bool
    code: str = "group_checkpoint_mismatch"


@attrs.frozen(kw_only=True)
class NotReserved(Event):
    """Some host lacks the source, the room or a port: nothing is reserved anywhere."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class PlanCommitted(Event):
    """Plan, all reservations and the rendezvous port are stored, in one transaction on all hosts."""

    generation: Generation
    port: int


@attrs.frozen(kw_only=True)
class PrepareSent(Event):
    """The stored plan is on its way to every member."""


@attrs.frozen(kw_only=True)
class MemberPrepared(Event):
    """A member's host checked everything and found it good."""

    rank: int


@attrs.frozen(kw_only=True)
class PrepareRefused(Event):
    """A member's host refused to prepare it."""

    rank: int
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class MemberLaunched(Event):
    """A member's processes are recorded."""

    rank: int


@attrs.frozen(kw_only=True)
class HeadProven(Event):
    """The head is ready, and one bounded completion through it answered."""

    usable: Usable


@attrs.frozen(kw_only=True)
class MemberFailed(Event):
    """A member's launch failed, its engine ended, or its share of a collective step is unproven."""

    rank: int
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class ProbeFailed(Event):
    """The readiness probe failed, or a stalled request's probe did; `code` says which."""

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class ParkAsked(Event):
    """It is to give its memory back."""


@attrs.frozen(kw_only=True)
class Drained(Event):
    """The route is closed, and the engine is proven quiet."""

    quiet: Quiet


@attrs.frozen(kw_only=True)
class DrainExpired(Event):
    """Requests still run at the drain's deadline."""


@attrs.frozen(kw_only=True)
class MemberParked(Event):
    """A member's own host proved what it holds."""

    rank: int


@attrs.frozen(kw_only=True)
class WakeAsked(Event):
    """It is wanted, and fits on every host."""


@attrs.frozen(kw_only=True)
class MemberBack(Event):
    """A member is resident again."""

    rank: int


@attrs.frozen(kw_only=True)
class CanaryRight(Event):
    """After the wake the head is ready, and answers as it did at its start."""

    canary: Canary
    usable: Usable


@attrs.frozen(kw_only=True)
class CanaryWrong(Event):
    """After the wake it answers otherwise, or not at all."""

    reason: str


@attrs.frozen(kw_only=True)
class StopAsked(Event):
    """It is to end."""

    kind: StopKind


@attrs.frozen(kw_only=True)
class MemberUncertain(Event):
    """A member's host is unreachable."""

    rank: int


@attrs.frozen(kw_only=True)
class MemberKnown(Event):
    """An unreachable member's host is back, with the recorded engine."""

    rank: int


@attrs.frozen(kw_only=True)
class MemberSettled(Event):
    """A member is proven gone."""

    rank: int


# --- effects --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Effect:
    """An order about one group."""

    deployment: DeploymentId


@attrs.frozen(kw_only=True)
class CompareDigests(Effect):
    """Fetch and measure the source on every host at once. Answer: DigestsCompared or NotReserved."""


@attrs.frozen(kw_only=True)
class CommitPlan(Effect):
    """Store the plan and every reservation, or nothing. Answer: PlanCommitted or NotReserved."""


@attrs.frozen(kw_only=True)
class SendPrepare(Effect):
    """Ask every member's host to check, without a process effect."""


@attrs.frozen(kw_only=True)
class SendLaunch(Effect):
    """Launch every member at once."""


@attrs.frozen(kw_only=True)
class DropPlan(Effect):
    """Release every member and the rendezvous port: no process effect was asked for."""


@attrs.frozen(kw_only=True)
class OpenRoute(Effect):
    """Open the head's route."""


@attrs.frozen(kw_only=True)
class CloseRoute(Effect):
    """Close the head's route."""


@attrs.frozen(kw_only=True)
class SendRelease(Effect):
    """Call the collective release on the head, once."""


@attrs.frozen(kw_only=True)
class SendWake(Effect):
    """Call the collective wake on the head, once."""


@attrs.frozen(kw_only=True)
class StopMembers(Effect):
    """End every member at once."""


@attrs.frozen(kw_only=True)
class FreePort(Effect):
    """The rendezvous port may be used again: every member is settled."""

    port: int


@attrs.frozen(kw_only=True)
class Conclude(Effect):
    """Tell who waits how it ended."""

    code: str | None
    reason: str


# --- guards ---------------------------------------------------------------------------------------

P = Phase
ANY = any_of(Phase)
WITH_LAUNCH = at(P.LAUNCHING, P.READY, P.DRAINING, P.PARKING, P.PARKED, P.WAKING)
ENDING = at(P.STOPPING, P.SETTLING)

ByRank = MemberPrepared | MemberLaunched | MemberParked | MemberBack


def _all_done(state: State, event: ByRank) -> bool:
    return len(state.done | {event.rank}) == state.size


def last_of_all(state: State, event: ByRank) -> bool:
    """every other member was there before"""
    return _all_done(state, event)


def others_to_come(state: State, event: ByRank) -> bool:
    """other members are to come"""
    return not _all_done(state, event)


def last_and_proven(state: State, event: MemberLaunched | MemberBack) -> bool:
    """every other member was there before, and the head is proven"""
    return _all_done(state, event) and state.proven


def not_last_or_unproven(state: State, event: MemberLaunched | MemberBack) -> bool:
    """other members, or the head's proof, are to come"""
    return not last_and_proven(state, event)


def all_there(state: State, event: HeadProven | CanaryRight) -> bool:
    """every member is there"""
    return len(state.done) == state.size


def some_missing(state: State, event: HeadProven | CanaryRight) -> bool:
    """some member is to come"""
    return not all_there(state, event)


def digests_equal(state: State, event: DigestsCompared) -> bool:
    """every host has the same"""
    return event.equal


def digests_differ(state: State, event: DigestsCompared) -> bool:
    """the hosts have different ones"""
    return not event.equal


def can_park(state: State, event: ParkAsked) -> bool:
    """its engine parks a group"""
    return state.parks


def cannot_park(state: State, event: ParkAsked) -> bool:
    """its engine parks no group"""
    return not state.parks


def _ends(state: State, event: MemberSettled) -> bool:
    return len(state.settled | {event.rank}) == state.size


def _failed(state: State) -> bool:
    return state.stop is None


def others_unsettled(state: State, event: MemberSettled) -> bool:
    """other members are not settled"""
    return not _ends(state, event)


def settled_to_relaunch(state: State, event: MemberSettled) -> bool:
    """it is the last; the run failed, and recovery has an attempt left"""
    return _ends(state, event) and _failed(state) and state.attempts_left > 0


def settled_for_good(state: State, event: MemberSettled) -> bool:
    """it is the last; the run failed, and no attempt is left"""
    return _ends(state, event) and _failed(state) and state.attempts_left == 0


def settled_as_asked(state: State, event: MemberSettled) -> bool:
    """it is the last, and a stop was asked for"""
    return _ends(state, event) and not _failed(state)


def head_unreachable(state: State, event: MemberUncertain) -> bool:
    """it is the head"""
    return event.rank == 0


def worker_unreachable(state: State, event: MemberUncertain) -> bool:
    """it is not the head"""
    return event.rank != 0


def head_is_reachable(state: State, event: DrainExpired) -> bool:
    """the head's host is reachable"""
    return 0 not in state.uncertain


def head_is_doubted(state: State, event: DrainExpired) -> bool:
    """the head's host is unreachable"""
    return 0 in state.uncertain


def head_known(state: State, event: MemberKnown) -> bool:
    """it is the head, which was doubted"""
    return event.rank == 0 and 0 in state.uncertain


def worker_known(state: State, event: MemberKnown) -> bool:
    """it is not the head, or was not doubted"""
    return not head_known(state, event)


# --- changes --------------------------------------------------------------------------------------


def fresh(state: State, event: Activated) -> State:
    """nothing of an older run"""
    return attrs.evolve(_blank(state), attempts_left=event.attempts, code=None, reason="", stop=None)


def _blank(state: State) -> State:
    none: frozenset[int] = frozenset()
    return attrs.evolve(state, generation=None, port=None, done=none, settled=none, uncertain=none, proven=False)


def refused(state: State, event: DigestsCompared | NotReserved | PrepareRefused) -> State:
    """nothing is reserved; note the reason"""
    reason = event.reason if not isinstance(event, DigestsCompared) else "the hosts have different checkpoints"
    return attrs.evolve(_blank(state), code=event.code, reason=reason)


def planned(state: State, event: PlanCommitted) -> State:
    """note generation and rendezvous port; an older generation's failure is history"""
    return attrs.evolve(state, generation=event.generation, port=event.port, code=None, reason="")


def counted(state: State, event: ByRank) -> State:
    """note the member"""
    return attrs.evolve(state, done=state.done | {event.rank})


def step_over(state: State, event: Event) -> State:
    """the step is over"""
    return attrs.evolve(state, done=frozenset(), proven=False)


def head_noted(state: State, event: HeadProven | CanaryRight) -> State:
    """the head is proven"""
    return attrs.evolve(state, proven=True, uncertain=state.uncertain - {0})


def head_answers(state: State, event: HeadProven | CanaryRight) -> State:
    """the step is over; the head is known"""
    return step_over(head_noted(state, event), event)


def failed(state: State, event: MemberFailed | ProbeFailed) -> State:
    """note why this generation ends"""
    return attrs.evolve(step_over(state, event), code=event.code, reason=event.reason)


def woke_wrong(state: State, event: CanaryWrong) -> State:
    """note why this generation ends"""
    return attrs.evolve(step_over(state, event), code="group_wake_mismatch", reason=event.reason)


def stopped(state: State, event: StopAsked) -> State:
    """note the stop"""
    return attrs.evolve(step_over(state, event), stop=event.kind)


def unplanned(state: State, event: StopAsked) -> State:
    """nothing is reserved; note the stop"""
    return attrs.evolve(_blank(state), stop=event.kind)


def doubted(state: State, event: MemberUncertain) -> State:
    """note that nobody knows about the member; a head is to be proven anew"""
    return attrs.evolve(state, uncertain=state.uncertain | {event.rank}, proven=state.proven and event.rank != 0)


def known(state: State, event: MemberKnown) -> State:
    """the member is known again"""
    return attrs.evolve(state, uncertain=state.uncertain - {event.rank})


def settled_one(state: State, event: MemberSettled) -> State:
    """note that the member is settled"""
    return attrs.evolve(state, settled=state.settled | {event.rank}, uncertain=state.uncertain - {event.rank})


def again(state: State, event: MemberSettled) -> State:
    """nothing of this run is left; one attempt less"""
    return attrs.evolve(_blank(state), attempts_left=state.attempts_left - 1)


def over(state: State, event: MemberSettled) -> State:
    """nothing of this run is left"""
    return _blank(state)


# --- emits ----------------------------------------------------------------------------------------


def _order(kind: type[Effect]) -> Emit:
    def emit(state: State, event: Event) -> Effect:
        return kind(deployment=state.deployment)

    emit.__doc__ = kind.__name__
    return emit


def conclude_refused(state: State, event: DigestsCompared | NotReserved | PrepareRefused) -> Effect:
    """Conclude(the event's code)"""
    after = refused(state, event)
    return Conclude(deployment=state.deployment, code=after.code, reason=after.reason)


def conclude_ready(state: State, event: Event) -> Effect:
    """Conclude(ready)"""
    return Conclude(deployment=state.deployment, code=None, reason="")


def conclude_failed(state: State, event: MemberSettled) -> Effect:
    """Conclude(why it failed)"""
    return Conclude(deployment=state.deployment, code=state.code, reason=state.reason)


def free_port(state: State, event: MemberSettled) -> Effect:
    """FreePort"""
    assert state.port is not None
    return FreePort(deployment=state.deployment, port=state.port)


# --- invariants -----------------------------------------------------------------------------------


def a_plan_has_a_generation_and_a_port(state: State) -> bool:
    """Exactly from the reservation to the last settlement a group has a generation and a rendezvous port (53)."""
    planned = state.phase not in at(P.IDLE, P.MATERIALIZING, P.FAILED)
    return planned == (state.generation is not None) == (state.port is not None)


def a_group_has_two_members_at_least(state: State) -> bool:
    """A group spans two hosts or more."""
    return state.size >= 2


def only_the_ending_settle(state: State) -> bool:
    """Members are settled only while the group ends, and never all of them without ending it."""
    return (not state.settled or state.phase is P.SETTLING) and len(state.settled) < state.size


def an_end_has_a_cause(state: State) -> bool:
    """What ends has a stop or a failure to name, and a failed group has a failure."""
    caused = state.stop is not None or state.code is not None
    return caused if state.phase in ENDING else state.phase is not P.FAILED or state.code is not None


def what_serves_has_not_failed(state: State) -> bool:
    """A generation that has failed is in no phase that may serve again (52, G5)."""
    return state.phase not in WITH_LAUNCH or (state.code is None and state.stop is None)


# --- table ----------------------------------------------------------------------------------------

EVENTS = (
    Activated,
    DigestsCompared,
    NotReserved,
    PlanCommitted,
    PrepareSent,
    MemberPrepared,
    PrepareRefused,
    MemberLaunched,
    HeadProven,
    MemberFailed,
    ProbeFailed,
    ParkAsked,
    Drained,
    DrainExpired,
    MemberParked,
    WakeAsked,
    MemberBack,
    CanaryRight,
    CanaryWrong,
    StopAsked,
    MemberUncertain,
    MemberKnown,
    MemberSettled,
)

open_route, close_route, stop_members = _order(OpenRoute), _order(CloseRoute), _order(StopMembers)

GROUP: Machine[State] = Machine(
    name="group",
    doc=__doc__,
    phases=Phase,
    events=EVENTS,
    invariants=(
        a_group_has_two_members_at_least,
        a_plan_has_a_generation_and_a_port,
        only_the_ending_settle,
        an_end_has_a_cause,
        what_serves_has_not_failed,
    ),
    rows=(
        # start
        Row(when=at(P.IDLE, P.FAILED), on=Activated, to=P.MATERIALIZING, change=fresh, emits=(_order(CompareDigests),),
            why="Every old member is settled (53)."),
        Row(when=at(P.MATERIALIZING), on=DigestsCompared, given=digests_equal, emits=(_order(CommitPlan),),
            why="All hosts or none, in one transaction (51)."),
        Row(when=at(P.MATERIALIZING), on=DigestsCompared, given=digests_differ, to=P.IDLE, change=refused,
            emits=(conclude_refused,), why="Ranks with different weights answer nonsense."),
        Row(when=at(P.MATERIALIZING), on=NotReserved, to=P.IDLE, change=refused, emits=(conclude_refused,),
            why="Nothing was reserved."),
        Row(when=at(P.MATERIALIZING), on=PlanCommitted, to=P.RESERVED, change=planned, emits=(_order(SendPrepare),),
            why="No host hears of a plan that is not stored (W14)."),
        Row(when=at(P.RESERVED), on=PrepareSent, to=P.PREPARING, why="From here on hosts may refuse."),
        Row(when=at(P.PREPARING), on=MemberPrepared, given=others_to_come, change=counted,
            why="None is launched before all are prepared."),
        Row(when=at(P.PREPARING), on=MemberPrepared, given=last_of_all, to=P.LAUNCHING, change=step_over,
            emits=(_order(SendLaunch),), why="All at once: the ranks wait for one another."),
        Row(when=at(P.RESERVED, P.PREPARING), on=PrepareRefused, to=P.IDLE, change=refused,
            emits=(_order(DropPlan), conclude_refused), why="One refusal refuses the group; no process was asked for."),
        Row(when=at(P.LAUNCHING), on=MemberLaunched, given=not_last_or_unproven, change=counted,
            why="The head answers only when all ranks are there."),
        Row(when=at(P.LAUNCHING), on=MemberLaunched, given=last_and_proven, to=P.READY, change=step_over,
            emits=(open_route, conclude_ready), why="The head had answered; the last report was late."),
        Row(when=at(P.LAUNCHING), on=HeadProven, given=some_missing, change=head_noted,
            why="The route waits until every member's processes are recorded (G4)."),
        Row(when=at(P.LAUNCHING), on=HeadProven, given=all_there, to=P.READY, change=head_answers,
            emits=(open_route, conclude_ready), why="Every rank is recorded, and the head answers."),
        # failure
        Row(when=at(P.LAUNCHING, P.DRAINING, P.PARKING, P.PARKED, P.WAKING), on=MemberFailed, to=P.STOPPING,
            change=failed, emits=(stop_members,), why="It stands or falls as one."),
        Row(when=at(P.READY), on=MemberFailed, to=P.STOPPING, change=failed, emits=(close_route, stop_members),
            why="The route closes before anything else (G4)."),
        Row(when=at(P.LAUNCHING), on=ProbeFailed, to=P.STOPPING, change=failed, emits=(stop_members,),
            why="Launched is not usable."),
        Row(when=at(P.READY), on=ProbeFailed, to=P.STOPPING, change=failed, emits=(close_route, stop_members),
            why="A stalled request and a probe that fails: no rank computes any more."),
        # park and wake
        Row(when=at(P.READY), on=ParkAsked, given=can_park, to=P.DRAINING, emits=(close_route,),
            why="The route is closed before any collective (G4)."),
        refuse(at(P.READY), ParkAsked, "unsupported_capability", given=cannot_park,
               why="It has nothing to park into."),
        Row(when=at(P.DRAINING), on=Drained, to=P.PARKING, emits=(_order(SendRelease),),
            why="One call, on the head, never repeated (27)."),
        Row(when=at(P.DRAINING), on=DrainExpired, given=head_is_reachable, to=P.READY, emits=(open_route,),
            why="Nothing was called yet."),
        Row(when=at(P.DRAINING), on=DrainExpired, given=head_is_doubted, to=P.READY,
            why="Nothing was called yet; the route opens when its host is back."),
        Row(when=at(P.PARKING), on=MemberParked, given=others_to_come, change=counted,
            why="Each by its own host's proof (G6)."),
        Row(when=at(P.PARKING), on=MemberParked, given=last_of_all, to=P.PARKED, change=step_over,
            why="Every member is at or below its budget (G10)."),
        Row(when=at(P.PARKED), on=WakeAsked, to=P.WAKING, emits=(_order(SendWake),),
            why="One call, on the head, never repeated (27)."),
        Row(when=at(P.WAKING), on=MemberBack, given=not_last_or_unproven, change=counted,
            why="Every host shows its rank resident."),
        Row(when=at(P.WAKING), on=MemberBack, given=last_and_proven, to=P.READY, change=step_over,
            emits=(open_route, conclude_ready), why="The canary was right; the last report was late."),
        Row(when=at(P.WAKING), on=CanaryRight, given=some_missing, change=head_noted,
            why="The route waits until every member is resident."),
        Row(when=at(P.WAKING), on=CanaryRight, given=all_there, to=P.READY, change=head_answers,
            emits=(open_route, conclude_ready), why="It answers as it did (G11)."),
        Row(when=at(P.WAKING), on=CanaryWrong, to=P.STOPPING, change=woke_wrong, emits=(stop_members,),
            why="What answers otherwise is never opened (44)."),
        # stop
        Row(when=at(P.MATERIALIZING), on=StopAsked, to=P.IDLE, change=unplanned, why="Nothing was reserved."),
        Row(when=at(P.RESERVED, P.PREPARING), on=StopAsked, to=P.IDLE, change=unplanned, emits=(_order(DropPlan),),
            why="No process was asked for."),
        Row(when=at(P.LAUNCHING, P.DRAINING, P.PARKING, P.PARKED, P.WAKING), on=StopAsked, to=P.STOPPING,
            change=stopped, emits=(stop_members,), why="Every member at once."),
        Row(when=at(P.READY), on=StopAsked, to=P.STOPPING, change=stopped, emits=(close_route, stop_members),
            why="The route closes first; the drain is the head's gate's."),
        Row(when=ENDING, on=StopAsked, change=stopped, why="It ends already; it will not be launched again."),
        ignore(at(P.IDLE, P.FAILED), StopAsked, why="Nothing of it runs."),
        # settling
        Row(when=at(P.STOPPING), on=MemberSettled, to=P.SETTLING, change=settled_one,
            why="Only that member is released (G6), and a group has two at least."),
        Row(when=at(P.SETTLING), on=MemberSettled, given=others_unsettled, change=settled_one,
            why="Only that member is released (G6)."),
        Row(when=at(P.SETTLING), on=MemberSettled, given=settled_to_relaunch, to=P.MATERIALIZING, change=again,
            emits=(free_port, _order(CompareDigests)), why="A new plan and generation, all members settled (53)."),
        Row(when=at(P.SETTLING), on=MemberSettled, given=settled_for_good, to=P.FAILED, change=over,
            emits=(free_port, conclude_failed), why="The attempts of this start are spent."),
        Row(when=at(P.SETTLING), on=MemberSettled, given=settled_as_asked, to=P.IDLE, change=over, emits=(free_port,),
            why="It was asked for."),
        # unreachable hosts
        Row(when=at(P.READY), on=MemberUncertain, given=head_unreachable, change=doubted, emits=(close_route,),
            why="Nobody can reach what serves."),
        Row(when=at(P.READY), on=MemberUncertain, given=worker_unreachable, change=doubted,
            why="The engine may be well: it serves until it stalls, exits or is stopped. Nothing is released (25)."),
        Row(when=WITH_LAUNCH - at(P.READY) | ENDING, on=MemberUncertain, change=doubted,
            why="The step waits or fails by its own bound; nothing is released (25)."),
        Row(when=at(P.READY), on=MemberKnown, given=head_known, change=known, emits=(open_route,),
            why="The recorded engine, same generation, no relaunch."),
        Row(when=at(P.READY), on=MemberKnown, given=worker_known, change=known,
            why="The recorded engine, same generation, no relaunch."),
        Row(when=WITH_LAUNCH - at(P.READY) | ENDING, on=MemberKnown, change=known,
            why="Its own machine says the rest."),
        # what does not concern it
        ignore(WITH_LAUNCH | ENDING | at(P.RESERVED, P.PREPARING, P.MATERIALIZING), Activated,
               why="It is wanted already, or ends first; the activation waits."),
        *(ignore(ENDING | at(P.IDLE, P.FAILED, P.MATERIALIZING), event, why="Too late to matter.")
          for event in (MemberPrepared, PrepareRefused, MemberLaunched, HeadProven, MemberFailed, ProbeFailed, Drained,
                        DrainExpired, MemberParked, MemberBack, CanaryRight, CanaryWrong)),
        *(ignore(at(P.IDLE, P.FAILED, P.MATERIALIZING, P.RESERVED, P.PREPARING), event, why="It has no launch.")
          for event in (MemberUncertain, MemberKnown)),
        ignore(ANY - at(P.MATERIALIZING), DigestsCompared, why="The plan was called off, or is made."),
        ignore(ANY - at(P.MATERIALIZING), NotReserved, why="The plan was called off, or is made."),
        ignore(at(P.DRAINING, P.PARKING, P.PARKED), ParkAsked, why="It parks already."),
        ignore(at(P.READY, P.WAKING, P.LAUNCHING), WakeAsked, why="It is there, or on its way."),
        ignore(at(P.READY, P.DRAINING, P.PARKING, P.PARKED), MemberLaunched, why="Said before."),
        ignore(at(P.READY, P.DRAINING, P.PARKING, P.PARKED, P.WAKING), HeadProven, why="Said before."),
        ignore(at(P.DRAINING, P.PARKING, P.PARKED, P.WAKING), ProbeFailed,
               why="The park or wake says what became of it."),
        ignore(at(P.READY), DrainExpired, why="The drain was over."),
        # what cannot come, and what must wait
        *(refuse(ANY - at(P.READY, P.DRAINING, P.PARKING, P.PARKED), event, "lifecycle_conflict",
                 why="It is not READY.") for event in (ParkAsked,)),
        *(refuse(ANY - at(P.READY, P.WAKING, P.LAUNCHING, P.PARKED), event, "lifecycle_conflict",
                 why="It is not parked.") for event in (WakeAsked,)),
        refuse(ANY - at(P.MATERIALIZING), PlanCommitted, "internal", why="A plan is committed once."),
        refuse(ANY - at(P.RESERVED), PrepareSent, "internal", why="A prepare is sent once."),
        refuse(WITH_LAUNCH | at(P.RESERVED), MemberPrepared, "internal", why="It was prepared, or not asked."),
        refuse(WITH_LAUNCH, PrepareRefused, "internal", why="It was prepared."),
        refuse(at(P.RESERVED, P.PREPARING, P.WAKING), MemberLaunched, "internal", why="It does not launch."),
        refuse(at(P.RESERVED, P.PREPARING), HeadProven, "internal", why="It has no process."),
        refuse(at(P.RESERVED, P.PREPARING), MemberFailed, "internal", why="It has no process."),
        refuse(at(P.RESERVED, P.PREPARING, ), ProbeFailed, "internal", why="It has no process."),
        refuse(ANY - ENDING - at(P.IDLE, P.FAILED, P.MATERIALIZING, P.DRAINING), Drained, "internal",
               why="It does not drain."),
        refuse(ANY - ENDING - at(P.IDLE, P.FAILED, P.MATERIALIZING, P.DRAINING, P.READY), DrainExpired, "internal",
               why="It does not drain."),
        refuse(ANY - ENDING - at(P.IDLE, P.FAILED, P.MATERIALIZING, P.PARKING), MemberParked, "internal",
               why="It does not park."),
        *(refuse(ANY - ENDING - at(P.IDLE, P.FAILED, P.MATERIALIZING, P.WAKING), event, "internal",
                 why="It does not wake.") for event in (MemberBack, CanaryRight, CanaryWrong)),
        refuse(ANY - ENDING, MemberSettled, "internal", why="No terminate was sent."),
    ),
)  # fmt: skip


def step(state: State, event: Event) -> tuple[State, tuple[Effect | Refused, ...]]:
    """Decide one event. Pure: the same state and event always give the same answer."""
    return GROUP.step(state, event)
