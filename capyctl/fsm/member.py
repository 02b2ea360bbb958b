"""One member of a group: the part of an instance that runs on one of its hosts, with its own charge.

A member's charge falls by its own host's proof alone; what another host proved releases nothing here.
An unreachable host leaves its member uncertain and charged, whatever the group does. (Reference:
lifecycle 5.2, groups 7, 10.)
"""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.proofs import Back, GoneProof, Lowering, Resident, SameEngine, Unsent, Usable
from capyctl.fsm.table import Emit, Machine, Refused, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import HostId, Incarnation, Millis, ProcessIdentity, Role
from capyctl.fsm.types import Phase as Charge


class Phase(enum.Enum):
    """Where a member is."""

    NAMED = "named"  # a plan names it; nothing is stored
    RESERVED = "reserved"  # the plan is stored, with every member's reservation
    PREPARED = "prepared"  # its host checked everything; no process yet
    LAUNCHING = "launching"  # the launch may have left
    LAUNCHED = "launched"  # its processes are recorded
    PARKING = "parking"  # the collective release was called
    PARKED = "parked"  # its own host proved what it holds
    WAKING = "waking"  # the collective wake was called
    FAILED = "failed"  # its engine process is gone, or never came; not everything of it is proven gone
    TERMINATING = "terminating"  # its host was told to end it
    UNCERTAIN = "uncertain"  # nobody can say; charged
    SETTLED = "settled"  # proven gone, nothing charged


# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class State:
    """`rank` 0 is the head. `before`: what an uncertain member was. `group_stops`: no way back to serving."""

    phase: Phase = Phase.NAMED
    incarnation: Incarnation
    rank: int
    host: HostId
    charged: Charge = Charge.NONE
    processes: tuple[ProcessIdentity, ...] = ()
    before: Phase | None = None
    group_stops: bool = False
    warnings: tuple[str, ...] = ()
    last_error: str | None = None


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Event:
    """A fact about one member, and when it was seen."""

    now_ms: Millis


@attrs.frozen(kw_only=True)
class PlanCommitted(Event):
    """The plan and every member's reservation are stored, in one transaction."""


@attrs.frozen(kw_only=True)
class PrepareAccepted(Event):
    """Its host found fingerprint, digest, address, ports and tuning good."""

    warnings: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class PlanDropped(Event):
    """Its host refused to prepare it, or another's did: no process effect was asked for."""

    proof: Unsent
    reason: str


@attrs.frozen(kw_only=True)
class LaunchSent(Event):
    """Every member is prepared, and the launch is on its way."""


@attrs.frozen(kw_only=True)
class Launched(Event):
    """Its processes are recorded."""

    processes: tuple[ProcessIdentity, ...]


@attrs.frozen(kw_only=True)
class LaunchFailed(Event):
    """The launch ended, and nothing of it is left."""

    proof: GoneProof
    reason: str


@attrs.frozen(kw_only=True)
class EngineGone(Event):
    """A recorded process ended."""

    role: Role
    reason: str


@attrs.frozen(kw_only=True)
class GroupReady(Event):
    """The head answered: the group is usable."""

    usable: Usable


@attrs.frozen(kw_only=True)
class ReleaseSent(Event):
    """The collective release is about to be called on the head."""


@attrs.frozen(kw_only=True)
class ResidencyProven(Event):
    """Its own host sampled what it holds, after the call."""

    proof: Resident


@attrs.frozen(kw_only=True)
class ParkUnproven(Event):
    """Its host was silent for a minute after the release, or it is still resident."""

    reason: str


@attrs.frozen(kw_only=True)
class WakeSent(Event):
    """The collective wake is about to be called on the head."""


@attrs.frozen(kw_only=True)
class Woken(Event):
    """It is resident again, and the group is proven usable."""

    back: Back
    usable: Usable


@attrs.frozen(kw_only=True)
class HostLost(Event):
    """The session with its host is lost."""


@attrs.frozen(kw_only=True)
class HostBack(Event):
    """Its host is back with its journal, and the engine is the recorded one."""

    proof: SameEngine


@attrs.frozen(kw_only=True)
class GroupStops(Event):
    """Every member is to end."""


@attrs.frozen(kw_only=True)
class TerminateUnproven(Event):
    """Its host could not prove that everything of it is gone."""

    reason: str


@attrs.frozen(kw_only=True)
class ProvenGone(Event):
    """Everything of it is gone, as its own host observed."""

    proof: GoneProof


# --- effects --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Effect:
    """An order about one member."""

    incarnation: Incarnation
    rank: int


