"""The simulated SGLang, TensorFold and custom server: what tests of the product rely on."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, lay_out
from tests.engines.running import Running, free_port, running
from tests.engines.simulated.options import facts
from tests.nvml.card import Card, one_card

GIB = 1 << 30
KEY, ADMIN = "inference-key", "admin-key"
CHAT = {"model": "q", "messages": [{"role": "user", "content": "Say OK."}]}
CANARY = {"model": "q", "prompt": "canary", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
SYSTEMONE = {
    "state": "ping",
    "questions": {
        "pick": {"type": "choice", "instructions": "Which?", "criteria": {"ping": None, "pong": None}},
        "sure": {"type": "noul", "instructions": "Is it?", "criteria": None},
    },
}

Serve = Callable[..., AbstractContextManager[Running]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "q", weights=2 * GIB)


@pytest.fixture
def cards(tmp_path: Path) -> Card:
    return one_card(tmp_path / "cards", 8 * GIB)


@pytest.fixture
def sglang(tmp_path: Path, cards: Card) -> Installation:
    return lay_out("sglang", "0.5.23", tmp_path / "sglang", cards=cards.state, load_s=0.0)


@pytest.fixture
def serve(sglang: Installation, model: Path) -> Serve:
    @contextmanager
    def start(*extra: str) -> Iterator[Running]:
        port = free_port()
        words = ["-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
        words += ["--served-model-name", "q", "--context-length", "4096", "--mem-fraction-static", "0.8"]
        words += ["--enable-memory-saver", "--enable-metrics", "--api-key", KEY, "--admin-api-key", ADMIN, *extra]
        with running(sglang, *words, port=port, key=KEY) as engine:
            yield engine

    return start


def streaming(engine: Running) -> http.client.HTTPConnection:
    """A stream that has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port)
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT | {"stream": True}), headers)
    connection.getresponse().read(10)
    return connection


def gauge(engine: Running, name: str) -> float:
    text = engine.ask("/metrics")[1].decode()
    return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])


def wait_until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


# --- SGLang ---------------------------------------------------------------------------------------------------


def test_sglang_knows_the_options_that_its_public_reference_names_and_refuses_an_ambiguous_one(
    sglang: Installation,
) -> None:
    names = {name for row in facts("sglang") for name in row["names"]}
    documented = """--model-path --host --port --served-model-name --api-key --admin-api-key --tp-size --pp-size
        --mem-fraction-static --max-total-tokens --max-running-requests --max-mamba-cache-size --context-length
        --chunked-prefill-size --dtype --quantization --kv-cache-dtype --language-model-only --trust-remote-code
        --cuda-graph-backend-decode --cuda-graph-backend-prefill --disable-cuda-graph --tokenizer-worker-num
        --enable-memory-saver --enable-weights-cpu-backup --sleep-on-idle --enable-metrics --enable-cache-report
        --skip-server-warmup --speculative-algorithm --attn-dp-size --nnodes --node-rank
        --dist-init-addr""".split()  # noqa: SIM905
    assert set(documented) <= names
    words = [sglang.python, "-m", "sglang.launch_server", "--model-path", "m", "--cuda-graph-max-bs", "3"]
    answer = subprocess.run(words, capture_output=True, text=True, env={})
    assert (answer.returncode, "ambiguous option: --cuda-graph-max-bs could match" in answer.stderr) == (2, True)


def test_sglang_takes_the_admin_key_alone_for_control_and_none_for_health(serve: Serve) -> None:
    with serve() as engine:
        refused = (401, b'{"error":"Unauthorized"}')
        assert engine.ask("/flush_cache", {}) == refused
        assert engine.ask("/flush_cache", {}, key=ADMIN)[0] == 200
        assert engine.ask("/v1/models", key=ADMIN) == refused
        assert engine.ask("/health", key="wrong") == engine.ask("/ready", key="wrong") == (200, b"")
        assert engine.json("/v1/chat/completions", CHAT | {"model": "anything"})["model"] == "anything"


