"""What the router needs: a desk that gives requests a place, and an upstream that carries them.

The router knows HTTP; it knows neither the world nor an engine. The desk is implemented by the
server's driver, the upstream by the host's ingress.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import trio

from capyctl.fsm.types import HostId, Incarnation, Millis, RequestId


@attrs.frozen(kw_only=True)
class Arrival:
    """An authenticated, parsed request. `route` is the client's `model`.

    `nameable`: an engine that is told an id for it would know its work by that id. `vectors`: it asks for embeddings
    or ranks.
    """

    request: RequestId
    route: str
    api: str
    stream: bool
    body_bytes: int
    cache_salt: bool = False
    nameable: bool = False
    vectors: bool = False
    allowed: frozenset[str] | None = None


@attrs.frozen(kw_only=True)
class Place:
    """Where to dispatch. `left_ms`: how long the first output may take; `cache_scope` is deployment and revision.

    `named`: the engine must be told the request's id, since by that id it will be asked to end it.
    """

    incarnation: Incarnation
    host: HostId
    served_name: str
    left_ms: Millis
    cache_scope: str = ""
    named: bool = False


@attrs.frozen(kw_only=True)
class Waiting:
    """What a keep-alive comment says: the deployment's published state, the place in the queue, an estimate.

    `why`: what it waits for, where that is more than the state.
    """

    state: str
    position: int
    estimate_s: int | None
    why: str = ""


class Ticket(Protocol):
    """One request's dealings with the world. All but `place` are plain calls that never block."""

    request: RequestId

    async def place(self) -> Place:
        """Wait for a place. Raises CapyError when the world refuses or expires the request."""

    def waiting(self) -> Waiting: ...

    def sent(self) -> None:
        """The first byte goes upstream now."""

    def not_accepted(self, reason: str) -> None:
        """The upstream took nothing; `place()` may be awaited again."""

    def first_output(self) -> None: ...

    def finished(self) -> None:
        """The whole answer has been written to the client."""

    def rejected(self, status: int) -> None: ...

    def errored(self, reason: str) -> None: ...

    def upstream_lost(self, reason: str) -> None: ...

    def client_gone(self, reason: str) -> None: ...

    @property
    def cut(self) -> trio.Event:
        """Set when the world ends a running request; `cut_error` then holds (code, message)."""

    @property
    def cut_error(self) -> tuple[str, str] | None: ...


@attrs.frozen(kw_only=True)
class Model:
    """One line of GET /v1/models. `deployment` is what a key's allow-list names; "" says: the same as `id`."""

    id: str
    api: str
    created_s: int
    deployment: str = ""


class Desk(Protocol):
    def arrive(self, arrival: Arrival) -> Ticket:
        """Hand a request to the world. Raises Refusal at once when nothing is queued for it."""

    def models(self) -> list[Model]:
        """Configured, enabled deployments by route, whatever their state."""

    @property
    def accepting(self) -> bool:
        """False while the role shuts down."""


class NotAccepted(Exception):
    """The upstream took nothing: refused connection, closed gate, stale generation. Failover is allowed."""


class UpstreamBroken(Exception):
    """The exchange ended before its answer did."""


class Exchange(Protocol):
    """One request on its way through an engine, and its answer."""

    status: int
    content_type: str

    async def receive_some(self) -> bytes:
        """The next bytes of the body as they came, b"" at its end. Raises UpstreamBroken."""

    async def aclose(self) -> None:
        """Give the connection back when the body ended, else close it at once."""

    def abandon(self, request: RequestId) -> None:
        """Cut: what becomes of it in the engine is waited for in the background and reported. Never blocks."""


class Upstream(Protocol):
    async def open(
        self, incarnation: Incarnation, path: str, body: bytes, ticket: Ticket, *, named: bool = False
    ) -> Exchange:
        """Send `body` and wait for the head of the answer. Calls `ticket.sent()` just before the first byte.

        `named`: the body tells the engine the request's id. Cancelling it after that leaves the connection to the
        ingress, which abandons it.
        Raises: NotAccepted when nothing was taken, UpstreamBroken when it was and no head came.
        """
