"""How events and records are spelled on disk. Renaming a class renames no record.

One table, written out: the test that every event has its word fails when somebody adds one without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from capyctl.control import events
from capyctl.fsm import activation, cleanup, residency
from capyctl.session.codec import Codec
from capyctl.session.kinds import PROOFS

EVENTS: Final[Mapping[type[events.Event], str]] = {
    events.DeployAsked: "deploy_asked",
    events.StartAsked: "start_asked",
    events.PreinitializeAsked: "preinitialize_asked",
    events.StopAsked: "stop_asked",
    events.ParkAsked: "park_asked",
    events.DeleteAsked: "delete_asked",
    events.DrainAsked: "drain_asked",
    events.RevisionResolved: "revision_resolved",
    events.RevisionUnusable: "revision_unusable",
    events.StartVerified: "start_verified",
    events.HostOnline: "host_online",
    events.ProfilesPublished: "profiles_published",
    events.HostOffline: "host_offline",
    events.Observed: "observed",
    events.Spawned: "spawned",
    events.LaunchReady: "launch_ready",
    events.LaunchFailed: "launch_failed",
    events.OrderLost: "order_lost",
    events.IdleGateEnded: "idle_gate_ended",
    events.Terminated: "terminated",
    events.TerminateUnproven: "terminate_unproven",
    events.Probed: "probed",
    events.ParkConfirmed: "park_confirmed",
    events.ParkRefused: "park_refused",
    events.WakeConfirmed: "wake_confirmed",
    events.WakeFailed: "wake_failed",
    events.EngineExited: "engine_exited",
    events.LoadReported: "load_reported",
    events.EngineSilent: "engine_silent",
    events.ReadyStored: "ready_stored",
    events.RequestArrived: "request_arrived",
    events.RequestSent: "request_sent",
    events.RequestNotAccepted: "request_not_accepted",
    events.FirstOutput: "first_output",
    events.RequestFinished: "request_finished",
    events.RequestRecorded: "request_recorded",
    events.EngineRejected: "engine_rejected",
    events.EngineErrored: "engine_errored",
    events.UpstreamLost: "upstream_lost",
    events.ClientGone: "client_gone",
    events.UpstreamEnded: "upstream_ended",
    events.AbortAcknowledged: "abort_acknowledged",
    events.AbortUnanswered: "abort_unanswered",
    events.Ticked: "ticked",
    events.ControllerStarted: "controller_started",
}

EVENT_OF: Final[Mapping[str, type[events.Event]]] = {word: kind for kind, word in EVENTS.items()}

LIVES: Final[Mapping[type, str]] = {
    activation.State: "activation",
    residency.State: "residency",
    cleanup.State: "cleanup",
}
"""The three machines of which exactly one is an instance's present one."""

STORE: Final = Codec({**PROOFS, **LIVES})
"""For the store's rows and its journal."""
