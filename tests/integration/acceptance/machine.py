"""One machine as its user has it: a home, `capyctl` commands, a role that can be killed, clients, and eyes.

Everything is looked at from outside: the process table, sockets, the engines' own logs and gauges, files. The
package is not imported, except to find its journal's port and key of an engine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
ESTABLISHED, CLOSE_WAIT = "01", "08"


def _stalled_s() -> float:
    """Seconds so far in which somebody on this machine waited for a processor; 0 where the kernel does not tell."""
    try:
        some = Path("/proc/pressure/cpu").read_text().partition("\n")[0]
    except OSError:
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6


@attrs.frozen
class Stopwatch:
    """Seconds since it was made that count against a bound: those in which nobody had to wait for a processor.

    On a machine with time these are all of them; one that is busy with something else fails no test by that.
    """

    _began: float = attrs.field(factory=time.monotonic, init=False)
    _stalled: float = attrs.field(factory=_stalled_s, init=False)

    @property
    def s(self) -> float:
        return time.monotonic() - self._began - (_stalled_s() - self._stalled)

    def sleep_until(self, s: float) -> None:
        while (left := s - self.s) > 0:
            time.sleep(max(left, 0.01))


BUSY = 5
"""How much longer than its limit something may take on a machine on which everybody waits for a processor."""


def until(holds: Callable[[], Any], limit_s: float = 20.0, what: str = "it", every_s: float = 0.02) -> Any:
    """Poll until the value is true, and return it; fail when it does not become so. `limit_s` as a Stopwatch counts."""
    since, ends = Stopwatch(), time.monotonic() + BUSY * limit_s
    while not (value := holds()):
        within = since.s < limit_s and time.monotonic() < ends
        assert within, f"{what} did not come to hold within {limit_s} s"
        time.sleep(every_s)
    return value


@attrs.frozen
class Done:
    """How a command ended. `took_s` as a Stopwatch counts."""

    status: int
    out: str
    err: str
    took_s: float

    @property
    def error(self) -> str:
        """The error line; everything else on stderr must be a notice."""
        lines = [line for line in self.err.splitlines() if line.startswith("error [")]
        assert len(lines) == 1, self.err
        return lines[0]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@attrs.frozen
class Answer:
    """A whole answer. `events` are the decoded `data:` payloads of a stream, `done` whether its end mark came."""

    status: int
    body: bytes
    headers: dict[str, str]
    took_s: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data(self) -> list[str]:
        return [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]

    @property
    def events(self) -> list[Any]:
        return [json.loads(one) for one in self.data if one != "[DONE]"]

    @property
    def done(self) -> bool:
        return "[DONE]" in self.data

    @property
    def text(self) -> str:
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            deltas = [choice["delta"] for event in self.events for choice in event.get("choices", ())]
            return "".join(delta.get("content") or "" for delta in deltas)
        return str(self.json["choices"][0]["message"]["content"])


@attrs.frozen
class Engine:
    """An engine process that lives."""

    pid: int
    name: str

    def alive(self) -> bool:
        try:
            return not gone(psutil.Process(self.pid))
        except psutil.NoSuchProcess:
            return False

    def pss_bytes(self) -> int:
        try:
            text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        except (OSError, ProcessLookupError):
            return 0
        found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """It computes nothing until the end of the block: whatever is asked of it lasts, however quick it is."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGCONT)

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]


