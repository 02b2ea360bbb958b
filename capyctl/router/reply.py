"""One answer on its way to a client: head, pieces, and an error in whichever form is still possible."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import attrs
import trio

from capyctl.router.answers import STREAM_HEADERS, Fault

Message = dict[str, Any]  # an ASGI message: its values differ by type
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Header = tuple[bytes, bytes]

CLOSE: Final[Header] = (b"connection", b"close")


@attrs.define(eq=False)
class Reply:
    """Writes are shielded: a cancelled request never leaves half a chunk before its error event.

    They are bounded all the same, since the connection gives up on a client that reads nothing.
    """

    _send: Send
    common: Sequence[Header] = ()  # request ids, CORS
    typed: bool = False  # error events of the Messages API have a type
    status: int | None = None
    ended: bool = False
    wrote_at: float = -1.0

    @property
    def begun(self) -> bool:
        """Whether the head is out, so that an error can no longer have a status."""
        return self.status is not None

    async def whole(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """A complete answer with its length."""
        self.status, self.ended = status, True
        length = (b"content-length", str(len(body)).encode())
        with trio.CancelScope(shield=True):
            await self._send(
                {"type": "http.response.start", "status": status, "headers": [*headers, length, *self.common]}
            )
            await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self) -> None:
        """The head of an event stream; it travels with the first bytes of the body."""
        self.status = 200
        with trio.CancelScope(shield=True):
            await self._send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *self.common]})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Whole events. Returns when the connection took them, or has given the client up."""
        if self.ended:
            return
        self.ended = last
        with trio.CancelScope(shield=True):
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.wrote_at = trio.current_time()

    async def fault(self, fault: Fault, *, close: bool = False) -> None:
        """Tell the client what went wrong, unless its answer is already complete."""
        if self.ended:
            return
        if not self.begun:
            headers = fault.headers()
            await self.whole(fault.status, [*headers, CLOSE] if close else headers, fault.body(self.typed))
            return
        event = b"event: error\n" if self.typed else b""
        await self.write(event + b"data: " + fault.body(self.typed) + b"\n\n", last=True)
