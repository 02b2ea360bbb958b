"""Everything that can be told to the world. Facts, in the past tense, each stamped with the time.

Commands come from operators, outcomes from hosts (through the driver), requests from the router.
The driver feeds them one at a time; nothing else changes the world.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from capyctl.control.spec import Spec
from capyctl.fsm.proofs import Aborted, Back, Canary, GoneProof, Quiet, Resident, SameEngine, Unsent, Usable
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Domain,
    HostId,
    Incarnation,
    Millis,
    OperationId,
    ProcessIdentity,
    RequestId,
    Residency,
    Role,
    SwitchId,
    Token,
)
from capyctl.ledger.types import HostPolicy, Observation, Plan


@attrs.frozen(kw_only=True)
class Event:
    """A fact, and when it was seen (Unix milliseconds)."""

    now_ms: Millis


# --- operators ---------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Command:
    """Identity of one operator command: the receipt is replayed for the same key and digest.

    `operation` is a fresh ULID, used if the command opens an operation; `switch` likewise.
    """

    key: str  # "<principal> <method> <target> <idempotency key>"
    digest: str  # of the canonical body
    operation: OperationId
    switch: SwitchId


@attrs.frozen(kw_only=True)
class DeployAsked(Event):
    """Create (`expected_revision` None) or revise a deployment. `deployment` is a fresh ULID for a create."""

    command: Command
    deployment: DeploymentId
    spec: Spec
    expected_revision: int | None = None
    activate: bool = False
    evict: bool = False
    deadline_ms: Millis | None = None


@attrs.frozen(kw_only=True)
class StartAsked(Event):
    """`park`: each instance is parked once it is proven, and only then the next one is started (preinitialize)."""

    command: Command
    deployment: DeploymentId
    expected_revision: int | None = None
    evict: bool = False
    deadline_ms: Millis | None = None
    initialize_ms: Millis | None = None
    park: bool = False


@attrs.frozen(kw_only=True)
class Member:
    """One deployment to be prepared; `operation` is a fresh ULID, used if it opens one."""

    deployment: DeploymentId
    operation: OperationId
    expected_revision: int | None = None


@attrs.frozen(kw_only=True)
class PreinitializeAsked(Event):
    """Prepare these deployments, one after the other: all are accepted, or none."""

    command: Command
    members: tuple[Member, ...]
    deadline_ms: Millis | None = None


@attrs.frozen(kw_only=True)
class StopAsked(Event):
    command: Command
    deployment: DeploymentId
    expected_revision: int | None = None


@attrs.frozen(kw_only=True)
class ParkAsked(Event):
    command: Command
    deployment: DeploymentId
    expected_revision: int | None = None


@attrs.frozen(kw_only=True)
class DeleteAsked(Event):
    command: Command
    deployment: DeploymentId
    stop: bool = False


@attrs.frozen(kw_only=True)
class DrainAsked(Event):
    """Stop every instance on a host with proof; `undrain` lets it take placements again.

    With a `profile`, only what runs on that profile is stopped, and the host takes placements as before.
    """

    command: Command
    host: HostId
    undrain: bool = False
    profile: str | None = None


# --- checkpoints -------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RevisionResolved(Event):
    """The checkpoint was measured and the revision resolves on at least one allowed host.

    `residency` is settled by hardware and model where the document states none; None: as it was accepted.
    `residency_reason` says why, for people; empty: as it was accepted.
    """

    deployment: DeploymentId
    revision: int
    digest: str
    weight_bytes: Bytes
    plans: Mapping[HostId, Plan]
    residency: Residency | None = None
    residency_reason: str = ""


@attrs.frozen(kw_only=True)
class RevisionUnusable(Event):
    """Measured, but it does not resolve (`checkpoint_unusable`, `checkpoint_mismatch`, …), or unmeasurable."""

    deployment: DeploymentId
    revision: int
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class StartVerified(Event):
    """Answer to VerifyStart: a start could begin there (`code` None), or what it would be refused with.

    `looked` False: the host could not be asked, or did not answer; that says nothing about the start.
    """

    deployment: DeploymentId
    revision: int
    digest: str
    host: HostId
    code: str | None = None
    reason: str = ""
    looked: bool = True


# --- hosts -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class HostOnline(Event):
    """A host's session is up. The first thing a controller session hears of it, before any probe.

    `installations`: profile -> which installation it runs, in words that change when it does.
    """

    policy: HostPolicy
    boot_id: str
    installations: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class ProfilesPublished(Event):
    """An engine was registered, exchanged or removed: what every profile of a host runs from now on."""

    host: HostId
    installations: Mapping[str, str]


@attrs.frozen(kw_only=True)
class HostOffline(Event):
    host: HostId
    reason: str


@attrs.frozen(kw_only=True)
class Observed(Event):
    """One coherent sample of every domain of a host."""

    host: HostId
    domains: Mapping[Domain, Observation]


# --- outcomes of orders: they carry the incarnation and the order's token -----------------------


@attrs.frozen(kw_only=True)
class Outcome(Event):
    incarnation: Incarnation
    token: Token


@attrs.frozen(kw_only=True)
class Spawned(Outcome):
    """The host journaled the launch and recorded its processes; it is loading."""

    processes: tuple[ProcessIdentity, ...]


@attrs.frozen(kw_only=True)
class LaunchReady(Outcome):
    processes: tuple[ProcessIdentity, ...]
    usable: Usable
    canary: str | None = None
    peak_bytes: Mapping[Domain, Bytes] = attrs.field(factory=dict)  # the most it held; empty: not to be told


@attrs.frozen(kw_only=True)
class LaunchFailed(Outcome):
    """The launch ended and nothing of it is left. `transient` reasons may be tried again in the operation."""

    code: str
    reason: str
    proof: GoneProof | Unsent
    transient: bool


@attrs.frozen(kw_only=True)
class OrderLost(Outcome):
    """Nobody knows whether the order with this token took effect."""

    reason: str


@attrs.frozen(kw_only=True)
class IdleGateEnded(Outcome):
    """Answer to AwaitIdle. `verdict`: idle, busy (at the bound), gone (not listening, 503) or silent."""

    verdict: str


@attrs.frozen(kw_only=True)
class Terminated(Outcome):
    proof: GoneProof


@attrs.frozen(kw_only=True)
class TerminateUnproven(Outcome):
    reason: str


@attrs.frozen(kw_only=True)
class Probed(Outcome):
    """Answer to Probe. `gone` when nothing of the launch is left; else `same` and `usable` as far as proven."""

    same: SameEngine | None = None
    usable: Usable | None = None
    gone: GoneProof | None = None
    resident: Mapping[Domain, Resident] | None = None
    canary: Canary | None = None
    reason: str = ""


@attrs.frozen(kw_only=True)
class ParkConfirmed(Outcome):
    quiet: Quiet
    same: SameEngine
    resident: Mapping[Domain, Resident]


@attrs.frozen(kw_only=True)
class ParkRefused(Outcome):
    """The release did not happen, and nothing changed (`not_quiescent`, host refusal)."""

    code: str
    reason: str
    unsent: Unsent | None = None  # it was refused before anything was sent


@attrs.frozen(kw_only=True)
class WakeConfirmed(Outcome):
    back: Back
    usable: Usable
    canary: Canary | None
    same: SameEngine


@attrs.frozen(kw_only=True)
class WakeFailed(Outcome):
    """The wake failed, the processes are still recorded. `mismatch`: it answered otherwise than before.

    `unsent`: nothing was asked of the engine, which is parked as it was.
    """

    code: str
    reason: str
    mismatch: bool = False
    unsent: Unsent | None = None


# --- facts about a running engine ----------------------------------------------------------------


@attrs.frozen(kw_only=True)
class EngineExited(Event):
    incarnation: Incarnation
    role: Role
    status: int | None
    reason: str  # the engine's last words, redacted
    unseen: bool = False  # it ended while its host did not run


@attrs.frozen(kw_only=True)
class LoadReported(Event):
    """A reading of the engine's own gauges; `read_at_ms` is when the engine was asked."""

    incarnation: Incarnation
    running: int
    waiting: int
    kv_usage_ppm: int | None
    read_at_ms: Millis


