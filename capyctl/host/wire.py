"""One HTTP/1.1 connection to an engine on loopback: h11 over a trio socket, one request at a time.

Redirects are never followed, proxies never asked, and of the engine's headers only the content type is
read. Everything that can go wrong is a `WireBroken`; who calls decides what it means.
"""

from __future__ import annotations

import errno
import select
import socket
import struct

import attrs
import h11
import trio

from capyctl.host.ports import LOOPBACK

READ_BYTES = 1 << 16
HEAD_BYTES = 1 << 16
RESET_BEHIND_S = 0.05  # between a shutdown and the close right after it, on a machine that is busy
RESET_LOOKS = 20
_TCP_INFO_ACKED = 120  # offset of tcpi_bytes_acked in struct tcp_info
_TCP_CLOSE = 7


class WireBroken(Exception):
    """The connection ended, or spoke no HTTP, before the exchange was over."""


@attrs.define(eq=False)
class Wire:
    """An open connection. `requests` counts what it has carried, `idle_since` is trio time."""

    port: int
    stream: trio.SocketStream
    http: h11.Connection
    requests: int = 0
    idle_since: float = 0.0
    sent: bool = False  # the whole of the present request has been handed to the kernel
    answered: bool = False  # a byte of the present answer has come
    reset: bool = False  # the engine's end vanished without closing first

    async def send(self, head: list[tuple[bytes, bytes]], method: bytes, path: bytes, body: bytes) -> None:
        """Send one request whole. Raises: WireBroken."""
        self.requests += 1
        self.answered = self.sent = False
        data = self.http.send(h11.Request(method=method, target=path, headers=head)) or b""
        if body:
            data += self.http.send(h11.Data(data=body)) or b""
        data += self.http.send(h11.EndOfMessage()) or b""
        try:
            await self.stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._note_reset(error)
            raise WireBroken("the engine closed the connection while it was asked") from error
        self.sent = True

    async def head(self) -> tuple[int, str]:
        """Wait for the answer's head: status and content type. Raises: WireBroken."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                kind = next((value for name, value in event.headers if name == b"content-type"), b"")
                return event.status_code, kind.decode("latin-1")
            if not isinstance(event, h11.InformationalResponse):
                raise WireBroken("the engine closed the connection before it answered")

    async def receive_some(self) -> bytes:
        """What has come of the body, at least one byte; b"" once it is complete. Raises: WireBroken."""
        if self.http.their_state is not h11.SEND_BODY:
            return b""
        event = await self._next()
        if not isinstance(event, h11.Data):
            return self._ended(event)
        received = bytes(event.data)
        # Whatever has already arrived goes along: one write to the client instead of many.
        while True:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError:
                return received  # said again by the next call
            if not isinstance(event, h11.Data):
                return received
            received += event.data

    def _ended(self, event: object) -> bytes:
        if isinstance(event, h11.EndOfMessage):
            return b""
        raise WireBroken("the engine closed the connection before its answer was complete")

    async def _next(self) -> object:
        while True:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError as error:
                raise WireBroken(f"the engine's answer is no HTTP, or incomplete: {error}") from error
            if event is not h11.NEED_DATA:
                return event
            try:
                data = await self.stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._note_reset(error)
                raise WireBroken("the connection to the engine was lost") from error
            self.answered = self.answered or bool(data)
            try:
                self.http.receive_data(data)
            except h11.RemoteProtocolError as error:
                raise WireBroken(f"the engine's answer is no HTTP: {error}") from error

    async def until_answered(self) -> bool:
        """Read and drop the answer to its end; False when the connection broke before it."""
        try:
            if self.http.their_state is h11.SEND_RESPONSE:
                await self.head()
            while await self.receive_some():
                pass
        except WireBroken:
            return False
        return self.complete

    @property
    def complete(self) -> bool:
        """Whether the whole answer has been read."""
        return self.http.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)

    def recycle(self) -> bool:
        """Make ready for another request; False when the engine or the protocol wants this one closed."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        self.idle_since = trio.current_time()
        return True

    def stale(self) -> bool:
        """Whether the engine has closed, or said something unasked, while the connection was idle."""
        poll = select.poll()
        poll.register(self.stream.socket.fileno(), select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(0))

    def _note_reset(self, error: Exception) -> None:
        # A socket that had received the engine's FIN before the reset says EPIPE instead.
        self.reset = self.reset or getattr(error.__cause__, "errno", None) != errno.EPIPE

    async def vanished(self) -> bool:
        """Whether the engine's end went with a reset, be it one behind an orderly end.

        A program that shuts a connection down and closes it with bytes unread sends both. Who reads then finds the
        end alone, and only the state of the socket tells of the reset, which may be a moment behind.
        """
        with trio.move_on_after(RESET_BEHIND_S, shield=True):
            for _ in range(RESET_LOOKS):
                if self.reset or self._state() in (_TCP_CLOSE, None):
                    break
                await trio.sleep(RESET_BEHIND_S / RESET_LOOKS)
        return self.reset or self._state() == _TCP_CLOSE

    def _state(self) -> int | None:
        """The kernel's state of the connection; None where it cannot be told, or we have closed it."""
        try:
            return self.stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except (OSError, ValueError):
            return None

    def acked_bytes(self) -> int | None:
        """How many bytes the engine's kernel has ever acknowledged; None where it cannot be told.

        A count that our request did not raise, on a connection that the engine closed and did not reset,
        proves that the request reached nobody: a process that reads bytes and then closes in order
        acknowledges them with its FIN. (A killed process may have read bytes that are not yet
        acknowledged; then there is a reset and no FIN before it.)
        """
        try:
            info = self.stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ACKED + 8)
        except (OSError, ValueError):
            return None
        if len(info) < _TCP_INFO_ACKED + 8:
            return None
        return int(struct.unpack_from("=Q", info, _TCP_INFO_ACKED)[0])

    def half_close(self) -> None:
        """Send our end of input: the engine reads EOF, and we go on reading until its own."""
        try:
            self.stream.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # already closed by the engine: its EOF is what we wait for

    async def until_eof(self) -> bool:
        """Read and drop until the engine's EOF; False when the connection broke instead."""
        try:
            while await self.stream.receive_some(READ_BYTES):
                pass
        except trio.BrokenResourceError:
            # A reset: its end of the socket is closed too, as after an EOF with our bytes unread.
            return True
        except trio.ClosedResourceError:
            return False
        return True

    def close(self) -> None:
        """Close at once; whoever waits on it gets WireBroken."""
        self.stream.socket.close()


async def connect(port: int) -> Wire:
    """Connect to an engine on loopback. Raises: ConnectionError (an OSError) when nobody listens."""
    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        await sock.connect((LOOPBACK, port))
    except BaseException:
        sock.close()
        raise
    stream = trio.SocketStream(sock)
    return Wire(port, stream, h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES))
