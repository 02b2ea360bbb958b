"""Contexts that engines refuse to start with are refused when they are written: what the cache holds, and what each
engine derives for a model."""

from __future__ import annotations

from typing import Any

import pytest
from sizing_values import GIB, MIB, alike, args, delta_net, deployment, layers_of, plain, spark, tensors

from capyctl.checkpoints import longest_context, token_bytes, vllm_blocks
from capyctl.checkpoints.cache_shape import Attention
from capyctl.checkpoints.model_config import describe
from capyctl.checkpoints.sizing import derive_plan
from capyctl.documents.deployment import Deployment
from capyctl.engines.vllm.installation import scales_yarn
from capyctl.errors import CapyError
from capyctl.ledger.types import HostPolicy, Plan
from capyctl.units import Size

PER_TOKEN = 32 * 8 * 256 * 2  # 128 KiB
FULL = tensors(GIB, (layers_of(32),), context_limits={"vllm": 1 << 17, "sglang": 1 << 17})
SHORT = {"gpu": "6GiB", "ram": "4GiB"}


def plan(facts: dict[str, Any], document: Deployment, policy: HostPolicy | None = None) -> Plan:
    return derive_plan(facts, document, policy or spark(), family=document.family)


def refusal(facts: dict[str, Any], document: Deployment, policy: HostPolicy | None = None) -> CapyError:
    with pytest.raises(CapyError) as caught:
        plan(facts, document, policy)
    assert "\n" not in caught.value.message
    return caught.value


