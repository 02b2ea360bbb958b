"""SGLang's options, its command line and memory, its calls, and what its words and answers are taken for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.documents.blocks import EngineProfile, Security
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.check import check_deployment
from capyctl.engines.families import FAMILIES, flag_rows, traits_of
from capyctl.engines.options import Consent, OptionClass, check_extra_args
from capyctl.engines.parking import provisional, why_restart_only
from capyctl.engines.parsers import Choice, Parsers
from capyctl.engines.registered import Registered
from capyctl.engines.sglang import parking
from capyctl.engines.sglang.adapter import SglangAdapter, read_loads
from capyctl.engines.sglang.failures import classify
from capyctl.engines.sglang.installation import owned_options
from capyctl.engines.sglang.options import POLICY
from capyctl.engines.sglang.render import Launch, check_served_name, fraction, variables, words
from capyctl.errors import CapyError, Lost, Refusal
from capyctl.fsm.types import Residency

GIB = 1 << 30
NONE = Choice(name=None, source="unknown_family")
BLANK = Parsers(tool_call=NONE, reasoning=NONE)
QWEN = Parsers(
    tool_call=Choice(name="qwen25", source="model_family"), reasoning=Choice(name="qwen3", source="model_family")
)
FOUND = Path("/m/qwen")
RECORDED = Path(__file__).parents[1] / "engines" / "simulated" / "sglang_options.json"


def registered(version: str = "0.5.22", **security: Any) -> Registered:
    profile = EngineProfile(
        engine="sglang",
        executable="/opt/env/bin/python3",  # type: ignore[arg-type]
        build_fingerprint=version,
        security=Security(**security),
    )
    return Registered(name="sglang", profile=profile)


def deployment(config: dict[str, Any] | None = None, **more: Any) -> Deployment:
    block = {"name": "m", "engine": "sglang", "model": "m", "engine_config": config or {}, **more}
    return parse_deployment(block, "test")


def extra(*args: str, **config: Any) -> dict[str, Any]:
    return {"accept_extra_args": True, "extra_args": list(args), **config}


def facts(**changes: Any) -> LaunchFacts:
    made = LaunchFacts(
        served_name="qwen",
        model_dir=FOUND,
        document={},
        context_tokens=4096,
        slots=32,
        allocation={"gpu0": 10 * GIB},
        ready={"gpu0": 8 * GIB, "system": 4 * GIB},
        port=8101,
        key="k" * 40,
        admin_key="a" * 40,
        state_dir=Path("/state"),
        log_path=Path("/state/log"),
        available={"gpu0": 20 * GIB, "system": 60 * GIB},
        capacity={"gpu0": 24 * GIB, "system": 64 * GIB},
        pools={"weights": 4 * GIB, "kv_cache": GIB, "kv_tokens": 9000, "static": 6 * GIB},
        residency=Residency.DEEP,
    )
    return attrs.evolve(made, **changes)


def rendered(document: Deployment | None = None, version: str = "0.5.22", **changes: Any) -> list[str]:
    own = {name: changes.pop(name) for name in ("parsers", "draft_dir") if name in changes}
    launch = Launch(
        facts=facts(**changes),
        document=document or deployment(),
        version=version,
        parsers=own.get("parsers", BLANK),
        draft_dir=own.get("draft_dir"),
    )
    block, rest = words(launch)
    return [*block, *rest]


def value(argv: list[str], option: str) -> str | None:
    return argv[argv.index(option) + 1] if option in argv else None


# --- options ---------------------------------------------------------------------------------------


def test_every_classed_option_is_one_that_the_engine_knows() -> None:
    known = {name for row in json.loads(RECORDED.read_text())["options"] for name in row["names"]}
    named = {name for rule in POLICY.rules for name in rule.names}
    assert named - known == {"--help", "--version"}
    assert len(named) == sum(len(rule.names) for rule in POLICY.rules), "no name is classed twice"
    owned = owned_options()
    assert set(owned["always"]) | set(owned["if_present"]) <= known
    assert all(rule.why for rule in POLICY.rules)


OWNED = sorted(
    name for rule in POLICY.rules if rule.kind in (OptionClass.RESERVED, OptionClass.TYPED) for name in rule.names
)


@given(st.sampled_from(OWNED), st.integers(0, 40), st.booleans(), st.booleans())
@settings(derandomize=True, max_examples=300)
def test_what_is_owned_cannot_be_said_abbreviated_or_with_underscores(
    name: str, cut: int, underscores: bool, equals: bool
) -> None:
    stem = name[: max(len(name) - cut, 5)]
    if stem in POLICY.by_name and POLICY.by_name[stem].kind not in (OptionClass.RESERVED, OptionClass.TYPED):
        return  # an option of its own, which the parser takes exactly
    word = "--" + stem[2:].replace("-", "_") if underscores else stem
    args = [f"{word}=1"] if equals else [word, "1"]
    with pytest.raises(Refusal):
        check_extra_args(POLICY, args, Consent(options=frozenset(POLICY.by_name)))


def test_speculation_is_passed_and_a_draft_needs_approval() -> None:
    check_extra_args(POLICY, ["--speculative-algorithm", "EAGLE"], Consent())
    with pytest.raises(Refusal, match="needs the host's approval"):
        check_extra_args(POLICY, ["--speculative-draft-model-path", "/m/draft"], Consent())


def test_engine_flags_lists_every_class_with_its_reason() -> None:
    rows = flag_rows("sglang")
    assert {row[2] for row in rows} >= {"owned", "reserved", "approval", "passed"}
    assert all(row[3] for row in rows)
    assert ("variable", "SGLANG_PLUGINS", "reserved", "no plugin is loaded") in rows


# --- the command line ------------------------------------------------------------------------------


def test_a_launch_that_parks_has_the_saver_and_nothing_secret_on_its_line() -> None:
    argv = rendered(parsers=QWEN)
    assert (value(argv, "--model-path"), value(argv, "--tokenizer-path")) == ("/m/qwen", "/m/qwen")
    assert (value(argv, "--host"), value(argv, "--port"), value(argv, "--nnodes")) == ("127.0.0.1", "8101", "1")
    assert (value(argv, "--max-total-tokens"), value(argv, "--context-length")) == ("9000", "4096")
    assert (value(argv, "--tool-call-parser"), value(argv, "--reasoning-parser")) == ("qwen25", "qwen3")
    assert value(argv, "--max-running-requests") is None, "the engine has a limit of its own"
    for option in ("--enable-memory-saver", "--sleep-on-idle", "--enable-metrics", "--skip-server-warmup"):
        assert option in argv
    assert "--enable-weights-cpu-backup" not in argv
    assert "k" * 40 not in argv
    assert "--enable-weights-cpu-backup" in rendered(residency=Residency.HOST_BACKED)
    assert "--enable-memory-saver" not in rendered(residency=Residency.RESTART_ONLY)


def test_fields_of_the_document_become_options() -> None:
    config = {
        "max_concurrent_requests": 12,
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8_e5m2",
        "quantization": "fp8",
        "cuda_graphs": False,
        "language_model_only": True,
        "sglang": {"max_total_tokens": 7000, "chunked_prefill_size": -1, "tool_call_parser": "none"},
    }
    argv = rendered(deployment(config), parsers=QWEN)
    for option, wanted in (
        ("--max-running-requests", "12"),
        ("--dtype", "bfloat16"),
        ("--kv-cache-dtype", "fp8_e5m2"),
        ("--quantization", "fp8"),
        ("--max-total-tokens", "7000"),
        ("--chunked-prefill-size", "-1"),
        ("--cuda-graph-backend-decode", "disabled"),
        ("--cuda-graph-backend-prefill", "disabled"),
        ("--tool-call-parser", None),
    ):
        assert value(argv, option) == wanted, option
    assert "--language-model-only" in argv
    larger = deployment({"sglang": {"max_total_tokens": 20_000}})
    assert value(rendered(larger), "--max-total-tokens") == "9000"  # what is charged holds no more
    assert value(rendered(larger, pools={}), "--max-total-tokens") == "20000"
    assert "--disable-cuda-graph" in rendered(deployment(config), version="0.5.21")


def test_a_hybrid_is_told_its_states_unless_the_arguments_size_them() -> None:
    pools = {**facts().pools, "state": GIB, "state_slots": 40, "running": 8}
    argv = rendered(pools=pools)
    assert (value(argv, "--max-mamba-cache-size"), value(argv, "--max-running-requests")) == ("40", "8")


def test_a_draft_of_the_document_is_named_by_its_directory() -> None:
    document = deployment(extra("--speculative-algorithm", "EAGLE3"), model={"path": "m", "draft": "d"})
    argv = rendered(document, draft_dir=Path("/m/d"), residency=Residency.RESTART_ONLY)
    assert value(argv, "--speculative-draft-model-path") == "/m/d"
    assert argv[-2:] == ["--speculative-algorithm", "EAGLE3"]


def test_the_fraction_of_an_engine_without_told_tokens_is_of_what_is_free_when_it_starts() -> None:
    whole = {"static": 6 * GIB}
    assert fraction(facts(pools=whole)) == "0.3000"
    assert fraction(facts(pools=whole, available={"gpu0": 12 * GIB})) == "0.5000"
    assert fraction(facts(pools=whole, available={"gpu0": 5 * GIB})) == "0.9999"
    beside = {**whole, "context": 2 * GIB}
    assert fraction(facts(available={"gpu0": 14 * GIB}, pools=beside)) == "0.5000"  # of what its context leaves
    assert (
        fraction(facts(available={"gpu0": 12 * GIB}, ready={"gpu0": 8 * GIB}, pools={"context": 2 * GIB})) == "0.6000"
    )
    pool = {"available": {"unified": 100 * GIB}, "ready": {"unified": 40 * GIB}}
    assert fraction(facts(**pool, pools=whole)) == "0.0600"
    assert fraction(facts(**pool, pools={})) == "0.4000"
    with pytest.raises(Refusal) as caught:
        fraction(facts(available={}, capacity={}))
    assert caught.value.code == "insufficient_device_memory"


def test_told_its_tokens_an_engine_takes_its_share_of_what_its_own_charge_sets_aside() -> None:
    assert fraction(facts()) == "0.6000"
    assert fraction(facts(available={"gpu0": 8 * GIB})) == "0.7500"


@given(
    pool=st.integers(1 << 30, 90 << 30),
    spare=st.integers(0, 60 << 30),
    context=st.integers(0, 2 << 30),
    real=st.integers(0, 100),
)
@settings(derandomize=True, max_examples=200)
def test_the_pool_and_the_context_that_is_really_made_stay_inside_the_charge(
    pool: int, spare: int, context: int, real: int
) -> None:
    free, made = pool + context + spare, context * real // 100
    said = float(fraction(facts(available={"gpu0": free}, pools={"static": pool, "context": context})))
    taken = made + said * (free - made)  # its base is what is free once the context is there
    assert taken <= pool + context
    assert taken - made >= min(pool, 0.9999 * (free - context)) - (free - made) / 10_000  # four decimals


@given(
    pool=st.integers(1 << 30, 90 << 30),
    startup=st.integers(0, 20 << 30),
    spare=st.integers(0, 60 << 30),
    context=st.integers(0, 2 << 30),
    lost=st.integers(0, 100),
)
@settings(derandomize=True, max_examples=200)
def test_whatever_others_take_before_it_looks_its_weights_and_its_told_tokens_have_room(
    pool: int, startup: int, spare: int, context: int, lost: int
) -> None:
    charge = pool + context + startup
    told = {"static": pool, "context": context, "kv_tokens": 1}
    free = charge + spare
    said = float(fraction(facts(available={"gpu0": free}, allocation={"gpu0": charge}, pools=told)))
    base = free - spare * lost // 100 - context
    assert said * base >= min(pool, 0.9999 * base) - base / 10_000


def test_the_environment_has_the_keys_and_no_plugins() -> None:
    env = variables(facts(device_env={"CUDA_VISIBLE_DEVICES": "GPU-1"}), telemetry=False)
    assert (env["CAPYCTL_ENGINE_API_KEY"], env["CAPYCTL_ENGINE_ADMIN_KEY"]) == ("k" * 40, "a" * 40)
    assert (env["SGLANG_PLUGINS"], env["HF_HUB_OFFLINE"]) == ("capyctl-loads-no-plugins", "1")
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert (env["CUDA_VISIBLE_DEVICES"], env["DO_NOT_TRACK"]) == ("GPU-1", "1")
    assert env["CAPYCTL_RENDEZVOUS_DIR"] == "/state/engines/sglang/rendezvous/8101"


# --- rules of a deployment --------------------------------------------------------------------------


def code_of(document: Deployment, profile: Registered | None = None) -> str | None:
    try:
        check_deployment(document, profile or registered())
    except CapyError as error:
        return error.code if "\n" not in error.message else "more than a line"
    return None


SPECULATES = extra("--speculative-algorithm", "NEXTN")


def test_an_engine_that_speculates_only_restarts() -> None:
    assert code_of(deployment(SPECULATES)) is None
    assert provisional(deployment(SPECULATES), registered()) is Residency.RESTART_ONLY
    assert provisional(deployment(), registered()) is Residency.DEEP
    assert provisional(deployment(residency="host_backed"), registered()) is Residency.HOST_BACKED
    for residency in ("deep", "host_backed"):
        with pytest.raises(Refusal, match="Use residency: restart_only") as caught:
            check_deployment(deployment(SPECULATES, residency=residency), registered())
        assert caught.value.code == "unsupported"
    assert code_of(deployment(SPECULATES, residency="restart_only")) is None


def test_a_budget_for_tables_that_stay_on_disk_is_refused_whoever_states_either() -> None:
    budget = {"SGLANG_QWEN4_PLE_FILE_RSS_BUDGET_GB": "64"}
    free = registered(approved_env=("SGLANG_QWEN4_*",))
    stated = attrs.evolve(free, profile=attrs.evolve(free.profile, env=budget))
    code, on_disk = f"engine_env_reserved:{next(iter(budget))}", ("--ple-offload-backend", "file")
    assert code_of(deployment(extra(*on_disk, env=budget)), free) == code
    assert code_of(deployment(extra(*on_disk)), stated) == code
    assert code_of(deployment(), stated) is None
    assert code_of(deployment({"env": budget}), free) is None
    assert code_of(deployment(extra(*on_disk)), free) is None
    assert code_of(deployment(extra("--ple-offload-backend", "cpu", env=budget)), free) is None


def test_options_whose_host_memory_nobody_knows_are_refused_when_they_are_written() -> None:
    assert code_of(deployment(extra("--enable-hisparse"))) == "no_safe_estimate"
    assert code_of(deployment(extra("--mm-preprocess-cache-size-mb", "much"))) == "invalid_config"
    stated = {"resources": {"gpu": "8GiB", "ram": "8GiB"}, "residency": "restart_only"}
    assert code_of(deployment(extra("--enable-hisparse"), **stated)) is None
    assert code_of(deployment(extra("--enable-hierarchical-cache"), **stated)) == "invalid_config"


def test_what_a_profile_or_an_api_forbids_is_said() -> None:
    off = registered(deep_park="disabled")
    assert "security.deep_park" in (why_restart_only(deployment(), off) or "")
    assert not traits_of(off).parks
    assert why_restart_only(deployment(api="decisions"), registered()) is not None
    assert code_of(deployment(residency="deep"), off) == "capability_missing:deep_park"
    assert code_of(deployment(api="decisions")) is None
    assert code_of(deployment(api="decisions"), registered("0.5.21")) == "capability_missing:decisions"


def test_fields_that_contradict_arguments_or_keys_are_refused() -> None:
    named = extra("--tool-call-parser", "hermes", sglang={"tool_call_parser": "qwen25"})
    assert code_of(deployment(named)) == "invalid_config"
    assert code_of(deployment({"sglang": {"tokenizer_workers": 2}})) == "invalid_config"
    assert code_of(deployment({"sglang": {"tokenizer_workers": 1}})) is None
    assert code_of(deployment(model={"path": "m", "draft": "d"})) == "invalid_config"
    with pytest.raises(CapyError, match="chunked_prefill_size"):
        deployment({"sglang": {"chunked_prefill_size": 0}})
    assert code_of(deployment({"trust_remote_code": True})) == "invalid_config"
    for name in ("", "a:b", "-x", " a"):
        with pytest.raises(Refusal):
            check_served_name(name)
    check_served_name("Qwen/Qwen3-8B")


def test_aborts_and_decisions_follow_the_version() -> None:
    assert traits_of(registered("0.5.22")).abort_by_id
    assert not traits_of(registered("0.5.21")).abort_by_id
    assert not SglangAdapter(registered=registered("0.5.20")).aborts
    assert registered("0.5.22").custom is False
    assert registered("0.5.23+cu130").custom is True
    assert FAMILIES["sglang"].traits.eof_proves_end is False


# --- answers and last words -------------------------------------------------------------------------


def loads(*rows: dict[str, Any]) -> bytes:
    return json.dumps({"timestamp": "t", "version": "v", "loads": list(rows)}).encode()


def test_loads_are_summed_over_ranks_and_nonsense_is_none() -> None:
    one = {"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 2, "token_usage": 0.25}
    assert read_loads(loads(one, one | {"token_usage": 0.5})) == (2, 4, 500_000)
    assert read_loads(loads(one | {"token_usage": float("nan")})) == (1, 2, 0)
    for wrong in (
        loads(),
        loads(one | {"num_running_reqs": -1}),
        loads(one | {"num_running_reqs": 1.5}),
        loads(one | {"num_running_reqs": True}),
        b"{}",
        b"[]",
        b"x",
        b'{"loads": {}}',
        b'{"loads": [1]}',
    ):
        assert read_loads(wrong) is None


@given(st.binary(max_size=200))
@settings(derandomize=True, max_examples=200)
def test_no_bytes_break_the_reading_of_loads(body: bytes) -> None:
    assert read_loads(body) is None or isinstance(read_loads(body), tuple)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (
            "capyctl_refused effective_args_mismatch the arguments change port, which CapyCTL owns",
            "effective_args_mismatch",
        ),
        ("capyctl_refused plugin_closure_failed x has the SGLang plugin y. Uninstall it", "plugin_closure_failed"),
        ("capyctl_refused capability_missing:core this build has no option for host", "capability_missing:core"),
        ("capyctl_refused made_up_code nothing", None),
        ("sglang serve: error: unrecognized arguments: --frobnicate secret", "engine_argument_rejected"),
        ("sglang serve: error: ambiguous option: --cuda-graph-max-bs could match", "engine_argument_rejected"),
        ("sglang serve: error: argument --dtype: invalid choice: 'secret'", "engine_argument_rejected"),
        ("ModuleNotFoundError: No module named 'torch_memory_saver'", "capability_missing:deep_park"),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "insufficient_device_memory",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "insufficient_device_memory"),
        ("[Errno 98] error while attempting to bind on address: address already in use", "port_conflict"),
        ("The server is fired up and ready to roll!", None),
    ],
)
def test_last_words_are_classed_and_values_are_not_repeated(line: str, code: str | None) -> None:
    found = classify(["first", line, "Traceback (most recent call last):"])
    assert (found[0] if found is not None else None) == code
    assert found is None or "secret" not in found[1]


class Told:
    """A client that answers from a list and remembers what it was asked."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, bytes, bool, float | None]] = []

    async def get(self, path: str, *, admin: bool = False) -> tuple[int, bytes]:
        self.asked.append((path, b"", admin, None))
        return self.answers.pop(0)

    async def post(
        self, path: str, body: bytes, limit_s: float | None = None, *, admin: bool = False
    ) -> tuple[int, bytes]:
        self.asked.append((path, body, admin, limit_s))
        return self.answers.pop(0)


