"""A small HTTP/1.1 server with one thread per connection, which leaves nothing to chance.

Like the servers of the real engines it closes an idle connection after 5 s, takes a client's end of file
for its leaving, and lower-cases its header names. Handlers get a `Request` and a `Reply`.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote

PHRASES = {
    200: "OK", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
    409: "Conflict", 415: "Unsupported Media Type", 422: "Unprocessable Entity", 500: "Internal Server Error",
    501: "Not Implemented", 503: "Service Unavailable",
}  # fmt: skip
HEAD_MAX = 64 << 10


class ClientLeft(Exception):
    """The client closed its connection, or half of it."""


class Request:
    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        path, _, query = target.partition("?")
        self.method, self.target, self.headers, self.body = method, target, headers, body
        self.path, self.query_text = unquote(path), query
        self.query = parse_qs(query, keep_blank_values=True)

    def json(self) -> Any:
        """Raises: ValueError when the body is no JSON."""
        return json.loads(self.body)

    @property
    def bearer(self) -> str | None:
        kind, _, key = self.headers.get("authorization", "").partition(" ")
        return key if kind.lower() == "bearer" else None


class Reply:
    """The one answer to a request. `status` is what was sent, None before."""

    def __init__(self, connection: socket.socket, request: Request, server_name: str) -> None:
        self._connection, self._request, self._server_name = connection, request, server_name
        self.status: int | None = None
        self.keep = request.headers.get("connection", "").lower() != "close"
        self.extra_headers: dict[str, str] = {}
        self.bytes_per_write = 0
        self._chunked = False

    def send(self, status: int, body: bytes = b"", kind: str = "application/json") -> None:
        """A whole answer."""
        headers = {"content-length": str(len(body))} | ({"content-type": kind} if body else {})
        self._head(status, headers)
        if self._request.method != "HEAD":
            self._write(body)

    def send_json(self, status: int, value: Any) -> None:
        self.send(status, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())

    def begin(self, status: int = 200, kind: str = "text/event-stream; charset=utf-8") -> None:
        """The head of a streamed answer."""
        self._head(status, {"content-type": kind, "transfer-encoding": "chunked"})
        self._chunked = True

    def write(self, piece: bytes) -> None:
        """One piece of a stream."""
        step = self.bytes_per_write or len(piece) or 1
        for at in range(0, len(piece), step):
            part = piece[at : at + step]
            self._write(b"%x\r\n%s\r\n" % (len(part), part))

    def end(self) -> None:
        self._write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with RST, as a process does that ends with unread input."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Close the connection now, answered or not."""
        self.keep = False
        try:
            if self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) != struct.pack("ii", 1, 0):
                self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client was faster
        self._connection.close()

    def left(self, wait_s: float = 0.0) -> bool:
        """Whether the client has left, looked at for up to `wait_s`."""
        try:
            ready, _, _ = select.select([self._connection], [], [], wait_s)
            return bool(ready) and not self._connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        now = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        lines = [f"HTTP/1.1 {status} {PHRASES.get(status, 'Unknown')}", f"date: {now}", f"server: {self._server_name}"]
        if not self.keep:
            headers["connection"] = "close"
        lines += [f"{name}: {value}" for name, value in (headers | self.extra_headers).items()]
        self._write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def _write(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise ClientLeft(str(error)) from error


Handler = Callable[[Request, Reply], None]


class Server:
    """Listeners and their connections. `accept` is called by the owner's loop; everything else is threads."""

    def __init__(self, handler: Handler, keep_alive_s: Callable[[], float], server_name: str = "uvicorn") -> None:
        self._handler, self._keep_alive_s, self._server_name = handler, keep_alive_s, server_name
        self.listeners: list[socket.socket] = []
        self.open = 0  # connections whose request is being answered
        self._lock = threading.Lock()

    def listen(self, host: str, port: int, *, reuse: bool = True) -> int:
        """Bind and listen; returns the port. Raises: OSError when it is taken."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        if reuse:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(512)
        except OSError:
            listener.close()
            raise
        self.listeners.append(listener)
        return int(listener.getsockname()[1])

    def accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # it was reset before we came to it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        self.listeners = []

    def _serve(self, connection: socket.socket) -> None:
        received = bytearray()
        try:
            with connection:
                while True:
                    connection.settimeout(self._keep_alive_s())
                    request = _read(connection, received)
                    if request is None:
                        return
                    connection.settimeout(None)
                    reply = Reply(connection, request, self._server_name)
                    if not self._answer(request, reply):
                        return
        except OSError:
            return  # the client is gone; there is nobody to tell

    def _answer(self, request: Request, reply: Reply) -> bool:
        with self._lock:
            self.open += 1
        try:
            self._handler(request, reply)
        except ClientLeft:
            return False
        finally:
            with self._lock:
                self.open -= 1
        return reply.keep and reply.status is not None


def _read(connection: socket.socket, received: bytearray) -> Request | None:
    """The next request of a connection; None when the client left, was idle too long, or talks no HTTP."""
    while b"\r\n\r\n" not in received:
        if len(received) > HEAD_MAX or not _more(connection, received):
            return None
    head, _, rest = bytes(received).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        return None
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    received[:] = rest
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = _read_chunks(connection, received)
    else:
        body = _take(connection, received, int(headers.get("content-length") or 0))
    return None if body is None else Request(words[0], words[1], headers, body)


def _more(connection: socket.socket, received: bytearray) -> bool:
    try:
        piece = connection.recv(65536)
    except TimeoutError:
        return False
    received += piece
    return bool(piece)


def _take(connection: socket.socket, received: bytearray, size: int) -> bytes | None:
    while len(received) < size:
        if not _more(connection, received):
            return None
    taken = bytes(received[:size])
    del received[:size]
    return taken


def _read_chunks(connection: socket.socket, received: bytearray) -> bytes | None:
    body = bytearray()
    while True:
        while b"\r\n" not in received:
            if not _more(connection, received):
                return None
        line = bytes(received[: received.index(b"\r\n")])
        del received[: len(line) + 2]
        size = int(line.split(b";")[0], 16)
        piece = _take(connection, received, size + 2)
        if piece is None:
            return None
        if size == 0:
            return bytes(body)
        body += piece[:-2]