# --- what the cache holds --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fields", "way_out"),
    [
        ({"memory": {"kv_cache": "1GiB"}}, {}, "raise engine_config.memory.kv_cache to 12502MiB"),
        ({"memory": {"request": "12GiB"}}, {}, "raise engine_config.memory.request by 9430MiB"),
        ({}, {}, "state engine_config.memory.kv_cache: 12502MiB"),
        ({}, {"resources": SHORT}, "raise the phases of resources by "),
        (
            {"memory": {"kv_cache": "1GiB"}},
            {"resources": SHORT},
            "raise engine_config.memory.kv_cache to 12502MiB with the memory around it",
        ),
    ],
)
def test_vllm_is_refused_a_context_that_its_cache_cannot_hold_with_figures_and_the_way_out(
    config: dict[str, Any], fields: dict[str, Any], way_out: str
) -> None:
    refused = refusal(FULL, deployment({**config, "context_length": 100_000}, **fields))
    assert refused.code == "checkpoint_unusable"
    assert "context_length: 100000 tokens need 12.2 GiB of KV cache, and there is " in refused.message
    assert way_out in refused.message
    assert refused.details["needs_bytes"] == (100_000 // 16 + 1) * 16 * PER_TOKEN


def test_what_the_refusal_names_is_accepted_and_one_block_more_is_not() -> None:
    stated = {"memory": {"kv_cache": "1GiB"}}
    assert "Lower it to 8176," in refusal(FULL, deployment({**stated, "context_length": 100_000})).message
    assert plan(FULL, deployment({**stated, "context_length": 8176})).context_tokens == 8176
    assert refusal(FULL, deployment({**stated, "context_length": 8177})).details["held_tokens"] == 8176
    assert plan(FULL, deployment({"memory": {"kv_cache": "12502MiB"}, "context_length": 100_000})) is not None


def test_sglang_starts_with_a_context_above_its_cache_and_is_warned() -> None:
    made = plan(FULL, deployment({"memory": {"kv_cache": "1GiB"}, "context_length": 100_000}, "sglang"))
    assert made.context_tokens == 100_000
    assert "8192" in made.facts["context_warning"]
    assert made.facts["longest_input"] == "8185"


def test_blocks_that_a_document_states_are_the_blocks_that_are_counted() -> None:
    stated = {"memory": {"kv_cache": "1GiB"}, "vllm": {"block_size_tokens": 256}}
    assert plan(FULL, deployment(stated)).context_tokens == (8192 // 256 - 1) * 256
    assert refusal(FULL, deployment({**stated, "context_length": 7937})).details["held_tokens"] == 7936


def test_kernels_with_longer_blocks_are_fitted_to_those_and_refused_only_what_no_kernel_could_hold() -> None:
    stated = {"memory": {"kv_cache": "1GiB"}}
    assert plan(FULL, deployment(stated), plain()).context_tokens == (8192 // 128 - 1) * 128
    assert refusal(FULL, deployment({**stated, "context_length": 8065}), plain()).details["held_tokens"] == 8064
    seen = {"memory": {"kv_cache": "288KiB"}}  # of the engine's CPU build: 1024 tokens start there, 1025 do not
    tiny = tensors(MIB, (layers_of(2, heads=1, key=32),), context_limits={"vllm": 2048})
    assert plan(tiny, deployment(seen), plain()).context_tokens == 1024
    assert refusal(tiny, deployment({**seen, "context_length": 1025}), plain()).code == "checkpoint_unusable"
    latent = tensors(GIB, (layers_of(61, 1, 512, Attention.LATENT, value=64),), attention="latent")
    assert plan(latent, deployment(stated)).context_tokens % 128 == 0


def test_a_cache_that_may_be_narrower_than_it_is_planned_is_not_refused() -> None:
    stated = {"memory": {"kv_cache": "1GiB"}}
    for narrower in ({"quantized_cache": "FP8"}, {"dtype": "float32"}):
        facts = FULL | narrower
        held = plan(facts, deployment(stated)).context_tokens
        assert "context_warning" in plan(facts, deployment({**stated, "context_length": held + 2048})).facts
        assert refusal(facts, deployment({**stated, "context_length": 2 * held + 2048})).code == "checkpoint_unusable"
    wide = FULL | {"dtype": "float32"}
    exact = deployment({**stated, "dtype": "float32", "context_length": 5000})
    assert refusal(wide, exact).details["held_tokens"] == 4080


def test_layers_with_a_window_need_no_more_than_the_window_holds() -> None:
    mixed = (layers_of(4), layers_of(28, attention=Attention.SLIDING, window=1024))
    facts = tensors(GIB, mixed, attention="sliding")
    stated = {"memory": {"kv_cache": "1GiB"}}
    assert plan(facts, deployment({**stated, "context_length": 40_000})).context_tokens == 40_000
    far = refusal(facts, deployment({**stated, "context_length": 65_536}))
    assert "Lower it, or raise" in far.message
    assert plan(facts, deployment({**stated, "context_length": 65_536}, "sglang")).context_tokens == 65_536


def test_ranks_that_share_a_context_out_hold_a_part_of_it_each() -> None:
    latent = tensors(GIB, (layers_of(61, 1, 512, Attention.LATENT, value=64),), attention="latent")
    two = {"topology": {"tensor_parallel": 2}}
    stated = {"memory": {"kv_cache": "1GiB"}, "context_length": 26_000}
    assert refusal(latent, deployment(stated, **two), alike(2)).code == "checkpoint_unusable"
    shared = stated | args("--decode-context-parallel-size", "2")
    assert plan(latent, deployment(shared, **two), alike(2)).context_tokens == 26_000


def test_each_stage_holds_its_own_layers() -> None:
    two = {"topology": {"pipeline_parallel": 2}}
    stated = {"memory": {"kv_cache": "1GiB"}}
    assert plan(FULL, deployment({**stated, "context_length": 16_000}, **two), alike(2)).context_tokens == 16_000
    assert refusal(FULL, deployment({**stated, "context_length": 17_000}, **two), alike(2)).code == (
        "checkpoint_unusable"
    )


def test_a_hybrid_is_refused_what_its_blocks_beside_one_state_cannot_hold() -> None:
    facts = tensors(GIB, **delta_net())
    stated = {"memory": {"kv_cache": "4GiB"}, "max_concurrent_requests": 4}
    held = plan(facts, deployment(stated)).context_tokens
    assert plan(facts, deployment({**stated, "context_length": held})).context_tokens == held
    refused = refusal(facts, deployment({**stated, "memory": {"kv_cache": "1GiB"}, "context_length": 1 << 17}))
    assert refused.code == "checkpoint_unusable"
    enough = Size(-(-refused.details["needs_bytes"] // MIB) * MIB)
    raised = {**stated, "memory": {"kv_cache": str(enough)}, "context_length": 1 << 17}
    assert plan(facts, deployment(raised)).context_tokens == 1 << 17


@pytest.mark.parametrize("sequences", [1, 32])
@pytest.mark.parametrize("tokens", [1, 527, 528, 40_000])
def test_the_cache_that_a_hybrid_is_told_to_have_holds_that_context(tokens: int, sequences: int) -> None:
    shape = vllm_blocks.Hybrid(attention_layers=8, token_bytes=2048, state_layers=24, state_bytes=1_073_152)
    asked: dict[str, Any] = {"block_size": None, "draft_tokens": 2}
    enough = vllm_blocks.needed_bytes(shape, tokens, sequences=sequences, **asked)
    held = vllm_blocks.held(shape, enough, sequences=sequences, **asked)
    assert held.tokens is not None
    assert held.tokens >= tokens
    assert vllm_blocks.least_bytes(shape, tokens, **asked) < enough


# --- what each engine derives for a model ----------------------------------------------------------

PLAIN = {"model_type": "qwen3", "num_hidden_layers": 2, "max_position_embeddings": 32_768}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("config", "vllm", "sglang"),
    [
        ({}, 32_768, 32_768),
        ({"rope_scaling": YARN}, 32_768, 32_768),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 32_768, 131_072),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 65_536, 65_536),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 81_920, 81_920),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 32_768, 32_768),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, 32_768, 32_768),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, 32_768, 32_768),
        ({"rope_scaling": {"type": "linear", "factor": None}}, 32_768, 32_768),
        ({"rope_scaling": {"type": "linear", "factor": True}}, 32_768, 32_768),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, 32_768, 32_768),
        ({"rope_scaling": "yarn"}, 32_768, 32_768),
        ({"rope_parameters": YARN}, 32_768, 32_768),
        ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}}, 65_536, 32_768),
        ({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 32_768, 262_144),
        ({"model_max_length": 131_072}, 131_072, 131_072),
        ({"max_sequence_length": 4096}, 4096, 4096),
        ({"seq_length": 65_536}, 32_768, 65_536),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024, 1024),
    ],
)
def test_the_longest_context_is_derived_as_each_engine_does(config: dict[str, Any], vllm: int, sglang: int) -> None:
    limits = describe({**PLAIN, **config})["context_limits"]
    limits.pop("vllm_scaled", None)
    assert limits == {"vllm": vllm, "sglang": sglang}


