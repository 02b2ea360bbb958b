"""The dispatch gate of one instance: open exactly while nothing speaks against dispatching to it.

Open means: READY, its readiness proven in the present controller session, its READY record durable,
and no closure reason left. Reasons come and go on their own; removing one never clears another.
This table alone decides invariants 28-30, 42 and 43. Lifecycle 9.
"""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.effects import ConfirmStored, GateClosed, GateOpened
from capyctl.fsm.facts import Fact, SessionBegan
from capyctl.fsm.proofs import SameEngine, Usable
from capyctl.fsm.table import Machine, Row, any_of, at, ignore
from capyctl.fsm.types import Generation, Incarnation, Lane, Millis

# --- phases ---------------------------------------------------------------------------------------


class GatePhase(enum.Enum):
    """Whether a request may be dispatched."""

    CLOSED = "closed"
    OPEN = "open"


class Closure(enum.Enum):
    """One reason against dispatching."""

    SWITCH = "switch"  # a switch drains it
    PARK = "park"  # an operator or an idle timer parks it
    STOP = "stop"  # it is being stopped; never removed for this incarnation
    HOST_SESSION = "host_session"  # its host does not answer
    ENGINE_EXIT = "engine_exit"  # its engine exited; never removed for this incarnation
    UNPROVEN = "unproven"  # its readiness is not proven to the present controller session, or is in doubt again
    UNSTORED = "unstored"  # the record that it is READY is not durable yet


LASTING = frozenset({Closure.STOP, Closure.ENGINE_EXIT})
"""Reasons that only the end of the incarnation removes."""

PROVABLE = frozenset({Closure.HOST_SESSION, Closure.UNPROVEN})
"""Reasons that P-READY and P-SAME remove."""

EPOCH = Millis(0)

# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class State:
    """The gate. `generation` is the run that is READY, None while none is; times are Unix milliseconds."""

    lane: Lane
    phase: GatePhase = GatePhase.CLOSED
    generation: Generation | None = None
    reasons: frozenset[Closure] = frozenset()
    session: int = 0  # the present controller session
    proven_in: int | None = None  # the session to which this run's readiness was proven
    closed_at_ms: Millis = EPOCH
    doubted_at_ms: Millis = EPOCH  # proofs older than this do not remove a provable reason


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ReadyProven(Fact):
    """From the instance: this generation is READY, by a proof of `probed_at_ms`."""

    generation: Generation
    probed_at_ms: Millis


@attrs.frozen(kw_only=True)
class LeftReady(Fact):
    """From the instance: no run of it is READY any more (parked, unknown or gone)."""


@attrs.frozen(kw_only=True)
class ReasonAdded(Fact):
    """From the instance: one more reason against dispatching."""

    reason: Closure


@attrs.frozen(kw_only=True)
class ReasonRemoved(Fact):
    """From the instance: this reason no longer holds."""

    reason: Closure


@attrs.frozen(kw_only=True)
class ReadyStored(Fact):
    """The record that this generation is READY is durable (W5)."""

    generation: Generation


@attrs.frozen(kw_only=True)
class HostLost(Fact):
    """The session of its host ended or is unresponsive."""


@attrs.frozen(kw_only=True)
class Doubted(Fact):
    """The engine answers nothing any more, for longer than slowness explains."""


@attrs.frozen(kw_only=True)
class Proven(Fact):
    """P-SAME and a fresh P-READY of the running engine."""

    same: SameEngine
    usable: Usable


FROM_OUTSIDE = (ReadyStored, HostLost, Doubted, Proven)
"""What control tells the gate alone; SessionBegan is told to all; the rest comes from the other machines."""

EVENTS: tuple[type[Fact], ...] = (ReadyProven, LeftReady, ReasonAdded, ReasonRemoved, *FROM_OUTSIDE, SessionBegan)

# --- guards ---------------------------------------------------------------------------------------


def _ours(state: State, event: ReadyStored) -> bool:
    return state.generation is not None and event.generation == state.generation


def _opens_without(state: State, gone: frozenset[Closure]) -> bool:
    return state.generation is not None and state.proven_in == state.session and state.reasons <= gone


def stored_and_free(state: State, event: ReadyStored) -> bool:
    """the record is of the run that is READY, and nothing else speaks against dispatching"""
    return _ours(state, event) and _opens_without(state, frozenset({Closure.UNSTORED}))


def stored_but_held(state: State, event: ReadyStored) -> bool:
    """the record is of the run that is READY, and another reason holds the gate"""
    return _ours(state, event) and not _opens_without(state, frozenset({Closure.UNSTORED}))


def stored_of_another(state: State, event: ReadyStored) -> bool:
    """the record is of another run"""
    return not _ours(state, event)


def is_lasting(state: State, event: ReasonRemoved) -> bool:
    """only the end of the incarnation removes this reason"""
    return event.reason in LASTING