@attrs.frozen(kw_only=True)
class RaiseCharge(Effect):
    """Charge this phase on its own host."""

    phase: Charge


@attrs.frozen(kw_only=True)
class SettleDown(Effect):
    """Lower its charge to this phase, on this proof."""

    phase: Charge
    proof: Lowering | Back


@attrs.frozen(kw_only=True)
class SendTerminate(Effect):
    """Tell its host to end every process of it."""

    processes: tuple[ProcessIdentity, ...]


@attrs.frozen(kw_only=True)
class TellGroup(Effect):
    """Tell the group that this member failed, and how."""

    code: str
    reason: str


# --- guards ---------------------------------------------------------------------------------------

P = Phase
ANY = any_of(Phase)
WITH_LAUNCH = at(P.LAUNCHING, P.LAUNCHED, P.PARKING, P.PARKED, P.WAKING, P.FAILED, P.TERMINATING)
WORKING = at(P.LAUNCHING, P.LAUNCHED, P.PARKING, P.PARKED, P.WAKING)


def is_engine(state: State, event: EngineGone) -> bool:
    """an api or worker process"""
    return event.role is not Role.HELPER


def is_helper(state: State, event: EngineGone) -> bool:
    """a helper process"""
    return event.role is Role.HELPER


def is_cold(state: State, event: GroupReady) -> bool:
    """its start peak is charged"""
    return state.charged is Charge.COLD


def is_not_cold(state: State, event: GroupReady) -> bool:
    """it was charged down before"""
    return not is_cold(state, event)


def _mine(state: State, proof: GoneProof | Resident | SameEngine | Back | Unsent) -> bool:
    return proof.incarnation == state.incarnation


def own_gone(state: State, event: ProvenGone | LaunchFailed) -> bool:
    """the proof is of this incarnation"""
    return _mine(state, event.proof)


def others_gone(state: State, event: ProvenGone | LaunchFailed) -> bool:
    """the proof is of another incarnation"""
    return not own_gone(state, event)


def own_residency(state: State, event: ResidencyProven) -> bool:
    """the sample is of this incarnation"""
    return _mine(state, event.proof)


def others_residency(state: State, event: ResidencyProven) -> bool:
    """the sample is of another incarnation"""
    return not own_residency(state, event)


def must_end(state: State, event: HostBack) -> bool:
    """the group stops, or it was failed or being ended"""
    return state.group_stops or state.before in (P.FAILED, P.TERMINATING)


def was_launching(state: State, event: HostBack) -> bool:
    """the group goes on; it was launching"""
    return not must_end(state, event) and state.before is P.LAUNCHING


def was_launched(state: State, event: HostBack) -> bool:
    """the group goes on; it was launched"""
    return not must_end(state, event) and state.before is P.LAUNCHED


def was_parking(state: State, event: HostBack) -> bool:
    """the group goes on; it was parking"""
    return not must_end(state, event) and state.before is P.PARKING


def was_parked(state: State, event: HostBack) -> bool:
    """the group goes on; it was parked"""
    return not must_end(state, event) and state.before is P.PARKED


def was_waking(state: State, event: HostBack) -> bool:
    """the group goes on; it was waking"""
    return not must_end(state, event) and state.before is P.WAKING


# --- changes and emits ----------------------------------------------------------------------------


def charged_cold(state: State, event: PlanCommitted) -> State:
    """charged cold"""
    return attrs.evolve(state, charged=Charge.COLD)


def charged_ready(state: State, event: GroupReady | Woken) -> State:
    """charged ready"""
    return attrs.evolve(state, charged=Charge.READY)


def charged_parking(state: State, event: ReleaseSent) -> State:
    """charged the peak of the park"""
    return attrs.evolve(state, charged=Charge.PARKING)


def charged_parked(state: State, event: ResidencyProven) -> State:
    """charged what it was proven to hold"""
    return attrs.evolve(state, charged=Charge.PARKED)


def charged_wake(state: State, event: WakeSent) -> State:
    """charged the peak of the wake"""
    return attrs.evolve(state, charged=Charge.WAKE)


def charged_nothing(state: State, event: Event) -> State:
    """charged nothing"""
    return attrs.evolve(state, charged=Charge.NONE, before=None)


def warned(state: State, event: PrepareAccepted) -> State:
    """note the host's warnings"""
    return attrs.evolve(state, warnings=event.warnings)


def recorded(state: State, event: Launched) -> State:
    """record its processes"""
    return attrs.evolve(state, processes=event.processes)


def noted_error(state: State, event: LaunchFailed | EngineGone | ParkUnproven) -> State:
    """note the reason"""
    return attrs.evolve(state, last_error=event.reason)


