"""SGLang through sockets and processes: registered, started by the protected entry, parked, woken, aborted."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.detect import detect
from capyctl.engines.register import add_engine, locate
from capyctl.engines.sglang.adapter import SglangAdapter
from capyctl.errors import CapyError, Lost, Refusal
from capyctl.fsm.types import Residency
from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, fail, lay_out, lose
from tests.nvml import card

from .launched import free_port, started

GIB = 1 << 30
KEY, ADMIN = "i" * 40, "a" * 40
ROOM = 24 * GIB  # of the simulated card
CACHE = 2 * GIB


@attrs.frozen(kw_only=True)
class Bench:
    """An installation with a card, registered, and a checkpoint."""

    sglang: Installation
    adapter: SglangAdapter
    model: Path
    state: Path
    cards: Any

    def facts(self, **changes: Any) -> LaunchFacts:
        config, document = changes.pop("config", {}), changes.pop("document", {})
        block = {"name": "qwen", "engine": "sglang", "model": {"path": str(self.model)}, "engine_config": config}
        facts = LaunchFacts(
            served_name="qwen",
            model_dir=self.model,
            document=block | document,
            context_tokens=2048,
            slots=32,
            allocation={"gpu0": 8 * GIB},
            ready={"gpu0": 6 * GIB},
            port=free_port(),
            key=KEY,
            admin_key=ADMIN,
            residency=Residency.DEEP,
            capacity={"gpu0": ROOM},
            available={"gpu0": ROOM - GIB},
            pools={"weights": GIB, "kv_cache": CACHE, "kv_tokens": CACHE // 147_456, "static": 4 * GIB},
            state_dir=self.state,
            log_path=self.state / "log",
        )
        return attrs.evolve(facts, **changes)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    cards = card.one_card(tmp_path / "cards")
    sglang = lay_out("sglang", "0.5.22", tmp_path / "sglang", cards=cards.state, load_s=0.05)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    profile = add_engine(sglang.prefix, engines_file=tmp_path / "conf" / "engines.yaml").registered
    model = write_checkpoint(tmp_path / "models" / "qwen", weights=GIB)
    return Bench(sglang=sglang, adapter=SglangAdapter(registered=profile), model=model, state=state, cards=cards)


async def run(bench: Bench, *words: str, env: dict[str, str] | None = None) -> tuple[int, tuple[str, str] | None]:
    """Run the rendered command to its end: (status, what its last lines are taken for)."""
    rendered = bench.adapter.render(bench.facts())
    with open(bench.state / "log", "wb") as log:
        ended = await trio.run_process(
            [*rendered.argv, *words], env={**rendered.env, **(env or {})}, stdout=log, stderr=log, check=False
        )
    return ended.returncode, bench.adapter.failure((bench.state / "log").read_text().splitlines()[-20:])


# --- registration ----------------------------------------------------------------------------------


def test_an_environment_is_found_by_its_metadata_and_asked_once_for_its_version(tmp_path: Path) -> None:
    sglang = lay_out("sglang", "0.5.22", tmp_path / "env")
    for given in (sglang.prefix, sglang.prefix / "bin", sglang.python):
        family, found = locate(given)
        assert (family.name, found.version, found.executable) == ("sglang", "0.5.22", sglang.python)
    row = next(row for row in detect({"HOME": "/none", "PATH": ""}, (sglang.prefix,)) if row.engine == "sglang")
    assert (row.version, row.custom) == ("0.5.22", False)
    added = add_engine(sglang.prefix, engines_file=tmp_path / "engines.yaml", deep_park="enabled")
    assert (added.registered.version, added.deep_park_probe, added.registered.deep_park) == (
        "0.5.22",
        "present",
        "enabled",
    )
    assert added.registered.digest is not None
    assert sglang.starts() == [], "nothing is served to find this out"


def test_a_build_without_the_memory_saver_is_registered_and_cannot_park(tmp_path: Path) -> None:
    lacking = lay_out("sglang", "0.5.23", tmp_path / "env", without=("torch_memory_saver",))
    added = add_engine(lacking.prefix, engines_file=tmp_path / "engines.yaml")
    assert (added.deep_park_probe, added.registered.deep_park, added.registered.custom) == ("missing", "disabled", True)
    assert "torch_memory_saver" in added.lacks
    with pytest.raises(Refusal) as caught:
        add_engine(lacking.prefix, engines_file=tmp_path / "other.yaml", deep_park="enabled")
    assert caught.value.code == "capability_missing:deep_park"


def test_a_build_that_no_launch_could_be_checked_on_is_refused(tmp_path: Path) -> None:
    lacking = lay_out("sglang", "0.5.22", tmp_path / "env", unknown_options=["--admin-api-key"])
    with pytest.raises(Refusal, match="--admin-api-key") as caught:
        add_engine(lacking.prefix, engines_file=tmp_path / "engines.yaml")
    assert caught.value.code == "capability_missing:core"


# --- the protected entry ---------------------------------------------------------------------------


async def test_the_entry_starts_nothing_when_arguments_change_what_is_owned(bench: Bench) -> None:
    for words, status, code in (
        (["--mem-fraction", "0.99"], 78, "effective_args_mismatch"),
        (["--admin_api_key=mine"], 2, "engine_argument_rejected"),
        (["--admin-api-key=mine"], 78, "effective_args_mismatch"),
        (["--log-requests"], 78, "effective_args_mismatch"),
        (["--context-length", "99"], 78, "effective_args_mismatch"),
        (["--grpc-port", "1"], 78, "effective_args_mismatch"),
        (["--frobnicate", "secret"], 2, "engine_argument_rejected"),
    ):
        ended, found = await run(bench, *words)
        assert ended == status, words
        assert found is not None, words
        assert found[0] == code, words
        assert "secret" not in found[1]
        assert "mine" not in found[1]
    assert bench.sglang.journal("ready") == []


async def test_a_plugin_of_a_foreign_package_ends_the_start(bench: Bench) -> None:
    info = bench.sglang.packages / "odd_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nhook = odd_hooks:run\n")
    status, found = await run(bench)
    assert (status, found) == (
        78,
        ("plugin_closure_failed", "odd-hooks has the SGLang plugin hook. Uninstall it"),
    )


async def test_an_engine_that_would_only_pretend_to_park_does_not_start(bench: Bench) -> None:
    os.rename(bench.sglang.packages / "torch_memory_saver", bench.sglang.packages / "gone")
    status, found = await run(bench)
    assert found is not None
    assert (status, found[0]) == (78, "capability_missing:deep_park")
    assert '"event": "capyctl_saver_enrollment_refused", "stage": "library"' in (bench.state / "log").read_text()


async def test_a_launch_without_keys_does_not_start(bench: Bench) -> None:
    status, _ = await run(bench, env={"CAPYCTL_ENGINE_API_KEY": ""})
    assert status == 78


# --- a life ----------------------------------------------------------------------------------------


async def test_an_engine_parks_deep_and_wakes_as_it_was(bench: Bench) -> None:
    adapter, facts = bench.adapter, bench.facts()
    async with started(bench.adapter, facts) as running:
        client = running.client
        await adapter.verify(client, facts)
        assert await adapter.probe(client, facts, 5) > 0
        before = await adapter.canary(client, facts, 5)
        assert before is not None
        assert before.startswith("ids:")
        assert (await adapter.gauges(client))[:2] == (0, 0)
        ready = bench.cards.used(0)
        await adapter.quiescent(client)
        await adapter.release(client, facts, 60)
        assert bench.cards.used(0) < ready - GIB - CACHE // 2
        assert await adapter.alive_parked(client)
        for key in ("", "wrong"):  # any of them would end what is parked
            stranger = attrs.evolve(client, key=key, admin_key=key)
            for path in ("/health_generate", "/health", "/ready", "/metrics", "/v1/models"):
                assert (await stranger.get(path))[0] == 401, path
        assert (await adapter.gauges(client))[:2] == (0, 0)
        await adapter.restore(client, facts, 60)
        assert await adapter.canary(client, facts, 5) == before
        assert bench.cards.used(0) == ready
        start = bench.sglang.starts()[0]
        assert KEY not in json.dumps(start)
        assert ADMIN not in json.dumps(start)
        assert start["env"]["SGLANG_PLUGINS"] == "capyctl-loads-no-plugins"
        assert start["env"]["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"].startswith(f"file://{bench.state}")
        control = ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation")
        calls = bench.sglang.calls(*control, "/update_weights_from_disk")
        assert [(call["path"], call["query"], call["key"]) for call in calls] == [
            ("/flush_cache", "timeout=5", "admin"),
            ("/release_memory_occupation", "", "admin"),
            ("/resume_memory_occupation", "", "admin"),
            ("/update_weights_from_disk", "", "admin"),
            ("/flush_cache", "timeout=0", "admin"),
        ]
        asked = bench.sglang.calls("/health", "/health_generate")
        assert {call["key"] for call in asked} <= {"none", "wrong"}, "by the strangers above alone"


async def test_a_host_backed_engine_wakes_without_reading_its_files(bench: Bench) -> None:
    facts = bench.facts(residency=Residency.HOST_BACKED)
    async with started(bench.adapter, facts) as running:
        before = await bench.adapter.canary(running.client, facts, 5)
        await bench.adapter.quiescent(running.client)
        await bench.adapter.release(running.client, facts, 60)
        await bench.adapter.restore(running.client, facts, 60)
        assert await bench.adapter.canary(running.client, facts, 5) == before
        assert bench.sglang.calls("/update_weights_from_disk") == []


async def test_an_engine_that_is_not_idle_is_never_asked_to_release(bench: Bench) -> None:
    facts = bench.facts()
    async with started(bench.adapter, facts) as running:
        bench.sglang.set(busy={"running": 1, "waiting": 0})
        with pytest.raises(Refusal) as caught:
            await bench.adapter.quiescent(running.client)
        assert caught.value.code == "not_quiescent"
        bench.sglang.set(busy={"running": 0, "waiting": 0}, faults=[fail("/flush_cache", status=400, times=1)])
        with pytest.raises(Refusal, match="/flush_cache answered 400"):
            await bench.adapter.quiescent(running.client)
        assert bench.sglang.calls("/release_memory_occupation") == []


async def test_an_answer_that_is_lost_or_wrong_leaves_the_wake_in_doubt(bench: Bench) -> None:
    facts = bench.facts()
    async with started(bench.adapter, facts) as running:
        await bench.adapter.quiescent(running.client)
        bench.sglang.set(faults=[lose("/release_memory_occupation", times=1)])
        with pytest.raises(ConnectionError):
            await bench.adapter.release(running.client, facts, 60)
        bench.sglang.set(faults=[fail("/update_weights_from_disk", status=400, times=1)])
        with pytest.raises(Lost):
            await bench.adapter.restore(running.client, facts, 60)
        assert len(bench.sglang.calls("/release_memory_occupation", "/resume_memory_occupation")) == 2


async def test_a_request_is_ended_by_its_id_and_loads_say_so(bench: Bench) -> None:
    facts = bench.facts(residency=Residency.RESTART_ONLY)
    async with started(bench.adapter, facts) as running:
        body = {"model": "qwen", "messages": [{"role": "user", "content": "go on"}], "max_tokens": 2000, "rid": "r-1"}
        bench.sglang.set(token_s=0.01)

        async def ask() -> None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await running.client.post("/v1/chat/completions", json.dumps(body).encode(), 20)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                while (await bench.adapter.gauges(running.client))[0] == 0:
                    await trio.sleep(0.02)
                await bench.adapter.abort(running.client, "r-1")
                while (await bench.adapter.gauges(running.client))[:2] != (0, 0):
                    await trio.sleep(0.02)
        assert bench.sglang.calls("/abort_request")[0]["key"] == "admin"
        assert bench.sglang.calls("/abort_request")[0]["body"] == '{"rid": "r-1"}'


async def test_loads_that_are_not_there_are_read_from_the_gauges(bench: Bench) -> None:
    facts = bench.facts(residency=Residency.RESTART_ONLY)
    bench.sglang.set(absent_routes=["/v1/loads"])
    async with started(bench.adapter, facts) as running:
        assert await bench.adapter.gauges(running.client) == (0, 0, 0)
        bench.sglang.set(gauges_missing=True)
        with pytest.raises(CapyError, match="num_running_reqs"):
            await bench.adapter.gauges(running.client)
