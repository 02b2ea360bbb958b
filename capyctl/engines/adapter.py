"""What every engine family offers to whoever drives its engines, and what it is told of one launch.

A family is driven through `Adapter` alone; the host adds processes, time and proofs, and never learns a
family's name from it. How an answer of an engine reads, everywhere below:

  ConnectionError  nobody listens, the connection broke, or the engine says 503 (still loading, going away)
  TimeoutError     it did not answer within the client's bound: busy or hung, never "gone"
  CapyError        the engine answered, and the answer forbids going on (`effective_args_mismatch`, …)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from capyctl.errors import Refusal
from capyctl.fsm.types import Residency


@attrs.frozen(kw_only=True)
class LaunchFacts:
    """Everything that rendering and readiness of one launch depend on. Amounts are bytes per memory domain.

    `model_dir` is resolved and absolute; `allocation` is the cold footprint, `ready` and `parked` what is charged
    then. `key` guards inference, `admin_key` the control routes: both belong into `env` and never into `argv`.
    """

    served_name: str
    model_dir: Path
    document: Mapping[str, Any]
    context_tokens: int
    slots: int
    allocation: Mapping[str, int]
    ready: Mapping[str, int]
    port: int
    key: str = attrs.field(repr=False)
    state_dir: Path  # <state_dir>/engines/<family>/… is the family's own room, 0700
    log_path: Path
    admin_key: str = attrs.field(default="", repr=False)
    residency: Residency = Residency.RESTART_ONLY  # what this launch may do with its memory; decides its switches
    parked: Mapping[str, int] = attrs.field(factory=dict)
    pools: Mapping[str, int] = attrs.field(factory=dict)  # of the plan, as its `pools`
    capacity: Mapping[str, int] = attrs.field(factory=dict)  # what each domain has in all
    available: Mapping[str, int] = attrs.field(factory=dict)  # what each domain had free when this was prepared
    device_env: Mapping[str, str] = attrs.field(factory=dict)  # shows the engine its cards and no other; the last word
    deadline_s: float = 1800.0  # of the start, from now
    alone: bool = False  # no process is left of any other launch of this family on this host


@attrs.frozen(kw_only=True)
class Command:
    """One command line and its whole environment, `PATH` included. `argv[0]` is absolute; keys are in `env` alone."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = attrs.field(repr=False)


class Client(Protocol):
    """HTTP to one launch on loopback, with its keys; each call is bounded to 5 s and 4 MiB unless said otherwise.

    Returns (status, body). Raises ConnectionError and TimeoutError as above, and never turns them into an
    answer; a body over the bound is a ConnectionError. No redirects, no retries.
    """

    async def get(self, path: str, *, admin: bool = False) -> tuple[int, bytes]: ...

    async def post(
        self, path: str, body: bytes, limit_s: float | None = None, *, admin: bool = False
    ) -> tuple[int, bytes]:
        """`body` is JSON, or empty. `limit_s` replaces the 5 s. `admin`: with the key of control routes."""


