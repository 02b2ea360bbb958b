"""How proofs and messages are spelled on the wire and in journals. Renaming a class renames no record.

One table, written out: the test that every message has its word fails when somebody adds one without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from capyctl.fsm import proofs
from capyctl.session import messages
from capyctl.session.codec import KIND, Codec, Malformed

PROOFS: Final[Mapping[type, str]] = {
    proofs.Gone: "gone",
    proofs.NeverLaunched: "never_launched",
    proofs.Rebooted: "rebooted",
    proofs.Usable: "usable",
    proofs.SameEngine: "same_engine",
    proofs.Quiet: "quiet",
    proofs.Resident: "resident",
    proofs.Back: "back",
    proofs.Canary: "canary",
    proofs.Aborted: "aborted",
    proofs.Idle: "idle",
    proofs.Closed: "closed",
    proofs.Unsent: "unsent",
}

COMMANDS: Final[Mapping[type, str]] = {
    messages.Inspect: "inspect",
    messages.Launch: "launch",
    messages.AwaitIdle: "await_idle",
    messages.Terminate: "terminate",
    messages.Probe: "probe",
    messages.Release: "release",
    messages.Restore: "restore",
    messages.Abort: "abort",
    messages.CloseIngress: "close_ingress",
    messages.DigestCheckpoint: "digest_checkpoint",
    messages.MaterializeSource: "materialize_source",
    messages.StopMaterializing: "stop_materializing",
    messages.PruneSources: "prune_sources",
    messages.PruneLogs: "prune_logs",
    messages.ReadLoad: "read_load",
    messages.ReadMemory: "read_memory",
    messages.VerifyStart: "verify_start",
}

RESULTS: Final[Mapping[type, str]] = {
    messages.Done: "done",
    messages.Refused: "refused",
    messages.Unresolved: "unresolved",
    messages.Launched: "launched",
    messages.LaunchRefused: "launch_refused",
    messages.IdleVerdict: "idle_verdict",
    messages.Absent: "absent",
    messages.Parked: "parked",
    messages.NotParked: "not_parked",
    messages.Awake: "awake",
    messages.NotAwake: "not_awake",
    messages.AbortAcknowledged: "abort_acknowledged",
    messages.ProbeResult: "probe_result",
    messages.Checkpoint: "checkpoint",
    messages.Materialized: "materialized",
    messages.Sources: "sources",
    messages.Inventory: "inventory",
}

REPORTS: Final[Mapping[type, str]] = {
    messages.Spawned: "spawned",
    messages.MemberExit: "member_exit",
    messages.LoadReport: "load_report",
    messages.LatencyReport: "latency_report",
    messages.EngineSilent: "engine_silent",
    messages.Domains: "domains",
    messages.ProfilesChanged: "profiles_changed",
    messages.SourceProgress: "source_progress",
    messages.DigestProgress: "digest_progress",
}

Message = messages.Command | messages.Result | messages.Report

SESSION: Final = Codec(PROOFS)
"""For everything between a server and a host, and for a host's own journal."""

_BY_NAME: Final[Mapping[str, type]] = {
    name: kind for table in (COMMANDS, RESULTS, REPORTS) for kind, name in table.items()
}
_NAME_OF: Final[Mapping[type, str]] = {kind: name for name, kind in _BY_NAME.items()}


def encode_message(message: Message) -> dict[str, Any]:
    """One session message as JSON values: `{"kind": …, …}`."""
    return {KIND: _NAME_OF[type(message)], **SESSION.encode(message)}


def decode_message(data: object) -> Message:
    """The message that `encode_message` made. Raises Malformed."""
    if type(data) is not dict or type(data.get(KIND)) is not str or data[KIND] not in _BY_NAME:
        raise Malformed("not a session message")
    rest = dict(data)
    message: Message = SESSION.decode(rest, _BY_NAME[rest.pop(KIND)])
    return message
