"""One accepted operator command, or the activation that a request opened, from its receipt to its end.

An operation names the instances it wants somewhere and collects what became of each; waiting clients
only watch it. What arms, sends and proves is the instance's own machine. (Reference: lifecycle 13, 19.)
"""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.types import DeploymentId, Millis, OperationId, Origin, SwitchId


class Phase(enum.Enum):
    """Where an operation is."""

    PROPOSED = "proposed"  # a command arrived; nothing is stored
    ACCEPTED = "accepted"  # the receipt is durable, no step is armed
    RUNNING = "running"  # at least one step was armed
    SUCCEEDED = "succeeded"  # every instance reached the target
    PARTIAL = "partial"  # some did, some failed
    FAILED = "failed"  # none did
    UNCERTAIN = "uncertain"  # the outcome of some step is unknown; accounting is held
    SUPERSEDED = "superseded"  # replaced before any step was armed
    EXPIRED = "expired"  # its deadline passed before any step was armed


class Kind(enum.Enum):
    """What an operation wants of each instance it names."""

    START = "start"
    STOP = "stop"
    PARK = "park"
    DELETE = "delete"
    INITIALIZE = "initialize"
    DRAIN = "drain"


class Result(enum.Enum):
    """What became of one instance of an operation."""

    PENDING = "pending"
    MET = "met"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Seen(enum.Enum):
    """What is stored under a command's idempotency key."""

    NEW = "new"
    SAME = "same"  # the same key with the same body
    OTHER = "other"  # the same key with another body


# --- state ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Target:
    """One instance of an operation, and what became of it."""

    index: int
    result: Result = Result.PENDING
    code: str | None = None
    reason: str = ""


@attrs.frozen(kw_only=True)
class State:
    """`waiting_code` says why the last unplaced target waits, and names the expiry. `joined` counts who joined."""

    phase: Phase = Phase.PROPOSED
    operation: OperationId
    deployment: DeploymentId
    kind: Kind
    origin: Origin
    accepted_at_ms: Millis | None = None
    deadline_ms: Millis | None = None
    targets: tuple[Target, ...] = ()
    joined: int = 0
    switch: SwitchId | None = None
    waiting_code: str | None = None
    waiting_reason: str = ""
    superseded_by: OperationId | None = None
    ended_at_ms: Millis | None = None
    code: str | None = None
    reason: str = ""


# --- events ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Event:
    """A fact about one operation, and when it was seen."""

    now_ms: Millis


@attrs.frozen(kw_only=True)
class Submitted(Event):
    """The command as it met the stored world.

    `stop_runs`: a stop of the deployment is open. `start_open`: an activation of it is open.
    `conflict`: some named instance has an open step that excludes this one.
    """

    indices: tuple[int, ...]
    deadline_ms: Millis | None = None
    seen: Seen = Seen.NEW
    stop_runs: bool = False
    start_open: bool = False
    conflict: bool = False


@attrs.frozen(kw_only=True)
class Joined(Event):
    """Another command or request asked for the same and joined."""


@attrs.frozen(kw_only=True)
class StepArmed(Event):
    """The first effect for one of its instances is armed."""

    index: int


@attrs.frozen(kw_only=True)
class Waited(Event):
    """A target could not be placed yet; `code` and `reason` say what is in the way, in figures."""

    index: int
    code: str
    reason: str


@attrs.frozen(kw_only=True)
class SwitchOpened(Event):
    """A switch makes room for it."""

    switch: SwitchId


@attrs.frozen(kw_only=True)
class TargetReported(Event):
    """What became of one instance. A later report corrects UNKNOWN, and nothing else."""

    index: int
    result: Result
    code: str | None = None
    reason: str = ""


@attrs.frozen(kw_only=True)
class Replaced(Event):
    """A stop was accepted over it."""

    by: OperationId


@attrs.frozen(kw_only=True)
class Ticked(Event):
    """Time passed."""


# --- effects --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Effect:
    """An order about one operation."""

    operation: OperationId


@attrs.frozen(kw_only=True)
class GiveReceipt(Effect):
    """Answer the command with a fresh receipt, once it is durable."""


@attrs.frozen(kw_only=True)
class ReplayReceipt(Effect):
    """Answer with the receipt stored under the key; nothing is created."""


@attrs.frozen(kw_only=True)
class JoinOpen(Effect):
    """Answer with the receipt of the open activation, `joined: true`."""


@attrs.frozen(kw_only=True)
class DropPlans(Effect):
    """Forget its planned and held steps: none was armed (P-NONE-WAITING)."""


@attrs.frozen(kw_only=True)
class Conclude(Effect):
    """Tell whoever watches that it ended, and how."""

    phase: Phase
    code: str | None
    reason: str
