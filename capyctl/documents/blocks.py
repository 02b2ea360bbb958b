"""Blocks that role documents share: listeners, queues, models, engines.

A server setting keeps its shape under `server.` and a host setting under `host.` of a standalone
document, so each block is written once. Source: config 4, 5.
"""

# The calls in defaults below build immutable values or attrs fields: nothing is shared by mistake.
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import attrs

from capyctl.documents import strict
from capyctl.documents.scalars import (
    AbsolutePath,
    Argument,
    EnvName,
    EnvPattern,
    EnvValue,
    HostName,
    HttpsUrl,
    Name,
    PeerAddress,
    SecretFile,
    SecretRef,
    SocketAddress,
)
from capyctl.documents.strict import Wrong, at_least, no_more_than, within
from capyctl.units import Duration, Size, parse_size


def duration(default: str, low: str, high: str) -> Any:
    """A field: a duration between two bounds. Any: attrs types its fields by their default."""
    from capyctl.units import parse_duration

    bounds = (parse_duration(low), parse_duration(high))
    value = parse_duration(default)
    return attrs.field(factory=lambda: value, validator=within(*bounds))


def amount(default: str) -> Any:
    """A field: a size with a default. Any: as above."""
    value = parse_size(default)
    return attrs.field(factory=lambda: value)


# ---------------------------------------------------------------- the server's half


@attrs.frozen(kw_only=True)
class InferenceListener:
    """Where clients connect. `allowed_origins` answers browsers of those origins; empty answers none."""

    bind: SocketAddress = attrs.field(factory=lambda: SocketAddress("0.0.0.0", 8443))
    authentication: Literal["api_key", "none"] = "api_key"
    allowed_origins: tuple[str, ...] = attrs.field(default=(), validator=no_more_than(64))

    def __attrs_post_init__(self) -> None:
        for index, origin in enumerate(self.allowed_origins):
            scheme, _, rest = origin.partition("://")
            plain = rest and origin.isascii() and origin.isprintable() and not set(rest) & set("/?#@* ")
            if scheme not in ("http", "https") or not plain:
                raise Wrong(("allowed_origins", index), f"{strict.shown(origin)}: expected http(s)://host[:port]")


@attrs.frozen(kw_only=True)
class ManagementListener:
    """Where operators' commands connect; loopback only. Both words for its one authentication are read."""

    bind: SocketAddress = attrs.field(factory=lambda: SocketAddress("127.0.0.1", 7443))
    authentication: Literal["admin_token", "token"] = "admin_token"

    def __attrs_post_init__(self) -> None:
        if not self.bind.loopback:
            raise Wrong(("bind",), f"is {self.bind}; the management listener is for this machine alone, use 127.0.0.1")


@attrs.frozen(kw_only=True)
class Relay:
    """What passes through the endpoint. `max_piece` bounds one line of a stream."""

    max_piece: Size = amount("4MiB")

    def __attrs_post_init__(self) -> None:
        if not Size(64 << 10) <= self.max_piece <= Size(64 << 20):
            raise Wrong(("max_piece",), f"is {self.max_piece}; it must be from 64KiB to 64MiB")


@attrs.frozen(kw_only=True)
class LifecycleDefaults:
    """Idle timers; absent is off."""

    ready_idle_timeout: Duration | None = attrs.field(default=None, validator=at_least(Duration(1_000)))
    parked_idle_timeout: Duration | None = attrs.field(default=None, validator=at_least(Duration(1_000)))


@attrs.frozen(kw_only=True)
class Switching:
    """How long a switch lets a victim's requests finish."""

    drain_timeout: Duration = duration("30s", "1s", "600s")


@attrs.frozen(kw_only=True)
class Shutdown:
    """How long a stopping role lets requests finish. Engines keep running."""

    drain_timeout: Duration = duration("30s", "0s", "600s")


@attrs.frozen(kw_only=True)
class Observability:
    """What answers say about themselves."""

    timing_header: bool = False


@attrs.frozen(kw_only=True)
class ServerGroups:
    """How long a group may stand still."""

    stall_timeout: Duration = duration("120s", "1s", "3600s")


# ---------------------------------------------------------------- the host's half


