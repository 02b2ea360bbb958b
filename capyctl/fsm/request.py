"""One inference request: from its arrival to the one outcome it gets, and the place it holds meanwhile.

A place (one of the deployment's 32) is given back on a proof only: the answer was delivered, the
engine refused it whole, it acknowledged an abort, it read idle, its EOF came back, its processes are
gone, or nothing had been sent. Which proof can come depends on the engine and on how far the answer
had got; that choice is made once, at the cut, and is the cancelling phase. (Reference: lifecycle 10.)
"""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.proofs import Aborted, Closed, GoneProof, Idle
from capyctl.fsm.table import Change, Emit, Machine, Refused, Row, any_of, at, ignore, refuse
from capyctl.fsm.types import DeploymentId, Incarnation, Millis, RequestId


class Phase(enum.Enum):
    """Where a request is."""

    RECEIVED = "received"  # authenticated and parsed; nobody has decided yet
    QUEUED = "queued"  # holds a waiting slot, its body is kept
    ADMITTED = "admitted"  # holds a place, nothing sent
    DISPATCHED = "dispatched"  # sent, no output yet
    STREAMING = "streaming"  # output has begun
    COMPLETING = "completing"  # the whole answer was delivered, its record is not closed
    CANCEL_ABORT = "cancel_abort"  # the engine was asked to end this id
    CANCEL_IDLE = "cancel_idle"  # settles when the engine reads idle
    CANCEL_CLOSED = "cancel_closed"  # settles when the engine's EOF came and it reads idle after that
    CANCEL_STOP = "cancel_stop"  # settles at the instance's next stop only
    SETTLED = "settled"  # terminal, with exactly one outcome
    REFUSED = "refused"  # terminal, never held a place or a slot


class Outcome(enum.Enum):
    """What became of a request."""

    OK = "ok"
    REJECTED = "rejected"  # the engine refused it with a complete 400, 413 or 422
    CANCELLED = "cancelled"  # cut, and the engine is proven done with it
    CUT = "cut"  # its engine is gone
    ABANDONED = "abandoned"  # the client left before anything was sent
    EXPIRED = "expired"  # its deadline passed while it waited
    FAILED = "failed"  # what it waited for failed
    REFUSED = "refused"  # turned away on arrival


# --- proofs that free a place, beside those of the catalogue --------------------------------------


@attrs.frozen(kw_only=True)
class Delivered:
    """The whole answer, terminator included, was relayed."""

    finished_at_ms: Millis


@attrs.frozen(kw_only=True)
class RejectedWhole:
    """The engine refused the request with a complete answer, so it holds no work of it."""

    status: int


@attrs.frozen(kw_only=True)
class NothingSent:
    """No byte of the request went upstream."""

    reason: str


PlaceProof = Delivered | RejectedWhole | NothingSent | Aborted | Idle | Closed | GoneProof
"""What may free a place (invariant 35)."""


# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class EngineTraits:
    """How an engine can prove that it is done with this request (lifecycle 2.2)."""

    abort_by_id: bool = False
    idle_signal: bool = True
    eof_proves_end: bool = False


@attrs.frozen(kw_only=True)
class State:
    """`deadline_ms` bounds the first output. `begun`: the engine has sent something of an answer, or an error.

    `nameable`: an engine that is told an id for it would know its work by that id.
    """

    phase: Phase = Phase.RECEIVED
    request: RequestId
    stream: bool
    arrived_at_ms: Millis
    deadline_ms: Millis
    nameable: bool = False
    deployment: DeploymentId | None = None
    incarnation: Incarnation | None = None
    traits: EngineTraits | None = None
    begun: bool = False
    finished_at_ms: Millis | None = None
    cut_at_ms: Millis | None = None
    half_closed_at_ms: Millis | None = None
    eof_at_ms: Millis | None = None
    outcome: Outcome | None = None


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Event:
    """A fact about one request, and when it was seen."""

    now_ms: Millis


@attrs.frozen(kw_only=True)
class TurnedAway(Event):
    """On arrival: nothing is queued for it, and this is why."""

    code: str
    message: str
    retry_after_s: int | None = None


@attrs.frozen(kw_only=True)
class WaitBegun(Event):
    """It must wait, and the waiting bounds allow it."""

    deployment: DeploymentId


@attrs.frozen(kw_only=True)
class PlaceGiven(Event):
    """The gate of this incarnation is open and one of the 32 places is free."""

    deployment: DeploymentId
    incarnation: Incarnation
    traits: EngineTraits


@attrs.frozen(kw_only=True)
class WaitFailed(Event):
    """What it waited for will not come: `activation_failed`, `deployment_stopped`, `unavailable`."""

    code: str
    message: str
    retry_after_s: int | None = None


@attrs.frozen(kw_only=True)
class Sent(Event):
    """The first byte is about to go upstream."""


@attrs.frozen(kw_only=True)
class NotAccepted(Event):
    """The upstream took nothing: refused connection, closed gate, stale generation."""

    reason: str


@attrs.frozen(kw_only=True)
class OutputBegun(Event):
    """The first piece of the answer came (an opening role-only chunk is none)."""


@attrs.frozen(kw_only=True)
class Finished(Event):
    """The whole answer was relayed."""


@attrs.frozen(kw_only=True)
class Recorded(Event):
    """The completion record is handed to the store."""


