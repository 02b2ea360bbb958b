"""Starts a simulated engine by hand, for tests of the engines themselves and for trying things out.

    with running(vllm, "serve", str(model), "--port", "0"): ...

Tests of the product launch through the product instead.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from .installation import Installation

READY_S = 20.0


@attrs.define
class Running:
    """A started engine: its process, its port, its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    key: str | None = None

    def ask(
        self, path: str, body: Any = None, *, key: str | None = None, method: str | None = None, limit_s: float = 10.0
    ) -> tuple[int, bytes]:
        """One request on its own connection. Raises: OSError, http.client.HTTPException when it is not answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        try:
            sent = None if body is None else json.dumps(body).encode()
            headers = {"content-type": "application/json"}
            if key or self.key:
                headers["authorization"] = f"Bearer {key or self.key}"
            connection.request(method or ("GET" if body is None else "POST"), path, sent, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, path: str, body: Any = None, **more: Any) -> Any:
        """The JSON of an answer of 200."""
        status, answer = self.ask(path, body, **more)
        assert status == 200, (status, answer)
        return json.loads(answer)

    def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The `data:` events of a stream, the last one `[DONE]`."""
        _, answer = self.ask(path, {**body, "stream": True})
        lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def words(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def group(self) -> list[int]:
        """Living pids of its process group."""
        return [pid for pid, pgid, state in _processes() if pgid == self.process.pid and state not in "ZX"]

    def wait_empty(self, limit_s: float = 10.0) -> None:
        """Until nothing of the group lives. Raises: TimeoutError."""
        ends = time.monotonic() + limit_s
        while self.group():
            if time.monotonic() > ends:
                raise TimeoutError(f"still there: {self.group()}")
            self.process.poll()
            time.sleep(0.01)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the group and wait for the leader; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        return self.process.wait(60)


@contextlib.contextmanager
def running(
    installation: Installation,
    *argv: str,
    port: int,
    env: Mapping[str, str] | None = None,
    key: str | None = None,
    program: Path | None = None,
    ready: bool = True,
) -> Iterator[Running]:
    """Start the installation's program in a group of its own; what is left at the end is killed."""
    log = installation.prefix / "log"
    with open(log, "ab") as stream:
        process = subprocess.Popen(
            [program or installation.executable, *argv],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={"PATH": "/usr/bin:/bin", **(env or {})},
            start_new_session=True,
        )
    engine = Running(process, port, log, key)
    try:
        if ready:
            wait_listening(engine)
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        engine.wait_empty()
        installation.sweep()


def wait_listening(engine: Running) -> None:
    """Until the port is open. Raises: AssertionError with the log when the engine ended, TimeoutError."""
    ends = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", engine.port), 1):
            return
        assert engine.process.poll() is None, engine.words()
        if time.monotonic() > ends:
            raise TimeoutError(engine.words())
        time.sleep(0.005)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _processes() -> Iterator[tuple[int, int, str]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            yield int(name), int(fields[2]), fields[0]