def lost_everything(state: State, event: ProvenGone) -> State:
    """note that it ended unasked"""
    return attrs.evolve(state, last_error=ENDED_UNASKED)


ENDED_UNASKED = "its processes ended unasked"


def unreachable(state: State, event: HostLost) -> State:
    """note what it was"""
    return attrs.evolve(state, before=state.phase)


def unproven(state: State, event: TerminateUnproven) -> State:
    """note what it was, and the reason"""
    return attrs.evolve(state, before=state.phase, last_error=event.reason)


def known_again(state: State, event: HostBack) -> State:
    """it is what it was"""
    return attrs.evolve(state, before=None)


def to_end(state: State, event: GroupStops) -> State:
    """no way back to serving"""
    return attrs.evolve(state, group_stops=True)


def _raise(charge: Charge) -> Emit:
    def emit(state: State, event: Event) -> Effect:
        return RaiseCharge(incarnation=state.incarnation, rank=state.rank, phase=charge)

    emit.__doc__ = f"RaiseCharge({charge.value})"
    return emit


def _settle(charge: Charge, proof: str) -> Emit:
    def emit(state: State, event: Event) -> Effect:
        return SettleDown(incarnation=state.incarnation, rank=state.rank, phase=charge, proof=getattr(event, proof))

    emit.__doc__ = f"SettleDown({charge.value}, the event's proof)"
    return emit


def send_terminate(state: State, event: Event) -> Effect:
    """SendTerminate"""
    return SendTerminate(incarnation=state.incarnation, rank=state.rank, processes=state.processes)


def tell_group(state: State, event: LaunchFailed | EngineGone | ParkUnproven) -> Effect:
    """TellGroup(group_member_failed)"""
    return TellGroup(incarnation=state.incarnation, rank=state.rank, code="group_member_failed", reason=event.reason)


def tell_gone(state: State, event: ProvenGone) -> Effect:
    """TellGroup(group_member_failed)"""
    return TellGroup(incarnation=state.incarnation, rank=state.rank, code="group_member_failed", reason=ENDED_UNASKED)


def tell_uncertain(state: State, event: HostLost) -> Effect:
    """TellGroup(group_member_uncertain)"""
    return TellGroup(
        incarnation=state.incarnation, rank=state.rank, code="group_member_uncertain", reason="its host is unreachable"
    )


# --- invariants -----------------------------------------------------------------------------------

CHARGES = {
    P.NAMED: (Charge.NONE,),
    P.RESERVED: (Charge.COLD,),
    P.PREPARED: (Charge.COLD,),
    P.LAUNCHING: (Charge.COLD,),
    P.LAUNCHED: (Charge.COLD, Charge.READY),
    P.PARKING: (Charge.PARKING,),
    P.PARKED: (Charge.PARKED,),
    P.WAKING: (Charge.WAKE,),
    P.SETTLED: (Charge.NONE,),
}


def the_charge_is_the_phase_s(state: State) -> bool:
    """A member is charged what its phase may hold, and keeps its charge while failed, terminating or uncertain."""
    if state.phase in CHARGES:
        return state.charged in CHARGES[state.phase]
    return state.charged is not Charge.NONE


def only_the_uncertain_remember(state: State) -> bool:
    """Exactly an uncertain member remembers what it was."""
    return (state.phase is P.UNCERTAIN) == (state.before is not None)


def nobody_serves_again(state: State) -> bool:
    """Once its group stops, a member is ending, uncertain or settled (52)."""
    return not state.group_stops or state.phase in at(P.TERMINATING, P.UNCERTAIN, P.SETTLED)


# --- table ----------------------------------------------------------------------------------------

EVENTS = (
    PlanCommitted,
    PrepareAccepted,
    PlanDropped,
    LaunchSent,
    Launched,
    LaunchFailed,
    EngineGone,
    GroupReady,
    ReleaseSent,
    ResidencyProven,
    ParkUnproven,
    WakeSent,
    Woken,
    HostLost,
    HostBack,
    GroupStops,
    TerminateUnproven,
    ProvenGone,
)