def test_sglang_parks_and_wakes_with_a_reload_and_answers_garbage_without_it(serve: Serve, cards: Card) -> None:
    with serve() as engine:
        before, held = engine.json("/v1/completions", CANARY)["choices"], cards.used(0)
        assert engine.ask("/flush_cache?timeout=1", {}, key=ADMIN)[0] == 200
        assert engine.ask("/release_memory_occupation", {}, key=ADMIN) == (200, b"null")
        assert cards.used(0) == 512 << 20
        assert engine.ask("/v1/models")[0] == engine.ask("/v1/loads?include=core")[0] == 200
        assert engine.ask("/resume_memory_occupation", {"tags": ["kv_cache", "weights"]}, key=ADMIN) == (200, b"null")
        assert cards.used(0) == held
        assert engine.json("/v1/completions", CANARY)["choices"] != before
        reload = {"model_path": engine.json("/model_info")["model_path"], "load_format": "auto", "flush_cache": True}
        assert engine.json("/update_weights_from_disk", reload, key=ADMIN)["success"] is True
        assert engine.json("/v1/completions", CANARY)["choices"] == before


@pytest.mark.parametrize("how", ["busy", "twice", "health", "request"])
def test_sglang_dies_of_a_release_while_busy_a_second_resume_and_anything_that_runs_while_parked(
    serve: Serve, sglang: Installation, how: str
) -> None:
    with serve() as engine:
        with suppress(http.client.HTTPException, OSError):
            if how == "busy":
                sglang.set(token_s=0.01, answer_tokens=1000)
                client = streaming(engine)
                engine.ask("/release_memory_occupation", {}, key=ADMIN)
                client.close()
            elif how == "twice":
                engine.ask("/resume_memory_occupation", {}, key=ADMIN)
            else:
                engine.ask("/release_memory_occupation", {}, key=ADMIN)
                engine.ask(*(("/health",) if how == "health" else ("/v1/chat/completions", CHAT)))
        assert engine.process.wait(60) != 0
        engine.wait_empty()


def test_sglang_gauges_read_zero_for_the_first_tokens_of_a_lone_request_and_loads_do_not(
    serve: Serve, sglang: Installation
) -> None:
    sglang.set(token_s=0.02, answer_tokens=1000)
    with serve() as engine:
        client = streaming(engine)
        assert gauge(engine, "sglang:num_running_reqs") == 0.0
        assert engine.json("/v1/loads?include=core")["loads"][0]["num_running_reqs"] == 1
        assert engine.ask("/flush_cache?timeout=0", {}, key=ADMIN)[0] == 400
        wait_until(lambda: gauge(engine, "sglang:num_running_reqs") == 1.0)
        client.close()
        wait_until(lambda: engine.json("/v1/loads")["loads"][0]["num_running_reqs"] == 0)


