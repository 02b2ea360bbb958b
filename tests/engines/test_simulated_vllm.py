"""The simulated vLLM against recorded facts of the real one, and the faults that tests of the product rely on."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, die_at, fail, hang, lay_out, lose
from tests.engines.running import Running, free_port, running
from tests.engines.simulated.options import facts
from tests.nvml.card import Card, one_card

GIB = 1 << 30
KEY, ADMIN = "inference-key", "admin-key"
CHAT = {"model": "q", "messages": [{"role": "user", "content": "Say OK."}]}
CANARY = {"model": "q", "prompt": "canary", "max_tokens": 8, "temperature": 0, "return_token_ids": True}

Serve = Callable[..., AbstractContextManager[Running]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "q", weights=2 * GIB, shards=2)


@pytest.fixture
def cards(tmp_path: Path) -> Card:
    return one_card(tmp_path / "cards", 8 * GIB)


@pytest.fixture
def vllm(tmp_path: Path, cards: Card) -> Installation:
    return lay_out("vllm", "0.32.0", tmp_path / "vllm", cards=cards.state, load_s=0.0)


@pytest.fixture
def serve(vllm: Installation, model: Path) -> Serve:
    @contextmanager
    def start(*extra: str, dev: str = "1", ready: bool = True) -> Iterator[Running]:
        port = free_port()
        words = ["serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "q"]
        words += ["--max-model-len", "4K", "--enable-sleep-mode", "--enable-per-request-metrics", *extra]
        env = {"VLLM_SERVER_DEV_MODE": dev, "VLLM_API_KEY": KEY, "CAPYCTL_VLLM_ADMIN_KEY": ADMIN}
        with running(vllm, *words, port=port, env=env, key=KEY, ready=ready) as engine:
            yield engine

    return start


def said(vllm: Installation, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([vllm.executable, *words], capture_output=True, text=True, env={}, timeout=60)


# --- the command line -------------------------------------------------------------------------------------


def test_options_are_those_that_the_public_reference_of_0_32_names() -> None:
    names = {name for row in facts("vllm") for name in row["names"]}
    documented = """--host --port --api-key --middleware --served-model-name --tensor-parallel-size -tp --grpc
        --pipeline-parallel-size --gpu-memory-utilization --kv-cache-memory-bytes --max-num-seqs --max-model-len
        --max-num-batched-tokens --block-size --kv-cache-dtype --dtype --quantization --enforce-eager
        --language-model-only --trust-remote-code --enable-sleep-mode --sleep-preserve-parameter-names
        --safetensors-load-strategy --enable-per-request-metrics --no-enable-log-requests --no-enable-log-outputs
        --tool-call-parser --enable-auto-tool-choice --reasoning-parser --speculative-config --kv-transfer-config
        --device-memory-utilization --shutdown-timeout --headless --nnodes --node-rank --master-addr --master-port
        --distributed-executor-backend --enable-prompt-tokens-details --disable-log-stats""".split()  # noqa: SIM905
    assert set(documented) <= names
    assert not {"--device", "--swap-space", "--disable-log-requests"} & names


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--bogus", "1"], "vllm: error: unrecognized arguments: --bogus 1"),
        (["--max-model-len", "abc"], "argument --max-model-len: invalid human_readable_int_or_auto value: 'abc'"),
        (["--max-num", "3"], "vllm serve: error: ambiguous option: --max-num could match --max-num-batched-tokens, "),
        (["--kv-cache-memory-bytes", "4GiB"], "Value 4GiB cannot be converted to <function human_readable_int"),
        (["--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
    ],
)
def test_a_bad_option_ends_it_with_status_2_and_the_words_of_argparse(
    vllm: Installation, words: list[str], error: str
) -> None:
    answer = said(vllm, "serve", "somewhere", *words)
    assert answer.returncode == 2
    assert error in answer.stderr
    assert answer.stderr.startswith("usage: vllm")


def test_an_abbreviation_an_underscore_and_a_unit_are_read_as_the_real_parser_reads_them(vllm: Installation) -> None:
    code = """
