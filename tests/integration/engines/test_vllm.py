"""vLLM through sockets and processes: registered, started by the protected entry, guarded, put to sleep, woken."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.detect import detect
from capyctl.engines.engines_file import read_engines
from capyctl.engines.parking import why_profile_does_not_park
from capyctl.engines.register import add_engine, locate
from capyctl.engines.registered import Registered
from capyctl.engines.vllm.adapter import VllmAdapter
from capyctl.engines.vllm.installation import ENTRY, install_helpers
from capyctl.errors import CapyError, Failure, Lost, Refusal
from capyctl.fsm.types import Residency
from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, fail, lay_out, lose
from tests.nvml import card

from .launched import free_port, started

GIB = 1 << 30
KEY, ADMIN = "i" * 40, "a" * 40
ROOM = 24 * GIB  # of the simulated card


@attrs.frozen(kw_only=True)
class Bench:
    """An installation with a card, registered, and a checkpoint."""

    vllm: Installation
    adapter: VllmAdapter
    model: Path
    state: Path
    cards: Any

    def facts(self, **changes: Any) -> LaunchFacts:
        config = changes.pop("config", {})
        facts = LaunchFacts(
            served_name="qwen",
            model_dir=self.model,
            document={"name": "qwen", "engine": "vllm", "model": {"path": str(self.model)}, "engine_config": config},
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
            pools={"kv_cache": 2 * GIB},
            state_dir=self.state,
            log_path=self.state / "log",
        )
        return attrs.evolve(facts, **changes)


def registered(vllm: Installation, engines_file: Path, **options: Any) -> Registered:
    return add_engine(vllm.prefix, engines_file=engines_file, **options).registered


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    cards = card.one_card(tmp_path / "cards")
    vllm = lay_out("vllm", "0.32.0", tmp_path / "vllm", cards=cards.state, load_s=0.05)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    profile = registered(vllm, tmp_path / "conf" / "engines.yaml")
    model = write_checkpoint(tmp_path / "models" / "qwen", weights=GIB)
    return Bench(vllm=vllm, adapter=VllmAdapter(registered=profile), model=model, state=state, cards=cards)


def code_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CapyError) as caught:
        call(*args, **kwargs)
    assert "\n" not in caught.value.message
    return caught.value.code


# --- registration ----------------------------------------------------------------------------------


def test_an_environment_its_program_and_its_interpreter_are_found_and_links_stay(tmp_path: Path) -> None:
    vllm = lay_out("vllm", "0.31.0", tmp_path / "env")
    for given in (vllm.prefix, vllm.prefix / "bin", vllm.executable, vllm.python):
        family, found = locate(given)
        assert (family.name, found.version, found.place) == ("vllm", "0.31.0", vllm.prefix)
        assert found.executable == vllm.prefix / "bin" / "vllm"
    rows = detect({"HOME": str(tmp_path / "none"), "PATH": ""}, (vllm.prefix,))
    row = next(row for row in rows if row.environment == str(vllm.prefix))
    assert (row.engine, row.version, row.custom) == ("vllm", "0.31.0", False)
    assert vllm.starts() == [], "detection executes nothing"


def test_an_environment_with_two_engines_asks_for_a_program(tmp_path: Path) -> None:
    vllm = lay_out("vllm", "0.32.0", tmp_path / "env")
    other = lay_out("tensorfold", "0.6.6", tmp_path / "other")
    os.rename(other.packages / "tensorfold-0.6.6.dist-info", vllm.packages / "tensorfold-0.6.6.dist-info")
    os.rename(other.packages / "tensorfold", vllm.packages / "tensorfold")
    with pytest.raises(Refusal, match="several engines"):
        locate(vllm.prefix)
    assert locate(vllm.executable)[0].name == "vllm"


def test_registration_writes_what_the_build_can_do(tmp_path: Path) -> None:
    cards = card.one_card(tmp_path / "cards")
    able = lay_out("vllm", "0.32.0", tmp_path / "able", cards=cards.state)
    old = lay_out("vllm", "0.27.0", tmp_path / "old", cards=cards.state, absent_routes=["/sleep"])
    unable = lay_out("vllm", "0.32.0+cpu", tmp_path / "unable")
    file = tmp_path / "engines.yaml"
    added = add_engine(able.prefix, engines_file=file, deep_park="enabled", allow_remote_code=True)
    assert (added.registered.deep_park, added.deep_park_probe, added.registered.custom) == ("enabled", "present", False)
    assert added.registered.profile.security.trust_remote_code
    assert registered(old, file, name="old").custom
    cpu = registered(unable, file, name="cpu")
    assert (cpu.deep_park, cpu.lacks) == ("disabled", "sleep mode on cpu")
    opted_out = registered(able, file, name="second", deep_park="disabled")
    assert (opted_out.profile.parks, opted_out.lacks) == (False, None)
    kept = read_engines(file).profiles
    assert [kept[name].lacks for name in ("cpu", "second")] == ["sleep mode on cpu", None]
    assert why_profile_does_not_park(kept["cpu"]) == "the build of cpu cannot park: it lacks sleep mode on cpu"
    assert why_profile_does_not_park(kept["second"]).startswith("this host opted out: the profile second has")
    before = file.read_bytes()
    with pytest.raises(Refusal, match="cannot park here: it lacks sleep mode on cpu") as caught:
        add_engine(unable.prefix, engines_file=file, name="third", deep_park="enabled")
    assert caught.value.code == "capability_missing:deep_park"
    assert file.read_bytes() == before, "nothing is written on a refusal"
    assert read_engines(file).profiles["vllm"].digest == added.registered.digest is not None


def test_a_build_without_what_every_launch_needs_is_refused(tmp_path: Path) -> None:
    lacking = lay_out("vllm", "0.32.0", tmp_path / "a", unknown_options=["--middleware"])
    assert code_of(registered, lacking, tmp_path / "engines.yaml") == "capability_missing:core"


def test_a_changed_package_is_drift_and_bytecode_is_none(bench: Bench) -> None:
    strict = attrs.evolve(
        bench.adapter.registered.profile,
        security=attrs.evolve(bench.adapter.registered.profile.security, installation_drift="refuse"),
    )
    adapter = VllmAdapter(registered=attrs.evolve(bench.adapter.registered, profile=strict))
    (bench.vllm.packages / "vllm" / "__pycache__").mkdir(exist_ok=True)
    (bench.vllm.packages / "vllm" / "__pycache__" / "x.pyc").write_bytes(b"x")
    adapter.preflight()
    (bench.vllm.packages / "vllm" / "logger.py").write_text("changed = True\n")
    assert adapter.drifted()
    assert code_of(adapter.preflight) == "installation_drift"
    bench.adapter.preflight()  # its profile only warns


# --- helpers ---------------------------------------------------------------------------------------


def test_helper_modules_are_private_rewritten_and_in_a_directory_of_ours(tmp_path: Path) -> None:
    runtime = install_helpers(tmp_path)
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in runtime.iterdir())
    (runtime / ENTRY).write_text("raise SystemExit(1)")
    install_helpers(tmp_path)
    assert "def main" in (runtime / ENTRY).read_text()
    foreign = tmp_path / "foreign"
    (foreign / "runtime").mkdir(parents=True)
    (foreign / "runtime" / "sitecustomize.py").write_text("")
    assert code_of(install_helpers, foreign) == "unsafe_file"
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "runtime").symlink_to(runtime)
    assert code_of(install_helpers, linked) == "unsafe_file"


# --- the protected entry ---------------------------------------------------------------------------


REFUSED = (
    (["--kv-cache-memory-by", "1"], 78, "effective_args_mismatch"),
    (["--device_memory_utilization=0.9"], 78, "effective_args_mismatch"),
    (["--enable-log-requests"], 78, "effective_args_mismatch"),
    (["--port", "1"], 78, "effective_args_mismatch"),
    (["--api-key", "mine"], 78, "effective_args_mismatch"),
    (["--middleware", "mine.Own"], 78, "effective_args_mismatch"),
    (["--max-model-len", "99"], 78, "effective_args_mismatch"),
    (["--frobnicate", "secret"], 2, "engine_argument_rejected"),
    (["/srv/other-model"], 2, "engine_argument_rejected"),
)


async def test_the_entry_starts_nothing_when_arguments_change_what_is_owned(bench: Bench) -> None:
    """What the option policy would have refused is caught again by the installed parser itself."""
    rendered = bench.adapter.render(bench.facts())
    for words, status, code in REFUSED:
        with open(bench.state / "log", "wb") as log:
            ended = await trio.run_process(
                [*rendered.argv, *words], env=dict(rendered.env), stdout=log, stderr=log, check=False
            )
        assert ended.returncode == status, words
        found = bench.adapter.failure((bench.state / "log").read_text().splitlines()[-20:])
        assert found is not None, words
        assert found[0] == code, words
        assert "secret" not in found[1]
    assert bench.vllm.journal("ready") == []


async def test_a_build_that_cannot_park_any_more_ends_with_its_code(bench: Bench) -> None:
    rendered = bench.adapter.render(bench.facts())
    bench.vllm.set(unknown_options=["--enable-sleep-mode"])
    with open(bench.state / "log", "wb") as log:
        await trio.run_process(list(rendered.argv), env=dict(rendered.env), stdout=log, stderr=log, check=False)
    found = bench.adapter.failure((bench.state / "log").read_text().splitlines()[-20:])
    assert found is not None
    assert found[0] in ("capability_missing:core", "engine_argument_rejected")


def test_a_launch_that_may_not_park_is_not_rendered_to_park(bench: Bench) -> None:
    profile = bench.adapter.registered.profile
    off = attrs.evolve(profile, security=attrs.evolve(profile.security, deep_park="disabled"))
    adapter = VllmAdapter(registered=attrs.evolve(bench.adapter.registered, profile=off))
    assert code_of(adapter.render, bench.facts()) == "capability_missing:deep_park"
    argv = adapter.render(bench.facts(residency=Residency.RESTART_ONLY)).argv
    assert "--enable-sleep-mode" not in argv


# --- a running engine ------------------------------------------------------------------------------


async def test_a_launch_is_verified_asked_and_read(bench: Bench) -> None:
    async with started(bench.adapter, bench.facts()) as run:
        await bench.adapter.verify(run.client, run.facts)
        assert await bench.adapter.probe(run.client, run.facts, 10) > 0
        running, waiting, usage = await bench.adapter.gauges(run.client)
        assert (running, waiting) == (0, 0)
        assert usage is None or 0 <= usage <= 1_000_000
        start = bench.vllm.starts()[0]
        assert KEY not in json.dumps(start["argv"])
        assert set(start["env"]) & set(os.environ) <= {"PATH", "DO_NOT_TRACK", "LC_CTYPE"}
        assert start["env"]["VLLM_PLUGINS"] == ""
        with pytest.raises(Failure) as caught:
            await bench.adapter.verify(run.client, attrs.evolve(run.facts, served_name="other"))
        assert caught.value.code == "effective_args_mismatch"


async def test_every_route_takes_its_own_key(bench: Bench) -> None:
    async with started(bench.adapter, bench.facts()) as run:

        async def status(path: str, key: str) -> int:
            return (await attrs.evolve(run.client, key=key, admin_key=key).get(path))[0]

        for path in ("/v1/models", "/metrics"):
            assert [await status(path, key) for key in (KEY, ADMIN, "", "wrong")] == [200, 401, 401, 401]
        for path in ("/is_sleeping", "/version", "/load"):
            assert [await status(path, key) for key in (ADMIN, KEY, "", "wrong")] == [200, 401, 401, 401]
        assert await status("/health", "") == 200
        assert await status("/v1x", KEY) == 401


@pytest.mark.parametrize("residency", [Residency.DEEP, Residency.HOST_BACKED])
async def test_a_parked_engine_gives_its_card_back_and_answers_as_before(bench: Bench, residency: Residency) -> None:
    async with started(bench.adapter, bench.facts(residency=residency)) as run:
        before, held = await bench.adapter.canary(run.client, run.facts, 10), bench.cards.used(0)
        await bench.adapter.quiescent(run.client)
        await bench.adapter.release(run.client, run.facts, 10)
        assert await bench.adapter.alive_parked(run.client)
        assert bench.cards.used(0) < held - 2 * GIB
        await bench.adapter.restore(run.client, run.facts, 10)
        assert not await bench.adapter.alive_parked(run.client)
        assert bench.cards.used(0) == held
        assert await bench.adapter.canary(run.client, run.facts, 10) == before
        assert before is not None
        assert before.startswith("ids:")
    asked = [f"{call['path']}?{call['query']}".rstrip("?") for call in bench.vllm.calls() if call["key"] == "admin"]
    steps = [path for path in asked if path != "/is_sleeping"]
    if residency is Residency.DEEP:
        weights, cache = "/wake_up?tags=weights", "/wake_up?tags=kv_cache"
        assert steps == ["/sleep?level=2", weights, "/collective_rpc", cache, "/reset_prefix_cache"]
    else:
        assert steps == ["/sleep?level=1", "/wake_up", "/reset_prefix_cache"]


async def test_a_lost_or_failed_step_is_never_repeated(bench: Bench) -> None:
    async with started(bench.adapter, bench.facts()) as run:
        bench.vllm.set(faults=[lose("/sleep", times=1)])
        with pytest.raises(ConnectionError):
            await bench.adapter.release(run.client, run.facts, 10)
        assert len(bench.vllm.calls("/sleep")) == 1
        bench.vllm.set(faults=[fail("/collective_rpc")])
        with pytest.raises((Failure, Lost)):
            await bench.adapter.restore(run.client, run.facts, 10)
        assert [len(bench.vllm.calls(path)) for path in ("/wake_up", "/collective_rpc", "/reset_prefix_cache")] == [
            1,
            1,
            0,
        ]


async def test_a_busy_engine_is_not_quiescent(bench: Bench) -> None:
    async with started(bench.adapter, bench.facts()) as run:
        bench.vllm.set(busy={"running": 1, "waiting": 2})
        with pytest.raises(Refusal) as caught:
            await bench.adapter.quiescent(run.client)
        assert caught.value.code == "not_quiescent"


async def test_too_little_memory_is_named(bench: Bench) -> None:
    bench.cards.hold(0, os.getpid(), 20 * GIB)
    async with started(bench.adapter, bench.facts(), dies=True) as run:
        assert run.process.poll() not in (None, 0)
    found = bench.adapter.failure((bench.state / "log").read_text().splitlines()[-40:])
    assert found is not None
    assert found[0] == "insufficient_device_memory"
