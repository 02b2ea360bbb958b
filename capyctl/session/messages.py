"""What a server and a host say to each other. The host renders command lines itself: no argv travels.

In standalone they travel over two bounded memory channels, between machines over a WebSocket.
Every command has one result. Reports are the host's own news, unasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.fsm.proofs import Aborted, Back, Canary, GoneProof, Quiet, Resident, SameEngine, Unsent, Usable
from capyctl.fsm.types import (
    Bytes,
    DeploymentId,
    Domain,
    HostId,
    Incarnation,
    Millis,
    ProcessIdentity,
    RequestId,
    Residency,
    Role,
    Token,
)
from capyctl.ledger.types import HostPolicy, Observation

# --- commands, server to host -------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Command:
    """`command_id` is the replay key: the same id gives the recorded result and never a second effect."""

    command_id: str


@attrs.frozen(kw_only=True)
class Inspect(Command):
    """Who are you, what do you have, what do you own? Result: Inventory."""


@attrs.frozen(kw_only=True)
class Launch(Command):
    """Journal, spawn gated, prove ready. Reports Spawned on the way. Result: Launched | LaunchRefused | Unresolved."""

    incarnation: Incarnation
    token: Token
    profile: str
    profile_fingerprint: str | None
    served_name: str
    model: str  # absolute directory, or relative to the host's models directory
    digest: str
    document: Mapping[str, Any]  # the completed deployment document; the host renders from it
    context_tokens: int
    slots: int
    allocation: Mapping[Domain, Bytes]  # the cold footprint, checked again against what the host sees
    ready: Mapping[Domain, Bytes]
    deadline_ms: Millis
    parked: Mapping[Domain, Bytes] = attrs.field(factory=dict)
    residency: Residency = Residency.RESTART_ONLY
    pools: Mapping[str, int] = attrs.field(factory=dict)  # what the engine is told of its memory, see ledger's Plan


@attrs.frozen(kw_only=True)
class AwaitIdle(Command):
    """Result: IdleVerdict."""

    incarnation: Incarnation
    limit_ms: Millis


@attrs.frozen(kw_only=True)
class Terminate(Command):
    """Result: Absent | Unresolved."""

    incarnation: Incarnation
    processes: tuple[ProcessIdentity, ...]
    limit_ms: Millis


@attrs.frozen(kw_only=True)
class Probe(Command):
    """Result: ProbeResult."""

    incarnation: Incarnation
    processes: tuple[ProcessIdentity, ...]
    parked: bool = False  # asked for what it still holds, not for an answer
    canary: str | None = None  # asked whether it answers the fixed prompt as it did before its memory was released
    parked_budget: Mapping[Domain, Bytes] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Release(Command):
    """Park: prove quiet, ask the engine once, read what is left. Result: Parked | NotParked | Unresolved.

    Journaled before the call; after that the same id never leads to a second one, whatever became of the first.
    """

    incarnation: Incarnation
    token: Token
    tier: Residency
    budget: Mapping[Domain, Bytes]  # what may be left on each domain
    gate_closed_at_ms: Millis
    processes: tuple[ProcessIdentity, ...]
    limit_ms: Millis


@attrs.frozen(kw_only=True)
class Restore(Command):
    """Wake: look at the files, ask the engine once, read its memory, canary, probe.

    Result: Awake | NotAwake | Unresolved.
    Journaled as a Release is.
    """

    incarnation: Incarnation
    token: Token
    tier: Residency
    digest: str
    canary: str | None
    processes: tuple[ProcessIdentity, ...]
    deadline_ms: Millis


@attrs.frozen(kw_only=True)
class Abort(Command):
    """Ask the engine to end one request by its id. Result: AbortAcknowledged | Refused."""

    incarnation: Incarnation
    request: RequestId


@attrs.frozen(kw_only=True)
class CloseIngress(Command):
    """Cut every upstream of that incarnation and refuse new ones. Result: Done."""

    incarnation: Incarnation


@attrs.frozen(kw_only=True)
class DigestCheckpoint(Command):
    """Result: Checkpoint | Refused."""

    model: str
    document: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class MaterializeSource(Command):
    """Have every source of a deployment complete in its directory. Reports SourceProgress on the way.

    Result: Materialized | Refused.
    """

    document: Mapping[str, Any]
    family: str  # decides which files of a repository are needed


@attrs.frozen(kw_only=True)
class StopMaterializing(Command):
    """Nobody wants what that MaterializeSource fetches any more; what has arrived is kept. Result: Done."""

    materialize: str


@attrs.frozen(kw_only=True)
class PruneSources(Command):
    """Say what is downloaded; with `kept`, remove what lies at no kept place, runs nowhere and is not being fetched.

    Result: Sources, of all, or of what was removed | Refused.
    """

    kept: tuple[str, ...] | None = None  # places below the download directory


@attrs.frozen(kw_only=True)
class ReadLoad(Command):
    """Read that engine's gauges now instead of when it is due; a LoadReport says what they read. Result: Done."""

    incarnation: Incarnation


