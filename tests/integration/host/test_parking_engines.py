"""The agent over simulated vLLM and SGLang on a simulated card: launched, parked, woken and ended with proof."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from capyctl.clock import now_ms
from capyctl.engines.adapter import Adapter
from capyctl.engines.register import add_engine
from capyctl.engines.sglang.adapter import SglangAdapter
from capyctl.engines.vllm.adapter import VllmAdapter
from capyctl.fsm.types import Bytes, Domain, HostId, Millis, Residency, Token
from capyctl.host.agent import HostAgent
from capyctl.host.devices import Observer
from capyctl.host.ingress import Ingress
from capyctl.host.journal import open_journal
from capyctl.host.policy import host_policy
from capyctl.host.ports import PortLeases
from capyctl.session import messages as m
from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, lay_out, lose
from tests.nvml import card, library

from .conftest import FIRST_PORT, Running
from .fakes import FakeCheckpoints, incarnation
from .test_agent import stopped
from .test_parking import look

GIB = 1 << 30
GPU, SYSTEM = Domain("gpu0"), Domain("system")
BUDGET = {GPU: Bytes(GIB)}


@attrs.define
class Registry:
    """One registered installation, and its adapter."""

    name: str
    one: Adapter

    def profiles(self) -> list[m.Profile]:
        return [
            m.Profile(
                name=self.name,
                engine=self.name,
                version="1",
                custom=False,
                deep_park="enabled",
                executable="/x",
                fingerprint="f",
            )
        ]

    def adapter(self, profile: str) -> Adapter:
        return self.one


@attrs.frozen(kw_only=True)
class Bench:
    family: str
    engine: Installation
    cards: Any
    model: Path
    host: Callable[[], AbstractAsyncContextManager[Running]]

    def launch(self, **more: Any) -> m.Launch:
        model = {"path": str(self.model)}
        facts: dict[str, Any] = {
            "command_id": "launch",
            "incarnation": incarnation(),
            "token": Token(1),
            "profile": self.family,
            "profile_fingerprint": "f",
            "served_name": "qwen",
            "model": str(self.model),
            "digest": "sha256:00",
            "document": {"name": "qwen", "engine": self.family, "model": model, "engine_config": {}},
            "context_tokens": 2048,
            "slots": 8,
            "allocation": {GPU: Bytes(8 * GIB), SYSTEM: Bytes(GIB // 4)},
            "ready": {GPU: Bytes(6 * GIB), SYSTEM: Bytes(GIB // 4)},
            "parked": {**BUDGET, SYSTEM: Bytes(GIB // 4)},
            "pools": {"kv_cache": Bytes(2 * GIB)},
            "residency": Residency.DEEP,
            "deadline_ms": Millis(now_ms() + 60_000),
        }
        known = {field.name for field in attrs.fields(m.Launch)}
        return m.Launch(**{name: value for name, value in {**facts, **more}.items() if name in known})

    async def loaded(self, running: Running) -> m.Launched:
        result = await running.agent.handle(self.launch())
        assert isinstance(result, m.Launched), result
        return result


def release(engine: m.Launched) -> m.Release:
    return m.Release(
        command_id="release",
        incarnation=incarnation(),
        token=Token(2),
        tier=Residency.DEEP,
        budget=BUDGET,
        gate_closed_at_ms=Millis(now_ms()),
        processes=engine.processes,
        limit_ms=Millis(60_000),
    )


def restore(engine: m.Launched) -> m.Restore:
    return m.Restore(
        command_id="restore",
        incarnation=incarnation(),
        token=Token(3),
        tier=Residency.DEEP,
        digest="sha256:00",
        canary=engine.canary,
        processes=engine.processes,
        deadline_ms=Millis(now_ms() + 60_000),
    )


@pytest.fixture(params=["vllm", "sglang"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    library.load()
    cards = card.one_card(tmp_path / "cards")
    monkeypatch.setenv(card.VARIABLE, str(cards.state))
    family, version = request.param, {"vllm": "0.32.0", "sglang": "0.5.23"}[request.param]
    engine = lay_out(family, version, tmp_path / family, cards=cards.state, load_s=0.05)
    known = add_engine(engine.prefix, engines_file=tmp_path / "conf" / "engines.yaml").registered
    adapter: Adapter = VllmAdapter(registered=known) if family == "vllm" else SglangAdapter(registered=known)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)

    @asynccontextmanager
    async def host() -> AsyncIterator[Running]:
        observer = Observer()
        memory, found = await observer.discover()
        policy = host_policy(HostId("h1"), "here", memory, found)
        observer.adopt(policy)
        journal = await open_journal(state / "journal.sqlite3")
        ingress = Ingress(on_upstream_ended=lambda *facts: None)
        agent = HostAgent(
            host=HostId("h1"),
            name="here",
            policy=policy,
            memory_source="meminfo",
            state_dir=state,
            models_root=tmp_path / "models",
            registry=Registry(family, adapter),
            checkpoints=FakeCheckpoints(),
            journal=journal,
            ingress=ingress,
            observer=observer,
            ports=PortLeases(FIRST_PORT, FIRST_PORT + 99),
            grace_s=2.0,
            kill_s=3.0,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.run)
            yield Running(agent, ingress, [], [])
            nursery.cancel_scope.cancel()
        await journal.close()

    model = write_checkpoint(tmp_path / "models" / "qwen", weights=GIB)
    return Bench(family=family, engine=engine, cards=cards, model=model, host=host)


async def test_an_engine_gives_its_card_back_and_wakes_as_it_was(bench: Bench) -> None:
    async with bench.host() as running:
        engine = await bench.loaded(running)
        assert engine.canary
        held = bench.cards.used(0)
        parked = await running.agent.handle(release(engine))
        assert isinstance(parked, m.Parked), parked
        assert parked.resident[GPU].resident_bytes <= GIB
        assert bench.cards.used(0) < held - GIB
    async with bench.host() as running:  # a parked engine outlives its role
        awake = await running.agent.handle(restore(engine))
        assert isinstance(awake, m.Awake), awake
        assert bench.cards.used(0) == held
        await stopped(running, incarnation())
        assert bench.cards.used(0) < GIB
    if bench.family == "vllm":
        assert [call["query"] for call in bench.engine.calls("/sleep")] == ["level=2"]
        assert bench.engine.calls("/sleep")[0]["key"] == "admin"
    else:
        assert len(bench.engine.calls("/release_memory_occupation")) == 1
        assert bench.engine.calls("/release_memory_occupation")[0]["key"] == "admin"


async def test_a_wake_that_leaves_numbers_that_are_none_is_no_wake(bench: Bench) -> None:
    async with bench.host() as running:
        engine = await bench.loaded(running)
        assert isinstance(await running.agent.handle(release(engine)), m.Parked)
        bench.engine.set(wake_answers="nonfinite")
        result = await running.agent.handle(restore(engine))
        assert isinstance(result, m.NotAwake), result
        assert "no finite numbers" in result.reason
        await stopped(running, incarnation())


async def test_a_lost_answer_is_never_asked_for_again_and_a_look_adopts_the_park(bench: Bench) -> None:
    route = "/sleep" if bench.family == "vllm" else "/release_memory_occupation"
    async with bench.host() as running:
        engine = await bench.loaded(running)
        bench.engine.set(faults=[lose(route, times=1)])
        command = release(engine)
        lost = await running.agent.handle(command)
        assert isinstance(lost, m.Unresolved), lost
    async with bench.host() as running:
        assert await running.agent.handle(command) == lost
        seen = await running.agent.handle(look(engine, parked=True, parked_budget=BUDGET))
        assert isinstance(seen, m.ProbeResult)
        assert seen.resident is not None, seen.reason
        assert isinstance(await running.agent.handle(restore(engine)), m.Awake)
        assert len(bench.engine.calls(route)) == 1
        await stopped(running, incarnation())


async def test_an_engine_that_freed_nothing_is_not_parked(bench: Bench) -> None:
    async with bench.host() as running:
        engine = await bench.loaded(running)
        bench.engine.set(sleep_frees=0.0)
        result = await running.agent.handle(attrs.evolve(release(engine), limit_ms=Millis(4_000)))
        assert isinstance(result, m.Unresolved), result
        assert "left on gpu0, at most 1024 MiB may be" in result.reason
        await stopped(running, incarnation())


async def test_what_a_killed_engine_left_in_shared_memory_goes_with_its_proof(bench: Bench) -> None:
    async with bench.host() as running:
        engine = await bench.loaded(running)
        assert bench.engine.segments()
        for process in engine.processes:
            os.kill(process.pid, signal.SIGKILL)
        await running.report(m.MemberExit)
        await stopped(running, incarnation())
        assert bench.engine.segments() == []