OK, NULL = (200, b"Cache flushed.\n"), (200, b"null")
LOADED = (200, b'{"success": true, "message": "", "num_paused_requests": 0}')


async def test_a_deep_wake_loads_the_frozen_directory_and_stays_within_its_bounds() -> None:
    client = Told(NULL, LOADED, OK)
    await parking.resume(client, Residency.DEEP, FOUND, 900)
    assert [path for path, *_ in client.asked] == [
        "/resume_memory_occupation",
        "/update_weights_from_disk",
        "/flush_cache?timeout=0",
    ]
    asked = json.loads(client.asked[1][1])
    assert (asked["model_path"], asked["load_format"], asked["flush_cache"]) == ("/m/qwen", "auto", True)
    assert asked["abort_all_requests"] is asked["keep_pause"] is asked["recapture_cuda_graph"] is False
    assert all(admin for _, _, admin, _ in client.asked)
    bounds = [limit or 0 for *_, limit in client.asked]
    assert bounds[0] <= 60
    assert bounds[1] <= 300
    assert bounds[2] <= 10


@pytest.mark.parametrize(
    "answers",
    [
        [(500, b"boom")],
        [(200, b'{"ok": 1}')],
        [NULL, (400, b'{"success": false, "message": "no"}')],
        [NULL, (200, b'{"success": false, "message": "no"}')],
        [NULL, (200, b"null")],
        [NULL, LOADED, (400, b"Flush cache failed.")],
    ],
)
async def test_a_wake_that_answers_otherwise_is_in_doubt_and_goes_no_further(answers: list[tuple[int, bytes]]) -> None:
    client = Told(*answers)
    with pytest.raises((Lost, CapyError)):
        await parking.resume(client, Residency.DEEP, FOUND, 900)
    assert client.answers == []


