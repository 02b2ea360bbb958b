"""The host document: what a GPU machine has and may give. Limits are literal sizes. Source: config 5."""

# The calls in defaults below build immutable values or attrs fields: nothing is shared by mistake.
# ruff: noqa: RUF009

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Mapping
from typing import Final, Literal

import attrs

from capyctl.documents.blocks import (
    Checkpoints,
    HostGroups,
    HostLifecycle,
    LocalEngine,
    ModelSources,
    ModelStore,
    PortRange,
    Profiles,
    Queue,
    Shutdown,
    check_reserved,
    duration,
    ports,
)
from capyctl.documents.scalars import AbsolutePath, DeviceName, DomainName, Name, SocketAddress
from capyctl.documents.server import check_identity
from capyctl.documents.strict import Wrong, no_more_than, within
from capyctl.units import Auto, Duration, Growth, Size

_PRIVATE: Final = tuple(
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "::1/128", "100.64.0.0/10", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)


@attrs.frozen(kw_only=True)
class Ingress:
    """Where the server sends requests for engines of this host."""

    transport: Literal["trusted_private_link"]
    address: str
    bind: SocketAddress

    def __attrs_post_init__(self) -> None:
        form = "expected http://ip:port of a loopback, 100.64.0.0/10 or private address"
        try:
            parts = urllib.parse.urlsplit(self.address)
            dialled = SocketAddress(parts.hostname or "", parts.port or 0)
            plain = parts.scheme == "http" and not parts.path.strip("/") and not parts.query and parts.username is None
            good = plain and dialled.port and _private(dialled.host)
        except ValueError:
            good = False
        if not good:
            raise Wrong(("address",), form)
        if not _private(self.bind.host):
            raise Wrong(("bind",), f"is {self.bind}; expected a loopback, 100.64.0.0/10 or private address")


def _private(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return any(address in network for network in _PRIVATE)


@attrs.frozen(kw_only=True)
class DomainLimits:
    """One memory domain and its limits."""

    memory: Literal["unified", "distinct", "device"]
    device: DeviceName | None = None
    managed_limit: Size
    free_reserve: Size
    parked_limit: Size
    host_kv_limit: Size = attrs.field(factory=lambda: Size(0))

    def __attrs_post_init__(self) -> None:
        if self.managed_limit == Size(0):
            raise Wrong(("managed_limit",), "is 0B; it must be more than nothing")
        for name in ("parked_limit", "host_kv_limit"):
            if getattr(self, name) > self.managed_limit:
                raise Wrong((name,), f"is {getattr(self, name)}, more than managed_limit, {self.managed_limit}")
        if self.memory == "device" and self.device is None:
            raise Wrong(("device",), "is required for memory: device")
        if self.memory == "device" and self.host_kv_limit != Size(0):
            raise Wrong(("host_kv_limit",), "is not for a card's own memory")
        if self.memory != "device" and self.device is not None:
            raise Wrong(("device",), f"is not for memory: {self.memory}")


@attrs.frozen(kw_only=True)
class DevicePolicy:
    """One card: the domain its memory is, and whether deployments share it."""

    domain: DomainName
    sharing: Literal["shared", "exclusive"] | None = None


@attrs.frozen(kw_only=True)
class HostResourcePolicy:
    """What engines on this host may take."""

    domains: Mapping[DomainName, DomainLimits]
    devices: Mapping[DeviceName, DevicePolicy] = attrs.field(factory=dict)
    device_sharing: Literal["shared", "exclusive"] = "shared"
    max_parked: int = attrs.field(default=4, validator=within(0, 1024))
    observation_ttl: Duration = duration("2s", "100ms", "10s")
    endpoint_port_range: PortRange = ports(8_100, 8_199)
    planner_max_states: int = attrs.field(default=4096, validator=within(1, 1 << 20))
    parked_growth_limit: Growth = Auto.AUTO
    labels: Mapping[Name, str] = attrs.field(factory=dict, validator=no_more_than(64))
    queue: Queue = attrs.field(factory=Queue)
    groups: HostGroups = attrs.field(factory=HostGroups)

    def __attrs_post_init__(self) -> None:
        kinds = {name: limits.memory for name, limits in self.domains.items()}
        pools = [name for name, kind in kinds.items() if kind in ("unified", "distinct")]
        if len(pools) != 1 or ("unified" in kinds.values() and len(kinds) != 1):
            raise Wrong(
                ("domains",),
                "expected one unified domain, or one distinct domain and one device domain for each card",
                "unsupported_gpu_topology",
            )
        for name, device in self.devices.items():
            if device.domain not in self.domains:
                raise Wrong(("devices", name, "domain"), f"there is no domain {device.domain}")
        for domain, limits in self.domains.items():
            if limits.device is None:
                continue
            mapped = self.devices.get(limits.device)
            if mapped is None or mapped.domain != domain:
                raise Wrong(
                    ("domains", domain, "device"),
                    f"{limits.device} is not mapped to {domain}",
                    "device_policy_mismatch",
                )


@attrs.frozen(kw_only=True)
class Host:
    """One host document. See the module."""

    schema_version: Literal[1]
    kind: Literal["host"]
    name: Name
    state_dir: AbsolutePath
    identity_dir: AbsolutePath
    runtime_dir: AbsolutePath | None = None
    hardware_fingerprint: str | None = None
    environment_fingerprint: str | None = None
    load_report_interval: Duration = duration("1s", "250ms", "5s")
    shutdown: Shutdown = attrs.field(factory=Shutdown)
    lifecycle: HostLifecycle = attrs.field(factory=HostLifecycle)
    ingress: Ingress | None = None
    model_store: ModelStore = attrs.field(factory=ModelStore)
    model_sources: ModelSources = attrs.field(factory=ModelSources)
    checkpoints: Checkpoints = attrs.field(factory=Checkpoints)
    engine_logs: Literal["file", "memory"] = "file"
    engine_telemetry: Literal["deny", "allow"] = "deny"
    lmcache: Literal["auto", "off"] = "auto"
    retention: Literal["standard", "zero"] = "standard"
    local_engine: LocalEngine = attrs.field(factory=LocalEngine)
    resource_policy: HostResourcePolicy
    runtime_profiles: Profiles = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        check_identity(self.state_dir, self.identity_dir)
        check_reserved(self.runtime_profiles, self.local_engine)
        if self.local_engine.kv_cache is not None:
            raise Wrong(("local_engine", "kv_cache"), "is for standalone; state engine_config.memory in the deployment")
