"""An engine that costs nothing: canned answers over HTTP/1.1 keep-alive, in a process of its own.

`python -m benchmarks.engine` prints its port and serves until its standard input ends. Streams are
written event by event, each in its own write, as engines do.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

EVENTS = 64

WHOLE = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "word " * 64}}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 64, "total_tokens": 76},
        "timings": {"prompt_ms": 1.0, "predicted_per_second": 100.0},
    },
    separators=(",", ":"),
).encode()


def _event(delta: dict[str, object]) -> bytes:
    chunk = {
        "choices": [{"finish_reason": None, "index": 0, "delta": delta}],
        "created": 1,
        "id": "chatcmpl-1",
        "model": "m",
        "system_fingerprint": "b1",
        "object": "chat.completion.chunk",
    }
    data = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM = [
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + _event({"role": "assistant", "content": None}),
    *[_event({"content": f"word{number} "}) for number in range(EVENTS)],
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE


class Engine(asyncio.Protocol):
    """One connection; requests come whole or in pieces, one after the other."""

    def __init__(self) -> None:
        self.held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every complete request."""
        self.held += data
        while (end := self.held.find(b"\r\n\r\n")) >= 0:
            head = self.held[:end].lower()
            size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            if len(self.held) < end + 4 + size:
                return
            body, self.held = self.held[end + 4 : end + 4 + size], self.held[end + 4 + size :]
            if b'"stream":true' in body.replace(b" ", b""):
                for piece in STREAM:
                    self.transport.write(piece)
            else:
                self.transport.write(ANSWER)


async def serve() -> None:
    """Serve until standard input ends: the benchmark holds its other end."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve())
