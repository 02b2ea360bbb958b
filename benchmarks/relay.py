"""What the router adds to a request, against the engine itself and, where it is installed, against nginx.

One client on one connection asks the same question by every way in turn, so that noise of the machine
falls on all of them alike. Printed: the median, the 99th percentile, what a way adds to the direct
one, and the ratio.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from benchmarks.router_process import TOKEN

ROUNDS = int(os.environ.get("CAPYCTL_BENCH_ROUNDS", "600"))

NGINX = """
daemon off; worker_processes 1; pid {room}/pid; error_log {room}/error;
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {room}/body; proxy_temp_path {room}/proxy;
  fastcgi_temp_path {room}/f; uwsgi_temp_path {room}/u; scgi_temp_path {room}/s;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 32; }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_requests 1000000;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@attrs.define
class Way:
    """One way to the engine, and the seconds that requests took on it."""

    name: str
    port: int
    took_s: list[float] = attrs.field(factory=list)
    sock: socket.socket = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.sock = socket.create_connection(("127.0.0.1", self.port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, raw: bytes, stream: bool) -> None:
        """One request, until its whole answer is here."""
        began = time.perf_counter()
        self.sock.sendall(raw)
        held = b""
        while not _complete(held, stream):
            data = self.sock.recv(262_144)
            if not data:
                raise RuntimeError(f"{self.name} closed: {held[-200:]!r}")
            held += data
        self.took_s.append(time.perf_counter() - began)
        if not held.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{self.name} answered {held[:200]!r}")


def _complete(held: bytes, stream: bool) -> bool:
    if stream:
        return held.endswith(b"0\r\n\r\n")
    head, end, body = held.partition(b"\r\n\r\n")
    if not end:
        return False
    return len(body) >= int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


def _question(stream: bool, turns: int) -> bytes:
    messages = [{"role": "user", "content": "What is the capital of France? " * 4}] * turns
    body = json.dumps({"model": "m", "messages": messages, "stream": stream, "max_tokens": 64}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (TOKEN.encode(), len(body))
    ) + body


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[int]:
    """A module that prints its port and ends with its standard input."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def _nginx(engine: int) -> Iterator[int | None]:
    """A plain reverse proxy with a pool, where nginx is installed."""
    program = shutil.which("nginx")
    if program is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as room:
        config = Path(room) / "nginx.conf"
        config.write_text(NGINX.format(room=room, engine=engine, port=port))
        with subprocess.Popen([program, "-c", str(config), "-e", f"{room}/error"]) as process:
            try:
                for _ in range(100):
                    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                        break
                    time.sleep(0.05)
                yield port
            finally:
                process.terminate()


def _measure(title: str, ways: list[Way], raw: bytes, stream: bool) -> None:
    for way in ways:
        for _ in range(50):
            way.ask(raw, stream)
        way.took_s.clear()
    for _ in range(ROUNDS):
        for way in ways:
            way.ask(raw, stream)
    direct_ms = statistics.median(ways[0].took_s) * 1000
    print(f"{title}, {ROUNDS} requests by each way")
    for way in ways:
        ordered = sorted(way.took_s)
        median_ms, p99_ms = statistics.median(ordered) * 1000, ordered[int(len(ordered) * 0.99)] * 1000
        print(
            f"  {way.name:8} median {median_ms:7.3f} ms  p99 {p99_ms:7.3f} ms"
            f"  adds {median_ms - direct_ms:+7.3f} ms  ratio {median_ms / direct_ms:5.2f}"
        )


def main() -> None:
    """Measure whole answers, a long conversation, and streams."""
    with (
        _process("benchmarks.engine") as engine,
        _process("benchmarks.router_process", str(engine)) as router,
        _nginx(engine) as nginx,
    ):
        ways = [Way("direct", engine), Way("capyctl", router)]
        if nginx is not None:
            ways.append(Way("nginx", nginx))
        else:
            print("nginx is not installed: no comparison with it")
        _measure("whole answer, one short message", ways, _question(False, 1), False)
        _measure("whole answer, 200 messages (30 KB)", ways, _question(False, 200), False)
        _measure("stream of 64 events written at once", ways, _question(True, 1), True)


if __name__ == "__main__":
    main()
