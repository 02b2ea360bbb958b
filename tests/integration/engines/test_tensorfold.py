"""TensorFold through sockets and processes: registered with its build tools, started, built, read, and its failures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from capyctl.checkpoints.sizing import derive_plan
from capyctl.checkpoints.store import CheckpointStore
from capyctl.documents.deployment import parse_deployment
from capyctl.engines import register
from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.check import check_deployment
from capyctl.engines.detect import detect
from capyctl.engines.families import traits_of
from capyctl.engines.python.installation import cuda_home
from capyctl.engines.register import add_engine
from capyctl.engines.registry import Registry
from capyctl.engines.tensorfold import installation as tensorfold
from capyctl.engines.tensorfold.adapter import TensorfoldAdapter, classify, extensions_dir, forget_locks
from capyctl.engines.tensorfold.render import memory_cap
from capyctl.errors import CapyError, Refusal
from capyctl.fsm.types import Bytes, Domain, HostId
from capyctl.host.http import LoopbackClient
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy
from tests.engines.checkpoints import write_checkpoint
from tests.engines.installation import Installation, lay_out
from tests.nvml import card

from .launched import free_port, started

GIB = 1 << 30
MIB = 1 << 20
MACHINE = HostPolicy(
    host=HostId("H"),
    name="box",
    domains={
        Domain("unified"): DomainPolicy(
            kind=DomainKind.UNIFIED,
            capacity_bytes=Bytes(32 * GIB),
            managed_bytes=Bytes(16 * GIB),
            reserve_bytes=Bytes(2 * GIB),
            parked_bytes=Bytes(0),
        )
    },
)


def tool(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def no_tools_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine may have a toolkit of its own; the tests say what there is."""
    monkeypatch.setattr(register, "cuda_home", lambda environ: cuda_home(environ, ()))
    monkeypatch.setattr(tensorfold, "SYSTEM_PATH", str(tmp_path / "usr-bin"))
    tool(tmp_path / "usr-bin" / "c++")


@attrs.frozen(kw_only=True)
class Bench:
    """An installation with a card, registered, and a checkpoint."""

    tensorfold: Installation
    adapter: TensorfoldAdapter
    model: Path
    state: Path

    def document(self, **changes: Any) -> dict[str, Any]:
        config = {"context_length": 2048, **changes.pop("config", {})}
        block = {"name": "qwen", "engine": "tensorfold", "model": {"path": str(self.model)}, "engine_config": config}
        return {**block, "resources": {"gpu": "6GiB", "ram": "2GiB"}, **changes}

    def facts(self, document: dict[str, Any] | None = None, **changes: Any) -> LaunchFacts:
        facts = LaunchFacts(
            served_name="qwen",
            model_dir=self.model,
            document=document or self.document(),
            context_tokens=2048,
            slots=8,
            allocation={"gpu0": 8 * GIB, "system": 2 * GIB},
            ready={"gpu0": 6 * GIB + 5 * MIB + 77, "system": 2 * GIB},
            port=free_port(),
            key="k" * 40,
            available={"system": 17 * GIB},
            device_env={"CUDA_VISIBLE_DEVICES": "GPU-1"},
            state_dir=self.state,
            log_path=self.state / "log",
        )
        return attrs.evolve(facts, **changes)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    cards = card.one_card(tmp_path / "cards")
    installation = lay_out("tensorfold", "0.6.6", tmp_path / "tf", cards=cards.state, load_s=0.05)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    profile = add_engine(installation.prefix, engines_file=tmp_path / "conf" / "engines.yaml").registered
    return Bench(
        tensorfold=installation,
        adapter=TensorfoldAdapter(registered=profile, models_root=tmp_path / "models"),
        model=write_checkpoint(tmp_path / "models" / "qwen", weights=GIB),
        state=state,
    )