def test_a_description_may_leave_out_what_its_family_has_by_default() -> None:
    assert describe({"model_type": "llama", "num_hidden_layers": 2})["context_limits"]["vllm"] == 2048
    assert describe({"model_type": "qwen3", "num_hidden_layers": 2})["context_limits"]["vllm"] == 32_768
    assert describe({"model_type": "mistral", "num_hidden_layers": 2, "seq_length": 99})["context_limits"]["vllm"] == 99


def test_builds_that_scale_yarn_are_refused_what_they_refuse_and_fitted_to_what_all_of_them_take() -> None:
    yarn = FULL | {"context_limits": describe({**PLAIN, "rope_scaling": YARN})["context_limits"]}
    assert yarn["context_limits"] == {"vllm": 32_768, "vllm_scaled": 131_072, "sglang": 32_768}
    asked = deployment({"memory": {"kv_cache": "32GiB"}, "context_length": 100_000})
    assert "above the 32768 tokens" in refusal(yarn, asked).message
    assert plan(yarn | {"scales_yarn": True}, asked).context_tokens == 100_000
    roomy = deployment({"memory": {"kv_cache": "32GiB"}})
    assert plan(yarn | {"scales_yarn": True}, roomy).context_tokens == 32_768
    assert [scales_yarn(version) for version in ("0.29.0", "0.31.2", "0.32.0", "0.32.1+cpu")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_a_description_without_a_length_has_no_limits_and_nothing_is_refused() -> None:
    facts = FULL | {"context_limits": describe({"model_type": "mamba", "num_hidden_layers": 2})["context_limits"]}
    assert facts["context_limits"] == {}
    for engine in ("vllm", "sglang"):
        stated = {"memory": {"kv_cache": "32GiB"}, "context_length": 200_000}
        assert plan(facts, deployment(stated, engine)).context_tokens == 200_000


LONG = {"memory": {"kv_cache": "40GiB"}, "context_length": 200_000}
VARIABLES = {"vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"}


@pytest.mark.parametrize(("engine", "title"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_context_above_what_the_engine_takes_is_refused_unless_its_variable_says_otherwise(
    engine: str, title: str
) -> None:
    refused = refusal(FULL, deployment(LONG, engine))
    assert refused.code == "invalid_config"
    assert refused.message == (
        "engine_config.context_length: 200000 is above the 131072 tokens that "
        f"{title} derives for the model from its config.json, and it does not start with more. Lower it, or state "
        f"engine_config.env: {VARIABLES[engine]}: '1' if the model is good for more"
    )
    allowed = deployment({**LONG, "env": {VARIABLES[engine]: "1"}}, engine)
    assert plan(FULL, allowed).context_tokens == 200_000
    assert plan(FULL | {"host_env": {VARIABLES[engine]: "true"}}, deployment(LONG, engine)).context_tokens == 200_000
    off = deployment({**LONG, "env": {VARIABLES[engine]: "0"}}, engine)
    assert refusal(FULL | {"host_env": {VARIABLES[engine]: "1"}}, off).code == "invalid_config"


def test_arguments_that_describe_the_model_otherwise_leave_it_to_the_engine() -> None:
    for engine, option in (("vllm", "--hf-overrides"), ("sglang", "--json-model-override-args")):
        assert plan(FULL, deployment(LONG | args(option, "{}"), engine)).context_tokens == 200_000


def test_vllm_without_windows_takes_no_more_than_a_window() -> None:
    windowed = (layers_of(8), layers_of(8, attention=Attention.SLIDING, window=1024))
    facts = tensors(GIB, windowed, attention="sliding", context_limits={"vllm": 32_768})
    off = args("--disable-sliding-window")
    assert plan(facts, deployment({"context_length": 2048})).context_tokens == 2048
    assert "above the 1024 tokens" in refusal(facts, deployment({"context_length": 2048} | off)).message
    assert plan(facts, deployment(off)).context_tokens == 1024


def test_a_drafter_of_sglang_runs_with_the_model_s_context_and_bounds_it() -> None:
    draft = {"weight_bytes": MIB, "cache_values": 64, "layers": 1, "not_derivable": None}
    draft |= {"context_limits": {"vllm": 2048, "sglang": 2048}}
    facts = FULL | {"draft": draft}
    eagle = args("--speculative-algorithm", "EAGLE3")
    made = plan(facts, deployment(eagle, "sglang"))
    assert (made.context_tokens, made.context_reason) == (2048, "the 2048 tokens that the draft model takes")
    refused = refusal(facts, deployment({"context_length": 8192} | eagle, "sglang"))
    assert "above the 2048 tokens that SGLang derives for the draft model" in refused.message
    lifted = {"env": {VARIABLES["sglang"]: "1"}}
    assert plan(facts, deployment({"context_length": 8192} | lifted | eagle, "sglang")).context_tokens == 8192
    assert plan(facts, deployment({"context_length": 8192})).context_tokens == 8192  # vLLM bounds its drafter itself


def test_a_fitted_context_is_never_above_what_the_engine_starts_with() -> None:
    linear = FULL | {"context_trained": 32_768, "context_limits": {"vllm": 131_072, "sglang": 32_768}}
    roomy = {"memory": {"kv_cache": "40GiB"}}
    assert plan(linear, deployment(roomy)).context_tokens == 131_072
    assert plan(linear, deployment(roomy, "sglang")).context_tokens == 32_768
    gemma = FULL | {"context_trained": 32_768, "context_limits": {"vllm": 32_768, "sglang": 262_144}}
    assert plan(gemma, deployment(roomy, "sglang")).context_tokens == 32_768
    older = {name: value for name, value in FULL.items() if name != "context_limits"}
    assert plan(older, deployment(roomy)).context_tokens == 131_072
    assert longest_context.longest(older, deployment(LONG), "vllm") is None


# --- heads inside the checkpoint --------------------------------------------------------------------


def test_heads_for_speculation_are_counted_in_the_cache_where_they_are_used() -> None:
    facts = FULL | {"mtp_layers": 2}

    def per_token(config: dict[str, Any], engine: str) -> int | None:
        return token_bytes.kv_bytes_per_token(facts, deployment(config, engine), engine)[0]

    layer = PER_TOKEN // 32
    mtp = args("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}')
    assert per_token({}, "vllm") == PER_TOKEN
    assert per_token(mtp, "vllm") == PER_TOKEN + 2 * layer
    other = args("--speculative-config", '{"method":"ngram","num_speculative_tokens":1}')
    assert per_token(other, "vllm") == PER_TOKEN
    assert per_token(args("--speculative-algorithm", "NEXTN"), "sglang") == PER_TOKEN + 2 * layer
    assert per_token(args("--speculative-algorithm", "NGRAM"), "sglang") == PER_TOKEN
    hybrid = tensors(GIB, **delta_net()) | {"mtp_layers": 1}
    roomy = {"memory": {"kv_cache": "2GiB"}, "max_concurrent_requests": 2}
    assert plan(hybrid, deployment(roomy | mtp)).context_tokens < plan(hybrid, deployment(roomy)).context_tokens


def test_layers_that_keep_a_wider_cache_are_counted_as_wide() -> None:
    narrow = {"memory": {"kv_cache": "1GiB"}, "kv_cache_dtype": "fp8"}
    some = args("--kv-cache-dtype-skip-layers", "0", "1")
    assert plan(FULL, deployment(narrow)).context_tokens == 16_368
    assert plan(FULL, deployment(narrow | some)).context_tokens == 8176
    assert plan(FULL, deployment(narrow | some | {"context_length": 12_000})).context_tokens == 12_000
    odd = {**narrow, "kv_cache_dtype": "nvfp4"}
    assert plan(FULL, deployment(odd | some | {"context_length": 12_000})).context_tokens == 12_000


def test_pages_of_sglang_are_the_blocks_that_its_cache_is_counted_in() -> None:
    stated = {"memory": {"kv_cache": "1GiB"}, "sglang": {"max_total_tokens": 1000}}
    assert plan(FULL, deployment(stated | args("--page-size", "64"), "sglang")).context_tokens == 960
    assert plan(FULL, deployment(stated, "sglang")).context_tokens == 992


def test_a_context_is_fitted_to_a_step_where_prompts_are_not_cut_into_pieces() -> None:
    stated = {"memory": {"kv_cache": "1GiB"}, "vllm": {"max_num_batched_tokens": 2048}}
    whole = args("--no-enable-chunked-prefill")
    assert plan(FULL, deployment(stated)).context_tokens == 8176
    made = plan(FULL, deployment(stated | whole))
    assert (made.context_tokens, "of a step" in (made.context_reason or "")) == (2048, True)