@attrs.frozen(kw_only=True)
class ReadMemory(Command):
    """Look at the memory now instead of when it is due; a Domains report says what was seen. Result: Done."""


@attrs.frozen(kw_only=True)
class PruneLogs(Command):
    """Delete the engine logs of every deployment but these, and but those that have launches. Result: Done | Refused.

    What was written at `as_of_ms` or later stays: it may be of a deployment that came after this list.
    """

    kept: tuple[DeploymentId, ...]
    as_of_ms: Millis


@attrs.frozen(kw_only=True)
class VerifyStart(Command):
    """Look at installation and files as a launch would, and begin nothing. Result: Done | Refused."""

    profile: str
    profile_fingerprint: str | None
    model: str
    digest: str


# --- results ------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Result:
    command_id: str


@attrs.frozen(kw_only=True)
class Done(Result):
    pass


@attrs.frozen(kw_only=True)
class Refused(Result):
    """Nothing happened."""

    code: str
    message: str


@attrs.frozen(kw_only=True)
class Unresolved(Result):
    """Nobody knows, or it could not be proven: the server keeps every charge."""

    reason: str


@attrs.frozen(kw_only=True)
class Launched(Result):
    processes: tuple[ProcessIdentity, ...]
    usable: Usable
    peak_bytes: Mapping[Domain, Bytes]
    canary: str | None = None  # how it answered the fixed prompt, where its family can be asked


@attrs.frozen(kw_only=True)
class Parked(Result):
    quiet: Quiet
    same: SameEngine
    resident: Mapping[Domain, Resident]


@attrs.frozen(kw_only=True)
class NotParked(Result):
    """It holds its memory as before. `unsent`: nothing was asked of the engine."""

    code: str
    reason: str
    unsent: Unsent | None = None


@attrs.frozen(kw_only=True)
class Awake(Result):
    back: Back
    usable: Usable
    same: SameEngine
    canary: Canary | None = None


@attrs.frozen(kw_only=True)
class NotAwake(Result):
    """The wake failed and the processes are still there. `mismatch`: it answered otherwise than before."""

    code: str
    reason: str
    mismatch: bool = False
    unsent: Unsent | None = None  # nothing was asked of the engine: it is parked as it was


@attrs.frozen(kw_only=True)
class AbortAcknowledged(Result):
    proof: Aborted


@attrs.frozen(kw_only=True)
class LaunchRefused(Result):
    """It failed, or never began, and nothing of it is left."""

    code: str
    reason: str
    proof: GoneProof
    transient: bool


@attrs.frozen(kw_only=True)
class IdleVerdict(Result):
    """idle, busy (at the bound), gone (not listening, 503), silent."""

    verdict: str


@attrs.frozen(kw_only=True)
class Absent(Result):
    proof: GoneProof


