"""What the host asks of an engine family, of the registered installations, and of the checkpoint room.

The Protocols stand where they are used; `capyctl.engines` and `capyctl.checkpoints` satisfy them by
shape, without importing this file. For that reason only plain types and `capyctl.errors` cross here.

How an answer of an engine reads, everywhere below:
  ConnectionError  nobody listens, the connection broke, or the engine says 503 (still loading, going away)
  TimeoutError     it did not answer within the client's bound: busy or hung, never "gone"
  CapyError        the engine answered, and the answer forbids going on (`effective_args_mismatch`, …)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs


@attrs.frozen(kw_only=True)
class LaunchFacts:
    """Everything that rendering and readiness of one launch depend on.

    `model_dir` is resolved and absolute; `allocation` is the cold footprint in bytes per domain;
    `key` is the launch key, which belongs into `env` and never into `argv`.
    """

    served_name: str
    model_dir: Path
    document: Mapping[str, Any]
    context_tokens: int
    slots: int
    allocation: Mapping[str, int]
    ready: Mapping[str, int]
    port: int
    key: str
    state_dir: Path  # <state_dir>/engines/<family>/… is the family's own room, 0700
    log_path: Path


class Rendered(Protocol):
    """One command line. `argv[0]` is absolute; `env` is the whole environment, `PATH` included."""

    @property
    def argv(self) -> Sequence[str]: ...

    @property
    def env(self) -> Mapping[str, str]: ...


class EngineClient(Protocol):
    """HTTP to one launch on loopback, with its key; each call is bounded to 5 s and 4 MiB unless said otherwise.

    Returns (status, body). Raises ConnectionError and TimeoutError as above; a body over the bound is a
    ConnectionError.
    """

    async def get(self, path: str) -> tuple[int, bytes]: ...

    async def post(self, path: str, body: bytes, limit_s: float | None = None) -> tuple[int, bytes]:
        """`body` is JSON. `limit_s` replaces the 5 s of this call."""


class EngineAdapter(Protocol):
    """One family, bound to one registered installation."""

    @property
    def family(self) -> str: ...

    @property
    def eof_settles(self) -> bool:
        """Whether the engine's EOF after our half-close proves that the request's handler returned."""

    def preflight(self) -> None:
        """Blocking look at the installation before a launch.

        Raises: Refusal `installation_drift`, `engine_config_file`, `capability_missing:…`.
        """

    def render(self, facts: LaunchFacts) -> Rendered:
        """Pure apart from creating the family's private directories. Raises: Refusal with the option's code."""

    async def loaded(self, client: EngineClient) -> bool:
        """One poll of the health check: False while it still loads (503). ConnectionError means "not yet" too."""

    async def verify(self, client: EngineClient, facts: LaunchFacts) -> None:
        """Served name and effective arguments. Raises: Failure `effective_args_mismatch` naming the difference."""

    async def probe(self, client: EngineClient, facts: LaunchFacts, limit_s: float) -> int:
        """One bounded inference; returns the characters of content or reasoning.

        Raises: Failure `launch_failed` on an empty answer or an error status.
        """

    async def gauges(self, client: EngineClient) -> tuple[int, int, int | None]:
        """(running, waiting, KV usage in ppm or None) as the engine itself counts them."""

    def failure(self, last_words: Sequence[str]) -> tuple[str, str] | None:
        """(code, one line) when the engine's last lines name a typed failure, else None."""


class EngineProfile(Protocol):
    """One registered installation, as lists show it (the fields of session's Profile)."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def custom(self) -> bool: ...
    @property
    def deep_park(self) -> str: ...
    @property
    def executable(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def revision(self) -> int: ...


class EngineRegistry(Protocol):
    """The merged profiles of `engines.yaml` and of the role document. Reads are from memory."""

    def profiles(self) -> Sequence[EngineProfile]: ...

    def adapter(self, profile: str) -> EngineAdapter:
        """Raises: Refusal `not_found` naming the registered profiles."""


class Measured(Protocol):
    """A checkpoint as the digest found it."""

    @property
    def digest(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...


class Checkpoints(Protocol):
    """Blocking; the host calls it in a thread. A cache of stat identities is theirs."""

    def measure(self, model_dir: Path, document: Mapping[str, Any]) -> Measured:
        """Digest the directory and read its headers. Raises: Refusal `checkpoint_unusable`, `not_found`, …"""

    def verify(self, model_dir: Path, digest: str) -> None:
        """P-DIGEST before a launch: stat identities, else a full rehash. Raises: Refusal `checkpoint_mismatch`."""