def words(bench: Bench, document: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    return list(bench.adapter.render(bench.facts(document, **changes)).argv[3:])


def refused(bench: Bench, **config: Any) -> str:
    """What accepting a deployment with these settings says."""
    return _said(bench, bench.document(config=config))


# --- registration ------------------------------------------------------------------------------------


def test_it_is_found_and_registered_with_what_it_is(bench: Bench, tmp_path: Path) -> None:
    registered = bench.adapter.registered
    assert (registered.engine, registered.version, registered.custom) == ("tensorfold", "0.6.6", False)
    assert (registered.executable, registered.deep_park) == (str(bench.tensorfold.executable), "disabled")
    assert not traits_of(registered).parks
    (row,) = [
        row for row in detect({"PATH": ""}, [bench.tensorfold.prefix], home=tmp_path) if row.engine == "tensorfold"
    ]
    assert (row.version, row.custom, row.source) == ("0.6.6", False, "venv")


def test_without_its_build_tools_nothing_is_written(tmp_path: Path) -> None:
    installation = lay_out("tensorfold", "0.6.4", tmp_path / "tf", without=("ninja", "nvcc"))
    engines_file = tmp_path / "conf" / "engines.yaml"
    with pytest.raises(Refusal, match="ninja, nvcc") as caught:
        add_engine(installation.prefix, engines_file=engines_file, environ={"PATH": str(tmp_path)})
    assert (caught.value.code, caught.value.exit_code) == ("toolchain_missing", 26)
    assert not engines_file.exists()
    toolkit = tool(tmp_path / "cuda" / "bin" / "nvcc").parent.parent
    tool(installation.prefix / "bin" / "ninja")
    added = add_engine(installation.prefix, engines_file=engines_file, environ={"CUDA_HOME": str(toolkit)})
    assert added.as_json()["cuda_home"] == str(toolkit)
    assert added.registered.custom  # a build that was never checked


@pytest.mark.parametrize(("version", "found"), [("0.6.0", False), ("0.6.1", True)])
def test_a_compiler_inside_the_environment_counts_from_the_release_that_finds_it(
    tmp_path: Path, version: str, found: bool
) -> None:
    installation = lay_out("tensorfold", version, tmp_path / "tf")
    for cuda in ("cu9", "cu12", "cu13"):
        tool(installation.packages / "nvidia" / cuda / "bin" / "nvcc")
    engines_file = tmp_path / "conf" / "engines.yaml"
    if not found:
        with pytest.raises(Refusal, match="nvcc"):
            add_engine(installation.prefix, engines_file=engines_file)
        return
    profile = add_engine(installation.prefix, engines_file=engines_file).registered
    model = write_checkpoint(tmp_path / "m", weights=GIB)
    bench = Bench(
        tensorfold=installation, adapter=TensorfoldAdapter(registered=profile), model=model, state=tmp_path / "s"
    )
    places = bench.adapter.render(bench.facts()).env["PATH"].split(":")
    assert places[:2] == [f"{installation.prefix}/bin", f"{installation.packages}/nvidia/cu13/bin"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"deep_park": "enabled"}, "capability_missing:deep_park"),
        ({"allow_remote_code": True}, "invalid_config"),
        ({"args": ["--backend", "mlx"]}, "invalid_config"),
        ({"args": ["--contex", "8"]}, "invalid_config"),
        ({"env": {"TORCH_EXTENSIONS_DIR": "/x"}}, "engine_env_reserved:TORCH_EXTENSIONS_DIR"),
        ({"approve_options": ["--host"]}, "invalid_config"),
    ],
)
def test_what_it_cannot_be_told_is_refused(bench: Bench, tmp_path: Path, options: Any, code: str) -> None:
    with pytest.raises(CapyError) as caught:
        add_engine(bench.tensorfold.prefix, engines_file=tmp_path / "conf" / "engines.yaml", name="two", **options)
    assert caught.value.code == code


# --- rendering -----------------------------------------------------------------------------------------


def test_the_command_line_has_its_order(bench: Bench) -> None:
    facts = bench.facts()
    assert bench.adapter.render(facts).argv == (
        *(str(bench.tensorfold.executable), "serve", str(bench.model)),
        *("--name", "qwen", "--host", "127.0.0.1", "--port", str(facts.port), "--no-update-check"),
        *("--backend", "cuda", "--snapshot-dir", "none", "--context", "2048"),
        *("--drafter", "none", "--parallel", "8"),
    )
    config = {
        "max_concurrent_requests": 3,
        "kv_cache_dtype": "int8",
        "tensorfold": {"max_tokens": 99, "thinking": "off"},
        "accept_extra_args": True,
        "extra_args": ["--no-drafts", "--precision=full"],
    }
    rest = words(bench, bench.document(config=config))
    assert rest[rest.index("--context") + 2 :] == [
        *("--parallel", "3", "--kv-dtype", "int8", "--max-tokens", "99", "--no-thinking"),
        *("--no-drafts", "--precision=full"),
    ]