import sys
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm")
cmd_init()[0].subparser_init(parser.add_subparsers(dest="subparser"))
args = parser.parse_args(["serve", "--model", "m", "--kv-cache-mem", "4G", "--max_num_seqs=7", "--max-model-len", "4k",
                          "--compilation-config.level", "3", "--no-enforce-eager"])
print(args.model_tag, args.kv_cache_memory_bytes, args.max_num_seqs, args.max_model_len, args.compilation_config)
"""
    answer = subprocess.run([vllm.python, "-c", code], capture_output=True, text=True, env={})
    assert answer.stdout == f"m {4 << 30} 7 4000 {{'level': 3}}\n", answer.stderr


def test_the_version_is_one_line_and_an_older_build_knows_fewer_options(tmp_path: Path) -> None:
    older = lay_out("vllm", "0.30.0", tmp_path / "older")
    assert said(older, "--version").stdout == "0.30.0\n"
    assert said(older, "serve", "m", "--sleep-preserve-parameter-names", "draft.*").returncode == 2


def test_sleep_mode_without_a_card_is_refused_as_on_a_cpu(tmp_path: Path, model: Path) -> None:
    plain = lay_out("vllm", "0.32.0", tmp_path / "plain")
    answer = said(plain, "serve", str(model), "--enable-sleep-mode", "--port", "1")
    assert (answer.returncode, "Sleep mode is not supported on current platform" in answer.stderr) == (1, True)


# --- answers ------------------------------------------------------------------------------------------------


def test_its_own_key_check_covers_v1_alone_and_dev_routes_are_there_in_dev_mode_alone(serve: Serve) -> None:
    with serve() as engine:
        assert engine.ask("/v1/models", key="wrong") == (401, b'{"error":"Unauthorized"}')
        assert engine.ask("/health", key="wrong") == (200, b"")
        assert engine.ask("/is_sleeping", key="wrong")[0] == 200
        status, answer = engine.ask("/v1/chat/completions", CHAT | {"model": "nope"})
        assert (status, json.loads(answer)["error"]["message"]) == (
            404,
            "The model `nope` does not exist. Valid aliases: q.",
        )
    with serve(dev="0") as engine:
        assert [engine.ask(path)[0] for path in ("/is_sleeping", "/server_info")] == [404, 404]
        assert engine.ask("/sleep", {})[0] == 404


def test_a_stream_begins_with_the_role_and_its_usage_chunk_carries_the_figures(serve: Serve) -> None:
    with serve("--reasoning-parser", "qwen3") as engine:
        plain = engine.events("/v1/chat/completions", CHAT)
        assert plain[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "reasoning" in plain[1]["choices"][0]["delta"]
        assert plain[-2]["choices"][0]["finish_reason"] == "stop"
        assert plain[-1] == "[DONE]"
        asked = engine.events("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
        usage = asked[-2]
        cut = engine.events("/v1/chat/completions", CHAT | {"max_tokens": 6})
        assert cut[-2]["choices"][0]["finish_reason"] == "length"
        assert len(cut) == 1 + 6 + 1  # the last token's chunk says that it was cut
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(asked) - 4
        assert usage["metrics"]["mean_itl_ms"] > 0


def test_a_tool_is_called_when_a_parser_is_on_and_refused_without_one(serve: Serve) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "weather"}}], "tool_choice": "auto"}
    weather = CHAT | tools | {"messages": [{"role": "user", "content": "the weather please"}]}
    with serve("--enable-auto-tool-choice", "--tool-call-parser", "hermes") as engine:
        choice = engine.json("/v1/chat/completions", weather)["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    with serve() as engine:
        assert engine.ask("/v1/chat/completions", weather)[0] == 400


def test_gauges_count_and_a_client_that_leaves_ends_its_request(serve: Serve, vllm: Installation) -> None:
    vllm.set(token_s=0.01, answer_tokens=1000)
    with serve() as engine:
        connection = http.client.HTTPConnection("127.0.0.1", engine.port)
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT | {"stream": True}), headers)
        connection.getresponse().read(10)
        assert running_now(engine) == 1.0
        connection.close()
        wait_until(lambda: running_now(engine) == 0.0)


def running_now(engine: Running) -> float:
    text = engine.ask("/metrics")[1].decode()
    return float(next(line for line in text.splitlines() if line.startswith("vllm:num_requests_running")).split()[-1])


def wait_until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


# --- park and wake ------------------------------------------------------------------------------------------


def test_a_deep_sleep_gives_the_card_back_and_the_wake_in_order_answers_the_same(serve: Serve, cards: Card) -> None:
    with serve() as engine:
        before, held = engine.json("/v1/completions", CANARY)["choices"], cards.used(0)
        assert held > 6 * GIB
        assert engine.json("/sleep?level=2", {}) == {"status": "sleeping", "level": 2}
        assert cards.used(0) == 512 << 20
        assert engine.json("/is_sleeping") == {"is_sleeping": True}
        assert engine.json("/sleep?level=1", {})["status"] == "sleeping"  # without effect
        assert engine.json("/wake_up?tags=weights", {}) == {"status": "sleeping", "tags": ["weights"]}
        assert engine.json("/collective_rpc", {"method": "reload_weights"}) == {"results": [None]}
        assert engine.json("/wake_up?tags=kv_cache", {})["status"] == "awake"
        assert engine.json("/reset_prefix_cache", {}) == {"success": True}
        assert engine.json("/v1/completions", CANARY)["choices"] == before
        assert cards.used(0) == held


def test_woken_at_once_after_a_deep_sleep_it_serves_garbage_until_the_reload(serve: Serve) -> None:
    with serve() as engine:
        engine.json("/sleep?level=2", {})
        assert engine.json("/wake_up", {})["status"] == "awake"
        assert engine.json("/v1/completions", CANARY)["choices"][0]["text"] == "!" * 8
        engine.json("/collective_rpc", {"method": "reload_weights"})
        assert engine.json("/v1/completions", CANARY)["choices"][0]["text"] != "!" * 8


def test_a_request_to_a_sleeping_engine_hangs_while_health_is_fine(serve: Serve) -> None:
    with serve() as engine:
        engine.json("/sleep?level=1", {})
        with pytest.raises(TimeoutError):
            engine.ask("/v1/chat/completions", CHAT, limit_s=0.2)
        assert engine.ask("/health") == (200, b"")


def test_older_builds_answer_sleep_and_wake_with_nothing(tmp_path: Path, cards: Card, model: Path) -> None:
    older = lay_out("vllm", "0.31.0", tmp_path / "older", cards=cards.state, load_s=0.0)
    port = free_port()
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    words = ("serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "64")
    with running(older, *words, "--enable-sleep-mode", port=port, env=env) as engine:
        assert engine.ask("/sleep?level=2", {}) == (200, b"")
        assert engine.json("/is_sleeping") == {"is_sleeping": True}


def test_a_lost_answer_was_carried_out_once_and_the_journal_tells(
    serve: Serve, vllm: Installation, cards: Card
) -> None:
    with serve() as engine:
        vllm.set(faults=[lose("/sleep", times=1)])
        with pytest.raises((http.client.HTTPException, OSError)):
            engine.ask("/sleep?level=2", {}, key=ADMIN)
        assert cards.used(0) == 512 << 20
        assert [(call["method"], call["query"], call["key"]) for call in vllm.calls("/sleep")] == [
            ("POST", "level=2", "admin")
        ]
        assert vllm.starts()[0]["env"]["VLLM_API_KEY"] == KEY


def test_a_park_may_answer_500_after_doing_it_or_free_half_or_wake_as_another(
    serve: Serve, vllm: Installation, cards: Card
) -> None:
    with serve() as engine:
        before, held = engine.json("/v1/completions", CANARY)["choices"][0]["text"], cards.used(0)
        vllm.set(faults=[fail("/sleep", perform=True, times=1)], sleep_frees=0.5, wake_answers="other")
        assert engine.ask("/sleep?level=1", {})[0] == 500
        assert 0 < cards.used(0) - (512 << 20) <= (held + GIB) // 2
        engine.json("/wake_up", {})
        assert engine.json("/v1/completions", CANARY)["choices"][0]["text"] != before


def test_a_wake_without_room_on_the_card_ends_the_engine_with_the_words_of_cuda(serve: Serve, cards: Card) -> None:
    with serve() as engine:
        engine.json("/sleep?level=1", {})
        cards.hold(0, 0, 7 * GIB)
        assert engine.ask("/wake_up", {})[0] == 500
        assert engine.process.wait(60) == 1
        assert "CUDA Error: out of memory" in engine.words()


# --- starts and ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"launch_fails": "oom"}, "torch.OutOfMemoryError: CUDA out of memory"),
        ({"card_free_bytes": GIB}, "is less than desired GPU memory utilization"),
        ({"dies": {"when": "loading", "status": 3, "text": "it broke"}}, "it broke"),
        ({"dies": {"when": "loading", "who": "worker", "signal": 9}}, "Engine core initialization failed"),
    ],
)
def test_a_start_fails_in_the_words_of_the_real_one(
    serve: Serve, vllm: Installation, knobs: dict[str, object], words: str
) -> None:
    vllm.set(**knobs)
    with serve(ready=False) as engine:
        assert engine.process.wait(60) in (1, 3)
        assert words in engine.words()
        engine.wait_empty()


def test_a_dead_worker_takes_the_front_down_unless_the_front_stays(serve: Serve, vllm: Installation) -> None:
    with serve() as engine:
        vllm.set(dies={"who": "worker", "signal": 9}, front_stays=True)
        wait_until(lambda: bool(vllm.journal("child_ended")))
        assert engine.ask("/health")[0] == 200
        assert engine.ask("/v1/chat/completions", CHAT)[0] == 500
        vllm.set(front_stays=False)
        assert engine.process.wait(60) == 1


def test_a_killed_front_leaves_its_workers_and_their_shared_memory(serve: Serve, vllm: Installation) -> None:
    with serve() as engine:
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait()
        time.sleep(0.1)  # a core that ends with its front would be gone by now
        assert len(engine.group()) == 1  # the engine core lives on
        assert len(vllm.segments()) == 2
    assert vllm.segments() == []  # swept


def test_a_stop_ends_the_leader_first_and_leaves_no_segment(serve: Serve, vllm: Installation) -> None:
    with serve() as engine:
        assert engine.stop() == 0
        engine.wait_empty()
        assert vllm.segments() == []


def test_a_stop_with_a_stream_open_goes_silent_until_the_client_leaves(serve: Serve, vllm: Installation) -> None:
    vllm.set(token_s=0.01, answer_tokens=1000)
    with serve() as engine:
        with socket.create_connection(("127.0.0.1", engine.port)) as client:
            body = json.dumps(CHAT | {"stream": True})
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body.encode())
            client.recv(100)
            os.kill(engine.process.pid, signal.SIGTERM)
            time.sleep(0.2)  # what was written before the signal has arrived
            client.setblocking(False)
            while True:
                try:
                    assert client.recv(65536)
                except BlockingIOError:
                    break
            assert engine.process.poll() is None
        assert engine.process.wait(60) == 0


def test_routes_hang_and_die_on_demand(serve: Serve, vllm: Installation) -> None:
    with serve() as engine:
        vllm.set(faults=[hang("/v1/models")])
        with pytest.raises(TimeoutError):
            engine.ask("/v1/models", limit_s=0.1)
        assert engine.ask("/health")[0] == 200
        vllm.set(faults=[die_at("/wake_up", after=True, signal=9)])
        assert engine.ask("/wake_up", {})[0] == 200
        assert engine.process.wait(60) == -9
