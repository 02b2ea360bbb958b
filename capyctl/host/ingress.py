"""The way from the router into an engine: pooled loopback connections, one launch key per incarnation.

Gates here are bound to an incarnation: `admit` opens one, `close` cuts every connection of it and
refuses what comes after. Which requests come at all is decided elsewhere.

A pooled connection is a guess that the engine still holds it. Engines close an idle one after 5 s
(llama.cpp after 100 requests too), so ours rest shorter and carry fewer. When one dies all the same
before a byte of an answer, it matters whether the engine can have had the whole request. Closed in order,
the kernel's count of acknowledged bytes says so: nothing acknowledged means that nothing was accepted. Reset,
by an engine that only ever closes, a part of the request lay unread when it did. In both cases the request
goes out once more on a fresh connection; anything else is a broken upstream, never a second send.

Abandoning half-closes and waits in the background for the engine's own EOF, which is half of P-CLOSED
where an EOF proves that the handler has returned.

A named request, which its engine knows by an id, is abandoned otherwise: its connection is kept open and read
to the end of the answer. The engine is asked elsewhere to end the id, and says 200 to that whether or not it has
heard of the id yet; only the answer's own end says that it is done with it. `Stay` is what is known of that.
Source: decisions 2, 14, 26; engines 5, 7.5, 14; api 2.13, 8.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import attrs
import trio

from capyctl.clock import now_ms
from capyctl.fsm.types import Incarnation, Millis, RequestId
from capyctl.host import wire
from capyctl.host.http import head
from capyctl.host.wire import Wire, WireBroken
from capyctl.router.desk import NotAccepted, Ticket, UpstreamBroken

IDLE_S = 4.0
REQUESTS_MAX = 90
IDLE_CONNECTIONS_MAX = 32  # as many as a deployment has places
EOF_LIMIT_S = 30.0
CONNECT_S = 5.0
UNASKED_S = 2.0  # a named request that was given up is let go of when nobody asks the engine to end it
ASKED_S = 15.0  # and at last after this, whoever asks
REMEMBERED_S = 15.0  # what became of a request that was given up

UpstreamEnded = Callable[[RequestId, Millis, Millis], None]
"""(request, half_closed_at_ms, eof_at_ms): the engine has closed after we did. Must not block."""


class Stage(Enum):
    """Where a named request is, as far as its connection tells."""

    INSIDE = "inside"  # sent, or being sent: the engine may have it, know its id and work on it
    OVER = "over"  # the engine has ended its answer, or can never have had the request whole
    LOST = "lost"  # the connection ended before the answer: nobody will see its end


@attrs.define(eq=False)
class Stay:
    """A named request in an engine, from its first byte to what its connection says of its end."""

    stage: Stage = Stage.INSIDE
    settled: trio.Event = attrs.field(factory=trio.Event)  # not INSIDE any more
    settled_at: float = 0.0  # trio time
    _open: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _asked: bool = False

    def settle(self, stage: Stage) -> None:
        """The first word on it stands."""
        if self.stage is Stage.INSIDE:
            self.stage, self.settled_at = stage, trio.current_time()
            self.settled.set()

    def hold(self) -> None:
        """The engine is being asked to end it: keep its connection open, since only there its end is seen."""
        self._asked = True
        self._open.deadline = trio.current_time() + ASKED_S

    def let_go(self) -> None:
        """Nobody waits for its end any more: half-close, so that the engine notices a hang-up by itself."""
        self._open.cancel()

    async def end_of(self, connection: Wire) -> None:
        """Read `connection` to the end of the answer, as long as somebody may be waiting for that."""
        if not self._asked:
            self._open.deadline = trio.current_time() + UNASKED_S
        with self._open:
            self.settle(Stage.OVER if await connection.until_answered() else Stage.LOST)


@attrs.define(eq=False)
class Endpoint:
    """One incarnation's engine: its port and key, its idle connections, those in use, its named requests."""

    incarnation: Incarnation
    port: int
    key: str
    resets_unread: bool = False
    idle: list[Wire] = attrs.field(factory=list)
    busy: set[Wire] = attrs.field(factory=set)
    leaving: set[Wire] = attrs.field(factory=set)  # given up, waiting for the end of the answer or for the EOF
    stays: dict[RequestId, Stay] = attrs.field(factory=dict)

    def take_idle(self) -> Wire | None:
        """The youngest idle connection that can still be believed; the others are closed."""
        ends = trio.current_time() - IDLE_S
        while self.idle:
            candidate = self.idle.pop()
            if candidate.idle_since >= ends and not candidate.stale():
                return candidate
            candidate.close()
        return None

    def close_all(self) -> None:
        for connection in (*self.idle, *self.busy, *self.leaving):
            connection.close()
        self.idle.clear()
        self.busy.clear()
        self.leaving.clear()
        for stay in self.stays.values():
            stay.settle(Stage.LOST)
        self.stays.clear()

    def settle(self, request: RequestId, stage: Stage) -> None:
        """What is known now of a named request; of others nothing is kept."""
        stay = self.stays.get(request)
        if stay is not None:
            stay.settle(stage)