def test_a_drafter_comes_from_the_model_or_from_an_approved_directory(bench: Bench, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "models" / "draft", weights=MIB)
    document = bench.document(model={"path": str(bench.model), "draft": {"path": "draft"}})
    rest = words(bench, document)
    assert rest[rest.index("--drafter") + 1] == str(tmp_path / "models" / "draft")
    assert "stands beside model.draft" in _said(bench, document | {"engine_config": _extra("--no-drafts")})
    assert "--drafter needs the host's approval" in refused(bench, **_extra("--drafter", "/srv/d"))
    security = attrs.evolve(
        bench.adapter.registered.profile.security, approved_options=("--drafter",), approved_paths=("/srv",)
    )
    profile = attrs.evolve(bench.adapter.registered.profile, security=security)
    approved = attrs.evolve(
        bench, adapter=TensorfoldAdapter(registered=attrs.evolve(bench.adapter.registered, profile=profile))
    )
    assert "outside the profile's" in refused(approved, **_extra("--drafter", "owner/repo"))
    assert words(approved, bench.document(config=_extra("--drafter", "/srv/d"))).count("--drafter") == 1
    assert "contradict" in refused(approved, **_extra("--drafter", "/srv/d", "--no-drafts"))


def _extra(*args: str) -> dict[str, Any]:
    return {"context_length": 2048, "accept_extra_args": True, "extra_args": list(args)}


def _said(bench: Bench, document: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as caught:
        check_deployment(parse_deployment(document, "d"), bench.adapter.registered)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (_extra("--hos", "0.0.0.0"), "--hos is reserved"),
        (_extra("--host=0.0.0.0"), "--host is reserved"),
        (_extra("--max", "5"), "tensorfold.max_tokens"),
        (_extra("--no-thinking"), "tensorfold.thinking"),
        (_extra("--vision-u"), "approval"),
        (_extra("--parallel", "4") | {"max_concurrent_requests": 4}, "keep one"),
        (_extra("--no-drafts", "--no-drafts"), "twice"),
        ({"tensorfold": {"thinking": "loud"}}, "on or off"),
        ({"dtype": "bfloat16"}, "is not read by tensorfold"),
        ({"memory": {"request": "4GiB"}}, "resources"),
    ],
)
def test_what_a_deployment_may_not_say(bench: Bench, config: dict[str, Any], said: str) -> None:
    assert said in refused(bench, **config)


def test_it_needs_declared_memory_and_never_parks(bench: Bench) -> None:
    for change, code in (
        ({"resources": None}, "invalid_config"),
        ({"residency": "deep", "resources": None}, "capability_missing:deep_park"),
        ({"api": "decisions"}, "capability_missing:decisions"),
    ):
        document = {name: value for name, value in (bench.document() | change).items() if value is not None}
        with pytest.raises(Refusal) as caught:
            check_deployment(parse_deployment(document, "d"), bench.adapter.registered)
        assert caught.value.code == code


def test_its_environment_is_closed_and_caps_its_memory(bench: Bench) -> None:
    env = bench.adapter.render(bench.facts(bench.document(config={"env": {"MAX_JOBS": "3"}}))).env
    extensions = bench.state / "engines" / "tensorfold" / "0.6.6" / "torch_extensions"
    nvcc = bench.tensorfold.packages / "nvidia" / "cu13" / "bin"
    assert env == {
        "PATH": f"{bench.tensorfold.prefix}/bin:{nvcc}:/usr/local/bin:/usr/bin:/bin",
        "MAX_JOBS": "3",
        "FLASHINFER_NVCC_THREADS": "1",
        "CAPYCTL_ENGINE_LOG": str(bench.state / "log"),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TENSORFOLD_NO_UPDATE_CHECK": "1",
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "TENSORFOLD_CUDA_MEMORY_LIMIT_GB": "6.0048828125",  # 6 GiB and 5 whole MiB
        "CUDA_VISIBLE_DEVICES": "GPU-1",
    }
    assert extensions.stat().st_mode & 0o777 == 0o700


