"""Everything the world can order. The driver performs each at most once per token, after its commit.

Orders to a host carry the incarnation and a token; their outcome is an event with both. Orders to
the router carry a request. `lane` is the key that orders effects: at most one in flight per lane.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.fsm.types import (
    DeploymentId,
    HostId,
    Incarnation,
    Lane,
    Millis,
    OperationId,
    ProcessIdentity,
    RequestId,
    Residency,
    Token,
)
from capyctl.ledger.types import Plan


@attrs.frozen(kw_only=True)
class Order:
    """Base of all orders."""

    @property
    def lane(self) -> Lane | None:
        return None


# --- to a host: performed after the commit, one at a time per lane ------------------------------


@attrs.frozen(kw_only=True)
class HostOrder(Order):
    incarnation: Incarnation
    token: Token
    host: HostId

    @property
    def lane(self) -> Lane | None:
        return self.incarnation.lane


@attrs.frozen(kw_only=True)
class Launch(HostOrder):
    """Spawn and prove ready. Outcome: Spawned, then LaunchReady | LaunchFailed | OrderLost."""

    revision: int
    plan: Plan
    digest: str
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class AwaitIdle(HostOrder):
    """Wait until the engine reads idle, at most `limit_ms`. Outcome: IdleGateEnded | OrderLost."""

    limit_ms: Millis


@attrs.frozen(kw_only=True)
class Terminate(HostOrder):
    """Close the upstreams, SIGTERM, wait, SIGKILL to the group. Outcome: Terminated | TerminateUnproven | OrderLost."""

    processes: tuple[ProcessIdentity, ...]
    limit_ms: Millis


@attrs.frozen(kw_only=True)
class Probe(HostOrder):
    """Is it still the recorded engine, and does it answer? Outcome: Probed | OrderLost."""

    processes: tuple[ProcessIdentity, ...]
    parked: bool = False  # asked for what it still holds, not for an answer
    canary: str | None = None  # asked whether it answers the fixed prompt as it did before its memory was released


@attrs.frozen(kw_only=True)
class Release(HostOrder):
    """Park. Sent once, never repeated. Outcome: ParkConfirmed | ParkRefused | OrderLost."""

    tier: Residency
    plan: Plan
    gate_closed_at_ms: Millis
    processes: tuple[ProcessIdentity, ...]
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class Restore(HostOrder):
    """Wake. Sent once. Outcome: WakeConfirmed | WakeFailed | OrderLost."""

    tier: Residency
    digest: str
    canary: str | None
    deadline_ms: Millis
    processes: tuple[ProcessIdentity, ...]


@attrs.frozen(kw_only=True)
class ConfirmStored(Order):
    """Feed ReadyStored when the commit that holds this order is durable."""

    incarnation: Incarnation


@attrs.frozen(kw_only=True)
class Measure(Order):
    """Have the model on an allowed host, digest it and resolve it. Outcome: RevisionResolved | RevisionUnusable."""

    deployment: DeploymentId
    revision: int


@attrs.frozen(kw_only=True)
class StopFetching(Order):
    """Nobody wants the model of a deployment any more: end its download, if there is one.

    No outcome of its own: the Measure that it belongs to ends with the reason.
    """

    deployment: DeploymentId


@attrs.frozen(kw_only=True)
class VerifyStart(Order):
    """Look whether a start or wake could begin on `host`: its installation, and the files that were measured.

    Nothing is begun. Outcome: StartVerified.
    """

    deployment: DeploymentId
    revision: int
    digest: str
    host: HostId


@attrs.frozen(kw_only=True)
class PruneLogs(Order):
    """Delete the engine logs of every deployment but `kept`, as they were at `as_of_ms`.

    No outcome: it is ordered again whenever the host comes online.
    """

    host: HostId
    kept: tuple[DeploymentId, ...]
    as_of_ms: Millis


@attrs.frozen(kw_only=True)
class ReadLoad(Order):
    """Read this engine's gauges now: everything that a drain waited for has ended, and its own word is what lacks.

    It changes nothing, so it is asked for at once. No outcome: the answer is a LoadReported, and one that is lost
    is followed by the host's next regular reading.
    """

    incarnation: Incarnation
    host: HostId


@attrs.frozen(kw_only=True)
class ReadMemory(Order):
    """Look at this host's memory now: something came free there, and a switch waits for a sample that is newer.

    As with ReadLoad: at once, and the answer is an Observed.
    """

    host: HostId


# --- to the router: performed at once, nothing waits for the disk ---------------------------------


@attrs.frozen(kw_only=True)
class RouterOrder(Order):
    request: RequestId


@attrs.frozen(kw_only=True)
class Admit(RouterOrder):
    """It has a place: dispatch to this incarnation."""

    incarnation: Incarnation
    host: HostId
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class Answer(RouterOrder):
    """Refuse or end the request with this code; the client has had no answer byte from an engine."""

    code: str
    message: str
    retry_after_s: int | None = None


@attrs.frozen(kw_only=True)
class Cut(RouterOrder):
    """Close the upstream connection of a running request, and tell its client `code`."""

    code: str
    message: str


@attrs.frozen(kw_only=True)
class Abort(RouterOrder):
    """Ask the engine to end this request id. Outcome: AbortAcknowledged | AbortUnanswered."""

    incarnation: Incarnation
    host: HostId


@attrs.frozen(kw_only=True)
class Settled(RouterOrder):
    """Terminal: `outcome` is ok, rejected, cancelled, cut, abandoned, expired, failed. For records and counters."""

    outcome: str
    deployment: DeploymentId | None
    incarnation: Incarnation | None


# --- to the operator ---------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class MemberReceipt:
    """What was accepted for one deployment of a command about several."""

    operation: OperationId
    deployment: DeploymentId
    revision: int
    joined: bool = False


@attrs.frozen(kw_only=True)
class Receipt:
    """What a command was answered, kept for replay."""

    operation: OperationId | None
    deployment: DeploymentId | None
    revision: int | None
    joined: bool = False
    switch: str | None = None
    victims: tuple[str, ...] = ()
    checkpoint_pending: bool = False
    members: tuple[MemberReceipt, ...] = ()


@attrs.frozen(kw_only=True)
class Reply(Order):
    """Answer the command with this key, once the commit is durable: a receipt, or a refusal with figures."""

    key: str
    receipt: Receipt | None = None
    code: str | None = None
    message: str = ""
    details: Mapping[str, Any] = attrs.field(factory=dict)