@attrs.define(eq=False)
class Relay:
    """`desk.Exchange`: one request inside an engine, and its answer as it comes."""

    status: int
    content_type: str
    _wire: Wire
    _endpoint: Endpoint
    _ingress: Ingress
    _request: RequestId
    _over: bool = False

    async def receive_some(self) -> bytes:
        """The next bytes of the body, b"" at its end. Raises: UpstreamBroken."""
        try:
            return await self._wire.receive_some()
        except WireBroken as broken:
            raise UpstreamBroken(str(broken)) from broken

    async def aclose(self) -> None:
        """Give the connection back when the body ended, else close it at once."""
        if not self._over:
            self._over = True
            self._ingress._finished(self._endpoint, self._wire, self._request)

    def abandon(self, request: RequestId) -> None:
        """Give the answer up; what the engine makes of it is waited for in the background. Never blocks."""
        if not self._over:
            self._over = True
            self._ingress._abandon(self._endpoint, self._wire, request)


@attrs.define(eq=False)
class Ingress:
    """`desk.Upstream` of this machine. `run` owns what goes on in the background; start it first."""

    on_upstream_ended: UpstreamEnded
    eof_limit_s: float = EOF_LIMIT_S
    runs: Callable[[Incarnation], bool] = lambda _: True
    """Whether the engine's process is there now. While it is, it holds its port, and nobody else can listen there."""
    _endpoints: dict[Incarnation, Endpoint] = attrs.field(factory=dict)
    _nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then every connection closes, and the engines read EOF."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                while True:
                    await trio.sleep(IDLE_S)
                    self._retire_idle()
                    self._forget_stays()
        finally:
            self._nursery = None
            for endpoint in list(self._endpoints.values()):
                endpoint.close_all()
            self._endpoints.clear()

    # --- gates ---------------------------------------------------------------------------------------

    def admit(self, incarnation: Incarnation, port: int, key: str, *, resets_unread: bool = False) -> None:
        """Let requests of this incarnation through to its engine. Admitting it again changes nothing.

        `resets_unread`: as `Adapter.resets_unread`.
        """
        endpoint = self._endpoints.get(incarnation)
        if endpoint is None or (endpoint.port, endpoint.key) != (port, key):
            self.close(incarnation)
            self._endpoints[incarnation] = Endpoint(incarnation, port, key, resets_unread)

    def close(self, incarnation: Incarnation) -> int:
        """Cut every connection of the incarnation and refuse new ones; returns how many were in use."""
        endpoint = self._endpoints.pop(incarnation, None)
        if endpoint is None:
            return 0
        cut = len(endpoint.busy) + len(endpoint.leaving)
        endpoint.close_all()
        return cut

    def in_flight(self, incarnation: Incarnation) -> int:
        """Requests inside the engine, those that we have given up included."""
        endpoint = self._endpoints.get(incarnation)
        return 0 if endpoint is None else len(endpoint.busy) + len(endpoint.leaving)

    def answering(self, incarnation: Incarnation) -> int:
        """Requests inside the engine whose answer somebody still wants."""
        endpoint = self._endpoints.get(incarnation)
        return 0 if endpoint is None else len(endpoint.busy)

    def abandoned(self, incarnation: Incarnation) -> int:
        """Requests that were given up and whose EOF has not come."""
        endpoint = self._endpoints.get(incarnation)
        return 0 if endpoint is None else len(endpoint.leaving)

    def stay(self, incarnation: Incarnation, request: RequestId) -> Stay | None:
        """A named request that is in the engine, or was given up lately. None: nobody here knows what became of it."""
        endpoint = self._endpoints.get(incarnation)
        return None if endpoint is None else endpoint.stays.get(request)

    # --- requests ------------------------------------------------------------------------------------

    async def open(
        self, incarnation: Incarnation, path: str, body: bytes, ticket: Ticket, *, named: bool = False
    ) -> Relay:
        """Send `body` (JSON) and wait for the head of the answer; `ticket.sent()` comes before the first byte.

        `named`: the engine knows it by the request's id. Cancelled, it is abandoned as by `Relay.abandon`.
        Raises: NotAccepted when the engine took nothing, UpstreamBroken when it may have and no head came.
        """
        endpoint = self._endpoints.get(incarnation)
        if endpoint is None:
            raise NotAccepted(f"the gate of {incarnation} is closed on this host")
        if named:
            endpoint.stays[ticket.request] = Stay()
        try:
            return await self._send(endpoint, path.encode("ascii"), body, ticket)
        except NotAccepted:
            endpoint.settle(ticket.request, Stage.OVER)
            endpoint.stays.pop(ticket.request, None)
            raise
        except UpstreamBroken:
            endpoint.settle(ticket.request, Stage.LOST)
            raise

    async def _send(self, endpoint: Endpoint, target: bytes, body: bytes, ticket: Ticket) -> Relay:
        connection = endpoint.take_idle()
        if connection is not None:
            ticket.sent()
            answer = await self._exchange(endpoint, connection, target, body, ticket.request, pooled=True)
            if answer is not None:
                return answer
            if self._endpoints.get(endpoint.incarnation) is not endpoint:
                raise NotAccepted(f"the gate of {endpoint.incarnation} closed")
            connection = await self._connect(endpoint, ticket.request)
        else:
            connection = await self._connect(endpoint, ticket.request)
            ticket.sent()
        answer = await self._exchange(endpoint, connection, target, body, ticket.request, pooled=False)
        assert answer is not None  # only a pooled connection may turn out never to have been one
        return answer

    async def _connect(self, endpoint: Endpoint, request: RequestId) -> Wire:
        try:
            with trio.fail_after(CONNECT_S):
                connection = await wire.connect(endpoint.port)
        except OSError as error:
            raise NotAccepted(f"the engine does not accept connections: {error.strerror}") from error
        except trio.TooSlowError:
            raise NotAccepted(f"the engine did not accept a connection within {CONNECT_S:g} s") from None
        except trio.Cancelled:
            endpoint.settle(request, Stage.OVER)  # nothing of it has left
            raise
        if self._endpoints.get(endpoint.incarnation) is not endpoint:
            connection.close()
            raise NotAccepted(f"the gate of {endpoint.incarnation} closed")
        if not self.runs(endpoint.incarnation):  # asked after the connect: what took its port would be asked otherwise
            connection.close()
            raise NotAccepted(f"the engine of {endpoint.incarnation} has ended")
        return connection

    async def _exchange(
        self, endpoint: Endpoint, connection: Wire, target: bytes, body: bytes, request: RequestId, *, pooled: bool
    ) -> Relay | None:
        """One attempt. None when a pooled connection was dead and the engine provably never had the request."""
        endpoint.busy.add(connection)
        acked = connection.acked_bytes() if pooled else None
        broken: WireBroken | None = None
        try:
            try:
                await connection.send(head(endpoint.port, endpoint.key, body), b"POST", target, body)
            except WireBroken as error:
                # An engine that refuses a body early answers and closes while we still write: read that answer.
                broken = error
            status, content_type = await connection.head()
        except WireBroken as error:
            unread = pooled and not connection.answered and await self._left_unread(endpoint, connection, acked)
            endpoint.busy.discard(connection)
            connection.close()
            if unread:
                return None
            raise UpstreamBroken(str(broken or error)) from error
        except trio.Cancelled:
            if request in endpoint.stays and not connection.sent:
                # The engine has not got the whole of it and never will, so it cannot begin.
                endpoint.busy.discard(connection)
                endpoint.settle(request, Stage.OVER)
                connection.close()
            else:
                self._abandon(endpoint, connection, request)
            raise
        return Relay(status, content_type, connection, endpoint, self, request)

    async def _left_unread(self, endpoint: Endpoint, connection: Wire, acked: int | None) -> bool:
        """Whether an engine that ended a connection without an answer provably never read the request on it."""
        if endpoint.resets_unread and await connection.vanished():
            return True
        return not connection.reset and acked is not None and connection.acked_bytes() == acked

    def _finished(self, endpoint: Endpoint, connection: Wire, request: RequestId) -> None:
        endpoint.busy.discard(connection)
        if connection.complete:
            endpoint.settle(request, Stage.OVER)
            endpoint.stays.pop(request, None)
        else:
            endpoint.settle(request, Stage.LOST)
        admitted = self._endpoints.get(endpoint.incarnation) is endpoint
        if admitted and connection.requests < REQUESTS_MAX and connection.recycle():
            endpoint.idle.append(connection)
            if len(endpoint.idle) > IDLE_CONNECTIONS_MAX:
                endpoint.idle.pop(0).close()
        else:
            connection.close()

    def _abandon(self, endpoint: Endpoint, connection: Wire, request: RequestId) -> None:
        endpoint.busy.discard(connection)
        if self._nursery is None or self._endpoints.get(endpoint.incarnation) is not endpoint:
            connection.close()  # cut by `close`: what is left of it is settled by the engine's end
            endpoint.settle(request, Stage.LOST)
            return
        endpoint.leaving.add(connection)
        stay = endpoint.stays.get(request)
        if stay is None:
            connection.half_close()
            self._nursery.start_soon(self._await_eof, endpoint, connection, request, now_ms())
        else:
            self._nursery.start_soon(self._see_out, endpoint, connection, request, stay)

    async def _see_out(self, endpoint: Endpoint, connection: Wire, request: RequestId, stay: Stay) -> None:
        """Read a named request to its end; let go of before that, it leaves as any other."""
        try:
            await stay.end_of(connection)
        finally:
            if stay.stage is not Stage.INSIDE:
                endpoint.leaving.discard(connection)
                connection.close()
        if stay.stage is Stage.INSIDE:
            stay.settle(Stage.LOST)
            connection.half_close()
            await self._await_eof(endpoint, connection, request, now_ms())

    async def _await_eof(
        self, endpoint: Endpoint, connection: Wire, request: RequestId, half_closed_at_ms: Millis
    ) -> None:
        """Report the engine's EOF. Without one within the limit the request settles at the engine's stop."""
        ended = False
        try:
            with trio.move_on_after(self.eof_limit_s):
                ended = await connection.until_eof()
        finally:
            endpoint.leaving.discard(connection)
            connection.close()
        if ended:
            self.on_upstream_ended(request, half_closed_at_ms, now_ms())

    def _forget_stays(self) -> None:
        """Of requests that were given up and never asked for."""
        ends = trio.current_time() - REMEMBERED_S
        for endpoint in self._endpoints.values():
            for request, stay in list(endpoint.stays.items()):
                if stay.settled.is_set() and stay.settled_at < ends:
                    del endpoint.stays[request]

    def _retire_idle(self) -> None:
        """Close what has rested too long, before the engine does."""
        ends = trio.current_time() - IDLE_S
        for endpoint in self._endpoints.values():
            for connection in [one for one in endpoint.idle if one.idle_since < ends or one.stale()]:
                endpoint.idle.remove(connection)
                connection.close()