MEMBER: Machine[State] = Machine(
    name="member",
    doc=__doc__,
    phases=Phase,
    events=EVENTS,
    invariants=(the_charge_is_the_phase_s, only_the_uncertain_remember, nobody_serves_again),
    rows=(
        Row(when=at(P.NAMED), on=PlanCommitted, to=P.RESERVED, change=charged_cold, emits=(_raise(Charge.COLD),),
            why="All members are reserved, or none (51)."),
        Row(when=at(P.RESERVED), on=PrepareAccepted, to=P.PREPARED, change=warned,
            why="Nothing was started; warnings are shown, the group still runs."),
        Row(when=at(P.RESERVED, P.PREPARED), on=PlanDropped, to=P.SETTLED, change=charged_nothing,
            emits=(_settle(Charge.NONE, "proof"),), why="A prepare has no process effect (P-UNSENT)."),
        Row(when=at(P.PREPARED), on=LaunchSent, to=P.LAUNCHING, why="Every member is prepared before any is launched."),
        Row(when=at(P.LAUNCHING), on=Launched, to=P.LAUNCHED, change=recorded,
            why="Workers are not held back for the head."),
        Row(when=at(P.LAUNCHING), on=LaunchFailed, given=own_gone, to=P.FAILED, change=noted_error,
            emits=(tell_group,), why="It is settled with the others, by the same proof as they."),
        ignore(at(P.LAUNCHING), LaunchFailed, given=others_gone, why="An older launch."),
        Row(when=WORKING, on=EngineGone, given=is_engine, to=P.FAILED, change=noted_error, emits=(tell_group,),
            why="No rank is replaced: one that ends, ends the group."),
        ignore(WORKING, EngineGone, given=is_helper, why="Helpers come and go (22)."),
        Row(when=at(P.LAUNCHED), on=GroupReady, given=is_cold, change=charged_ready,
            emits=(_settle(Charge.READY, "usable"),), why="The start peak of every rank is over."),
        ignore(at(P.LAUNCHED), GroupReady, given=is_not_cold, why="Said before."),
        Row(when=at(P.LAUNCHED), on=ReleaseSent, to=P.PARKING, change=charged_parking,
            emits=(_raise(Charge.PARKING),), why="The peak is charged before the call that can reach it."),
        Row(when=at(P.PARKING), on=ResidencyProven, given=own_residency, to=P.PARKED, change=charged_parked,
            emits=(_settle(Charge.PARKED, "proof"),), why="Its own host's sample, newer than the call."),
        ignore(at(P.PARKING), ResidencyProven, given=others_residency, why="Another run's memory."),
        Row(when=at(P.PARKING), on=ParkUnproven, to=P.FAILED, change=noted_error, emits=(tell_group,),
            why="The collective is never repeated; the group stops."),
        Row(when=at(P.PARKED), on=WakeSent, to=P.WAKING, change=charged_wake, emits=(_raise(Charge.WAKE),),
            why="The peak is charged before the call that can reach it."),
        Row(when=at(P.WAKING), on=Woken, to=P.LAUNCHED, change=charged_ready, emits=(_settle(Charge.READY, "usable"),),
            why="Resident on its host, and the group answers."),
        # hosts come and go
        Row(when=WITH_LAUNCH, on=HostLost, to=P.UNCERTAIN, change=unreachable, emits=(tell_uncertain,),
            why="Reachability is not ownership: nothing is released."),
        Row(when=at(P.UNCERTAIN), on=HostBack, given=was_launching, to=P.LAUNCHING, change=known_again,
            why="Its host replays what became of the launch."),
        Row(when=at(P.UNCERTAIN), on=HostBack, given=was_launched, to=P.LAUNCHED, change=known_again,
            why="Same generation, no relaunch."),
        Row(when=at(P.UNCERTAIN), on=HostBack, given=was_parking, to=P.PARKING, change=known_again,
            why="Its sample is still owed."),
        Row(when=at(P.UNCERTAIN), on=HostBack, given=was_parked, to=P.PARKED, change=known_again,
            why="Same generation, no relaunch."),
        Row(when=at(P.UNCERTAIN), on=HostBack, given=was_waking, to=P.WAKING, change=known_again,
            why="Its sample is still owed."),
        Row(when=at(P.UNCERTAIN), on=HostBack, given=must_end, to=P.TERMINATING, change=known_again,
            emits=(send_terminate,), why="The terminate is told again."),
        # the end
        Row(when=WORKING | at(P.FAILED), on=GroupStops, to=P.TERMINATING, change=to_end, emits=(send_terminate,),
            why="Every member at once; each settles on its own proof."),
        Row(when=at(P.UNCERTAIN), on=GroupStops, change=to_end, why="Told when its host is back."),
        ignore(at(P.TERMINATING), GroupStops, why="It is ending."),
        Row(when=at(P.TERMINATING), on=TerminateUnproven, to=P.UNCERTAIN, change=unproven,
            why="Alive or unknown is not gone; the charge is kept."),
        Row(when=at(P.FAILED, P.TERMINATING, P.UNCERTAIN), on=ProvenGone, given=own_gone, to=P.SETTLED,
            change=charged_nothing, emits=(_settle(Charge.NONE, "proof"),), why="This member only (G6)."),
        ignore(at(P.FAILED, P.TERMINATING, P.UNCERTAIN), ProvenGone, given=others_gone, why="An older launch."),
        Row(when=WORKING, on=ProvenGone, given=own_gone, to=P.FAILED, change=lost_everything, emits=(tell_gone,),
            why="The host saw it end before anybody said so; it settles when told again."),
        ignore(WORKING, ProvenGone, given=others_gone, why="An older launch."),
        # what does not concern it
        ignore(at(P.FAILED, P.TERMINATING, P.UNCERTAIN, P.SETTLED), EngineGone, why="It is ending or unknown already."),
        ignore(at(P.NAMED, P.RESERVED, P.PREPARED, P.UNCERTAIN, P.SETTLED), HostLost,
               why="It has no launch, or its host is lost already."),
        ignore(ANY - at(P.UNCERTAIN), HostBack, why="Nobody doubted it."),
        ignore(at(P.NAMED, P.RESERVED, P.PREPARED), GroupStops, why="Without a launch the plan is dropped instead."),
        ignore(at(P.FAILED, P.TERMINATING, P.UNCERTAIN, P.SETTLED), Launched, why="Too late to matter."),
        ignore(at(P.FAILED, P.TERMINATING, P.UNCERTAIN, P.SETTLED), LaunchFailed, why="The terminate says the rest."),
        ignore(ANY - at(P.LAUNCHED), GroupReady, why="It is not one that waits for this."),
        ignore(at(P.FAILED, P.TERMINATING, P.UNCERTAIN, P.SETTLED), ResidencyProven, why="Too late to matter."),
        ignore(at(P.FAILED, P.TERMINATING, P.UNCERTAIN, P.SETTLED), ParkUnproven, why="It is ending or unknown."),
        ignore(at(P.FAILED, P.TERMINATING, P.UNCERTAIN, P.SETTLED), Woken, why="Too late to matter."),
        ignore(at(P.FAILED, P.UNCERTAIN, P.SETTLED), TerminateUnproven, why="No terminate is awaited."),
        *(ignore(at(P.SETTLED), event, why="It is settled.")
          for event in (PlanCommitted, PrepareAccepted, PlanDropped, LaunchSent, ReleaseSent, WakeSent, GroupStops,
                        ProvenGone)),
        # what cannot come
        refuse(ANY - at(P.NAMED, P.SETTLED), PlanCommitted, "internal", why="A plan is committed once."),
        refuse(ANY - at(P.RESERVED, P.SETTLED), PrepareAccepted, "internal", why="It was not asked."),
        refuse(ANY - at(P.RESERVED, P.PREPARED, P.SETTLED), PlanDropped, "internal", why="A launch may have left."),
        refuse(ANY - at(P.PREPARED, P.SETTLED), LaunchSent, "internal", why="A launch is sent once, when prepared."),
        refuse(ANY - at(P.LAUNCHED, P.SETTLED), ReleaseSent, "internal", why="Only what is launched is parked."),
        refuse(ANY - at(P.PARKED, P.SETTLED), WakeSent, "internal", why="Only what is parked is woken."),
        refuse(at(P.NAMED, P.RESERVED, P.PREPARED), EngineGone, "internal", why="It has no process."),
        refuse(at(P.NAMED, P.RESERVED, P.PREPARED), ProvenGone, "internal", why="It has no process."),
        *(refuse(at(P.NAMED, P.RESERVED, P.PREPARED, P.LAUNCHED, P.PARKING, P.PARKED, P.WAKING), event, "internal",
                 why="It does not launch.") for event in (Launched, LaunchFailed)),
        *(refuse(at(P.NAMED, P.RESERVED, P.PREPARED, P.LAUNCHING, P.LAUNCHED, P.PARKED, P.WAKING), event, "internal",
                 why="It does not park.") for event in (ResidencyProven, ParkUnproven)),
        refuse(at(P.NAMED, P.RESERVED, P.PREPARED, P.LAUNCHING, P.LAUNCHED, P.PARKING, P.PARKED), Woken, "internal",
               why="It does not wake."),
        refuse(at(P.NAMED, P.RESERVED, P.PREPARED) | WORKING, TerminateUnproven, "internal",
               why="No terminate was sent."),
    ),
)  # fmt: skip


def step(state: State, event: Event) -> tuple[State, tuple[Effect | Refused, ...]]:
    """Decide one event. Pure: the same state and event always give the same answer."""
    return MEMBER.step(state, event)
