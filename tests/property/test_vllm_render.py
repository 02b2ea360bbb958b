"""One launch of vLLM as words and variables, and what a document may not ask of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capyctl.documents.blocks import EngineProfile, Security
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.documents.scalars import AbsolutePath
from capyctl.engines.adapter import LaunchFacts
from capyctl.engines.check import check_deployment
from capyctl.engines.parsers import Choice, Parsers
from capyctl.engines.registered import Registered
from capyctl.engines.vllm.options import POLICY
from capyctl.engines.vllm.render import Launch, chosen_parsers, utilization, variables, words
from capyctl.errors import CapyError, InvariantBroken, Refusal
from capyctl.fsm.types import Residency

GIB = 1 << 30
NOTHING = Parsers(
    tool_call=Choice(name=None, source="unknown_family"), reasoning=Choice(name=None, source="unknown_family")
)
QWEN = Parsers(
    tool_call=Choice(name="hermes", source="model_family"), reasoning=Choice(name="qwen3", source="model_family")
)


def document(config: Mapping[str, Any] | None = None, **fields: Any) -> Deployment:
    return parse_deployment(
        {"name": "qwen", "engine": "vllm", "model": {"path": "/srv/qwen"}, "engine_config": config or {}, **fields},
        "the document",
    )


FACTS = LaunchFacts(
    served_name="qwen",
    model_dir=Path("/srv/qwen"),
    document={},
    context_tokens=4096,
    slots=32,
    allocation={"gpu0": 13 * GIB, "system": 4 * GIB},
    ready={"gpu0": 12 * GIB, "system": 4 * GIB},
    port=8100,
    key="inference",
    admin_key="admin",
    state_dir=Path("/state"),
    log_path=Path("/state/log"),
    capacity={"gpu0": 80 * GIB, "system": 200 * GIB},
    available={"gpu0": 79 * GIB, "system": 100 * GIB},
    pools={"kv_cache": 4 * GIB},
)


def launch(
    config: Mapping[str, Any] | None = None,
    *,
    fixed: tuple[str, ...] = (),
    version: str = "0.32.0",
    parsers: Parsers = NOTHING,
    draft: Path | None = None,
    fields: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Launch:
    return Launch(
        facts=attrs.evolve(FACTS, **facts),
        document=document(config, **(fields or {})),
        fixed_args=fixed,
        version=version,
        parsers=parsers,
        draft_dir=draft,
    )


def test_a_plain_launch_has_its_words_in_their_order() -> None:
    rendered, rest = words(launch())
    assert rendered == [
        *("/srv/qwen", "--host", "127.0.0.1", "--port", "8100", "--served-model-name", "qwen"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1", "--gpu-memory-utilization", "0.75"),
        *("--kv-cache-memory-bytes", str(4 * GIB), "--max-num-seqs", "32", "--max-model-len", "4096"),
        *("--middleware", "capyctl_vllm_guard.KeyGuard", "--enable-per-request-metrics"),
        *("--no-enable-log-requests", "--no-enable-log-outputs"),
    ]
    assert rest == []


def test_every_field_of_the_document_is_said_in_its_place() -> None:
    config = {
        "dtype": "bfloat16",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "cuda_graphs": False,
        "language_model_only": True,
        "trust_remote_code": True,
        "max_concurrent_requests": 7,
        "memory": {"request": "40GiB", "kv_cache": "6GiB"},
        "vllm": {"block_size_tokens": 32, "max_num_batched_tokens": 8192, "safetensors_load_strategy": "lazy"},
    }
    rendered, _ = words(launch(config, residency=Residency.DEEP, parsers=QWEN))
    assert rendered[11:] == [
        *("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", str(6 * GIB), "--max-num-seqs", "7"),
        *("--max-model-len", "4096", "--max-num-batched-tokens", "8192", "--block-size", "32"),
        *("--kv-cache-dtype", "fp8_e4m3", "--dtype", "bfloat16", "--quantization", "fp8"),
        *("--enforce-eager", "--language-model-only", "--trust-remote-code"),
        *("--enable-sleep-mode", "--sleep-preserve-parameter-names", "draft.*"),
        *("--safetensors-load-strategy", "lazy", "--middleware", "capyctl_vllm_guard.KeyGuard"),
        *("--enable-per-request-metrics", "--no-enable-log-requests", "--no-enable-log-outputs"),
        *("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--reasoning-parser", "qwen3"),
    ]


def test_everything_rendered_is_an_option_that_a_class_knows() -> None:
    config = {"cuda_graphs": False, "trust_remote_code": True, "vllm": {"block_size_tokens": 16}}
    rendered, _ = words(launch(config, residency=Residency.HOST_BACKED, parsers=QWEN))
    assert all(word in POLICY.by_name for word in rendered if word.startswith("--"))


def test_sleep_is_switched_on_for_residencies_that_park_and_no_other() -> None:
    for residency in Residency:
        rendered, _ = words(launch(residency=residency))
        assert ("--enable-sleep-mode" in rendered) is residency.parks
        assert ("eager" in rendered) is residency.parks
        env = variables(attrs.evolve(FACTS, residency=residency), Path("/r"), telemetry=False)
        assert env["VLLM_SERVER_DEV_MODE"] == ("1" if residency.parks else "0")
    rendered, _ = words(launch(residency=Residency.DEEP, version="0.30.0"))
    assert "--sleep-preserve-parameter-names" not in rendered


def test_keys_are_variables_and_never_words() -> None:
    env = variables(FACTS, Path("/state/runtime"), telemetry=False)
    assert (env["VLLM_API_KEY"], env["CAPYCTL_VLLM_ADMIN_KEY"]) == ("inference", "admin")
    assert env["VLLM_PLUGINS"] == ""
    assert env["VLLM_DO_NOT_TRACK"] == env["VLLM_NO_USAGE_STATS"] == "1"
    assert "VLLM_NO_USAGE_STATS" not in variables(FACTS, Path("/r"), telemetry=True)
    assert not {"inference", "admin"} & set(words(launch())[0])
    shown = attrs.evolve(FACTS, device_env={"CUDA_VISIBLE_DEVICES": "GPU-1"})
    assert variables(shown, Path("/r"), telemetry=False)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    with pytest.raises(InvariantBroken):
        variables(attrs.evolve(FACTS, admin_key="", residency=Residency.DEEP), Path("/r"), telemetry=False)


@given(
    total=st.integers(8, 200),
    ready_mib=st.integers(1, 200 * 1024),
    free_mib=st.integers(0, 200 * 1024),
    stated=st.booleans(),
    unified=st.booleans(),
)
@settings(derandomize=True, max_examples=300)
def test_the_share_never_exceeds_what_is_free_nor_falls_below_the_charge_when_that_is_free(
    total: int, ready_mib: int, free_mib: int, stated: bool, unified: bool
) -> None:
    domain = "unified" if unified else "gpu0"
    free, ready = min(free_mib << 20, total * GIB), min(ready_mib << 20, total * GIB)
    config = {"memory": {"request": f"{ready}B"}} if stated else {}
    given_launch = launch(config, capacity={domain: total * GIB}, available={domain: free}, ready={domain: ready})
    if free - (512 << 20) < total * GIB // 10_000:
        with pytest.raises(Refusal, match="too little"):
            utilization(given_launch)
        return
    share = float(utilization(given_launch))
    assert 0 < share <= 0.99
    assert share * total * GIB <= free
    roomy = free - (512 << 20) >= total * GIB
    if roomy:
        assert share >= min(0.99, ready / (total * GIB))
        if not stated and not unified:
            assert share >= 0.75


def test_the_context_is_no_part_of_the_share_and_every_rank_has_the_same() -> None:
    pools = {"kv_cache": GIB, "context": 2 * GIB}
    one = launch(ready={"gpu0": 66 * GIB}, capacity={"gpu0": 80 * GIB}, available={"gpu0": 79 * GIB}, pools=pools)
    assert utilization(one) == "0.8"
    two = launch(
        ready={"gpu0": 66 * GIB, "gpu1": 66 * GIB, "system": 4 * GIB},
        capacity={"gpu0": 80 * GIB, "gpu1": 80 * GIB},
        available={"gpu0": 79 * GIB, "gpu1": 65 * GIB},
        pools=pools,
        fields={"topology": {"tensor_parallel": 2}},
    )
    assert utilization(two) == "0.8"
    fuller = attrs.evolve(two, facts=attrs.evolve(two.facts, available={"gpu0": 79 * GIB, "gpu1": 64 * GIB}))
    assert float(utilization(fuller)) < 0.8
    assert words(two)[0][7:9] == ["--tensor-parallel-size", "2"]


def test_a_share_of_an_unknown_size_is_refused() -> None:
    with pytest.raises(Refusal, match="the size of gpu0 is not known"):
        utilization(launch(capacity={}))


def test_arguments_of_the_host_come_before_those_of_the_deployment() -> None:
    config = {"accept_extra_args": True, "extra_args": ["--stream-interval", "4"]}
    rendered, rest = words(launch(config, fixed=("--max-num-seqs", "64", "--seed", "3")))
    assert rest == ["--max-num-seqs", "64", "--seed", "3", "--stream-interval", "4"]
    assert "--max-num-seqs" not in rendered
    stale = {"accept_extra_args": True, "extra_args": ["--gpu-memory-util", "0.9"]}
    with pytest.raises(Refusal, match="owned by CapyCTL"):
        words(launch(stale))


def test_parsers_that_arguments_name_are_not_said_twice() -> None:
    config = {"accept_extra_args": True, "extra_args": ["--tool-call-parser", "mistral", "--enable-auto-tool-choice"]}
    rendered, _ = words(launch(config, parsers=QWEN))
    assert "--tool-call-parser" not in rendered
    assert "--enable-auto-tool-choice" not in rendered
    assert rendered[-2:] == ["--reasoning-parser", "qwen3"]
    tool, reasoning = chosen_parsers(launch(config, parsers=QWEN))
    assert (tool.source, reasoning.source) == ("extra_args", "model_family")
    declared = {"vllm": {"tool_call_parser": "none", "reasoning_parser": "deepseek_r1"}}
    assert words(launch(declared, parsers=QWEN))[0][-2:] == ["--reasoning-parser", "deepseek_r1"]


SPECULATIVE = {"accept_extra_args": True, "extra_args": ["--speculative-config", '{"method":"eagle"}', "--seed", "1"]}


def test_the_draft_of_the_document_is_filled_in() -> None:
    _, rest = words(launch(SPECULATIVE, draft=Path("/srv/draft")))
    assert rest[:2] == ["--seed", "1"]
    assert json.loads(rest[3]) == {"method": "eagle", "model": "/srv/draft"}
    other = {"accept_extra_args": True, "extra_args": ['--speculative-config={"method":"eagle","model":"/srv/other"}']}
    with pytest.raises(Refusal, match="another model than"):
        words(launch(other, draft=Path("/srv/draft")))
    with pytest.raises(Refusal, match="needs --speculative-config"):
        words(launch({}, draft=Path("/srv/draft")))


# --- what a document may ask -----------------------------------------------------------------------


def registered(version: str = "0.32.0", *, args: tuple[str, ...] = (), **security: Any) -> Registered:
    profile = EngineProfile(
        engine="vllm",
        executable=AbsolutePath("/opt/vllm/bin/vllm"),
        build_fingerprint=version,
        args=args,  # type: ignore[arg-type]
        security=Security(approved_options=("--speculative-config",), **security),  # type: ignore[arg-type]
    )
    return Registered(name="vllm", profile=profile)


@pytest.mark.parametrize(
    ("fields", "profile", "code"),
    [
        ({}, registered(), None),
        ({"residency": "deep"}, registered(), None),
        ({"residency": "deep"}, registered(deep_park="disabled"), "capability_missing:deep_park"),
        ({"residency": "host_backed"}, registered(deep_park="disabled"), "capability_missing:deep_park"),
        ({"residency": "restart_only"}, registered(deep_park="disabled"), None),
        ({"api": "decisions"}, registered(), "capability_missing:decisions"),
        ({"engine_config": {"trust_remote_code": True}}, registered(), "invalid_config"),
        ({"engine_config": {"trust_remote_code": True}}, registered(trust_remote_code=True), None),
        ({"engine_config": {"max_concurrent_requests": 4}}, registered(args=("--max-num-seqs", "8")), "invalid_config"),
        (
            {"engine_config": {"vllm": {"reasoning_parser": "none"}}},
            registered(args=("--reasoning-parser", "qwen3")),
            "invalid_config",
        ),
        ({"engine_config": {"vllm": {"reasoning_parser": "none"}}}, registered(), None),
        ({"residency": "deep", "engine_config": SPECULATIVE}, registered("0.30.0"), "capability_missing:deep_park"),
        ({"residency": "deep", "engine_config": SPECULATIVE}, registered(), None),
        ({"residency": "host_backed", "engine_config": SPECULATIVE}, registered("0.30.0"), None),
        (
            {
                "residency": "deep",
                "engine_config": {"accept_extra_args": True, "extra_args": ["--load-format", "dummy"]},
            },
            registered(),
            "capability_missing:deep_park",
        ),
        ({"routes": ["--host"]}, registered(), "invalid_config"),
    ],
)
def test_a_document_is_held_to_the_family_and_the_profile(
    fields: dict[str, Any], profile: Registered, code: str | None
) -> None:
    fields = dict(fields)
    config = fields.pop("engine_config", None)

    def run() -> None:
        check_deployment(document(config, **fields), profile)

    if code is None:
        run()
        return
    with pytest.raises(CapyError) as caught:
        run()
    assert caught.value.code == code
    assert "\n" not in caught.value.message