def descendants() -> list[psutil.Process]:
    """Every process below this one; orphans come back here, since the session makes this process their reaper."""
    return psutil.Process().children(recursive=True)


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended. A zombie that was orphaned to us is taken away; the role's exit is its Popen's."""
    try:
        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return False
        if process.ppid() == os.getpid():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    except psutil.NoSuchProcess:
        pass
    return True


@attrs.define(eq=False)
class Machine:
    """See the module. `limit_mib` is what engines may hold together."""

    home: Path
    environment: Path
    first_port: int
    limit_mib: int = 768
    settings: Sequence[str] = ()
    role: subprocess.Popen[bytes] | None = None
    inference: str = ""
    management: str = ""
    roles: int = 0
    _pids: set[int] = attrs.field(factory=set)  # of processes seen to be ours

    # --- commands -----------------------------------------------------------------------------------

    def environ(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    @property
    def state(self) -> Path:
        return self.home / ".local/state/capyctl"

    def command(self, *words: str, limit_s: float = 120.0) -> Done:
        took = Stopwatch()
        ended = subprocess.run(
            [sys.executable, "-m", "capyctl", *words],
            capture_output=True,
            text=True,
            env=self.environ(),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        )
        return Done(ended.returncode, ended.stdout, ended.stderr, took.s)

    def ok(self, *words: str, limit_s: float = 120.0) -> Done:
        done = self.command(*words, limit_s=limit_s)
        assert done.status == 0, f"capyctl {' '.join(words)}: {done.status}\n{done.out}\n{done.err}"
        return done

    def add_engine(self) -> Done:
        return self.ok("engine", "add", str(self.environment), "--arg=--threads", "--arg=1")

    def write(self, name: str, text: str | bytes) -> str:
        file = self.home / name
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(file)

    def document(self, name: str, model: str, request_mib: int | None = None, **engine_config: Any) -> str:
        """A deployment document's file."""
        config = dict(engine_config)
        if request_mib is not None:
            config["memory"] = {"request": f"{request_mib}MiB"}
        body: dict[str, Any] = {"name": name, "engine": "llamacpp", "model": model}
        if config:
            body["engine_config"] = config
        return self.write(f"{name}.yaml", json.dumps(body))

    def deploy(self, name: str, model: str, request_mib: int | None = None, **engine_config: Any) -> None:
        """A deployment whose checkpoint has been measured; nothing is started."""
        self.ok("deploy", "model", "--file", self.document(name, model, request_mib, **engine_config))
        until(lambda: self.view(name)["checkpoint"]["state"] not in ("pending", "measuring"), what="measuring")
        checkpoint = self.view(name)["checkpoint"]
        assert checkpoint["state"] == "measured", checkpoint

    def view(self, name: str) -> dict[str, Any]:
        """The deployment as the management API shows it."""
        for row in self.manage("GET", "/deployments")["deployments"]:
            if row["name"] == name:
                return dict(row)
        raise AssertionError(f"there is no deployment {name}")

    def instance(self, name: str) -> dict[str, Any]:
        return dict(self.view(name)["instances"][0])

    def manage(self, method: str, path: str, body: dict[str, Any] | None = None, limit_s: float = 60.0) -> Any:
        """One management call. Raises: AssertionError unless it is answered well."""
        status, answer = self.call(method, path, body, limit_s)
        assert status in (200, 202), answer
        return answer

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, limit_s: float = 60.0
    ) -> tuple[int, Any]:
        """Status and content of one management call, however it is answered."""
        host, _, port = self.management.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=limit_s)
        try:
            headers = {"Authorization": f"Bearer {self.credential('admin_token')}"}
            if body is not None:
                headers |= {"Content-Type": "application/json", "Idempotency-Key": uuid.uuid4().hex}
            connection.request(method, f"/management/v1{path}", body and json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def act(self, name: str, action: str, *, wait: bool = True, **more: Any) -> dict[str, Any]:
        """What `capyctl <action> deployment <name> --wait` does, without a process of its own. Returns the receipt."""
        view = self.view(name)
        deadline_ms = time.time_ns() // 1_000_000 + 60_000
        body = {"expected_revision": int(view["revision"]), "action": action, "deadline_ms": deadline_ms, **more}
        receipt = dict(self.manage("POST", f"/deployments/{view['id']}/actions", body))
        if wait:
            end = until(lambda: self._ended(receipt["operation_id"]), 30, f"the end of {action} {name}")
            assert end == "succeeded", end
        return receipt

    def _ended(self, operation: str) -> str | None:
        state = str(self.manage("GET", f"/operations/{operation}")["state"])
        return state if state in ("succeeded", "failed", "cancelled") else None

    def charged(self) -> dict[str, str]:
        """What the ledger holds: bytes and phase by owner and domain."""
        rows = self.manage("GET", "/snapshot")["ledger"]["reservations"]
        return {f"{row['owner']} {row['domain']}": f"{row['bytes']} {row['phase']}" for row in rows}

    def credential(self, name: str) -> str:
        text = (self.state / "identity/credentials").read_text()
        found = re.search(rf'{name}"?\s*[:=]\s*"?([^\s",]+)', text)
        assert found, f"the credentials file has no {name}"
        return found[1]

    # --- the role -----------------------------------------------------------------------------------

    def role_words(self) -> list[str]:
        words = ["start", "standalone", "--format", "json"]
        words += ["--listen", "127.0.0.1:0", "--management-listen", "127.0.0.1:0"]
        words += ["--engine-ports", f"{self.first_port}-{self.first_port + 9}"]
        words += ["--set", f"host.resource_policy.memory.system.managed_limit={self.limit_mib}MiB"]
        for setting in self.settings:
            words += ["--set", setting]
        return words

    @property
    def log_path(self) -> Path:
        return self.home / f"role-{self.roles}.log"

    def log(self) -> list[dict[str, Any]]:
        """What the present role has said, decoded."""
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def said(self, message: str, at_least: int = 1, **fields: Any) -> list[dict[str, Any]]:
        """Lines of this message and with these fields, waited for: an answer may overtake the line that tells of it."""

        def found() -> list[dict[str, Any]]:
            return [
                line
                for line in self.log()
                if line["message"] == message and all(line.get(name) == value for name, value in fields.items())
            ]

        until(lambda: len(found()) >= at_least, what=f"{message} of {fields} in the log")
        return found()

    def story(self) -> str:
        """What the present role has said, a line each and without requests: why something went another way."""
        told = [
            line for line in self.log() if line["message"] != "request.ended" and line.get("machine") != "operation"
        ]
        return "\n".join(" ".join(str(value) for value in line.values()) for line in told)

    def spawn(self) -> None:
        """Start the role without waiting for it."""
        assert self.role is None or self.role.poll() is not None
        self.roles += 1
        with self.log_path.open("wb") as log:
            self.role = subprocess.Popen(
                [sys.executable, "-m", "capyctl", *self.role_words()],
                env=self.environ(),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self, ready_s: float = 40) -> float:
        """Start the role; seconds until it said that it is ready."""
        began = time.monotonic()
        self.spawn()
        assert self.role is not None
        role = self.role

        def ready() -> dict[str, Any] | None:
            assert role.poll() is None, self.log_path.read_text()[-2000:]
            return next((line for line in self.log() if line["message"] == "role.ready"), None)

        said = until(ready, ready_s, "the role's ready line", 0.01)
        self.inference, self.management = said["inference"], said["management"]
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL to the role, as a machine short of memory does it."""
        assert self.role is not None
        self.engines()  # so that they are known to be ours
        self.role.kill()
        self.role.wait(timeout=60)

    def terminate(self, limit_s: float = 90.0) -> int:
        assert self.role is not None
        self.engines()
        self.role.terminate()
        return self.role.wait(timeout=limit_s)

    def drop_everything(self) -> None:
        """End the role and every process that belongs to this machine, by pid; fail if one cannot be ended."""
        faults = [line for line in self.log() if line["level"] in ("error", "critical")] if self.roles else []
        if self.role is not None and self.role.poll() is None:
            self.role.kill()
            self.role.wait(timeout=60)
        self.engines()
        for pid in self.ours():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self.ours(), 20, f"the end of {self.ours()}")
        assert not faults, faults

    # --- processes ----------------------------------------------------------------------------------

    def ours(self) -> list[int]:
        """Living processes of this machine, besides the role: engines, their children, writers, gates."""
        place = str(self.home)
        found = []
        for process in descendants():
            if self.role is not None and process.pid == self.role.pid:
                continue
            try:
                if gone(process):
                    continue
                known = process.pid in self._pids or any(
                    one.pid in self._pids or (self.role is not None and one.pid == self.role.pid)
                    for one in process.parents()
                )
                if not known:
                    known = place in " ".join(process.cmdline()) or any(place in f.path for f in process.open_files())
            except psutil.NoSuchProcess:
                continue
            if known:
                self._pids.add(process.pid)
                found.append(process.pid)
        return found

    def engines(self, name: str | None = None) -> list[Engine]:
        """Engines that live, as the process table has them."""
        found = []
        for process in descendants():
            try:
                words = process.cmdline()
                if str(self.home) not in " ".join(words) or "--alias" not in words or process.pid in self._role_pids():
                    continue
                if gone(process):
                    continue
            except psutil.NoSuchProcess:
                continue
            self._pids.add(process.pid)
            engine = Engine(process.pid, words[words.index("--alias") + 1])
            if name in (None, engine.name):
                found.append(engine)
        return found

    def _role_pids(self) -> set[int]:
        return set() if self.role is None else {self.role.pid}

    def engine(self, name: str, limit_s: float = 20.0) -> Engine:
        """The only engine of this deployment, waited for."""
        engines: list[Engine] = until(lambda: self.engines(name), limit_s, f"an engine of {name}", 0.005)
        assert len(engines) == 1
        return engines[0]

    def engine_logs(self) -> dict[str, str]:
        """The log of every launch that is kept, by deployment id and launch."""
        folder = self.state / "host/logs"
        return {f"{f.parent.name}/{f.stem}": f.read_text(errors="replace") for f in sorted(folder.glob("*/*.log"))}

    def launches(self, name: str) -> list[str]:
        """Logs of this deployment's launches, as far as they are kept."""
        identity = self.view(name)["id"]
        return [text for place, text in self.engine_logs().items() if place.startswith(identity)]

    def served(self, name: str, at_least: int) -> int:
        """How many requests the last launch worked on, once so many are in its log, which somebody else writes."""
        until(lambda: served(self.launches(name)[-1]) >= at_least, what=f"{at_least} requests in the log of {name}")
        return served(self.launches(name)[-1])

    def engine_door(self, name: str) -> tuple[int, str]:
        """Port and key of the present engine, from the host's journal."""
        identity = self.view(name)["id"]
        with contextlib.closing(sqlite3.connect(f"file:{self.state}/host/journal.sqlite3?mode=ro", uri=True)) as db:
            rows = db.execute(
                "SELECT port, key FROM launch WHERE deployment = ? ORDER BY generation DESC LIMIT 1", (identity,)
            ).fetchall()
        return int(rows[0][0]), str(rows[0][1])

    def busy(self, name: str) -> tuple[int, int]:
        """The engine's own gauges: requests it works on, requests it holds back."""
        port, key = self.engine_door(name)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {key}"})
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        gauge = {
            line.split()[0].partition(":")[2]: int(float(line.split()[1]))
            for line in text.splitlines()
            if line.startswith("llamacpp:requests_")
        }
        return gauge["requests_processing"], gauge["requests_deferred"]

    # --- clients ------------------------------------------------------------------------------------

    def ask(
        self,
        model: str,
        *,
        stream: bool = False,
        max_tokens: int = 4,
        prompt: str = "Say hello.",
        key: str | None = None,
        path: str = "/v1/chat/completions",
        limit_s: float = 90.0,
        **body: Any,
    ) -> Answer:
        content = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": stream,
            **body,
        }
        return self.send("POST", path, json.dumps(content).encode(), key=key, limit_s=limit_s)

    def send(
        self, method: str, path: str, body: bytes | None = None, *, key: str | None = None, limit_s: float = 90.0
    ) -> Answer:
        host, _, port = self.inference.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=limit_s)
        headers = {"Authorization": f"Bearer {key or self.credential('api_key')}", "Content-Type": "application/json"}
        began = time.monotonic()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            kept = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, data, kept, time.monotonic() - began)
        finally:
            connection.close()

    def open(self, model: str, *, stream: bool = True, max_tokens: int = 400, prompt: str = "Tell a story.") -> Call:
        """Send a request on a socket of its own; the caller reads from it, or hangs up."""
        content = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": stream,
        }
        return self.raw(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
            % (self.credential("api_key").encode(), len(body := json.dumps(content).encode()), body)
        )

    def raw(self, data: bytes) -> Call:
        host, _, port = self.inference.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=60)
        sock.sendall(data)
        return Call(sock)