@attrs.frozen(kw_only=True)
class Rejected(Event):
    """A complete 400, 413 or 422 with a JSON body came; the router relays it as `engine_rejected`."""

    status: int


@attrs.frozen(kw_only=True)
class Errored(Event):
    """Any other error answer, or an answer that broke the relay's rules or fell silent."""

    reason: str


@attrs.frozen(kw_only=True)
class UpstreamLost(Event):
    """The connection ended before the answer did, after the upstream had accepted."""

    reason: str


@attrs.frozen(kw_only=True)
class ClientGone(Event):
    """The client hung up, or read nothing for its bound."""

    reason: str


@attrs.frozen(kw_only=True)
class UpstreamEnded(Event):
    """After our half-close the engine sent EOF."""

    half_closed_at_ms: Millis
    eof_at_ms: Millis


@attrs.frozen(kw_only=True)
class IdleRead(Event):
    """Its engine read idle."""

    proof: Idle


@attrs.frozen(kw_only=True)
class AbortAcknowledged(Event):
    """The engine said that it ended this request id."""

    proof: Aborted


@attrs.frozen(kw_only=True)
class AbortUnanswered(Event):
    """The engine did not answer the abort."""


@attrs.frozen(kw_only=True)
class IncarnationGone(Event):
    """The processes of an incarnation are proven gone."""

    proof: GoneProof


@attrs.frozen(kw_only=True)
class Ticked(Event):
    """Time passed. `places_full`: all 32 places of its deployment are held. `why`: what a waiting one waits for."""

    places_full: bool = False
    why: str = ""


@attrs.frozen(kw_only=True)
class ControllerRestarted(Event):
    """A new controller session over the stored record; connections and bodies of the old one are lost."""


# --- effects --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Effect:
    """An order about one request."""

    request: RequestId


@attrs.frozen(kw_only=True)
class TakeSlot(Effect):
    """Count it among the waiting."""


@attrs.frozen(kw_only=True)
class FreeSlot(Effect):
    """It waits no more; its body may be forgotten if it was settled."""


@attrs.frozen(kw_only=True)
class TakePlace(Effect):
    """Count it among the 32 of its deployment."""

    incarnation: Incarnation


@attrs.frozen(kw_only=True)
class FreePlace(Effect):
    """Give its place back, on this proof."""

    incarnation: Incarnation
    proof: PlaceProof


@attrs.frozen(kw_only=True)
class Dispatch(Effect):
    """Let the router send it to this incarnation."""

    incarnation: Incarnation
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class CutUpstream(Effect):
    """Half-close the upstream and watch for the engine's EOF."""

    reason: str


@attrs.frozen(kw_only=True)
class AbortWork(Effect):
    """Ask the engine to end this request id."""

    incarnation: Incarnation


@attrs.frozen(kw_only=True)
class AnswerClient(Effect):
    """Tell the client this code; mid-stream it is an event, before that a status."""

    code: str
    message: str
    retry_after_s: int | None = None


@attrs.frozen(kw_only=True)
class CloseRecord(Effect):
    """Write the completion record; the answer was delivered already (W17)."""


@attrs.frozen(kw_only=True)
class Settle(Effect):
    """The request is over, with this outcome."""

    outcome: Outcome


# --- guards ---------------------------------------------------------------------------------------

EOF_LIMIT_MS = Millis(30_000)
"""How long a half-closed upstream may keep its EOF to itself; llama.cpp needs about one second."""

PLACED = at(
    Phase.ADMITTED,
    Phase.DISPATCHED,
    Phase.STREAMING,
    Phase.COMPLETING,
    Phase.CANCEL_ABORT,
    Phase.CANCEL_IDLE,
    Phase.CANCEL_CLOSED,
    Phase.CANCEL_STOP,
)
"""Holds one of the 32 places."""

CANCELLING = at(Phase.CANCEL_ABORT, Phase.CANCEL_IDLE, Phase.CANCEL_CLOSED, Phase.CANCEL_STOP)

WAITED_FOR = PLACED - at(Phase.COMPLETING, Phase.CANCEL_STOP)
"""What drains, switches and stops wait for, and what must be zero before a park completes (invariant 36)."""

IN_ENGINE = at(Phase.DISPATCHED, Phase.STREAMING)
"""Was sent and is not cut: what never grows while a gate is closed (invariant 30)."""

OVER = at(Phase.SETTLED, Phase.REFUSED)

ANY = any_of(Phase)


def _cut_before_output(traits: EngineTraits | None) -> Phase:
    """How a request that got no output is proven over. An idle reading says nothing of it: it may not be queued yet."""
    if traits is not None and traits.abort_by_id:
        return Phase.CANCEL_ABORT
    if traits is not None and traits.eof_proves_end and traits.idle_signal:
        return Phase.CANCEL_CLOSED
    return Phase.CANCEL_STOP


def _cut_after_output(traits: EngineTraits | None) -> Phase:
    """How a request whose answer had begun is proven over: the engine knows of it, so idle means done."""
    if traits is not None and traits.abort_by_id:
        return Phase.CANCEL_ABORT
    if traits is not None and traits.idle_signal:
        return Phase.CANCEL_IDLE
    return Phase.CANCEL_STOP


def silent_abort(state: State, event: Event) -> bool:
    """nothing came yet; the engine ends a request by its id"""
    return _cut_before_output(state.traits) is Phase.CANCEL_ABORT