@attrs.frozen(kw_only=True)
class ProbeResult(Result):
    same: SameEngine | None
    usable: Usable | None
    gone: GoneProof | None
    reason: str = ""
    resident: Mapping[Domain, Resident] | None = None
    canary: Canary | None = None


@attrs.frozen(kw_only=True)
class Checkpoint(Result):
    """What the digest covers, and the facts that sizing needs (checkpoints room)."""

    digest: str
    weight_bytes: Bytes
    path: str
    facts: Mapping[str, Any]


@attrs.frozen(kw_only=True)
class Materialized(Result):
    """Where the sources lie, in the document's order; each is complete."""

    paths: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Source:
    """A download on a host. Not `complete`: what has arrived of it."""

    place: str
    bytes: int
    complete: bool


@attrs.frozen(kw_only=True)
class Sources(Result):
    sources: tuple[Source, ...]


@attrs.frozen(kw_only=True)
class Profile:
    """One published engine installation, as lists show it."""

    name: str
    engine: str
    version: str
    custom: bool
    deep_park: str
    executable: str
    fingerprint: str
    source: str = "engines.yaml"
    revision: int = 1


@attrs.frozen(kw_only=True)
class Inventory(Result):
    host: HostId
    name: str
    boot_id: str
    policy: HostPolicy
    profiles: tuple[Profile, ...]
    owned: tuple[Incarnation, ...]
    models_root: str
    downloads_root: str | None = None  # below it lies what is downloaded
    lifecycle_activation: str = "on_demand"
    memory_source: str = "meminfo"


# --- reports, host to server ------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Report:
    seen_at_ms: Millis


@attrs.frozen(kw_only=True)
class Spawned(Report):
    incarnation: Incarnation
    token: Token
    processes: tuple[ProcessIdentity, ...]


@attrs.frozen(kw_only=True)
class MemberExit(Report):
    incarnation: Incarnation
    process: ProcessIdentity
    role: Role
    status: int | None
    last_words: str
    unseen: bool = False  # it ended while the host did not run


@attrs.frozen(kw_only=True)
class LoadReport(Report):
    """One reading of an engine's gauges; the engine was asked at `seen_at_ms`."""

    incarnation: Incarnation
    running: int
    waiting: int
    kv_usage_ppm: int | None


@attrs.frozen(kw_only=True)
class Bucket:
    """How many requests took at most `le_us` microseconds; None: any."""

    le_us: int | None
    count: int


@attrs.frozen(kw_only=True)
class Distribution:
    """One figure of an engine's requests since it began: ttft, e2e or queue. `source` is the engine's own series."""

    figure: str
    source: str
    count: int
    sum_us: int
    buckets: tuple[Bucket, ...]


@attrs.frozen(kw_only=True)
class LatencyReport(Report):
    """How long an engine's requests took, by its own histograms; it was asked at `seen_at_ms`."""

    incarnation: Incarnation
    distributions: tuple[Distribution, ...]


@attrs.frozen(kw_only=True)
class EngineSilent(Report):
    """An engine answers no gauge, for longer than slowness explains. Told again while that is so."""

    incarnation: Incarnation
    reason: str


@attrs.frozen(kw_only=True)
class Domains(Report):
    host: HostId
    domains: Mapping[Domain, Observation]


@attrs.frozen(kw_only=True)
class SourceProgress(Report):
    """How far the sources of one MaterializeSource are. `phase`: asking, waiting, downloading, verifying."""

    materialize: str
    phase: str
    done_bytes: Bytes
    total_bytes: Bytes | None


@attrs.frozen(kw_only=True)
class DigestProgress(Report):
    """How many of the bytes that one DigestCheckpoint has to read have been read."""

    digest: str
    done_bytes: Bytes
    total_bytes: Bytes


@attrs.frozen(kw_only=True)
class ProfilesChanged(Report):
    """The merged profiles after `engine add` or `engine remove`."""

    host: HostId
    profiles: tuple[Profile, ...]
