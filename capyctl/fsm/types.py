"""Identities and units shared by every pure room. Plain values: no behaviour beyond their text form."""

from __future__ import annotations

import enum
from typing import NewType

import attrs

DeploymentId = NewType("DeploymentId", str)  # ULID, stable over start/park/stop/revision
OperationId = NewType("OperationId", str)  # ULID of one accepted command
RequestId = NewType("RequestId", str)  # ULID of one inference request
SwitchId = NewType("SwitchId", str)  # ULID of one eviction plan in progress
HostId = NewType("HostId", str)  # ULID; survives rename and reconnect
Domain = NewType("Domain", str)  # memory domain of a host: "unified", "system", "gpu0"
Device = NewType("Device", str)  # "gpu0"
Generation = NewType("Generation", int)  # per deployment, strictly rising, drawn at a cold arm only
Token = NewType("Token", int)  # fences one armed step; strictly rising over the whole world
Millis = NewType("Millis", int)  # Unix milliseconds, or a span of them
Bytes = NewType("Bytes", int)  # never negative


@attrs.frozen(cache_hash=True)
class Lane:
    """(deployment, instance index): the key that orders effects, at most one in flight."""

    deployment: DeploymentId
    index: int

    def __lt__(self, other: Lane) -> bool:  # written out: sorted and looked up wherever the world is
        return (self.deployment, self.index) < (other.deployment, other.index)

    def __str__(self) -> str:
        return f"{self.deployment}/{self.index}"

    @property
    def owner(self) -> str:
        """The ledger's owner key of this lane."""
        return f"deployment:{self.deployment}/instance:{self.index}"


@attrs.frozen(cache_hash=True)
class Incarnation:
    """One run of one instance: what dispatch, logs and settlement are fenced by."""

    lane: Lane
    generation: Generation

    def __lt__(self, other: Incarnation) -> bool:
        return (self.lane, self.generation) < (other.lane, other.generation)

    def __str__(self) -> str:
        return f"{self.lane}@{self.generation}"


class Role(enum.Enum):
    """What a recorded process is to its engine: only `api` and `worker` exits are engine exits."""

    API = "api"
    WORKER = "worker"
    HELPER = "helper"


@attrs.frozen(order=True)
class ProcessIdentity:
    """A process that cannot be mistaken for another one: the pid alone is reused, the triple is not.

    `start_ticks` is field 22 of /proc/<pid>/stat; `boot_id` is /proc/sys/kernel/random/boot_id.
    """

    pid: int
    boot_id: str
    start_ticks: int
    role: Role = attrs.field(default=Role.API, eq=False)  # what it is to its engine is no part of who it is
    number: int = attrs.field(default=0, eq=False)  # the N of worker-N and helper-N


class Residency(enum.Enum):
    """The one declared tier of a deployment; there is no ladder at run time."""

    RESTART_ONLY = "restart_only"
    HOST_BACKED = "host_backed"
    DEEP = "deep"

    @property
    def parks(self) -> bool:
        return self is not Residency.RESTART_ONLY


class Activation(enum.Enum):
    """Who may start a deployment: a request, or an operator alone."""

    ON_DEMAND = "on_demand"
    EXPLICIT = "explicit"


class Origin(enum.Enum):
    """Who asked for an activation or a park."""

    OPERATOR = "operator"
    REQUEST = "request"
    SWITCH = "switch"
    IDLE = "idle"
    PREINIT = "preinit"
    COUNT = "count"
    DRAIN = "drain"


class StopKind(enum.Enum):
    """Why a run ends (lifecycle 20). Only `operator` and `delete` close on-demand activation."""

    OPERATOR = "operator"
    INSTANCE = "instance"
    DELETE = "delete"
    PRESSURE = "pressure"
    IDLE = "idle"
    RECLAIM = "reclaim"
    GROWTH = "growth"
    CUT_REQUEST = "cut_request"
    DRAIN = "drain"
    REVISION = "revision"
    EXIT = "exit"
    MISMATCH = "mismatch"
    SATURATION = "saturation"
    PROFILE = "profile"
    FAILED_WAKE = "failed_wake"
    FAILED_PARK = "failed_park"
    FAILED_START = "failed_start"


class Phase(enum.Enum):
    """Ledger phases (memory 4.1). Reconciling has none of its own: it keeps the larger of two."""

    NONE = "none"
    COLD = "cold"
    READY = "ready"
    PARKING = "parking"
    PARKED = "parked"
    WAKE = "wake"