def silent_closed(state: State, event: Event) -> bool:
    """nothing came yet; no abort by id, but the engine's EOF proves that it is done"""
    return _cut_before_output(state.traits) is Phase.CANCEL_CLOSED


def silent_stop(state: State, event: Event) -> bool:
    """nothing came yet; the engine can prove nothing about one request"""
    return _cut_before_output(state.traits) is Phase.CANCEL_STOP


def begun_abort(state: State, event: Event) -> bool:
    """the answer had begun; the engine ends a request by its id"""
    return _cut_after_output(state.traits) is Phase.CANCEL_ABORT


def begun_idle(state: State, event: Event) -> bool:
    """the answer had begun; no abort by id, but the engine tells when it is idle"""
    return _cut_after_output(state.traits) is Phase.CANCEL_IDLE


def begun_stop(state: State, event: Event) -> bool:
    """the answer had begun; the engine has no idle signal"""
    return _cut_after_output(state.traits) is Phase.CANCEL_STOP


def tells_idle(state: State, event: Event) -> bool:
    """the engine has an idle signal"""
    return _tells_idle(state.traits)


def tells_no_idle(state: State, event: Event) -> bool:
    """the engine has no idle signal"""
    return not tells_idle(state, event)


def deadline_ahead(state: State, event: Ticked) -> bool:
    """the deadline is ahead"""
    return event.now_ms < state.deadline_ms


def deadline_passed(state: State, event: Ticked) -> bool:
    """the deadline has passed"""
    return not deadline_ahead(state, event)


def expired_unserved(state: State, event: Ticked) -> bool:
    """the deadline has passed, and no model serves it yet"""
    return deadline_passed(state, event) and not event.places_full


def expired_crowded(state: State, event: Ticked) -> bool:
    """the deadline has passed, and all 32 places are held"""
    return deadline_passed(state, event) and event.places_full


def overdue_abort(state: State, event: Ticked) -> bool:
    """the deadline has passed; the engine ends a request by its id"""
    return deadline_passed(state, event) and silent_abort(state, event)


def overdue_closed(state: State, event: Ticked) -> bool:
    """the deadline has passed; no abort by id, but the engine's EOF proves that it is done"""
    return deadline_passed(state, event) and silent_closed(state, event)


def overdue_stop(state: State, event: Ticked) -> bool:
    """the deadline has passed; the engine can prove nothing about one request"""
    return deadline_passed(state, event) and silent_stop(state, event)


def same_run(state: State, event: IncarnationGone) -> bool:
    """it was this request's incarnation"""
    return event.proof.incarnation == state.incarnation


def other_run(state: State, event: IncarnationGone) -> bool:
    """it was another incarnation"""
    return not same_run(state, event)


def ended_this(state: State, event: AbortAcknowledged) -> bool:
    """the acknowledgement names this request and its incarnation"""
    return event.proof.request == state.request and event.proof.incarnation == state.incarnation


def ended_other(state: State, event: AbortAcknowledged) -> bool:
    """the acknowledgement names another request or incarnation"""
    return not ended_this(state, event)


def idle_after_cut(state: State, event: IdleRead) -> bool:
    """the reading is of its incarnation and newer than the cut"""
    newer = state.cut_at_ms is not None and event.proof.read_at_ms > state.cut_at_ms
    return newer and event.proof.incarnation == state.incarnation


def idle_too_old(state: State, event: IdleRead) -> bool:
    """the reading is older than the cut, or of another incarnation"""
    return not idle_after_cut(state, event)


def idle_after_eof(state: State, event: IdleRead) -> bool:
    """the engine's EOF has come, and the reading is of its incarnation and newer than that"""
    newer = state.eof_at_ms is not None and event.proof.read_at_ms > state.eof_at_ms
    return newer and event.proof.incarnation == state.incarnation


def idle_before_eof(state: State, event: IdleRead) -> bool:
    """no EOF yet, or the reading is older than it, or of another incarnation"""
    return not idle_after_eof(state, event)


def eof_is_first(state: State, event: UpstreamEnded) -> bool:
    """the EOF follows our half-close, and is the first that is told"""
    return event.eof_at_ms >= event.half_closed_at_ms and state.eof_at_ms is None


def eof_is_old(state: State, event: UpstreamEnded) -> bool:
    """the engine closed before we did, or its EOF is known already"""
    return not eof_is_first(state, event)


def eof_proves(state: State, event: UpstreamEnded) -> bool:
    """the EOF follows our half-close, nothing had come before the cut, and this engine's EOF proves its end"""
    return eof_is_first(state, event) and not state.begun and _closes(state.traits)


def eof_proves_nothing(state: State, event: UpstreamEnded) -> bool:
    """the engine closed first, or had begun an answer, or its EOF proves nothing"""
    return not eof_proves(state, event)


def _tells_idle(traits: EngineTraits | None) -> bool:
    return traits is not None and traits.idle_signal


def _closes(traits: EngineTraits | None) -> bool:
    return traits is not None and traits.eof_proves_end and traits.idle_signal


def eof_overdue(state: State, event: Ticked) -> bool:
    """no EOF came within the limit"""
    return state.eof_at_ms is None and state.cut_at_ms is not None and event.now_ms >= state.cut_at_ms + EOF_LIMIT_MS