def test_sglang_aborts_ids_that_begin_with_one_it_knows_and_refuses_one_in_flight(
    serve: Serve, sglang: Installation
) -> None:
    sglang.set(token_s=0.01, answer_tokens=1000)
    with serve() as engine:
        answers: list[tuple[int, bytes]] = []
        bodies = [CHAT | {"rid": rid, "n": n} for rid, n in (("abc", 1), ("abc-1", 1), ("several", 2))]

        def ask(body: dict[str, Any]) -> None:
            answers.append(engine.ask("/v1/chat/completions", body))

        threads = [threading.Thread(target=ask, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        wait_until(lambda: at_work(engine) == 3)
        assert engine.ask("/v1/chat/completions", bodies[0])[0] == 400
        for rid in ("nobody", "ab", "several", ""):
            assert engine.ask("/abort_request", {"rid": rid}, key=ADMIN)[0] == 200
        assert at_work(engine) == 3
        assert engine.ask("/abort_request", {"rid": "abc"}, key=ADMIN)[0] == 200
        wait_until(lambda: len(answers) == 2)
        assert sorted(json.loads(answer)["id"] for _, answer in answers) == ["abc", "abc-1"]
        assert engine.ask("/abort_request", {"abort_all": True}, key=ADMIN)[0] == 200
        for thread in threads:
            thread.join(60)


def at_work(engine: Running) -> int:
    return int(engine.json("/v1/loads")["loads"][0]["num_running_reqs"])


def test_sglang_children_die_with_a_killed_front(serve: Serve, sglang: Installation) -> None:
    with serve() as engine:
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait()
        engine.wait_empty(2)
        assert [path.name.startswith("sglang_loads_") for path in sglang.segments()] == [True]
    assert sglang.segments() == []  # swept


def test_sglang_without_its_hidden_packages_does_not_start(tmp_path: Path, model: Path) -> None:
    bare = lay_out("sglang", "0.5.23", tmp_path / "bare", without=("torch_memory_saver",))
    words = ["-m", "sglang.launch_server", "--model-path", str(model), "--enable-memory-saver", "--port", "1"]
    answer = subprocess.run([bare.python, *words], capture_output=True, text=True, env={})
    assert (answer.returncode, "No module named 'torch_memory_saver'" in answer.stderr) == (1, True)
    packages = bare.packages
    code = f"import sys; sys.path.append({str(packages)!r}); from sglang.launch_server import main; main()"
    answer = subprocess.run([bare.python, "-S", "-c", code, *words[2:4]], capture_output=True, text=True, env={})
    assert "No module named 'cutlass'" in answer.stderr


def test_sglang_decides_with_a_probability_for_every_option(serve: Serve) -> None:
    with serve() as engine:
        answers = engine.json("/v1/systemone", SYSTEMONE | {"model": "q"})["answers"]
        assert abs(sum(answers["pick"]["probabilities"].values()) - answers["pick"]["x_label_mass"]) < 1e-6
        assert 0 <= answers["sure"]["noul"] <= 1
        assert engine.ask("/v1/systemone", {"state": "x", "questions": {}})[0] == 422


# --- TensorFold -------------------------------------------------------------------------------------------------


def test_tensorfold_builds_its_kernels_on_the_first_request_and_reports_on_the_finish_chunk(
    tmp_path: Path, cards: Card, model: Path
) -> None:
    tensorfold = lay_out("tensorfold", "0.6.6", tmp_path / "tensorfold", cards=cards.state, load_s=0.0, build_s=0.05)
    version = subprocess.run([tensorfold.executable, "--version"], capture_output=True, text=True, env={})
    assert version.stdout == "tensorfold 0.6.6\n"
    port, extensions = free_port(), tmp_path / "extensions"
    words = ["serve", str(model), "--name", "q", "--host", "127.0.0.1", "--port", str(port), "--no-update-check"]
    words += [
        "--backend",
        "cuda",
        "--snapshot-dir",
        "none",
        "--context",
        "2048",
        "--drafter",
        "none",
        "--parallel",
        "4",
    ]
    env = {"TORCH_EXTENSIONS_DIR": str(extensions), "TENSORFOLD_CUDA_MEMORY_LIMIT_GB": "6"}
    with running(tensorfold, *words, port=port, env=env) as engine:
        health = engine.json("/health")
        assert (health["ok"], health["busy"], health["requests_running"]) == (True, False, 0)
        events = engine.events("/v1/chat/completions", CHAT)
        assert events[-2]["tensorfold"]["tokens_per_second"] > 0
        assert events[-2]["usage"]["completion_tokens"] == len(events) - 3
        assert "logprobs" not in events[1]["choices"][0]
        assert [path.name for path in extensions.glob("*/*")] == ["tensorfold_kernels.so"]
        assert cards.used(0) == sum(path.stat().st_size for path in model.glob("*.safetensors")) + (
            4 * 2048 * 147456
        ) + (512 << 20)
        assert engine.stop() == 0
    small = running(tensorfold, *words, port=port, env=env | {"TENSORFOLD_CUDA_MEMORY_LIMIT_GB": "2"}, ready=False)
    with small as engine:
        assert engine.process.wait(60) == 1
        assert "the budget is 2.00 GiB" in engine.words()


# --- custom -------------------------------------------------------------------------------------------------------


def test_a_custom_server_tells_its_work_and_may_listen_where_it_should_not(tmp_path: Path, model: Path) -> None:
    custom = lay_out("custom", "3", tmp_path / "custom", also_listens="0.0.0.0", load_s=0.0)
    port = free_port()
    words = ["--host", "127.0.0.1", "--port", str(port), "--model", str(model), "--name", "q", "--api", "decisions"]
    with running(custom, *words, "--whatever", port=port) as engine:
        assert engine.ask("/healthz") == (200, b"ok")
        assert engine.json("/status") == {"state": "serving", "work": {"active": 0, "queued": 0}}
        assert abs(sum(engine.json("/v1/systemone", SYSTEMONE)["answers"]["pick"]["probabilities"].values()) - 1) < 1e-6
        assert engine.ask("/v1/systemone", {"questions": 3})[0] == 422
        assert b":0" not in engine.ask("/metrics")[1]
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
        assert any(place.startswith("00000000:") for place in listening)