@attrs.frozen(kw_only=True)
class ModelStore:
    """Where relative model paths resolve; absent means ~/models."""

    path: AbsolutePath | None = None


@attrs.frozen(kw_only=True)
class ModelSources:
    """What the host may download, from where, and how much."""

    huggingface: Literal["allowed", "disabled", "denied"] = "allowed"
    http: Literal["allowed", "disabled", "denied"] = "allowed"
    plain_http: Literal["allowed", "disabled", "denied"] = "disabled"
    max_bytes: Size = amount("500GiB")
    path: AbsolutePath | None = None
    huggingface_endpoint: HttpsUrl = HttpsUrl("https://huggingface.co")
    huggingface_token_file: SecretFile | None = None
    allowed_hosts: tuple[HostName, ...] = attrs.field(default=(), validator=no_more_than(256))


@attrs.frozen(kw_only=True)
class Checkpoints:
    """Whether a declared digest of a local checkpoint is believed without a full read."""

    trust_declared_digest: bool = False


@attrs.frozen(kw_only=True)
class LocalEngine:
    """The role's own installation, published as `local` or `local-<family>`."""

    vllm: AbsolutePath | None = None
    sglang: AbsolutePath | None = None
    tensorfold: AbsolutePath | None = None
    llamacpp: AbsolutePath | None = None
    build_fingerprint: str | None = None
    args: tuple[Argument, ...] = attrs.field(default=(), validator=no_more_than(256))
    kv_cache: Size | None = None
    deep_park: Literal["on", "off"] = "on"
    trust_remote_code: bool = False
    installation_drift: Literal["warn", "refuse"] = "warn"
    cuda_home: AbsolutePath | None = None

    @property
    def installations(self) -> dict[str, str]:
        """Family to executable, for those that are stated."""
        pairs = ((family, getattr(self, family)) for family in ("vllm", "sglang", "tensorfold", "llamacpp"))
        return {family: path for family, path in pairs if path is not None}

    def __attrs_post_init__(self) -> None:
        _check_fingerprint(self.build_fingerprint)
        if self.args and not (self.vllm or self.tensorfold):
            raise Wrong(("args",), "are read by vllm and tensorfold only")


@attrs.frozen(kw_only=True)
class HostLifecycle:
    """`explicit` covers every deployment that may run here."""

    activation: Literal["on_demand", "explicit"] = "on_demand"


@attrs.frozen(kw_only=True)
class PortRange:
    """Ports from start to end, both included."""

    start: int = attrs.field(validator=within(1, 65_535))
    end: int = attrs.field(validator=within(1, 65_535))

    def __attrs_post_init__(self) -> None:
        if self.start > self.end:
            raise Wrong(("start",), f"is {self.start}, after the end, {self.end}")


def ports(start: int, end: int) -> Any:
    """A field: a port range with a default. Any: attrs types its fields by their default."""
    return attrs.field(factory=lambda: PortRange(start=start, end=end))


@attrs.frozen(kw_only=True)
class Queue:
    """How many requests wait, how much of them is kept, and for how long."""

    admission_window: Duration = duration("2s", "1ms", "30s")
    max_pending_per_deployment: int = attrs.field(default=64, validator=within(0, 4096))
    max_pending_total: int = attrs.field(default=256, validator=within(0, 16_384))
    max_buffered_bytes_total: Size = amount("64MiB")
    request_deadline: Duration = duration("600s", "1s", "3600s")
    stream_idle_timeout: Duration = duration("120s", "1s", "3600s")

    def __attrs_post_init__(self) -> None:
        within(Size(0), Size(1 << 30))(
            self, attrs.fields(Queue).max_buffered_bytes_total, self.max_buffered_bytes_total
        )
        if self.admission_window > self.request_deadline:
            raise Wrong(
                ("admission_window",),
                f"is {self.admission_window}, longer than {self.request_deadline}, request_deadline",
            )


@attrs.frozen(kw_only=True)
class StandaloneQueue(Queue):
    """As Queue; one machine that loads big models lets a request wait longer."""

    request_deadline: Duration = duration("1800s", "1s", "3600s")