def eof_awaited(state: State, event: Ticked) -> bool:
    """the EOF is known, or its limit is ahead"""
    return not eof_overdue(state, event)


def eof_known(state: State, event: Event) -> bool:
    """the engine's EOF is recorded"""
    return state.eof_at_ms is not None


def eof_unknown(state: State, event: Event) -> bool:
    """no EOF is recorded, and nobody listens for it any more"""
    return not eof_known(state, event)


def begun_and_idle_told(state: State, event: AbortUnanswered) -> bool:
    """the answer had begun, and the engine tells when it is idle"""
    return state.begun and tells_idle(state, event)


def unproven_otherwise(state: State, event: AbortUnanswered) -> bool:
    """nothing had come yet, or the engine has no idle signal"""
    return not begun_and_idle_told(state, event)


# --- changes --------------------------------------------------------------------------------------


def refused(state: State, event: TurnedAway) -> State:
    """outcome refused"""
    return attrs.evolve(state, outcome=Outcome.REFUSED)


def waiting_for(state: State, event: WaitBegun) -> State:
    """note the deployment"""
    return attrs.evolve(state, deployment=event.deployment)


def placed(state: State, event: PlaceGiven) -> State:
    """note the incarnation and what its engine can prove"""
    return attrs.evolve(state, deployment=event.deployment, incarnation=event.incarnation, traits=event.traits)


def displaced(state: State, event: NotAccepted) -> State:
    """forget the incarnation"""
    return attrs.evolve(state, incarnation=None, traits=None)


def answering(state: State, event: Event) -> State:
    """the answer has begun"""
    return attrs.evolve(state, begun=True)


def delivered(state: State, event: Finished) -> State:
    """note when the answer was delivered"""
    return attrs.evolve(state, begun=True, finished_at_ms=event.now_ms)


def cut(state: State, event: Event) -> State:
    """note when it was cut"""
    return attrs.evolve(state, cut_at_ms=event.now_ms)


def cut_answered(state: State, event: Errored) -> State:
    """note when it was cut, and that the engine had answered"""
    return attrs.evolve(state, cut_at_ms=event.now_ms, begun=True)


def eof_noted(state: State, event: UpstreamEnded) -> State:
    """note our half-close and the engine's EOF"""
    return attrs.evolve(state, half_closed_at_ms=event.half_closed_at_ms, eof_at_ms=event.eof_at_ms)


def _outcome(outcome: Outcome) -> Change:
    def settled(state: State, event: Event) -> State:
        return attrs.evolve(state, outcome=outcome)

    settled.__doc__ = f"outcome {outcome.value}"
    return settled


# --- emits ----------------------------------------------------------------------------------------


def take_slot(state: State, event: Event) -> Effect:
    """TakeSlot"""
    return TakeSlot(request=state.request)


def free_slot(state: State, event: Event) -> Effect:
    """FreeSlot"""
    return FreeSlot(request=state.request)


def take_place(state: State, event: PlaceGiven) -> Effect:
    """TakePlace"""
    return TakePlace(request=state.request, incarnation=event.incarnation)


def dispatch(state: State, event: PlaceGiven) -> Effect:
    """Dispatch"""
    return Dispatch(request=state.request, incarnation=event.incarnation, deadline_ms=state.deadline_ms)


def _free(state: State, proof: PlaceProof) -> Effect:
    assert state.incarnation is not None  # only phases with a place give one back
    return FreePlace(request=state.request, incarnation=state.incarnation, proof=proof)


def free_unsent(state: State, event: NotAccepted | ClientGone) -> Effect:
    """FreePlace(nothing was sent)"""
    return _free(state, NothingSent(reason=event.reason))


def free_delivered(state: State, event: Recorded | ControllerRestarted) -> Effect:
    """FreePlace(the answer was delivered)"""
    assert state.finished_at_ms is not None
    return _free(state, Delivered(finished_at_ms=state.finished_at_ms))


def free_rejected(state: State, event: Rejected) -> Effect:
    """FreePlace(the engine refused it whole)"""
    return _free(state, RejectedWhole(status=event.status))


def free_proven(state: State, event: AbortAcknowledged | IdleRead | IncarnationGone) -> Effect:
    """FreePlace(the event's proof)"""
    return _free(state, event.proof)


def free_closed(state: State, event: IdleRead) -> Effect:
    """FreePlace(P-CLOSED)"""
    assert state.incarnation is not None
    assert state.half_closed_at_ms is not None
    assert state.eof_at_ms is not None
    return _free(
        state,
        Closed(
            incarnation=state.incarnation,
            half_closed_at_ms=state.half_closed_at_ms,
            eof_at_ms=state.eof_at_ms,
            idle=event.proof,
        ),
    )


def cut_upstream(state: State, event: Event) -> Effect:
    """CutUpstream"""
    return CutUpstream(request=state.request, reason=getattr(event, "reason", "deadline"))


def abort_work(state: State, event: Event) -> Effect:
    """AbortWork"""
    assert state.incarnation is not None
    return AbortWork(request=state.request, incarnation=state.incarnation)


def answer_as_told(state: State, event: TurnedAway | WaitFailed) -> Effect:
    """AnswerClient(the event's code)"""
    return AnswerClient(
        request=state.request, code=event.code, message=event.message, retry_after_s=event.retry_after_s
    )


