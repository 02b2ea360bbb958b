"""Contexts that a cache holds, states of hybrid models, and what a drafter adds: worked values and their rules."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizing_values import GIB, MIB, alike, args, delta_net, deployment, host, layers_of, spark, tensors

from capyctl.checkpoints import token_bytes, vllm_blocks
from capyctl.checkpoints.cache_shape import Attention
from capyctl.checkpoints.hybrid_state import State, state_of
from capyctl.checkpoints.sizing import derive_plan
from capyctl.documents.deployment import Deployment
from capyctl.errors import CapyError
from capyctl.fsm.types import Bytes, Domain
from capyctl.ledger.types import HostPolicy, Plan
from capyctl.units import gib

CACHE = {"memory": {"kv_cache": "1GiB"}}
PER_TOKEN = 32 * 8 * 256 * 2


def plan(facts: dict[str, Any], document: Deployment, policy: HostPolicy | None = None) -> Plan:
    return derive_plan(facts, document, policy or spark(), family=document.family)


def per_token(facts: dict[str, Any], document: Deployment) -> int | None:
    return token_bytes.kv_bytes_per_token(facts, document, document.family)[0]


# --- bytes of one token ----------------------------------------------------------------------------


def test_heads_are_shared_out_among_ranks_and_one_stays_on_each() -> None:
    facts = tensors(GIB, (layers_of(32, heads=4),))
    one = per_token(facts, deployment())
    assert one == 32 * 4 * 256 * 2
    for ranks, heads in ((2, 2), (4, 1), (8, 1)):
        assert per_token(facts, deployment(topology={"tensor_parallel": ranks})) == 32 * heads * 256 * 2


def test_a_latent_cache_is_the_same_on_every_rank_and_has_layouts_of_its_own() -> None:
    latent = (layers_of(61, 1, 512, Attention.LATENT, value=64),)
    facts = tensors(GIB, latent, attention="latent")
    assert per_token(facts, deployment()) == 61 * 576 * 2
    assert per_token(facts, deployment(topology={"tensor_parallel": 8})) == 61 * 576 * 2
    assert per_token(facts, deployment({"kv_cache_dtype": "fp8_ds_mla"})) == 61 * 656
    assert per_token(facts, deployment({"kv_cache_dtype": "nvfp4_ds_mla"})) == 61 * 352
    indexed = tensors(GIB, (attrs.evolve(latent[0], index=128),), attention="latent")
    assert per_token(indexed, deployment()) == 61 * (576 * 2 + 132)
    plain = tensors(GIB, (layers_of(8),))
    assert token_bytes.kv_bytes_per_token(plain, deployment({"kv_cache_dtype": "fp8_ds_mla"}), "vllm") == (
        None,
        "the cache per token cannot be derived: the size of a fp8_ds_mla cache is not known",
    )


def test_a_stage_is_counted_with_the_layers_that_keep_most() -> None:
    facts = tensors(GIB, (layers_of(6, heads=2), layers_of(2, heads=16)))
    document = deployment(topology={"pipeline_parallel": 4})
    assert per_token(facts, document) == 2 * 16 * 256 * 2
    assert per_token(facts, deployment(topology={"pipeline_parallel": 2})) == (2 * 16 + 2 * 2) * 256 * 2


def test_a_drafter_is_counted_at_the_larger_of_its_own_cache_and_the_engine_s_guess() -> None:
    draft = {"weight_bytes": GIB, "cache_values": 100, "layers": 2, "not_derivable": None}
    facts = tensors(GIB, (layers_of(32),), draft=draft)
    own, guessed = 100 * 2, 2 * 8 * 256 * 2  # two layers like the target's
    whole = PER_TOKEN
    assert per_token(facts, deployment(args("--speculative-algorithm", "EAGLE"), "sglang")) == whole + guessed
    assert per_token(facts, deployment(args("--speculative-algorithm", "DFLASH"), "sglang")) == whole + own
    assert per_token(facts, deployment()) == whole + own
    wide = args("--speculative-draft-kv-cache-dtype", "float32", "--speculative-algorithm", "DFLASH")
    assert per_token(facts, deployment(wide, "sglang")) == whole + 100 * 4
    unread = tensors(GIB, (layers_of(32),), draft={**draft, "not_derivable": "no header"})
    made = plan(unread, deployment())
    assert (made.context_tokens, "draft" in (made.context_reason or "")) == (4096, True)


# --- contexts --------------------------------------------------------------------------------------


def test_sglang_says_its_longest_input_and_vllm_keeps_a_block() -> None:
    facts = tensors(GIB, (layers_of(32),))
    sglang, vllm = plan(facts, deployment(CACHE, "sglang")), plan(facts, deployment(CACHE))
    assert sglang.context_tokens == GIB // PER_TOKEN
    assert sglang.facts["longest_input"] == str(GIB // PER_TOKEN - 7)
    assert vllm.context_tokens == GIB // PER_TOKEN - 16
    assert "longest_input" not in vllm.facts
    beyond = plan(facts, deployment(CACHE | {"context_length": 100_000}, "sglang"))
    assert beyond.facts["longest_input"] == str(GIB // PER_TOKEN - 7)


def test_a_lowered_number_of_tokens_lowers_the_context_and_never_the_charge() -> None:
    facts = tensors(GIB, (layers_of(32),))
    low = plan(facts, deployment(CACHE | {"sglang": {"max_total_tokens": 1000}}, "sglang"))
    assert (low.context_tokens, low.pools["kv_tokens"]) == (992, 1000)
    high = plan(facts, deployment(CACHE | {"sglang": {"max_total_tokens": 1 << 30}}, "sglang"))
    assert high.pools["kv_tokens"] == GIB // PER_TOKEN
    assert low.phases == high.phases


def test_what_lowers_a_context_is_named_in_its_reason_and_its_refusal() -> None:
    facts = tensors(GIB, (layers_of(32),))

    def sglang(tokens: int, **config: Any) -> Deployment:
        return deployment({"memory": {"kv_cache": "1GiB"}, "sglang": {"max_total_tokens": tokens}, **config}, "sglang")

    field = "engine_config.sglang.max_total_tokens"
    assert plan(facts, sglang(1000)).context_reason == f"fitted to {field}, 1000"
    assert plan(facts, sglang(1 << 20)).context_reason == "fitted to 1.0 GiB of KV cache"
    warned = plan(facts, sglang(1000, context_length=5000)).facts["context_warning"]
    assert warned == f"5000 tokens are more than the 992 that {field}, 1000, allows"
    with pytest.raises(CapyError, match=f"{field}: 10 is less than a block of 16 tokens. Raise it"):
        plan(facts, sglang(10))


def test_tensorfold_is_told_no_cache_and_its_own_option_bounds_its_requests() -> None:
    facts = tensors(4 * GIB, (layers_of(32),))

    def made(gpu: str, context: int, **config: Any) -> Any:
        stated = {"context_length": context, **config}
        return plan(facts, deployment(stated, "tensorfold", resources={"gpu": gpu, "ram": "1GiB"}))

    roomy = made("30GiB", 4096, accept_extra_args=True, extra_args=["--parallel", "3"])
    assert (roomy.slots, "context_warning" in roomy.facts, "kv_cache_bytes" in roomy.facts) == (3, False, False)
    assert made("30GiB", 4096).slots == 8
    assert "beside its weights would" in made("30GiB", 10_000_000).facts["context_warning"]
    assert made("2GiB", 4096).facts["context_warning"] == "nothing is left for it beside the weights"


def test_only_shapes_that_are_known_exactly_warn_of_a_long_context() -> None:
    window = tensors(GIB, (layers_of(32, attention=Attention.SLIDING, window=1024),), attention="sliding")
    stated = CACHE | {"context_length": 100_000}
    for engine in ("vllm", "sglang"):
        assert "context_warning" not in plan(window, deployment(stated, engine)).facts
    warned = plan(tensors(GIB, (layers_of(32),)), deployment(stated, "sglang")).facts["context_warning"]
    assert warned == "100000 tokens are more than the 8192 that 1.0 GiB of KV cache hold"


def test_a_cache_of_less_than_a_block_names_what_would_hold_one() -> None:
    facts = tensors(GIB, (layers_of(32),))
    for engine, blocks in (("vllm", 2), ("sglang", 1)):
        with pytest.raises(CapyError, match=f"{blocks * 16 * PER_TOKEN // 1024} KiB would") as caught:
            plan(facts, deployment({"memory": {"kv_cache": "1MiB"}}, engine))
        assert caught.value.code == "checkpoint_unusable"
        enough = deployment({"memory": {"kv_cache": f"{blocks * 16 * PER_TOKEN}B"}}, engine)
        assert plan(facts, enough).context_tokens == 16


def test_a_cache_that_the_host_states_is_for_documents_that_say_nothing() -> None:
    facts = tensors(GIB, (layers_of(32),), default_kv_bytes=6 * GIB)
    assert plan(facts, deployment()).pools["kv_cache"] == 6 * GIB
    assert plan(facts, deployment(CACHE)).pools["kv_cache"] == GIB
    assert plan(facts, deployment({"memory": {"request": "12GiB"}})).pools["kv_cache"] == 12 * GIB - GIB - 8 * GIB
    header = {"weight_bytes": GIB, "kv_heads": [8] * 32, "key_length": 128, "value_length": 128}
    header |= {"context_trained": 1 << 20, "not_derivable": None, "default_kv_bytes": 6 * GIB}
    assert plan(header, deployment({}, "llamacpp")).context_tokens == 6 * GIB // (4 * PER_TOKEN) // 256 * 256


# --- hybrids on vLLM -------------------------------------------------------------------------------

QWEN_35_9B = delta_net(8, 24) | {
    "kv_heads": 4,
    "states": {"recurrence": "gated delta net", "layers": 24, "convolution": 24_576, "temporal": 524_288},
    "state_slot_values": [24 * 24_576, 24 * 524_288],
}


def test_the_blocks_of_a_hybrid_are_those_that_the_engine_logs() -> None:
    # Qwen3.5-9B on two ranks: "Setting attention block size to 528 tokens".
    on_rank = vllm_blocks.Hybrid(
        attention_layers=8, token_bytes=2 * 512 * 2, state_layers=24, state_bytes=(24_576 * 2 + 524_288 * 4) // 2
    )
    one = vllm_blocks.held(on_rank, GIB, sequences=1, block_size=None, draft_tokens=0)
    assert one.tokens is not None
    assert one.tokens % 528 == 0
    blocks = GIB // (8 * 528 * 2048)
    assert one.tokens == (blocks - 2 - 3 * 4) * 528
    latent = attrs.evolve(on_rank, latent=True)
    held = vllm_blocks.held(latent, GIB, sequences=1, block_size=None, draft_tokens=0)
    assert held.tokens is not None
    assert held.tokens % 640 == 0


def test_a_hybrid_is_fitted_beside_its_states_or_falls_back_naming_the_cache_it_needs() -> None:
    facts = tensors(18 * GIB, (layers_of(8, heads=4, key=256),)) | QWEN_35_9B
    facts["cache"] = tensors(1, (layers_of(8, heads=4, key=256),))["cache"]
    made = plan(facts, deployment({"memory": {"kv_cache": "8GiB"}}))
    block = 528 * 4096 * 8
    assert made.context_tokens == min(1 << 17, (8 * GIB // block - 2 - 3 * 4) * 528)
    tight = plan(facts, deployment(CACHE))
    needed = gib((32 * 3 + 2) * block)
    assert tight.context_tokens == 4096
    assert tight.context_reason == f"since 1.0 GiB of KV cache holds no state for each of 32 requests; {needed} would"
    few = plan(facts, deployment(CACHE | {"max_concurrent_requests": 2}))
    assert few.context_tokens == (GIB // block - 2 - 3 * 4) * 528
    extra = args("--speculative-config", '{"method":"mtp","num_speculative_tokens":2}')
    drafted = plan(facts, deployment(CACHE | {"max_concurrent_requests": 2} | extra))
    assert drafted.context_tokens < few.context_tokens
    two = plan(facts, deployment(CACHE | {"max_concurrent_requests": 2}, topology={"tensor_parallel": 2}), alike(2))
    assert two.context_tokens == (GIB // (block // 2) - 2 - 3 * 4) * 528
    assert plan(tensors(GIB, **QWEN_35_9B, draft={"weight_bytes": 1, "cache_values": 1}), deployment(CACHE)) is not None


@given(
    st.integers(1, 96),
    st.integers(1, 8192),
    st.integers(1, 96),
    st.integers(1, 1 << 22),
    st.integers(0, 64 * GIB),
    st.integers(0, GIB),
    st.integers(1, 64),
    st.none() | st.sampled_from((16, 32, 64)),
    st.integers(0, 8),
)
@settings(derandomize=True, max_examples=200)
def test_m19_a_hybrid_s_context_and_its_states_fit_the_cache_and_more_cache_never_holds_less(
    layers: int,
    token: int,
    states: int,
    state: int,
    cache: int,
    more: int,
    sequences: int,
    block_size: int | None,
    draft: int,
) -> None:
    shape = vllm_blocks.Hybrid(attention_layers=layers, token_bytes=token, state_layers=states, state_bytes=state)

    def held(amount: int) -> vllm_blocks.Held:
        return vllm_blocks.held(shape, amount, sequences=sequences, block_size=block_size, draft_tokens=draft)

    found = held(cache)
    if found.tokens is None:
        assert held(found.needs_bytes).needs_bytes != found.needs_bytes  # what is named would do, as far as it was said
        assert cache < found.needs_bytes
        return
    assert found.tokens * layers * token + states * state <= cache
    after = held(cache + more).tokens
    assert after is not None
    assert after >= found.tokens


# --- states on SGLang ------------------------------------------------------------------------------

SLOT = 36 * (30_720 * 2 + 786_432 * 4)


def state(extra: dict[str, Any] | None = None, **facts: Any) -> State | None:
    return state_of(tensors(GIB, **(delta_net() | facts)), deployment(extra or {}, "sglang"), "sglang")


@pytest.mark.parametrize(
    ("words", "env", "slots"),
    [
        ((), {}, 5),
        (("--mamba-radix-cache-strategy", "extra_buffer"), {}, 5),
        (("--mamba-radix-cache-strategy", "extra_buffer", "--disable-overlap-schedule"), {}, 4),
        (("--mamba-radix-cache-strategy", "extra_buffer_lazy"), {}, 4),
        (("--mamba-radix-cache-strategy", "no_buffer"), {}, 3),
        (("--linear-attn-backend", "cutedsl"), {}, 3),
        (("--disable-radix-cache",), {}, 1),
        ((), {"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "1"}, 4),
        (("--mamba-radix-cache-strategy", "extra_buffer_lazy"), {"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "1"}, 3),
        (("--mamba-radix-cache-strategy", "no_buffer"), {"SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK": "1"}, 3),
    ],
)
def test_each_running_request_has_the_slots_of_its_strategy(
    words: tuple[str, ...], env: dict[str, str], slots: int
) -> None:
    found = state(args(*words) | {"env": env})
    assert found is not None
    assert (found.per_request, found.slot) == (slots, SLOT)
    assert found.bytes(8) == (8 * slots + 1) * SLOT


def test_the_published_pool_of_a_hybrid_comes_out() -> None:
    slot = 14_681 * MIB // 100  # 146.81 MiB
    plain = State(slot=slot, per_request=5, draft_tokens=0)
    assert round(plain.bytes(8) / GIB, 1) == 5.9
    drafted = attrs.evolve(plain, draft_tokens=8)
    assert drafted.bytes(8) == 113 * slot
    assert round(drafted.bytes(8) / GIB, 1) == 16.2


def test_types_of_a_state_are_the_last_that_were_said() -> None:
    half = 36 * (30_720 * 2 + 786_432 * 2)
    for extra, facts, slot in (
        ({}, {"state_dtype": "bfloat16"}, half),
        ({"env": {"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"}}, {}, half),
        ({}, {"host_env": {"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"}}, half),
        (args("--mamba-ssm-dtype", "float32") | {"env": {"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"}}, {}, SLOT),
        ({"env": {"SGLANG_MAMBA_CONV_DTYPE": "float32"}}, {}, 36 * (30_720 * 4 + 786_432 * 4)),
    ):
        found = state(extra, **facts)
        assert found is not None
        assert found.slot == slot
    assert state(args("--mamba-ssm-dtype", "int8")) is None
    assert state(args("--max-mamba-cache-size", "9")) is None
    assert state(args("--speculative-algorithm", "NEXTN")) is None
    ring = args("--speculative-algorithm", "NEXTN", "--enable-linear-replayssm-spec")
    replayed = state(ring)
    assert replayed is not None
    assert replayed.draft_tokens == 0


def test_ranks_share_out_a_state() -> None:
    document = deployment({}, "sglang", topology={"tensor_parallel": 4})
    found = state_of(tensors(GIB, **delta_net()), document, "sglang")
    assert found is not None
    assert found.slot == SLOT // 4
    staged = deployment({}, "sglang", topology={"pipeline_parallel": 4})
    stage = state_of(tensors(GIB, **delta_net()), staged, "sglang")
    assert stage is not None
    assert stage.slot == SLOT // 3  # 12 of 48 layers, any of which may keep a state


def test_running_requests_are_lowered_until_their_states_fit_the_machine() -> None:
    facts = tensors(20 * GIB, **delta_net())
    made = plan(facts, deployment({}, "sglang"))
    assert (made.slots, made.pools["running"]) == (8, 8)
    unified = spark().domains[Domain("unified")]
    for amount in range(36 * GIB, 42 * GIB, GIB // 2):
        small = host(unified=attrs.evolve(unified, managed_bytes=Bytes(amount)))
        fitted = plan(facts, deployment({}, "sglang"), small)
        if fitted.slots == 8:
            break
        assert fitted.facts["running_limited"] == f"Running limited to {fitted.slots} requests by the state cache"
    else:
        raise AssertionError("more room never sufficed")
