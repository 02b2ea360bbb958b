"""The standalone document: a `server` block and a `host` block for one process on one machine.

Most machines need none of it: every field has a default, and limits follow from the machine.
Source: config 6, 16.1.
"""

# The calls in defaults below build immutable values or attrs fields: nothing is shared by mistake.
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from capyctl.documents import reader, strict
from capyctl.documents.blocks import (
    Checkpoints,
    HostGroups,
    HostLifecycle,
    InferenceListener,
    LifecycleDefaults,
    LocalEngine,
    ManagementListener,
    ModelSources,
    ModelStore,
    Observability,
    PortRange,
    Profiles,
    Relay,
    ServerGroups,
    Shutdown,
    StandaloneQueue,
    Switching,
    check_reserved,
    ports,
)
from capyctl.documents.scalars import AbsolutePath, Name
from capyctl.documents.strict import Wrong
from capyctl.errors import Refusal
from capyctl.units import Auto, Growth, Limit, Percent, Size

_DERIVED = "it is derived from the machine on standalone; leave it out"
_REMOTE = "standalone has no hosts to enrol"


@attrs.frozen(kw_only=True)
class Listeners:
    """The two listeners of one machine."""

    MOVED: ClassVar[Mapping[str, str]] = {"bootstrap": _REMOTE, "control": _REMOTE}

    inference: InferenceListener = attrs.field(factory=InferenceListener)
    management: ManagementListener = attrs.field(factory=ManagementListener)


@attrs.frozen(kw_only=True)
class ServerHalf:
    """The server's settings on one machine."""

    MOVED: ClassVar[Mapping[str, str]] = {"enrollment": _REMOTE, "control": _REMOTE}

    name: Name = Name("local")
    state_dir: AbsolutePath | None = None
    listeners: Listeners = attrs.field(factory=Listeners)
    relay: Relay = attrs.field(factory=Relay)
    switching: Switching = attrs.field(factory=Switching)
    observability: Observability = attrs.field(factory=Observability)
    lifecycle_defaults: LifecycleDefaults = attrs.field(factory=LifecycleDefaults)
    groups: ServerGroups = attrs.field(factory=ServerGroups)


@attrs.frozen(kw_only=True)
class SystemMemory:
    """Limits of the machine's memory: the shared pool, or the RAM beside cards."""

    managed_limit: Limit = Auto.AUTO
    free_reserve: Limit = Auto.AUTO
    parked_limit: Limit = Auto.AUTO

    def __attrs_post_init__(self) -> None:
        if self.managed_limit in (Size(0), Percent(0)):
            raise Wrong(("managed_limit",), f"is {self.managed_limit}; it must be more than nothing")
        if self.free_reserve == Percent(100):
            raise Wrong(("free_reserve",), "is 100%; it must leave something to manage")


@attrs.frozen(kw_only=True)
class MemoryPolicy:
    """How memory is counted; domains are always found, never declared, on standalone."""

    accounting: Literal["auto"] = "auto"
    system: SystemMemory = attrs.field(factory=SystemMemory)


@attrs.frozen(kw_only=True)
class ResourcePolicy:
    """What engines on this machine may take."""

    MOVED: ClassVar[Mapping[str, str]] = {
        "domains": _DERIVED,
        "devices": _DERIVED,
        "device_sharing": _DERIVED,
        "labels": _DERIVED,
        "max_parked": _DERIVED,
        "observation_ttl": _DERIVED,
        "planner_max_states": _DERIVED,
    }

    allowed_devices: Literal["auto"] = "auto"
    memory: MemoryPolicy = attrs.field(factory=MemoryPolicy)
    parked_growth_limit: Growth = Auto.AUTO
    endpoint_port_range: PortRange = ports(8_100, 8_199)
    queue: StandaloneQueue = attrs.field(factory=StandaloneQueue)
    groups: HostGroups = attrs.field(factory=HostGroups)


