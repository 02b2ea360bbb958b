"""One client connection: Hypercorn's HTTP/1.1, with the bounds that an inference endpoint needs.

What Hypercorn does by itself, and what is changed here, each seen on a real socket:

* A pipelined request, or a stray CRLF after a body, stops its reading, so that a hang-up goes unseen
  until the answer ends. Here reading never stops: what comes early is kept up to a bound.
* Its sends are shielded and unbounded, so that a client which reads nothing holds its request for
  ever. Here a send that makes no progress for ten seconds ends the connection.
* An application that answers before the body has arrived leaves the reader stuck on a full queue, and
  a close with unread bytes resets the answer. Here the rest is discarded, for a while, before closing.
* It sends the end of an answer apart from its last bytes, and a client that leaves at `[DONE]`, as many do, has
  then left before the end. Here they are one write.
* It upgrades to HTTP/2 in clear text, and to WebSockets. Here there is HTTP/1.1 and nothing else, so
  no rule has a second door.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import struct
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import attrs
import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Body, EndBody, Response
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Request as StreamRequest
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState
from hypercorn.utils import parse_socket_addr

from capyctl.router.answers import Fault
from capyctl.router.reply import Message, Receive, Send

LOG: Final = logging.getLogger("capyctl.router")

HEAD_BYTES_MAX: Final = 16 * 2**10
HEADERS_MAX: Final = 100
EARLY_BYTES_MAX: Final = 64 * 2**10  # pipelined behind the request being answered
READ_BYTES: Final = 2**16
WAITING_BODY_BYTES: Final = 2**20  # received and not yet taken by the application


@attrs.frozen(kw_only=True)
class Bounds:
    """How long a connection may take for what, in seconds."""

    head_seconds: float = 5.0  # a whole header block, from its first byte or from the connect
    idle_seconds: float = 60.0  # between an answer and the first byte of the next request
    stall_seconds: float = 10.0  # a send without progress
    linger_seconds: float = 2.0  # reading the rest of a body that nobody wants


App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]


class Mailbox:
    """ASGI messages on their way to the application: body bytes joined, and the disconnect at the end."""

    def __init__(self, before_body: Callable[[], Awaitable[None]]) -> None:
        self._before_body = before_body  # a client that waits for `100 Continue` gets it when the body is wanted
        self._pieces: deque[bytes] = deque()
        self._bytes = 0
        self._complete = False
        self._delivered = False
        self._gone: Message | None = None
        self._changed = trio.Event()

    def _notify(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def put(self, message: Message) -> None:
        """Take a message from the protocol; wait while too much of a body lies unread.

        An application that returns without reading ends the wait: a disconnect follows its return.
        """
        if message["type"] == "http.disconnect":
            if self._gone is None:
                self._gone = message
        elif message["more_body"]:
            self._pieces.append(message["body"])
            self._bytes += len(message["body"])
        else:
            self._complete = True
        self._notify()
        while self._bytes > WAITING_BODY_BYTES and self._gone is None:
            await self._changed.wait()

    async def receive(self) -> Message:
        """The next message for the application."""
        if not self._delivered and not self._complete and self._gone is None:
            await self._before_body()
        while True:
            if self._gone is not None:
                return self._gone
            if not self._delivered and (self._pieces or self._complete):
                body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces.clear()
                self._bytes = 0
                self._delivered = self._complete
                self._notify()
                return {"type": "http.request", "body": body, "more_body": not self._delivered}
            await self._changed.wait()


class Requests(TaskGroup):
    """Starts the application for each request of one connection."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    async def spawn_app(self, app: Any, config: Config, scope: Any, send: Any) -> Any:
        """Hypercorn's seam: `send(None)` tells it that the application has returned."""
        connection = self._connection
        mailbox = Mailbox(connection.continue_if_awaited)

        async def say(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                connection.ends_with_the_next()
            await send(message)

        async def run() -> None:
            try:
                await app(scope, mailbox.receive, say)
            except* Exception as failed:
                LOG.error("application.failed", extra={"fields": {"error": place_of(failed)}})
            await send(None)

        async def put(message: Any) -> None:
            if message["type"] == "http.disconnect":
                message = {"type": "http.disconnect", "reason": connection.gone_because}
            await mailbox.put(message)

        assert self._nursery is not None
        self._nursery.start_soon(run)
        return put


class Http1(H11Protocol):
    """HTTP/1.1 over h11: one request at a time, reading on while it is answered."""

    connection: h11.Connection

    def __init__(self, owner: Connection, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._owner = owner
        self._head = b""  # of an answer, until there is something to send with it; its last bytes, until its end
        self.at_last = False  # the bytes that come next are the last of an answer
        self._early = b""  # pipelined bytes that h11 has not seen

    # --- from the client ----------------------------------------------------------------------------

    async def handle(self, event: Event) -> None:
        """Bytes from the client, or the end of the connection."""
        if not isinstance(event, RawData):
            await super().handle(event)
            return
        data = event.data
        if self.connection.their_state is h11.DONE and self.stream is not None:
            # More than any client sends ahead is dropped, and the connection ends after this answer:
            # what was dropped was never answered, so its sender may send it again.
            room = EARLY_BYTES_MAX - len(self._early)
            self._owner.keep = self._owner.keep and len(data) <= room
            self._early += data[:room]
            return
        if self.connection.their_state is h11.IDLE and not self.connection.trailing_data[0]:
            data = data.lstrip(b"\r\n")
        if data:
            self._owner.head_began()
            self.connection.receive_data(data)
            await self._handle_events()

    async def _handle_events(self) -> None:
        while True:
            at_head = self.connection.their_state is h11.IDLE
            before = self.connection.trailing_data[0] if at_head else b""
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(error.error_status_hint or 400, "the request is not HTTP/1.1 as it should be")
                return
            if isinstance(event, h11.Request):
                self._owner.head_ended()
                problem = _problem(event, before[: len(before) - len(self.connection.trailing_data[0])])
                if problem is not None:
                    await self._refuse(*problem)
                    return
                await self._create_stream(event)
            elif self.stream is None:
                return
            elif isinstance(event, h11.Data):
                await self.stream.handle(Body(stream_id=STREAM_ID, data=bytes(event.data)))
            elif isinstance(event, h11.EndOfMessage):
                await self.stream.handle(EndBody(stream_id=STREAM_ID))
            else:
                return  # more is needed, or the next request waits for this answer's end

    async def _create_stream(self, request: h11.Request) -> None:
        """No upgrade exists: a request that asks for one is answered as what else it is."""
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            StreamRequest(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )

    async def _refuse(self, status: int, message: str) -> None:
        """Answer what is not a request, where an answer is still possible, and close."""
        if self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            fault = Fault(status=status, code="invalid_request", message=message)
            body = fault.body()
            headers = [*fault.headers(), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
            answer = self.connection.send(h11.Response(headers=headers, status_code=status)) or b""
            answer += self.connection.send(h11.Data(data=body)) or b""
            await self.send(RawData(data=answer + (self.connection.send(h11.EndOfMessage()) or b"")))
        self._owner.gone_because = "sent something that is not HTTP"
        await self.send(Closed())

    # --- to the client ------------------------------------------------------------------------------

    async def stream_send(self, event: StreamEvent) -> None:
        """An answer's head waits for its first bytes, its last bytes for its end: one packet, one system call."""
        if isinstance(event, Response) and event.status_code >= 200:
            headers = [*event.headers, *self.config.response_headers("h11")]
            self._head = self._framed(h11.Response(headers=headers, status_code=event.status_code))
        elif isinstance(event, Body) and self.at_last:
            self._head += self._framed(h11.Data(data=event.data))
        else:
            self.at_last = False
            await super().stream_send(event)

    def _framed(self, event: Any) -> bytes:
        try:
            return self.connection.send(event) or b""
        except h11.LocalProtocolError:
            # After a protocol error of the client's nothing can be said; otherwise it is our fault.
            if self.connection.their_state is not h11.ERROR:
                raise
            return b""

    async def _send_h11_event(self, event: Any) -> None:
        data = self._framed(event)
        head, self._head = self._head, b""
        if head or data:
            await self.send(RawData(data=head + data))

    async def _maybe_recycle(self) -> None:
        """The answer is complete: close, or be ready for the next request, which may already lie here."""
        await self._close_stream()
        done = self.connection.our_state is h11.DONE and self.connection.their_state is h11.DONE
        if not done or not self._owner.keep or self.context.terminated.is_set():
            await self.send(Closed())
            return
        early = self.connection.trailing_data[0] + self._early
        self._early = b""
        if early:
            # h11 would trip over line ends before a request, so what came early goes to a fresh parser.
            self.connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
            early = early.lstrip(b"\r\n")
        else:
            self.connection.start_next_cycle()
        self._owner.answered(early)


class Connection(TCPServer):
    """One accepted socket: its reader, its bounded writer, and the applications it runs."""

    stream: trio.SocketStream  # type: ignore[assignment]  # never TLS here

    def __init__(
        self, app: App, config: Config, context: WorkerContext, bounds: Bounds, stream: trio.SocketStream
    ) -> None:
        super().__init__(app, config, context, LifespanState({}), stream)  # type: ignore[arg-type]
        self.bounds = bounds
        self.gone_because: str | None = None
        self.keep = True
        self._dead = False
        self._lingering = False
        self._between = False  # requests: nothing of the next has come
        self._early = b""
        self._deadline = trio.current_time() + self.bounds.head_seconds
        self._reading = trio.CancelScope()
        self._writing = trio.CancelScope()

    async def run(self) -> None:
        """Serve the connection until either side ends it."""
        sock = self.stream.socket
        try:
            client = parse_socket_addr(sock.family, sock.getpeername())
            server = parse_socket_addr(sock.family, sock.getsockname())
            async with Requests(self) as task_group:
                self.protocol = Http1(  # type: ignore[assignment]  # in place of the wrapper that upgrades
                    self,
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    False,
                    client,
                    server,
                    self.protocol_send,
                )
                await self._read()
        except OSError:
            pass  # it was gone before it was looked at
        finally:
            await self.stream.aclose()

    # --- what the protocol tells ----------------------------------------------------------------------

    def head_began(self) -> None:
        """The first bytes of a request came."""
        if self._between:
            self._between = False
            self._deadline = trio.current_time() + self.bounds.head_seconds

    def head_ended(self) -> None:
        """A header block is complete: from here the application keeps time."""
        self._deadline = math.inf

    def answered(self, early: bytes) -> None:
        """The answer is complete and the connection stays; `early` is what came of the next request."""
        self._between = not early
        self._early = early
        self._deadline = trio.current_time() + (self.bounds.head_seconds if early else self.bounds.idle_seconds)
        if early:
            self._reading.cancel()
        else:
            self._reading.deadline = self._deadline

    def ends_with_the_next(self) -> None:
        """What is sent next are the last bytes of an answer."""
        protocol = self.protocol
        assert isinstance(protocol, Http1)
        protocol.at_last = True

    async def continue_if_awaited(self) -> None:
        """Send `100 Continue` to a client that waits for it."""
        protocol = self.protocol
        assert isinstance(protocol, Http1)
        if protocol.connection.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await self.protocol_send(RawData(data=protocol.connection.send(go_on) or b""))

    async def protocol_send(self, event: Event) -> None:
        """Bytes for the client, or the end of the connection."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            self._close_softly()
            await self.protocol.handle(Closed())

    # --- reading ----------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._dead:
            data, self._early = self._early, b""
            if not data:
                with trio.CancelScope(deadline=self._deadline) as self._reading:
                    try:
                        data = await self.stream.receive_some(READ_BYTES)
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        break
                if self._reading.cancelled_caught and (self._early or self._deadline > trio.current_time()):
                    continue  # woken to look at what came early, or at a new deadline
            if not data:
                break
            if not self._lingering:
                await self.protocol.handle(RawData(data))
        if self.gone_because is None:
            self.gone_because = "hung up"
        self._give_up()
        await self.protocol.handle(Closed())

    def _close_softly(self) -> None:
        """No more answers; read on for a while, so that what was sent is not reset away from its reader."""
        if self._dead or self._lingering:
            return
        self._lingering = True
        try:
            self.stream.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._give_up()
        self._deadline = self._reading.deadline = trio.current_time() + self.bounds.linger_seconds

    # --- writing ------------------------------------------------------------------------------------------

    async def _write(self, data: bytes) -> None:
        if self._dead or self._lingering or not data:
            return
        try:
            self.send_lock.acquire_nowait()
        except trio.WouldBlock:
            await self.send_lock.acquire()
        try:
            await self._write_all(memoryview(data))
        finally:
            self.send_lock.release()

    async def _write_all(self, left: memoryview) -> None:
        with trio.CancelScope(shield=True) as self._writing:
            try:
                while left and not self._dead:
                    self._writing.deadline = trio.current_time() + self.bounds.stall_seconds
                    left = left[await self.stream.socket.send(left) :]
            except (OSError, trio.ClosedResourceError):
                self._give_up()
                await self.protocol.handle(Closed())
        if self._writing.cancelled_caught and not self._dead:
            self.gone_because = f"read nothing for {self.bounds.stall_seconds:g} s"
            self.abort()
            await self.protocol.handle(Closed())

    def _give_up(self) -> None:
        """The client is gone: whoever writes to it stops."""
        self._dead = True
        self._writing.cancel()

    def abort(self) -> None:
        """Reset the connection now, and with it what the client has not read. Plain call."""
        self._give_up()
        self._reading.cancel()
        try:
            # Zero linger: close() drops the send buffer, where a stalled reader would keep it in the kernel.
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # closed already
        self.stream.socket.close()


def place_of(error: BaseException) -> str:
    """The type of an exception and the line that raised it. Its text is left out: it may quote a request."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}" if frames else type(error).__name__


_LENGTHS: Final = re.compile(rb"\n(?:content-length|transfer-encoding):([^\r\n]*)", re.IGNORECASE)
_FOLDED: Final = re.compile(rb"\n[ \t]")


def _problem(request: h11.Request, head: bytes) -> tuple[int, str] | None:
    """What h11 lets pass and this listener does not: status and message.

    `head` is the block as it came: h11 has unfolded the lines and made one length of equal ones, which a proxy in
    front may have read otherwise.
    """
    if request.http_version not in (b"1.1", b"1.0"):
        return 505, "this listener speaks HTTP/1.1"
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        return 400, "Content-Length and Transfer-Encoding exclude each other"
    if _FOLDED.search(head):
        return 400, "a header goes on over a second line; send it on one"
    lengths = _LENGTHS.findall(head)
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        return 400, "Content-Length is stated more than once"
    size = sum(len(name) + len(value) + 4 for name, value in request.headers) + len(request.target)
    if len(names) > HEADERS_MAX or size > HEAD_BYTES_MAX:
        return 431, f"at most {HEADERS_MAX} headers in {HEAD_BYTES_MAX} bytes"
    return None