def answer_unserved(state: State, event: Ticked) -> Effect:
    """AnswerClient(unavailable)"""
    why = f": {event.why}" if event.why else ""
    message = f"the model was not ready within the request's deadline{why}"
    return _answer(state, "unavailable", message, retry_after_s=10 if why else 1)


def answer_crowded(state: State, event: Ticked) -> Effect:
    """AnswerClient(queue_full)"""
    return _answer(state, "queue_full", "all 32 places stayed taken until the request's deadline", retry_after_s=1)


def answer_late(state: State, event: Ticked) -> Effect:
    """AnswerClient(deadline_exceeded)"""
    return _answer(state, "deadline_exceeded", "the engine sent no output within the request's deadline")


def answer_engine_error(state: State, event: Errored) -> Effect:
    """AnswerClient(engine_error)"""
    return _answer(state, "engine_error", event.reason)


def answer_lost(state: State, event: UpstreamLost | NotAccepted) -> Effect:
    """AnswerClient(engine_unreachable)"""
    return _answer(state, "engine_unreachable", event.reason)


def answer_engine_gone(state: State, event: IncarnationGone) -> Effect:
    """AnswerClient(engine_unreachable)"""
    return _answer(state, "engine_unreachable", "the engine ended while it had the request")


def answer_gone_unsent(state: State, event: IncarnationGone) -> Effect:
    """AnswerClient(unavailable)"""
    return _answer(state, "unavailable", "the engine ended before it had the request", retry_after_s=1)


def _answer(state: State, code: str, message: str, *, retry_after_s: int | None = None) -> Effect:
    return AnswerClient(request=state.request, code=code, message=message, retry_after_s=retry_after_s)


def close_record(state: State, event: Finished) -> Effect:
    """CloseRecord"""
    return CloseRecord(request=state.request)


def _settle(outcome: Outcome) -> Emit:
    def settle(state: State, event: Event) -> Effect:
        return Settle(request=state.request, outcome=outcome)

    settle.__doc__ = f"Settle({outcome.value})"
    return settle


# --- invariants -----------------------------------------------------------------------------------


def a_place_is_at_one_incarnation(state: State) -> bool:
    """A request that holds a place names its incarnation and what that engine can prove; one that waits names none."""
    if state.phase in PLACED:
        return state.incarnation is not None and state.traits is not None
    return state.phase in OVER or state.incarnation is None


def the_outcome_is_the_end(state: State) -> bool:
    """Exactly a terminal request has an outcome (31)."""
    return (state.phase in OVER) == (state.outcome is not None)


def exactly_the_cut_have_a_time(state: State) -> bool:
    """A cancelling request has a time of its cut, and no request before that has one."""
    return state.phase in OVER or (state.phase in CANCELLING) == (state.cut_at_ms is not None)


def idle_settles_only_what_had_begun(state: State) -> bool:
    """What waits for an idle reading alone had an answer begun, and its engine has an idle signal (35, 37)."""
    return state.phase is not Phase.CANCEL_IDLE or (state.begun and _tells_idle(state.traits))


def eof_settles_only_where_it_proves(state: State) -> bool:
    """What waits for the engine's EOF had no output, and the EOF of its engine proves the end (35)."""
    return state.phase is not Phase.CANCEL_CLOSED or (_closes(state.traits) and not state.begun)


def the_delivered_have_a_time(state: State) -> bool:
    """A completing request knows when its answer was delivered."""
    return state.phase is not Phase.COMPLETING or state.finished_at_ms is not None


def an_eof_follows_a_half_close(state: State) -> bool:
    """A recorded EOF is not older than the recorded half-close."""
    if state.eof_at_ms is None:
        return state.half_closed_at_ms is None
    return state.half_closed_at_ms is not None and state.eof_at_ms >= state.half_closed_at_ms


# --- table ----------------------------------------------------------------------------------------

EVENTS = (
    TurnedAway,
    WaitBegun,
    PlaceGiven,
    WaitFailed,
    Sent,
    NotAccepted,
    OutputBegun,
    Finished,
    Recorded,
    Rejected,
    Errored,
    UpstreamLost,
    ClientGone,
    UpstreamEnded,
    IdleRead,
    AbortAcknowledged,
    AbortUnanswered,
    IncarnationGone,
    Ticked,
    ControllerRestarted,
)

R, Q, A, D, S = Phase.RECEIVED, Phase.QUEUED, Phase.ADMITTED, Phase.DISPATCHED, Phase.STREAMING
CO, SE, RE = Phase.COMPLETING, Phase.SETTLED, Phase.REFUSED
C_ABORT, C_IDLE, C_CLOSED, C_STOP = Phase.CANCEL_ABORT, Phase.CANCEL_IDLE, Phase.CANCEL_CLOSED, Phase.CANCEL_STOP