@attrs.frozen(kw_only=True)
class HostGroups:
    """How the members of a group on this host are reached."""

    peer_address: PeerAddress | None = None
    rendezvous_port_range: PortRange = ports(25_000, 25_099)
    require_rdma: bool = False

    def __attrs_post_init__(self) -> None:
        if self.rendezvous_port_range.start < 1024:
            raise Wrong(
                ("rendezvous_port_range", "start"), f"is {self.rendezvous_port_range.start}; it must be at least 1024"
            )


@attrs.frozen(kw_only=True)
class LogPolicy:
    """Read for older documents; an engine's log is 16 MiB and two older files."""

    max_file_bytes: Size = amount("16MiB")
    retained_files: int = attrs.field(default=3, validator=within(1, 100))


@attrs.frozen(kw_only=True)
class Security:
    """What deployments on this profile may ask for."""

    deep_park: Literal["enabled", "disabled"] | None = None
    trust_remote_code: bool = False
    extra_args: Literal["allowed", "denied"] = "allowed"
    approved_options: tuple[Argument, ...] = attrs.field(default=(), validator=no_more_than(256))
    approved_paths: tuple[AbsolutePath, ...] = attrs.field(default=(), validator=no_more_than(256))
    approved_env: tuple[EnvPattern, ...] = attrs.field(default=(), validator=no_more_than(256))
    installation_drift: Literal["warn", "refuse"] = "warn"
    credential_ref: SecretRef | None = None
    admin_credential_ref: SecretRef | None = None


_PARKING: Final = ("vllm", "sglang")


@attrs.frozen(kw_only=True)
class EngineProfile:
    """One registered engine. The same schema in a role document and in engines.yaml."""

    MOVED: ClassVar[Mapping[str, str]] = {
        "kv_cache_dtype": "state engine_config.kv_cache_dtype in the deployment",
        "block_size_tokens": "state engine_config.vllm.block_size_tokens in the deployment",
        "cpu_offload_bytes": "state engine_config.memory in the deployment",
        "requested_budget": "state engine_config.memory.request in the deployment",
        "recipe": "state recipe in the deployment",
    }

    engine: Literal["vllm", "sglang", "tensorfold", "llamacpp"]
    revision: int = attrs.field(default=1, validator=within(1, 2**31 - 1))
    executable: AbsolutePath
    build_fingerprint: str
    args: tuple[Argument, ...] = attrs.field(default=(), validator=no_more_than(256))
    cuda_home: AbsolutePath | None = None
    env: Mapping[EnvName, EnvValue] = attrs.field(factory=dict, validator=no_more_than(64))
    log_policy: LogPolicy = attrs.field(factory=LogPolicy)
    security: Security = attrs.field(factory=Security)

    @property
    def parks(self) -> bool:
        """Whether deployments on this profile may park: the family can, and it was not turned off."""
        return self.engine in _PARKING and self.security.deep_park != "disabled"

    def __attrs_post_init__(self) -> None:
        _check_fingerprint(self.build_fingerprint)
        if self.engine == "sglang" and self.args:
            raise Wrong(
                ("args",), "sglang takes no arguments fixed by the host; state them in extra_args of a deployment"
            )
        if self.security.deep_park == "enabled" and self.engine not in _PARKING:
            raise Wrong(("security", "deep_park"), f"{self.engine} cannot park", "capability_missing:deep_park")
        if self.security.trust_remote_code and self.engine not in _PARKING:
            raise Wrong(("security", "trust_remote_code"), f"{self.engine} runs no code of a model")


def _check_fingerprint(text: str | None) -> None:
    """Lists print it as it is. Raises Wrong."""
    if text is not None and not (0 < len(text) <= 128 and text.isprintable() and " " not in text):
        raise Wrong(("build_fingerprint",), "expected one word of at most 128 characters")


Profiles = Mapping[Name, EngineProfile]
RESERVED_PROFILES: Final = ("local", "local-vllm", "local-sglang", "local-tensorfold", "local-llamacpp")


def check_reserved(profiles: Profiles, local: LocalEngine) -> None:
    """Refuse a profile under a name that the role's own engine has. Raises Wrong profile_exists."""
    for name in profiles:
        if name in RESERVED_PROFILES and local.installations:
            raise Wrong(
                ("runtime_profiles", name), "is the name of the role's own engine (local_engine)", "profile_exists"
            )
