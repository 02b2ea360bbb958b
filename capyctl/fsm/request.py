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
    """How an engine build can prove that it is done with a request (lifecycle 2.2)."""

    abort_by_id: bool = False
    idle_signal: bool = True
    eof_proves_end: bool = False


@attrs.frozen(kw_only=True)
class State:
    """`deadline_ms` bounds the first output. `begun`: the engine has sent something of an answer, or an error."""

    phase: Phase = Phase.RECEIVED
    request: RequestId
    stream: bool
    arrived_at_ms: Millis
    deadline_ms: Millis
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
    """Time passed. `places_full`: all 32 places of its deployment are held."""

    places_full: bool = False


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