REQUEST: Machine[State] = Machine(
    name="request",
    doc=__doc__,
    phases=Phase,
    events=EVENTS,
    invariants=(
        a_place_is_at_one_incarnation,
        the_outcome_is_the_end,
        exactly_the_cut_have_a_time,
        idle_settles_only_what_had_begun,
        eof_settles_only_where_it_proves,
        the_delivered_have_a_time,
        an_eof_follows_a_half_close,
    ),
    rows=(
        # arrival
        Row(when=at(R), on=TurnedAway, to=RE, change=refused, emits=(answer_as_told, _settle(Outcome.REFUSED)),
            why="Nothing is queued for what nobody could serve."),
        Row(when=at(R), on=WaitBegun, to=Q, change=waiting_for, emits=(take_slot,),
            why="Also while the model drains for a switch: the next switch brings it back."),
        Row(when=at(R), on=PlaceGiven, to=A, change=placed, emits=(take_place, dispatch),
            why="A READY model with a free place costs no wait."),
        # waiting
        Row(when=at(Q), on=PlaceGiven, to=A, change=placed, emits=(free_slot, take_place, dispatch),
            why="Arrival order is control's; the slot is given up in the step that takes the place."),
        Row(when=at(Q), on=WaitFailed, to=SE, change=_outcome(Outcome.FAILED),
            emits=(free_slot, answer_as_told, _settle(Outcome.FAILED)),
            why="What it waited for will not come; the next request may try again."),
        Row(when=at(Q), on=Ticked, given=expired_unserved, to=SE, change=_outcome(Outcome.EXPIRED),
            emits=(free_slot, answer_unserved, _settle(Outcome.EXPIRED)),
            why="The deadline includes switch, activation and prefill."),
        Row(when=at(Q), on=Ticked, given=expired_crowded, to=SE, change=_outcome(Outcome.EXPIRED),
            emits=(free_slot, answer_crowded, _settle(Outcome.EXPIRED)),
            why="The model is ready, its places were not."),
        ignore(at(Q), Ticked, given=deadline_ahead, why="A late timer of something else ends nothing."),
        Row(when=at(Q), on=ClientGone, to=SE, change=_outcome(Outcome.ABANDONED),
            emits=(free_slot, _settle(Outcome.ABANDONED)),
            why="It frees its slot only; the activation or switch goes on."),
        Row(when=at(Q), on=ControllerRestarted, to=SE, change=_outcome(Outcome.ABANDONED),
            emits=(free_slot, _settle(Outcome.ABANDONED)),
            why="Its body and its connection died with the controller."),
        # a place, nothing sent
        Row(when=at(A), on=Sent, to=D, why="From here on nothing is replayed."),
        Row(when=at(A), on=NotAccepted, to=Q, change=displaced, emits=(free_unsent, take_slot),
            why="Only here may a request go elsewhere: nothing was accepted."),
        Row(when=at(A), on=ClientGone, to=SE, change=_outcome(Outcome.ABANDONED),
            emits=(free_unsent, _settle(Outcome.ABANDONED)),
            why="The router says so, and the router is who sends."),
        ignore(at(A), Ticked,
               why="Only the router knows whether the first byte left; it says so at once, and a tick then cuts it."),
        Row(when=at(A), on=IncarnationGone, given=same_run, to=SE, change=_outcome(Outcome.CUT),
            emits=(free_proven, answer_gone_unsent, _settle(Outcome.CUT)),
            why="A byte may be under way unreported, so it is not given to another engine."),
        Row(when=at(A), on=ControllerRestarted, to=C_STOP, change=cut,
            why="Whether anything was sent died with the controller."),
        # in the engine, no output
        Row(when=at(D), on=OutputBegun, to=S, change=answering,
            why="Only a tick enforces the deadline: an answer that beats it is an answer."),
        Row(when=at(D), on=ClientGone, given=silent_abort, to=C_ABORT, change=cut, emits=(cut_upstream, abort_work),
            why="The engine acknowledges the end of this id."),
        Row(when=at(D), on=ClientGone, given=silent_closed, to=C_CLOSED, change=cut, emits=(cut_upstream,),
            why="An idle reading alone proves nothing: the request may not have reached the engine's queue."),
        Row(when=at(D), on=ClientGone, given=silent_stop, to=C_STOP, change=cut, emits=(cut_upstream,),
            why="Nothing but the end of the engine proves that it does not work on this."),
        Row(when=at(D), on=Ticked, given=overdue_abort, to=C_ABORT, change=cut,
            emits=(answer_late, cut_upstream, abort_work), why="As if the client had left, but it is told."),
        Row(when=at(D), on=Ticked, given=overdue_closed, to=C_CLOSED, change=cut, emits=(answer_late, cut_upstream),
            why="As if the client had left, but it is told."),
        Row(when=at(D), on=Ticked, given=overdue_stop, to=C_STOP, change=cut, emits=(answer_late, cut_upstream),
            why="As if the client had left, but it is told."),
        ignore(at(D), Ticked, given=deadline_ahead, why="A late timer of something else ends nothing."),
        Row(when=at(D), on=NotAccepted, to=C_STOP, change=cut, emits=(answer_lost,),
            why="Something was on the wire: whether it was taken is not known, so it is not replayed."),
        # in the engine, answering
        Row(when=at(S), on=ClientGone, given=begun_abort, to=C_ABORT, change=cut, emits=(cut_upstream, abort_work),
            why="The engine acknowledges the end of this id."),
        Row(when=at(S), on=ClientGone, given=begun_idle, to=C_IDLE, change=cut, emits=(cut_upstream,),
            why="The engine knew of it, so an idle engine is done with it."),
        Row(when=at(S), on=ClientGone, given=begun_stop, to=C_STOP, change=cut, emits=(cut_upstream,),
            why="Nothing but the end of the engine proves that it does not work on this."),
        ignore(at(S), OutputBegun, why="It has begun already."),
        ignore(at(S), Ticked, why="The deadline bounds the first output; silence after that is reported by the relay."),
        # how an engine ends one
        Row(when=at(D, S), on=Finished, to=CO, change=delivered, emits=(close_record,),
            why="Delivery precedes the record (W17)."),
        Row(when=at(D, S), on=Rejected, to=SE, change=_outcome(Outcome.REJECTED),
            emits=(free_rejected, _settle(Outcome.REJECTED)),
            why="A complete refusal leaves no work behind, so nothing is waited for."),
        Row(when=at(D), on=Errored, given=tells_idle, to=C_IDLE, change=cut_answered,
            emits=(answer_engine_error, cut_upstream),
            why="An error answer is an answer: the engine knew of it. Its place is kept until it reads idle."),
        Row(when=at(D), on=Errored, given=tells_no_idle, to=C_STOP, change=cut_answered,
            emits=(answer_engine_error, cut_upstream), why="It cannot say that it is done."),
        Row(when=at(S), on=Errored, given=begun_abort, to=C_ABORT, change=cut,
            emits=(answer_engine_error, cut_upstream, abort_work),
            why="An answer that broke off or broke the rules may still be computed."),
        Row(when=at(S), on=Errored, given=begun_idle, to=C_IDLE, change=cut,
            emits=(answer_engine_error, cut_upstream),
            why="An answer that broke off or broke the rules may still be computed."),
        Row(when=at(S), on=Errored, given=begun_stop, to=C_STOP, change=cut,
            emits=(answer_engine_error, cut_upstream), why="It cannot say that it is done."),
        Row(when=at(D, S), on=UpstreamLost, to=C_STOP, change=cut, emits=(answer_lost,),
            why="No replay and no failover after acceptance; a lost connection proves nothing."),
        Row(when=at(D, S), on=IncarnationGone, given=same_run, to=SE, change=_outcome(Outcome.CUT),
            emits=(free_proven, answer_engine_gone, _settle(Outcome.CUT)), why="Never replayed."),
        Row(when=at(D, S), on=ControllerRestarted, to=C_STOP, change=cut,
            why="The open stream is gone, the engine may still work on it."),
        # delivered
        Row(when=at(CO), on=Recorded, to=SE, change=_outcome(Outcome.OK),
            emits=(free_delivered, _settle(Outcome.OK)),
            why="The client had its answer already, so it may briefly be counted still."),
        Row(when=at(CO), on=IncarnationGone, given=same_run, to=SE, change=_outcome(Outcome.OK),
            emits=(free_proven, _settle(Outcome.OK)), why="It was delivered; nothing is left to wait for."),
        Row(when=at(CO), on=ControllerRestarted, to=SE, change=_outcome(Outcome.OK),
            emits=(free_delivered, _settle(Outcome.OK)), why="It was delivered, and the engine holds none of it."),
        # cancelling
        Row(when=at(C_ABORT, C_IDLE, C_STOP), on=AbortAcknowledged, given=ended_this, to=SE,
            change=_outcome(Outcome.CANCELLED), emits=(free_proven, _settle(Outcome.CANCELLED)),
            why="A late acknowledgement proves as much as a prompt one."),
        ignore(at(C_ABORT, C_IDLE, C_STOP), AbortAcknowledged, given=ended_other, why="It is not about this request."),
        Row(when=at(C_ABORT), on=AbortUnanswered, given=begun_and_idle_told, to=C_IDLE,
            why="The engine knew of it, so an idle engine is done with it."),
        Row(when=at(C_ABORT), on=AbortUnanswered, given=unproven_otherwise, to=C_STOP,
            why="Neither silence nor an idle reading proves that it is not still to come."),
        Row(when=at(C_ABORT), on=ControllerRestarted, emits=(abort_work,),
            why="Ending an id twice ends it once; whether the first call was answered is not known."),
        Row(when=at(C_IDLE), on=IdleRead, given=idle_after_cut, to=SE, change=_outcome(Outcome.CANCELLED),
            emits=(free_proven, _settle(Outcome.CANCELLED)), why="P-IDLE, and the answer had begun (37)."),
        ignore(at(C_IDLE), IdleRead, given=idle_too_old, why="A reading from before the cut says nothing after it."),
        Row(when=at(C_CLOSED), on=UpstreamEnded, given=eof_is_first, change=eof_noted,
            why="The handler has returned; whether its work is out of the engine is the idle reading's to say."),
        ignore(at(C_CLOSED), UpstreamEnded, given=eof_is_old,
               why="An engine that closes first may finish later."),
        Row(when=at(C_CLOSED), on=IdleRead, given=idle_after_eof, to=SE, change=_outcome(Outcome.CANCELLED),
            emits=(free_closed, _settle(Outcome.CANCELLED)), why="P-CLOSED."),
        ignore(at(C_CLOSED), IdleRead, given=idle_before_eof,
               why="Before its EOF the request may not have reached the engine's queue (37)."),
        Row(when=at(C_CLOSED), on=Ticked, given=eof_overdue, to=C_STOP,
            why="It keeps its place; a drain no longer waits for it."),
        ignore(at(C_CLOSED), Ticked, given=eof_awaited, why="The EOF may still come."),
        Row(when=at(C_CLOSED), on=ControllerRestarted, given=eof_unknown, to=C_STOP,
            why="Who listened for the EOF is gone."),
        ignore(at(C_CLOSED), ControllerRestarted, given=eof_known, why="An idle reading settles it as before."),
        Row(when=at(C_STOP), on=UpstreamEnded, given=eof_proves, to=C_CLOSED, change=eof_noted,
            why="A late EOF proves as much as a prompt one."),
        ignore(at(C_STOP), UpstreamEnded, given=eof_proves_nothing, why="This engine's EOF is not its end."),
        Row(when=CANCELLING, on=IncarnationGone, given=same_run, to=SE, change=_outcome(Outcome.CUT),
            emits=(free_proven, _settle(Outcome.CUT)), why="No process, no work."),
        # what does not concern it
        ignore(PLACED, IncarnationGone, given=other_run, why="Another run's end says nothing of this one."),
        ignore(at(R, Q), IncarnationGone, why="It has no incarnation."),
        Row(when=at(R), on=ControllerRestarted, to=RE, change=_outcome(Outcome.ABANDONED),
            emits=(_settle(Outcome.ABANDONED),), why="Nothing of it was kept."),
        ignore(at(C_IDLE, C_STOP), ControllerRestarted, why="The recorded way to settle it stands."),
        ignore(at(R), ClientGone, why="Whoever classifies it hears of that next."),
        ignore(at(CO) | CANCELLING, ClientGone, why="It had its answer, or was cut already."),
        ignore(at(R, CO, C_ABORT, C_IDLE, C_STOP), Ticked, why="No deadline runs here."),
        ignore(PLACED - at(C_IDLE, C_CLOSED), IdleRead, why="An idle reading settles only what waits for one."),
        ignore(at(A, D, S, CO, C_ABORT, C_IDLE), UpstreamEnded,
               why="It was not cut, or something better than the EOF settles it."),
        ignore(CANCELLING | at(CO), OutputBegun, why="It was cut; what still comes is not relayed."),
        ignore(CANCELLING, Finished, why="It was cut before the end could be told."),
        ignore(CANCELLING, Rejected, why="Cut first: whether the refusal was whole is not known."),
        ignore(CANCELLING | at(CO), Errored, why="It was cut, or had its answer."),
        ignore(CANCELLING | at(CO), UpstreamLost, why="It was cut, or had its answer."),
        ignore(at(C_IDLE, C_CLOSED, C_STOP), AbortUnanswered, why="No abort is waited for."),
        *(ignore(OVER, event, why="It is over.") for event in EVENTS),
        # what cannot come
        refuse(ANY - OVER - at(R), TurnedAway, "internal", why="Refused on arrival or not at all."),
        refuse(ANY - OVER - at(R), WaitBegun, "internal", why="It waits once, from its arrival."),
        refuse(ANY - OVER - at(R, Q), PlaceGiven, "internal", why="It has a place."),
        refuse(ANY - OVER - at(Q), WaitFailed, "internal", why="It does not wait."),
        refuse(ANY - OVER - at(A), Sent, "internal", why="It is sent once, from its place."),
        refuse(ANY - OVER - at(A, D), NotAccepted, "internal", why="It is not on its way."),
        refuse(at(R, Q, A), OutputBegun, "internal", why="It was not sent."),
        refuse(at(R, Q, A, CO), Finished, "internal", why="It was not sent, or is over in the engine."),
        refuse(ANY - OVER - at(CO), Recorded, "internal", why="Only a delivered answer has its record closed."),
        refuse(at(R, Q, A, CO), Rejected, "internal", why="It was not sent, or is over in the engine."),
        refuse(at(R, Q, A), Errored, "internal", why="It was not sent."),
        refuse(at(R, Q, A), UpstreamLost, "internal", why="It was not sent."),
        refuse(at(R, Q), UpstreamEnded, "internal", why="It was not sent."),
        refuse(at(R, Q), IdleRead, "internal", why="It has no engine."),
        refuse(at(R, Q, A, D, S, CO, C_CLOSED), AbortAcknowledged, "internal", why="No abort was asked for."),
        refuse(at(R, Q, A, D, S, CO), AbortUnanswered, "internal", why="No abort was asked for."),
    ),
)  # fmt: skip


def due_at_ms(state: State) -> Millis | None:
    """When a tick would change this request, if nothing else comes first."""
    if state.phase in at(Q, D):
        return state.deadline_ms
    if state.phase is C_CLOSED and state.eof_at_ms is None and state.cut_at_ms is not None:
        return Millis(state.cut_at_ms + EOF_LIMIT_MS)
    return None


def step(state: State, event: Event) -> tuple[State, tuple[Effect | Refused, ...]]:
    """Decide one event. Pure: the same state and event always give the same answer."""
    return REQUEST.step(state, event)


STATUS = (
    {Q: "waiting", C_STOP: "settle_at_stop"}
    | dict.fromkeys((A, D, S, CO), "running")
    | dict.fromkeys((C_ABORT, C_IDLE, C_CLOSED), "settle_when_idle")
)
"""Under which of its counters status shows a request."""

QUESTION_HEADS = ("holds one of the 32 places?", "does a drain wait for it?", "may the engine work on it?", "status")
QUESTIONS = {
    phase: (phase in PLACED, phase in WAITED_FOR, phase in PLACED - at(A, CO), STATUS.get(phase, "")) for phase in Phase
}
"""What a reviewer asks of each phase; `spec/questions.md` shows it."""