class Adapter(Protocol):
    """One family, bound to one registered installation.

    `release` and `restore` are called once per park and per wake, whatever comes of them: neither repeats a
    call, and whoever calls them never does. A Refusal of theirs means that nothing at all was sent; everything
    else that they raise means that nobody knows what the engine did. Their return proves nothing either: memory
    and the canary are read afterwards.
    """

    @property
    def family(self) -> str: ...

    @property
    def eof_settles(self) -> bool:
        """Whether the engine's EOF after our half-close proves that the request's handler returned."""

    @property
    def resets_unread(self) -> bool:
        """Whether it resets a connection only while a part of a request lies unread in it.

        So does every server that just closes: the kernel resets then, and ends in order once all was read. A server
        that lingers zero seconds resets what it has read and begun as well, and nobody can tell the two apart.
        """

    @property
    def parks(self) -> bool:
        """Whether this installation releases its memory and takes it back: the family can, the host lets it."""

    @property
    def aborts(self) -> bool:
        """Whether `abort` ends a request by the id that it was sent with."""

    @property
    def workers_listen(self) -> bool:
        """Whether processes behind the API may listen beyond loopback, on ports of their own.

        True where a library does so whatever it is told: PyTorch's rendezvous store takes every interface, at a
        world of one rank too. The API process, and the leased port, are held to loopback for every family.
        """

    def preflight(self) -> None:
        """Blocking look at the installation before a launch.

        Raises: Refusal `installation_drift`, `engine_config_file`, `toolchain_missing`, `capability_missing:…`.
        """

    def render(self, facts: LaunchFacts) -> Command:
        """Pure apart from creating the family's private directories and helper modules.

        Raises: Refusal with the option's code; `capability_missing:deep_park` for a residency that it cannot keep.
        """

    async def loaded(self, client: Client) -> bool:
        """One poll of the family's readiness: False while it still loads. ConnectionError means "not yet" too."""

    async def verify(self, client: Client, facts: LaunchFacts) -> None:
        """Served name and effective arguments. Raises: Failure `effective_args_mismatch` naming the difference."""

    async def probe(self, client: Client, facts: LaunchFacts, limit_s: float) -> int:
        """One bounded inference; returns the characters of content or reasoning.

        Raises: Failure `launch_failed` on an empty answer or an error status.
        """

    async def gauges(self, client: Client) -> tuple[int, int, int | None]:
        """(running, waiting, KV usage in ppm or None) as the engine itself counts them."""

    async def canary(self, client: Client, facts: LaunchFacts, limit_s: float) -> str | None:
        """What the fixed prompt is answered with, 8 tokens at temperature 0: token ids where the engine gives them,
        else text of at most 4096 bytes. None when this engine cannot be asked.

        Raises: Failure when it answered with an error; `wake_mismatch` when what it answered cannot be right.
        """

    async def quiescent(self, client: Client) -> None:
        """The engine's own word that nothing runs in it, beyond the gauges; asked before `release`.

        Raises: Refusal `not_quiescent`.
        """

    async def release(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        """Give the memory back, as `facts.residency` says."""

    async def restore(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        """Take the memory back, reload what was dropped, and forget every cache of before."""

    async def alive_parked(self, client: Client) -> bool:
        """Whether a parked engine still answers, asked only what may be asked of one without its memory."""

    async def sleeps(self, client: Client) -> bool:
        """Whether it says that some of its memory is still away; False of one that cannot tell.

        Raises: ConnectionError, TimeoutError.
        """

    async def abort(self, client: Client, request_id: str) -> None:
        """Ask the engine to end that request. Raises: Failure when it refused."""

    def failure(self, last_words: Sequence[str]) -> tuple[str, str] | None:
        """(code, one line) when the engine's last lines name a typed failure, else None."""


class RestartOnly:
    """The half of `Adapter` that is the same for every engine which gives its memory back only by ending."""

    @property
    def parks(self) -> bool:
        return False

    @property
    def aborts(self) -> bool:
        return False

    @property
    def workers_listen(self) -> bool:
        return False

    @property
    def resets_unread(self) -> bool:
        return False

    async def canary(self, client: Client, facts: LaunchFacts, limit_s: float) -> str | None:
        return None

    async def quiescent(self, client: Client) -> None:
        return None

    async def release(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        raise Refusal("residency_tier", "this engine gives its memory back only when it stops")

    async def restore(self, client: Client, facts: LaunchFacts, limit_s: float) -> None:
        raise Refusal("residency_tier", "this engine was never parked")

    async def alive_parked(self, client: Client) -> bool:
        return False

    async def sleeps(self, client: Client) -> bool:
        return False

    async def abort(self, client: Client, request_id: str) -> None:
        raise Refusal("unsupported_capability", "this engine ends a request only when its connection closes")