@attrs.frozen(kw_only=True)
class HostHalf:
    """The host's settings on one machine."""

    MOVED: ClassVar[Mapping[str, str]] = {"ingress": "standalone reaches its engines itself; leave it out"}

    name: Name = Name("local")
    state_dir: AbsolutePath | None = None
    connection: Literal["embedded"] = "embedded"
    runtime_dir: AbsolutePath | None = None
    lifecycle: HostLifecycle = attrs.field(factory=HostLifecycle)
    model_store: ModelStore = attrs.field(factory=ModelStore)
    model_sources: ModelSources = attrs.field(factory=ModelSources)
    checkpoints: Checkpoints = attrs.field(factory=Checkpoints)
    local_engine: LocalEngine = attrs.field(factory=LocalEngine)
    engine_logs: Literal["file", "memory"] = "file"
    engine_telemetry: Literal["deny", "allow"] = "deny"
    lmcache: Literal["auto", "off"] = "auto"
    retention: Literal["standard", "zero"] = "standard"
    resource_policy: ResourcePolicy = attrs.field(factory=ResourcePolicy)
    runtime_profiles: Profiles = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        check_reserved(self.runtime_profiles, self.local_engine)


@attrs.frozen(kw_only=True)
class Standalone:
    """One standalone document. See the module."""

    schema_version: Literal[1] = 1
    kind: Literal["standalone"] = "standalone"
    name: Name = Name("local")
    state_dir: str | None = None
    server: ServerHalf = attrs.field(factory=ServerHalf)
    host: HostHalf = attrs.field(factory=HostHalf)
    shutdown: Shutdown = attrs.field(factory=Shutdown)

    def __attrs_post_init__(self) -> None:
        inference, management = self.server.listeners.inference.bind, self.server.listeners.management.bind
        same_port = inference.port == management.port != 0
        if same_port and (inference.host == management.host or inference.host in ("0.0.0.0", "::")):
            raise Wrong(("server", "listeners", "management", "bind"), f"is {management}, where inference listens too")
        low, high = self.host.resource_policy.endpoint_port_range, (inference, management)
        for address in high:
            if low.start <= address.port <= low.end:
                raise Wrong(
                    ("host", "resource_policy", "endpoint_port_range"),
                    f"is {low.start}-{low.end}, which holds a listener's port, {address.port}",
                )


def check_release(document: Standalone) -> None:
    """Refuse what this release would otherwise silently not do: promises about privacy.

    A start does it, and `validate config`; reading a document for anything else does not. Raises: Refusal.
    """
    if document.host.engine_logs == "memory" or document.host.retention == "zero":
        raise Refusal(
            "unsupported", "host.engine_logs: memory and host.retention: zero are not in this release; logs are files"
        )


def parse_standalone(text: str | bytes | dict[str, Any], source: str) -> Standalone:
    """A standalone document, strictly read. Raises: Refusal invalid_config naming the field."""
    data = text if isinstance(text, dict) else reader.read(text, source)
    return strict.structure(data, Standalone, source)


GENERATED = """\
# CapyCTL on one machine. Written by the first `capyctl start standalone`; yours to edit from now on:
# CapyCTL never rewrites it. What is left out has its default; `capyctl config show` prints every
# setting, its value and where the value comes from.
schema_version: 1
kind: standalone
name: local

server:
  listeners:
    # The OpenAI-compatible endpoint. 0.0.0.0 is every interface; use 127.0.0.1:8443 for this machine alone.
    inference: {bind: "0.0.0.0:8443", authentication: api_key}
    # Where `capyctl` commands connect. Loopback only.
    management: {bind: "127.0.0.1:7443", authentication: admin_token}
  # Idle models stop by themselves after this long. Off unless stated.
  # lifecycle_defaults: {ready_idle_timeout: "15m"}

host:
  # Directory that relative `model:` paths of deployments resolve in.
  # model_store: {path: /srv/models}
  resource_policy:
    memory:
      # What engines may use together, and what must stay free beside them: a size, a percentage, or auto.
      system: {managed_limit: auto, free_reserve: auto, parked_limit: auto}

# How long a stopping CapyCTL lets requests finish. Engines keep running.
shutdown: {drain_timeout: "30s"}
"""