def test_the_cap_follows_the_domain_of_the_gpu() -> None:
    assert memory_cap({"unified": 3 * GIB + 1}) == "3"
    assert memory_cap({"gpu1": GIB // 2, "system": 9 * GIB}) == "0.5"
    assert memory_cap({"system": GIB}) is None


# --- a running engine ------------------------------------------------------------------------------------


async def test_the_first_request_builds_and_is_waited_for_longer_than_any_other_answer(bench: Bench) -> None:
    bench.tensorfold.set(build_s=0.4)
    facts = bench.facts()
    registry = Registry(bench.state.parent / "conf" / "engines.yaml", models_root=bench.model.parent)
    registry.reload()
    store = CheckpointStore(
        None, bench.model.parent, family_of=lambda profile: "tensorfold", built=partial(registry.built, bench.state)
    )
    document = parse_deployment(bench.document(), "d")
    first = derive_plan(store.measure(bench.model, document).facts, document, MACHINE, family="tensorfold")
    assert first.initialize_ms == 1_800_000
    async with started(bench.adapter, facts) as running:
        client = running.client
        await bench.adapter.verify(client, facts)
        impatient = LoopbackClient(port=facts.port, key=facts.key, limit_s=0.2)
        assert await bench.adapter.probe(impatient, facts, 10.0) > 0
        later = derive_plan(store.measure(bench.model, document).facts, document, MACHINE, family="tensorfold")
        assert later.initialize_ms == 130_737
        assert await bench.adapter.gauges(client) == (0, 0, 0)
        bench.tensorfold.set(busy={"running": 2, "waiting": 3})
        assert (await bench.adapter.gauges(client))[:2] == (2, 3)
        bench.tensorfold.set(gauges_missing=True)
        assert await bench.adapter.gauges(client) == (2, 0, None)
    bench.tensorfold.set(drift={"served_name": "other"})
    async with started(bench.adapter, bench.facts()) as running:
        client = running.client
        with pytest.raises(CapyError, match="serves other") as caught:
            await bench.adapter.verify(client, facts)
        assert caught.value.code == "effective_args_mismatch"


async def test_the_lock_of_a_dead_build_is_removed_only_when_nobody_else_can_be_building(bench: Bench) -> None:
    extensions = extensions_dir(bench.adapter.registered, bench.state)
    lock = extensions / "tensorfold_kernels" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (extensions / "linked").mkdir()
    (extensions / "linked" / "lock").symlink_to(lock)
    bench.adapter.render(bench.facts())
    assert lock.exists()
    facts = bench.facts(alone=True)
    async with started(bench.adapter, facts) as running:
        client = running.client
        assert await bench.adapter.probe(client, facts, 10.0) > 0
    assert (extensions / "linked" / "lock").is_symlink()
    forget_locks(extensions)  # twice is once


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("tensorfold: this family has no drafter; pass --no-drafts", "launch_failed", "--no-drafts"),
        ("tensorfold serve: error: unrecognized arguments: --colour blue", "engine_argument_rejected", "--colour"),
        (
            "tensorfold serve: error: argument --precision: invalid choice: 'x'",
            "engine_argument_rejected",
            "--precision",
        ),
        ("tensorfold serve: error: ambiguous option: --m could match --max", "engine_argument_rejected", "--m"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "insufficient_device_memory", "memory"),
        ("OSError: [Errno 98] Address already in use", "port_conflict", "port"),
        ("tensorfold: no family serves /srv/m", "checkpoint_unusable", "no model"),
    ],
)
def test_its_last_words_name_the_failure(line: str, code: str, says: str) -> None:
    named = classify(["loading", line, "and then some"])
    assert named is not None
    assert named[0] == code
    assert says in named[1]
    assert "blue" not in named[1]
    assert classify(["loading", "the end"]) is None