@attrs.define(eq=False)
class Call:
    """One request on the wire."""

    sock: socket.socket
    got: bytes = b""

    def read_until(self, mark: bytes, limit_s: float = 60.0) -> bytes:
        """Everything received so far, once `mark` is in it. Raises: EOFError when it ends before."""
        self.sock.settimeout(limit_s)
        while mark not in self.got:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError(self.got.decode(errors="replace"))
            self.got += data
        return self.got

    def rest(self, limit_s: float = 60.0) -> bytes:
        """Everything, up to the end or the break of the connection."""
        self.sock.settimeout(limit_s)
        with contextlib.suppress(ConnectionError):
            while data := self.sock.recv(1 << 16):
                self.got += data
        return self.got

    def hang_up(self) -> None:
        self.sock.close()

    def reset(self) -> None:
        """Hang up with a reset, as a killed client does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()


def connections(port: int, state: str) -> int:
    """TCP connections whose server side, at this loopback port, is in a state."""
    suffix = f":{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(suffix) and row[3] == state for row in rows)


@attrs.define(eq=False)
class Watch:
    """What a look at the machine each 100 ms has seen, from start to end."""

    machine: Machine
    most_pss_bytes: int = 0
    most_engines: int = 0
    samples: int = 0
    pids: dict[int, str] = attrs.field(factory=dict)  # every engine seen, by pid
    logs: dict[Path, Path] = attrs.field(factory=dict)  # a second name of each log: old ones are pruned
    _over: threading.Event = attrs.field(factory=threading.Event)

    def _look(self) -> None:
        engines = self.machine.engines()
        self.samples += 1
        self.most_engines = max(self.most_engines, len(engines))
        self.most_pss_bytes = max(self.most_pss_bytes, sum(engine.pss_bytes() for engine in engines))
        self.pids |= {engine.pid: engine.name for engine in engines}
        kept = self.machine.home / "kept"
        for log in (self.machine.state / "host/logs").glob("*/*.log"):
            if log not in self.logs:
                kept.mkdir(exist_ok=True)
                second = kept / f"{log.parent.name}-{log.name}"
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.link(log, second)
                self.logs[log] = second

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self._look()

    @contextlib.contextmanager
    def on(self) -> Iterator[Watch]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()
            self._look()  # what came after the last one


def served(log: str) -> int:
    """Requests that an engine worked on, by its own log, without the probe that proves readiness."""
    return len(re.findall(r"launch_slot_: id .* processing task", log)) - 1
