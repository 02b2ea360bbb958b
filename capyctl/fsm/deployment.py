"""One deployment's record: what is wanted, which revision counts, and whether its checkpoint may be used.

The record never says whether an engine runs; that is the instances' own. It says who may start them:
an operator stop is lifted by an operator start alone. (Reference: lifecycle 3, 15.)
"""

from __future__ import annotations

import enum

import attrs

from capyctl.fsm.types import Activation, DeploymentId, Millis


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
    """`suspended`: an operator stopped it. `stopped`: indices that an operator stopped one by one."""

    phase: Phase = Phase.ABSENT
    deployment: DeploymentId
    revision: int = 0
    wanted: Wanted = Wanted()
    suspended: bool = False
    stopped: frozenset[int] = frozenset()
    gate: Gate = Gate.PENDING
    gate_code: str | None = None
    gate_reason: str = ""


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
    """A change. `count_only`: only the number of instances differs. `live`: some instance of it is not settled."""

    expected_revision: int
    wanted: Wanted
    count_only: bool = False
    live: bool = False


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
    """An operator parks every READY instance."""

    expected_revision: int | None = None


@attrs.frozen(kw_only=True)
class DeleteAsked(Event):
    """`stop`: end what runs first. `live`: some runtime, charge, lease or open operation is left."""

    stop: bool = False
    live: bool = False


@attrs.frozen(kw_only=True)
class RevisionResolved(Event):
    """The checkpoint was measured, and the revision resolves on at least one allowed host."""

    revision: int


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
    """Plan a stop of these instances; `kind` is operator, instance, revision or delete."""

    indices: tuple[int, ...]
    kind: str


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
