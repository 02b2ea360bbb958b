"""The launcher against the wheel it starts: it must look like `llama-server` from outside."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from capyctl.engines.llamacpp.installation import read_version

from .conftest import KEY, PYTHON, Engine, launcher, until

pytestmark = pytest.mark.engine


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        launcher(*words), env=env or {}, capture_output=True, text=True, timeout=30, cwd="/", stdin=subprocess.DEVNULL
    )


def ask(port: int, method: str, path: str, body: object = None, key: str | None = KEY) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request(method, path, body=json.dumps(body) if body is not None else None, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def health(port: int) -> int:
    try:
        return ask(port, "GET", "/health")[0]
    except (ConnectionError, OSError):
        return 0


@pytest.fixture
def engine(start: Callable[..., Engine], tiny_model: Path, free_port: int) -> Engine:
    words = launcher(
        *("--host", "127.0.0.1", "--port", str(free_port), "--model", str(tiny_model / "tiny.gguf")),
        *("--alias", "tiny", "--ctx-size", "1024", "--parallel", "2", "--no-kv-unified", "--gpu-layers", "all"),
        *("--cache-type-k", "f16", "--cache-type-v", "f16", "--fit", "off", "--cache-ram", "0", "--no-context-shift"),
        *("--metrics", "--slots", "--offline", "--no-webui", "--cors-origins", "localhost", "--no-cors-credentials"),
        *("--threads", "1"),
    )
    engine = start(words, {"LLAMA_API_KEY": KEY}, free_port)
    until(lambda: health(free_port) == 200 or engine.process.poll() is not None)
    until(lambda: engine.process.poll() is not None or catches(engine.process.pid, signal.SIGTERM))
    assert engine.process.poll() is None, engine.log
    return engine


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal: it is ready a moment before it does."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_version_is_printed_on_standard_error_as_the_binary_prints_it() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, "")
    assert re.match(r"version: \d{4}\.\d+\.\d+ \(build \d+, commit [0-9a-f]{7}\)\nbuilt with .+ for .+\n$", done.stderr)


def test_the_version_reader_understands_the_launcher() -> None:
    version = read_version(Path(PYTHON))
    assert version.fingerprint == f"{version.version}+{version.commit}"
    assert version.build == int(version.version.rpartition(".")[2])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--frobnicate",), "error: invalid argument: --frobnicate"),
        (("--mlock",), "error: invalid argument: --mlock"),
        (("--threads=1",), "error: invalid argument: --threads=1"),
        (("stray",), "error: invalid argument: stray"),
        (("--threads", "abc"), 'error while handling argument "--threads": expected a whole number'),
        (("--threads",), 'error while handling argument "--threads": expected value for argument'),
        (("--fit", "maybe"), 'error while handling argument "--fit": expected on or off'),
    ],
)
def test_a_word_that_it_does_not_know_ends_it_with_status_1(words: tuple[str, ...], line: str) -> None:
    done = run(*words)
    assert done.returncode == 1
    assert done.stderr.strip() == line


def test_underscores_are_dashes_as_in_the_binary() -> None:
    assert run("--cache_ram", "0", "--frob_nicate").stderr.strip() == "error: invalid argument: --frob_nicate"


def test_a_missing_model_ends_it_with_status_1(tmp_path: Path, free_port: int) -> None:
    done = run("--model", str(tmp_path / "none.gguf"), "--port", str(free_port), "--threads", "1")
    assert done.returncode == 1
    assert "failed to load model" in done.stderr


def test_a_taken_port_ends_it_with_status_1(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("--model", str(tiny_model / "tiny.gguf"), "--port", port, "--threads", "1")
    assert done.returncode == 1
    assert "couldn't bind HTTP server socket" in done.stderr


def test_only_health_answers_without_the_key(engine: Engine) -> None:
    assert ask(engine.port, "GET", "/health", key=None) == (200, b'{"status":"ok"}')
    for path in ("/v1/models", "/props", "/slots", "/metrics"):
        status, body = ask(engine.port, "GET", path, key=None)
        assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error"), path
        assert ask(engine.port, "GET", path, key="wrong")[0] == 401
        assert ask(engine.port, "GET", path)[0] == 200


def test_the_rendered_block_takes_effect(engine: Engine) -> None:
    props = json.loads(ask(engine.port, "GET", "/props")[1])
    assert (props["total_slots"], props["endpoint_metrics"], props["endpoint_slots"]) == (2, True, True)
    assert (props["endpoint_props"], props["ui"], props["model_alias"]) == (False, False, "tiny")
    assert json.loads(ask(engine.port, "GET", "/v1/models")[1])["data"][0]["meta"]["n_ctx"] == 512
    assert "n_threads = 1" in engine.log
    assert ask(engine.port, "GET", "/", key=None)[0] in (401, 404)  # no web page


def test_foreign_origins_are_not_allowed_by_the_engine(engine: Engine) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    connection.request("GET", "/health", headers={"Origin": "https://evil.example"})
    allowed = connection.getresponse().getheader("Access-Control-Allow-Origin")
    connection.close()
    assert allowed not in ("*", "https://evil.example")


def test_sigterm_ends_an_idle_engine_with_status_0(engine: Engine) -> None:
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(timeout=60) == 0


def test_sigint_ends_it_as_well(engine: Engine) -> None:
    engine.process.send_signal(signal.SIGINT)
    assert engine.process.wait(timeout=60) == 0


def test_sigterm_while_it_streams_waits_for_the_client_and_a_second_one_does_not(engine: Engine) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    # A small window: the answer of a tiny, fast model must not fit into the kernel's buffers and end before the signal.
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sock.connect(("127.0.0.1", engine.port))
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": 100_000, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read(64)
    engine.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        engine.process.wait(timeout=0.1)  # its 512 tokens take several times as long, on a quick machine too
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(timeout=60) == -signal.SIGTERM
    connection.close()


def test_it_stays_one_process_without_children(engine: Engine) -> None:
    children = Path(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children").read_text()
    assert children.split() == []