async def test_an_abort_names_the_request_and_never_everybody() -> None:
    adapter, client = SglangAdapter(registered=registered()), Told((200, b""), (401, b""))
    await adapter.abort(client, "r-1")
    assert client.asked == [("/abort_request", b'{"rid": "r-1"}', True, None)]
    with pytest.raises(CapyError):
        await adapter.abort(client, "r-1")
    with pytest.raises(Refusal):
        await adapter.abort(client, "")
    with pytest.raises(Refusal):
        await SglangAdapter(registered=registered("0.5.21")).abort(client, "r-1")


async def test_nothing_is_nothing_only_when_it_is_read_twice(autojump_clock: Any) -> None:
    idle = loads({"num_running_reqs": 0, "num_waiting_reqs": 0, "token_usage": 0.0})
    busy = loads({"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.1})
    adapter = SglangAdapter(registered=registered())
    assert await adapter.gauges(Told((200, idle), (200, busy))) == (1, 0, 100_000)
    assert await adapter.gauges(Told((200, busy))) == (1, 0, 100_000)
    assert await adapter.gauges(Told((200, idle), (200, idle))) == (0, 0, 0)
    page = b'sglang:num_running_reqs{model_name="a{b}"} 2.0\nsglang:num_queue_reqs{} 1.0\n'
    assert await adapter.gauges(Told((404, b""), (200, page))) == (2, 1, None)