@attrs.frozen(kw_only=True)
class EngineSilent(Event):
    """An engine answers no gauge, for longer than slowness explains. Told again while that is so."""

    incarnation: Incarnation
    reason: str


@attrs.frozen(kw_only=True)
class ReadyStored(Event):
    """The record that this incarnation is READY is durable: its gate may open (W5)."""

    incarnation: Incarnation


# --- requests ------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RequestArrived(Event):
    """Authenticated, parsed, within size. `route` is the client's `model`."""

    request: RequestId
    route: str
    api: str
    stream: bool
    body_bytes: int
    cache_salt: bool = False
    nameable: bool = False  # an engine that is told an id for it would know its work by that id
    vectors: bool = False  # it asks for embeddings or ranks
    allowed: frozenset[str] | None = None  # deployments this key may use; None is all


@attrs.frozen(kw_only=True)
class RequestFact(Event):
    request: RequestId


@attrs.frozen(kw_only=True)
class RequestSent(RequestFact):
    """The first byte is about to go upstream: from here on nothing is replayed."""


@attrs.frozen(kw_only=True)
class RequestNotAccepted(RequestFact):
    """The upstream took nothing: connection refused, gate closed, stale generation."""

    reason: str


@attrs.frozen(kw_only=True)
class FirstOutput(RequestFact):
    """The engine sent its first piece of answer (an opening role-only chunk is none)."""