def was_the_last(state: State, event: ReasonRemoved) -> bool:
    """it was the last reason, and readiness is proven in this session"""
    return not is_lasting(state, event) and _opens_without(state, frozenset({event.reason}))


def others_hold(state: State, event: ReasonRemoved) -> bool:
    """another reason holds, or readiness is unproven"""
    return not is_lasting(state, event) and not was_the_last(state, event)


def _proves(state: State, event: Proven) -> bool:
    if state.generation is None:
        return False
    run = Incarnation(state.lane, state.generation)
    fresh = min(event.same.observed_at_ms, event.usable.probed_at_ms) >= state.doubted_at_ms
    return fresh and event.same.incarnation == run and event.usable.incarnation == run


def proven_and_free(state: State, event: Proven) -> bool:
    """both proofs are of this run and newer than the doubt, and nothing else holds the gate"""
    return _proves(state, event) and state.reasons <= PROVABLE


def proven_but_held(state: State, event: Proven) -> bool:
    """both proofs are of this run and newer than the doubt, and another reason holds the gate"""
    return _proves(state, event) and not state.reasons <= PROVABLE


def proves_nothing(state: State, event: Proven) -> bool:
    """a proof is of another run, or older than the doubt"""
    return not _proves(state, event)


def has_a_run(state: State, event: Doubted) -> bool:
    """a run is READY, or leaves"""
    return state.generation is not None


def has_no_run(state: State, event: Doubted) -> bool:
    """no run is READY"""
    return not has_a_run(state, event)


def is_newer(state: State, event: SessionBegan) -> bool:
    """the session is newer than the known one"""
    return event.session > state.session


def is_not_newer(state: State, event: SessionBegan) -> bool:
    """the session is not newer than the known one"""
    return not is_newer(state, event)


# --- changes --------------------------------------------------------------------------------------


def become_ready(state: State, event: ReadyProven) -> State:
    """a fresh closure set: not stored yet; still in doubt if the proof is older than the doubt"""
    fresh = event.probed_at_ms >= state.doubted_at_ms
    doubts = frozenset() if fresh else (state.reasons & PROVABLE) | {Closure.UNPROVEN}
    return attrs.evolve(
        state,
        generation=event.generation,
        reasons=doubts | {Closure.UNSTORED},
        proven_in=state.session if fresh else None,
    )


def leave_ready(state: State, event: LeftReady) -> State:
    """no run is READY; only what is known of the host stays"""
    return attrs.evolve(
        _closed(state, event), generation=None, proven_in=None, reasons=state.reasons & {Closure.HOST_SESSION}
    )


def _closed(state: State, event: Fact) -> State:
    return state if state.phase is GatePhase.CLOSED else attrs.evolve(state, closed_at_ms=event.now_ms)


def add_reason(state: State, event: ReasonAdded) -> State:
    """one more reason"""
    return attrs.evolve(_closed(state, event), reasons=state.reasons | {event.reason})


def remove_reason(state: State, event: ReasonRemoved) -> State:
    """without that reason"""
    return attrs.evolve(state, reasons=state.reasons - {event.reason})


def note_stored(state: State, event: ReadyStored) -> State:
    """the record is durable"""
    return attrs.evolve(state, reasons=state.reasons - {Closure.UNSTORED})


def doubt_host(state: State, event: HostLost) -> State:
    """the host's session is gone; proofs must be newer than this"""
    return attrs.evolve(
        _closed(state, event), reasons=state.reasons | {Closure.HOST_SESSION}, doubted_at_ms=event.now_ms
    )


def doubt_engine(state: State, event: Doubted) -> State:
    """in doubt; proofs must be newer than this"""
    return attrs.evolve(_closed(state, event), reasons=state.reasons | {Closure.UNPROVEN}, doubted_at_ms=event.now_ms)


def accept_proof(state: State, event: Proven) -> State:
    """proven in this session"""
    return attrs.evolve(state, reasons=state.reasons - PROVABLE, proven_in=state.session)


def begin_session(state: State, event: SessionBegan) -> State:
    """whatever is READY is unproven to this session; what was loaded is durable"""
    kept = state.reasons - {Closure.UNSTORED}
    return attrs.evolve(
        _closed(state, event),
        session=event.session,
        doubted_at_ms=event.now_ms,
        reasons=kept if state.generation is None else kept | {Closure.UNPROVEN},
        proven_in=None,
    )


# --- emits ----------------------------------------------------------------------------------------


def confirm_stored(state: State, event: ReadyProven) -> ConfirmStored:
    """say when the READY record is durable"""
    return ConfirmStored(incarnation=Incarnation(state.lane, event.generation))


def opened(state: State, event: Fact) -> GateOpened:
    """requests may come"""
    assert state.generation is not None  # every row that opens has asked
    return GateOpened(incarnation=Incarnation(state.lane, state.generation))


def closed(state: State, event: Fact) -> GateClosed:
    """no request may come any more"""
    return GateClosed(generation=state.generation)


