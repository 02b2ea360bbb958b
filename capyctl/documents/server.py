"""The server document: listeners, enrolment and timers of the machine that drives hosts. Source: config 4."""

# The calls in defaults below build immutable values or attrs fields: nothing is shared by mistake.
# ruff: noqa: RUF009

from __future__ import annotations

import urllib.parse
from typing import Literal

import attrs

from capyctl.documents.blocks import (
    InferenceListener,
    LifecycleDefaults,
    ManagementListener,
    Observability,
    Relay,
    ServerGroups,
    Shutdown,
    Switching,
    duration,
)
from capyctl.documents.scalars import AbsolutePath, HttpsUrl, Name, SocketAddress
from capyctl.documents.strict import Wrong
from capyctl.units import Duration


@attrs.frozen(kw_only=True)
class BootstrapListener:
    """Where hosts enrol."""

    bind: SocketAddress = attrs.field(factory=lambda: SocketAddress("127.0.0.1", 7444))
    authentication: Literal["server_tls"] = "server_tls"


@attrs.frozen(kw_only=True)
class ControlListener:
    """Where enrolled hosts keep their session."""

    bind: SocketAddress = attrs.field(factory=lambda: SocketAddress("127.0.0.1", 7445))
    authentication: Literal["mutual_tls"] = "mutual_tls"


@attrs.frozen(kw_only=True)
class Listeners:
    """The four listeners of a server. Two of them never share an address and port."""

    inference: InferenceListener = attrs.field(factory=InferenceListener)
    management: ManagementListener = attrs.field(factory=ManagementListener)
    bootstrap: BootstrapListener = attrs.field(factory=BootstrapListener)
    control: ControlListener = attrs.field(factory=ControlListener)

    def __attrs_post_init__(self) -> None:
        seen: list[tuple[str, SocketAddress]] = []
        for name in ("inference", "management", "bootstrap", "control"):
            bind: SocketAddress = getattr(self, name).bind
            for other, taken in seen:
                overlaps = bind.host == taken.host or {bind.host, taken.host} & {"0.0.0.0", "::"}
                if bind.port == taken.port != 0 and overlaps:
                    raise Wrong((name, "bind"), f"is {bind}, where {other} listens too")
            seen.append((name, bind))


@attrs.frozen(kw_only=True)
class Enrollment:
    """What hosts dial; one certificate covers both, so both name one host."""

    bootstrap_address: HttpsUrl
    control_address: HttpsUrl

    def __attrs_post_init__(self) -> None:
        names = ("bootstrap_address", "control_address")
        hosts = [urllib.parse.urlsplit(getattr(self, name)).hostname for name in names]
        for name in names:
            if not getattr(self, name).startswith("https://"):
                raise Wrong((name,), "expected an https:// URL")
        if hosts[0] != hosts[1]:
            raise Wrong(("control_address",), f"names {hosts[1]}, but bootstrap_address names {hosts[0]}")


@attrs.frozen(kw_only=True)
class Control:
    """When a silent host stops getting work, and when its session counts as lost."""

    heartbeat_suspend_after: Duration = duration("5s", "1s", "600s")
    heartbeat_lost_after: Duration = duration("30s", "1s", "3600s")

    def __attrs_post_init__(self) -> None:
        suspend, lost = self.heartbeat_suspend_after, self.heartbeat_lost_after
        if suspend >= lost:
            raise Wrong(
                ("heartbeat_suspend_after",), f"is {suspend}; it must be less than heartbeat_lost_after, {lost}"
            )


@attrs.frozen(kw_only=True)
class Server:
    """One server document. See the module."""

    schema_version: Literal[1]
    kind: Literal["server"]
    name: Name
    state_dir: AbsolutePath
    identity_dir: AbsolutePath
    listeners: Listeners
    enrollment: Enrollment
    relay: Relay = attrs.field(factory=Relay)
    lifecycle_defaults: LifecycleDefaults = attrs.field(factory=LifecycleDefaults)
    switching: Switching = attrs.field(factory=Switching)
    shutdown: Shutdown = attrs.field(factory=Shutdown)
    control: Control = attrs.field(factory=Control)
    groups: ServerGroups = attrs.field(factory=ServerGroups)
    observability: Observability = attrs.field(factory=Observability)

    def __attrs_post_init__(self) -> None:
        check_identity(self.state_dir, self.identity_dir)


def check_identity(state_dir: str, identity_dir: str) -> None:
    """The identity lives in the state directory and nowhere else. Raises Wrong."""
    expected = f"{state_dir.rstrip('/')}/identity"
    if identity_dir != expected:
        raise Wrong(("identity_dir",), f"is {identity_dir}; it can only be {expected}")