@attrs.frozen(kw_only=True)
class RequestFinished(RequestFact):
    """The whole answer was relayed, terminator included."""


@attrs.frozen(kw_only=True)
class RequestRecorded(RequestFact):
    """Its completion record is handed to the store."""


@attrs.frozen(kw_only=True)
class EngineRejected(RequestFact):
    """A complete 400/413/422 answer with a JSON body."""

    status: int


@attrs.frozen(kw_only=True)
class EngineErrored(RequestFact):
    """Any other error answer, or an answer that broke the rules of 10.2 (piece too large, silence)."""

    reason: str


@attrs.frozen(kw_only=True)
class UpstreamLost(RequestFact):
    """The connection ended before the answer did, after the engine accepted."""

    reason: str


@attrs.frozen(kw_only=True)
class ClientGone(RequestFact):
    """The client hung up, or read nothing for its bound."""

    reason: str


@attrs.frozen(kw_only=True)
class UpstreamEnded(RequestFact):
    """After our half-close the engine sent EOF: half of P-CLOSED, the idle reading is the other."""

    half_closed_at_ms: Millis
    eof_at_ms: Millis


@attrs.frozen(kw_only=True)
class AbortAcknowledged(RequestFact):
    proof: Aborted


@attrs.frozen(kw_only=True)
class AbortUnanswered(RequestFact):
    pass


# --- clock and controller --------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Ticked(Event):
    """Time passed: sent when the world's next deadline is due."""


@attrs.frozen(kw_only=True)
class ControllerStarted(Event):
    """A new controller session over the stored world: armed orders without an outcome are lost, gates are unproven."""

    session: int


EVENTS: tuple[type[Event], ...] = (
    DeployAsked, StartAsked, PreinitializeAsked, StopAsked, ParkAsked, DeleteAsked, DrainAsked,
    RevisionResolved, RevisionUnusable, StartVerified,
    HostOnline, ProfilesPublished, HostOffline, Observed,
    Spawned, LaunchReady, LaunchFailed, OrderLost, IdleGateEnded, Terminated, TerminateUnproven, Probed,
    ParkConfirmed, ParkRefused, WakeConfirmed, WakeFailed,
    EngineExited, LoadReported, EngineSilent, ReadyStored,
    RequestArrived, RequestSent, RequestNotAccepted, FirstOutput, RequestFinished, RequestRecorded,
    EngineRejected, EngineErrored, UpstreamLost, ClientGone, UpstreamEnded, AbortAcknowledged, AbortUnanswered,
    Ticked, ControllerStarted,
)  # fmt: skip

REQUEST_EVENTS: tuple[type[Event], ...] = (RequestArrived, RequestFact)
"""Left out of the journal (isinstance check): replay compares the durable projection only."""