# --- invariants -----------------------------------------------------------------------------------


def open_means_nothing_against(state: State) -> bool:
    """28, 43: An open gate has an empty closure set and a run that is READY."""
    return state.phase is GatePhase.CLOSED or (not state.reasons and state.generation is not None)


def open_means_proven_now(state: State) -> bool:
    """42: An open gate's readiness was proven in the present controller session."""
    return state.phase is GatePhase.CLOSED or state.proven_in == state.session


def a_free_gate_is_open(state: State) -> bool:
    """A READY run with no closure reason left is open: nobody is kept out for nothing."""
    return state.phase is GatePhase.OPEN or state.generation is None or bool(state.reasons)


# --- table ----------------------------------------------------------------------------------------

ANY = any_of(GatePhase)
CLOSED, OPEN = GatePhase.CLOSED, GatePhase.OPEN

GATE: Machine[State] = Machine(
    name="gate",
    doc=__doc__,
    phases=GatePhase,
    events=EVENTS,
    invariants=(open_means_nothing_against, open_means_proven_now, a_free_gate_is_open),
    rows=(
        Row(when=at(CLOSED), on=ReadyProven, change=become_ready, emits=(confirm_stored,),
            why="Proven is not enough: the record must be durable first, and the proof must belong to this session."),
        ignore(at(OPEN), ReadyProven, why="It is READY and open already."),
        Row(when=at(CLOSED), on=ReadyStored, given=stored_and_free, to=OPEN, change=note_stored, emits=(opened,),
            why="W5: the gate opens on the event that READY is stored, so no request waits for the disk."),
        Row(when=at(CLOSED), on=ReadyStored, given=stored_but_held, change=note_stored,
            why="Stored, and held by something else."),
        ignore(at(CLOSED), ReadyStored, given=stored_of_another, why="A record of a run that is READY no more."),
        ignore(at(OPEN), ReadyStored, why="It was stored before it opened."),
        Row(when=at(OPEN), on=ReasonAdded, to=CLOSED, change=add_reason, emits=(closed,),
            why="Closing waits for nothing: from this step on nothing is dispatched."),
        Row(when=at(CLOSED), on=ReasonAdded, change=add_reason,
            why="Reasons add up; the time of closing stays that of the first."),
        Row(when=at(CLOSED), on=ReasonRemoved, given=was_the_last, to=OPEN, change=remove_reason, emits=(opened,),
            why="Only the last reason opens."),
        Row(when=at(CLOSED), on=ReasonRemoved, given=others_hold, change=remove_reason,
            why="43: removing one reason clears no other; a refused park reopens nothing that a restart closed."),
        ignore(at(CLOSED), ReasonRemoved, given=is_lasting,
               why="A stop or an exit is never taken back for this incarnation."),
        ignore(at(OPEN), ReasonRemoved, why="An open gate has no reason to remove."),
        Row(when=at(OPEN), on=LeftReady, to=CLOSED, change=leave_ready, emits=(closed,),
            why="Nothing is READY, so nothing may be dispatched, whatever closed it before."),
        Row(when=at(CLOSED), on=LeftReady, change=leave_ready,
            why="The closure set belonged to the run that was READY; the next one starts its own."),
        Row(when=at(OPEN), on=HostLost, to=CLOSED, change=doubt_host, emits=(closed,),
            why="Running streams may finish; nothing new goes to a host that does not answer."),
        Row(when=at(CLOSED), on=HostLost, change=doubt_host, why="One more doubt, and a newer one."),
        Row(when=at(OPEN), on=Doubted, to=CLOSED, change=doubt_engine, emits=(closed,),
            why="An engine that answers nothing gets nothing new until it is seen to answer."),
        Row(when=at(CLOSED), on=Doubted, given=has_a_run, change=doubt_engine,
            why="One more doubt: whatever else closed it, it opens only on a newer proof."),
        ignore(at(CLOSED), Doubted, given=has_no_run, why="The next run brings its own proof."),
        Row(when=at(CLOSED), on=Proven, given=proven_and_free, to=OPEN, change=accept_proof, emits=(opened,),
            why="The recorded engine is alive and answers, seen after the doubt arose."),
        Row(when=at(CLOSED), on=Proven, given=proven_but_held, change=accept_proof,
            why="A passing probe does not open a gate that a switch, a park or the disk holds."),
        ignore(at(CLOSED), Proven, given=proves_nothing, why="An old proof, or one of another run."),
        ignore(at(OPEN), Proven, why="Nothing was in doubt."),
        Row(when=at(OPEN), on=SessionBegan, given=is_newer, to=CLOSED, change=begin_session, emits=(closed,),
            why="42: what an earlier session proved must be proven again."),
        Row(when=at(CLOSED), on=SessionBegan, given=is_newer, change=begin_session,
            why="42: what an earlier session proved must be proven again."),
        ignore(ANY, SessionBegan, given=is_not_newer, why="This session is known."),
    ),
)  # fmt: skip
