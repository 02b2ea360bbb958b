"""A Hub on loopback: repositories, redirects to a second server, ranges, and faults. See README.md."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".gguf", ".safetensors", ".bin")


@attrs.frozen(kw_only=True)
class Fault:
    """What a file's server does once instead of answering as it should."""

    status: int | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)
    cut_after: int | None = None
    length: int | None = None
    flip: int | None = None
    no_length: bool = False
    more: int = 0
    pause_s: float = 0.0
    piece: int = 1 << 16
    stall: bool = False
    redirect: str | None = None
    no_ranges: bool = False
    shift: int = 0
    etag: str | None = None
    raw: bytes | None = None
    endless: bytes = b""


@attrs.frozen
class Seen:
    """A request that arrived. `server`: `hub` or `cdn`."""

    server: str
    path: str
    headers: Mapping[str, str]


@attrs.define(eq=False)
class Hub:
    """Both servers. `faults` are consumed in order; `repos` maps a repository to its files at COMMIT."""

    repos: dict[str, dict[str, bytes]]
    token: str | None = None
    faults: dict[str, list[Fault]] = attrs.field(factory=dict)
    seen: list[Seen] = attrs.field(factory=list)
    closing: threading.Event = attrs.field(factory=threading.Event)
    scheme: str = "http"
    names: tuple[str, str] = ("localhost", "127.0.0.1")  # two origins on one machine
    ports: list[int] = attrs.field(factory=list)
    listing: Any = None  # answered instead of the true listing

    @property
    def endpoint(self) -> str:
        return f"{self.scheme}://{self.names[0]}:{self.ports[0]}"

    @property
    def cdn(self) -> str:
        return f"{self.scheme}://{self.names[1]}:{self.ports[1]}"

    def fault(self, path: str) -> Fault:
        """The next fault of a file (by the end of its path), else none."""
        for name, planned in self.faults.items():
            if path.endswith(name) and planned:
                return planned.pop(0)
        return Fault()

    def to(self, server: str) -> list[Seen]:
        """What reached one of the servers."""
        return [one for one in self.seen if one.server == server]

    def siblings(self, repo: str) -> Any:
        """The listing of a repository."""
        rows = []
        for path, content in self.repos[repo].items():
            row: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob(content)}
            if path.endswith(LARGE):
                row["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
            rows.append(row)
        return {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": rows}

    def file(self, digest: str) -> bytes | None:
        """A large file by its hash."""
        every = (content for files in self.repos.values() for content in files.values())
        return next((content for content in every if sha256(content) == digest), None)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    name: str

    def log_message(self, format: str, *args: object) -> None:
        """Silent: tests look at `seen`."""

    def do_GET(self) -> None:
        hub = self.hub
        hub.seen.append(Seen(self.name, self.path, {name.lower(): value for name, value in self.headers.items()}))
        self.close_connection = True
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client had enough
            if self.name == "cdn":
                return self._large(path)
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self._plain(401, {"X-Error-Message": "Invalid username or password."}, b"{}")
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
                return self._listing(match[1], path)
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path):
                return self._resolve(match[1], match[3])
            return self._plain(404, {}, b"not here")

    def _listing(self, repo: str, path: str) -> None:
        fault = self.hub.fault(path)
        if fault.redirect is not None or fault.status is not None:
            return self._send(b"", fault)
        if repo not in self.hub.repos:
            return self._plain(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        said = self.hub.siblings(repo) if self.hub.listing is None else self.hub.listing
        return self._send(json.dumps(said).encode(), fault, {"Content-Type": "application/json"})

    def _resolve(self, repo: str, name: str) -> None:
        content = self.hub.repos.get(repo, {}).get(name)
        if content is None:
            return self._plain(404, {"X-Error-Code": "EntryNotFound"}, b"")
        if name.endswith(LARGE):
            digest = sha256(content)
            fault = Fault(redirect=f"{self.hub.cdn}/files/{digest}/{name}?signature=s3cret")
            return self._send(b"", fault, {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))})
        return self._send(content, self.hub.fault(name), {"ETag": f'"{blob(content)}"'})

    def _large(self, path: str) -> None:
        match = re.fullmatch(r"/files/([0-9a-f]{64})/(.+)", path)
        content = self.hub.file(match[1]) if match else None
        if match is None or content is None:
            return self._plain(404, {}, b"")
        return self._send(content, self.hub.fault(match[2]), {"ETag": f'"{match[1]}"'})

    # --- sending -----------------------------------------------------------------------------------------------

    def _plain(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _send(self, content: bytes, fault: Fault, headers: Mapping[str, str] | None = None) -> None:
        if fault.raw is not None:
            self._raw(fault.raw, fault)
            return
        sent = dict(headers or {})
        if fault.etag is not None:
            sent["ETag"] = fault.etag
        start, status = self._range(content, sent.get("ETag"), fault)
        if fault.redirect is not None:
            self._plain(302, {**sent, "Location": fault.redirect}, b"moved")
        elif fault.status is not None:
            self._plain(fault.status, fault.headers, b"")
        elif status == 416:
            self._plain(416, {"Content-Range": f"bytes */{len(content)}"}, b"")
        else:
            self._content(content, start, status, sent, fault)

    def _content(self, content: bytes, start: int, status: int, sent: dict[str, str], fault: Fault) -> None:
        body = bytearray(content[start:])
        if status == 206:
            sent["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if fault.flip is not None and start <= fault.flip:
            body[fault.flip - start] ^= 0xFF
        body += b"x" * fault.more
        self.send_response(status)
        for name, value in {**sent, **fault.headers, "Connection": "close"}.items():
            self.send_header(name, value)
        if fault.no_length:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body) if fault.length is None else fault.length))
        self.end_headers()
        self._body(bytes(body), fault)

    def _raw(self, answer: bytes, fault: Fault) -> None:
        self.wfile.write(answer)
        while fault.endless:
            self.wfile.write(fault.endless)
            if self.hub.closing.wait(fault.pause_s):
                return

    def _range(self, content: bytes, etag: str | None, fault: Fault) -> tuple[int, int]:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        condition = self.headers.get("If-Range")
        if asked is None or fault.no_ranges or (condition is not None and condition != etag):
            return 0, 200
        start = int(asked[1]) + fault.shift
        return (start, 206) if start < len(content) else (0, 416)

    def _body(self, body: bytes, fault: Fault) -> None:
        end = len(body) if fault.cut_after is None else min(fault.cut_after, len(body))
        for at in range(0, end, fault.piece):
            piece = body[at : min(at + fault.piece, end)]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if fault.no_length else piece)
            if fault.pause_s and self.hub.closing.wait(fault.pause_s):
                return
        if fault.stall:
            self.wfile.flush()
            self.hub.closing.wait()
        elif fault.no_length and fault.cut_after is None:
            self.wfile.write(b"0\r\n\r\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that ends in the middle is what many tests are about."""


@contextlib.contextmanager
def running(
    repos: dict[str, dict[str, bytes]],
    *,
    token: str | None = None,
    faults: Mapping[str, Sequence[Fault]] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Hub]:
    """Both servers, until the block ends."""
    hub = Hub(repos, token=token, faults={name: list(planned) for name, planned in (faults or {}).items()})
    servers = []
    for name in ("hub", "cdn"):
        handler = type("Handler", (_Handler,), {"hub": hub, "name": name})
        server = _Server(("127.0.0.1", 0), handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
            hub.scheme = "https"
        servers.append(server)
        hub.ports.append(server.server_address[1])
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.closing.set()
        for server in servers:
            server.shutdown()
            server.server_close()
