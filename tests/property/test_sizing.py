"""The sums of the memory pages: their worked values, and what must hold for every model and machine."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sizing_values import GIB, MIB, cards, plain, spark

from capyctl.checkpoints import kv_cache
from capyctl.checkpoints.sizing import derive_plan
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.errors import CapyError
from capyctl.fsm.types import Bytes, Domain, Phase
from capyctl.ledger.types import HostPolicy, Plan


def facts(
    weights: int, *, layers: int = 32, heads: int = 8, length: int = 128, trained: int = 8192, **more: Any
) -> dict[str, Any]:
    return {
        "weight_bytes": weights,
        "kv_heads": [heads] * layers,
        "key_length": length,
        "value_length": length,
        "context_trained": trained,
        "not_derivable": None,
        **more,
    }


def deployment(engine_config: dict[str, Any] | None = None, **fields: Any) -> Deployment:
    block = {"name": "m", "engine": "llamacpp", "model": "m", "engine_config": engine_config or {}, **fields}
    return parse_deployment(block, "test")


def code_of(given_facts: dict[str, Any], document: Deployment, policy: HostPolicy) -> str:
    with pytest.raises(CapyError) as caught:
        derive_plan(given_facts, document, policy)
    assert "\n" not in caught.value.message
    return caught.value.code


def on(plan: Plan, phase: Phase, name: str = "unified") -> int:
    return plan.at(phase).bytes[Domain(name)]


# --- worked values ---------------------------------------------------------------------------------


def test_the_cache_of_a_135_million_model_is_the_one_the_engine_reports() -> None:
    # SmolLM2-135M: 30 layers, 3 KV heads of 64, f16: 22.5 KiB a token, 720 MiB for 4 slots of 8192.
    small = facts(98_362_432, layers=30, heads=3, length=64)
    assert kv_cache.bytes_per_token(small, "f16", flash_attention=False) == 23_040
    plan = derive_plan(small, deployment(), plain())
    assert (plan.context_tokens, plan.slots) == (8192, 4)
    assert int(plan.facts["kv_cache_bytes"]) == 720 * MIB
    assert on(plan, Phase.READY) == 98_362_432 + 720 * MIB + 256 * MIB
    assert on(plan, Phase.COLD) == on(plan, Phase.READY)
    assert plan.at(Phase.READY).claims == ()


def test_without_a_gpu_the_margin_is_a_tenth_of_the_weights_and_at_least_256_mib() -> None:
    for weights, margin in ((1 * GIB, 256 * MIB), (10 * GIB, 1 * GIB)):
        plan = derive_plan(facts(weights), deployment({"memory": {"kv_cache": "4GiB"}}), plain())
        assert on(plan, Phase.READY) == weights + 4 * GIB + margin


def test_on_unified_memory_with_a_gpu_the_reference_values_come_out() -> None:
    weights = 2042 * GIB // 100
    plan = derive_plan(facts(weights), deployment({"memory": {"kv_cache": "4GiB"}}), spark())
    assert on(plan, Phase.READY) == weights + 12 * GIB + 5 * GIB // 4  # 33.67 GiB
    larger = derive_plan(facts(24 * GIB), deployment({"memory": {"kv_cache": "16GiB"}}), spark())
    assert on(larger, Phase.READY) == 48 * GIB + 5 * GIB // 4
    assert [claim.device for claim in larger.at(Phase.READY).claims] == ["gpu0"]
    assert on(derive_plan(facts(40 * GIB), deployment({"memory": {"kv_cache": "4GiB"}}), spark()), Phase.READY) == (
        40 * GIB + 4 * GIB + 10 * GIB + 5 * GIB // 4
    )


def test_on_a_card_weights_are_scaled_and_system_memory_is_charged_beside() -> None:
    plan = derive_plan(facts(10 * GIB), deployment({"memory": {"kv_cache": "2GiB"}}), cards())
    assert on(plan, Phase.READY, "gpu1") == 11 * GIB + 2 * GIB + 5 * GIB // 4
    assert on(plan, Phase.READY, "system") == 4 * GIB
    chosen = deployment({"memory": {"kv_cache": "2GiB"}}, devices=[{"id": "gpu0"}], host="box")
    assert Domain("gpu0") in derive_plan(facts(10 * GIB), chosen, cards()).at(Phase.COLD).bytes
    assert code_of(facts(1), deployment(devices=[{"id": "gpu7"}], host="box"), cards()) == "host_ineligible"


def test_the_default_cache_is_4_gib_and_at_most_a_quarter_of_the_managed_memory() -> None:
    wide = facts(1 * GIB, layers=64, heads=32, trained=1 << 20)  # 1 MiB a token
    per_token = kv_cache.bytes_per_token(wide, "f16", flash_attention=False)
    plenty = derive_plan(wide, deployment(), plain(64 * GIB))
    assert plenty.context_tokens == 4 * GIB // (4 * per_token) // 256 * 256
    card = 1471 * GIB // 100
    tight = derive_plan(wide, deployment(), plain(card))
    assert tight.context_tokens == card // 4 // (4 * per_token) // 256 * 256


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        ("f32", 32),
        ("f16", 16),
        ("bf16", 16),
        ("q8_0", 8.5),
        ("q5_1", 6),
        ("q5_0", 5.5),
        ("q4_1", 5),
        ("q4_0", 4.5),
        ("iq4_nl", 4.5),
    ],
)
def test_cache_types_take_their_bits(kind: str, bits: float) -> None:
    assert kv_cache.bytes_per_token(facts(1), kind, flash_attention=True) == 32 * 8 * 256 * bits / 8


def test_a_transposed_v_is_padded_to_its_widest_layer_without_flash_attention() -> None:
    uneven = facts(1) | {"kv_heads": [8, 2, 0]}
    key_bytes = (8 + 2) * 128 * 2
    assert kv_cache.bytes_per_token(uneven, "f16", flash_attention=True) == 2 * key_bytes
    assert kv_cache.bytes_per_token(uneven, "f16", flash_attention=False) == key_bytes + 3 * 8 * 128 * 2


def test_quantised_caches_need_whole_blocks_and_flash_attention() -> None:
    odd = facts(1 * GIB, length=80)
    assert code_of(odd, deployment({"kv_cache_dtype": "q8_0"}), plain()) == "invalid_config"
    off = {"kv_cache_dtype": "q8_0", "accept_extra_args": True, "extra_args": ["--flash-attn", "off"]}
    assert code_of(facts(1 * GIB), deployment(off), plain()) == "invalid_config"


def test_time_limits_follow_the_weights() -> None:
    plan = derive_plan(facts(10 * 10**9), deployment({"memory": {"kv_cache": "1GiB"}}), plain())
    assert (plan.initialize_ms, plan.wake_ms) == (220_000, 110_000)
    bounded = derive_plan(
        facts(10 * 10**9), deployment({"memory": {"kv_cache": "1GiB"}}, request_deadline="100s"), plain()
    )
    assert (bounded.initialize_ms, bounded.wake_ms) == (100_000, 100_000)
    stated = deployment({"memory": {"kv_cache": "1GiB"}}, timeouts={"initialize": "31s", "wake": "11s"})
    assert derive_plan(facts(10**9), stated, plain()).initialize_ms == 31_000
    hosts = derive_plan(facts(10**12), deployment(), plain(4096 * GIB), request_deadline_ms=600_000)
    assert hosts.initialize_ms == 600_000


# --- declared memory -------------------------------------------------------------------------------


def test_a_declared_request_leaves_what_is_left_to_the_cache() -> None:
    plan = derive_plan(facts(10 * GIB), deployment({"memory": {"request": "16GiB"}}), plain())
    assert on(plan, Phase.READY) == 16 * GIB
    assert plan.provenance[Phase.READY] == "declared"
    left = 16 * GIB - 10 * GIB - 1 * GIB
    assert plan.context_tokens == min(8192, left // (4 * 131_072) // 256 * 256)
    assert code_of(facts(16 * GIB), deployment({"memory": {"request": "16GiB"}}), plain()) == "checkpoint_unusable"


def test_a_declared_cache_that_is_too_small_for_the_declared_context_is_refused() -> None:
    config = {"context_length": 8192, "memory": {"kv_cache": "2GiB"}}
    assert code_of(facts(1 * GIB), deployment(config), plain()) == "checkpoint_unusable"
    config["memory"] = {"kv_cache": "4GiB"}
    assert derive_plan(facts(1 * GIB), deployment(config), plain()).context_reason is None


def test_a_refusal_never_names_one_figure_twice() -> None:
    config = {"context_length": 8192, "memory": {"kv_cache": "4095MiB"}}
    with pytest.raises(CapyError, match=r"need 4096 MiB of KV cache and 4095 MiB is left for it"):
        derive_plan(facts(1 * GIB), deployment(config), plain())


def test_a_cache_that_holds_no_context_names_what_would() -> None:
    tiny = deployment({"memory": {"kv_cache": "1MiB"}})
    assert code_of(facts(1 * GIB), tiny, plain()) == "checkpoint_unusable"


def test_a_declared_start_peak_is_charged_while_it_starts() -> None:
    memory = {"request": "12GiB", "startup": "20GiB"}
    plan = derive_plan(facts(4 * GIB), deployment({"memory": memory}), plain())
    assert (on(plan, Phase.COLD), on(plan, Phase.READY)) == (20 * GIB, 12 * GIB)
    beyond = deployment({"memory": {"request": "12GiB", "startup": "70GiB"}})
    assert code_of(facts(4 * GIB), beyond, plain()) == "insufficient_resources"
    below = deployment({"memory": {"startup": "1GiB"}})
    assert code_of(facts(4 * GIB), below, plain()) == "invalid_config"


def test_the_short_resources_form_is_one_sum_on_one_pool() -> None:
    plan = derive_plan(facts(4 * GIB), deployment(resources={"gpu": "8GiB", "ram": "2GiB"}), plain())
    assert on(plan, Phase.COLD) == on(plan, Phase.READY) == 10 * GIB
    assert set(plan.provenance.values()) == {"declared"}
    split = derive_plan(facts(4 * GIB), deployment(resources={"gpu": "8GiB", "ram": "2GiB"}), cards())
    assert dict(split.at(Phase.READY).bytes) == {"gpu1": 8 * GIB, "system": 2 * GIB}


def test_the_phases_form_is_charged_as_it_is_written() -> None:
    def phase(size: str, name: str = "unified") -> dict[str, Any]:
        return {"allocations": [{"domain": name, "bytes": size}]}

    plan = derive_plan(facts(4 * GIB), deployment(resources={"cold": phase("9GiB"), "ready": phase("8GiB")}), plain())
    assert (on(plan, Phase.COLD), on(plan, Phase.READY)) == (9 * GIB, 8 * GIB)
    elsewhere = deployment(resources={"cold": phase("9GiB", "system"), "ready": phase("8GiB", "system")})
    assert code_of(facts(4 * GIB), elsewhere, plain()) == "host_ineligible"
    no_system = deployment(resources={"cold": phase("9GiB"), "ready": phase("8GiB")})
    assert code_of(facts(4 * GIB), no_system, cards()) == "host_ineligible"


# --- what cannot be derived -----------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["sliding-window attention", "recurrent layers", "latent attention (MLA)"])
def test_a_model_that_the_formula_does_not_describe_needs_a_declared_cache(reason: str) -> None:
    odd = facts(2 * GIB, not_derivable=reason)
    assert code_of(odd, deployment(), plain()) == "no_safe_estimate"
    assert code_of(odd, deployment({"memory": {"request": "9GiB"}}), plain()) == "no_safe_estimate"
    plan = derive_plan(odd, deployment({"memory": {"kv_cache": "1GiB"}}), plain())
    assert plan.context_tokens == 4096
    assert reason in (plan.context_reason or "")


@pytest.mark.parametrize(
    "words",
    [
        ["--override-tensor", "exps=CPU"],
        ["--cpu-moe"],
        ["--n_cpu_moe", "3"],
        ["--n-cpu-ffn", "3"],
        ["--no-kv-offload"],
        ["--load-mode", "mmap+mlock"],
        ["--spec-type", "draft-mtp"],
        ["--model-draft", "/m.gguf"],
    ],
)
def test_options_that_move_memory_need_declared_memory_wherever_they_are_said(words: list[str]) -> None:
    extra = deployment({"accept_extra_args": True, "extra_args": words})
    assert code_of(facts(1 * GIB), extra, plain()) == "no_safe_estimate"
    assert code_of(facts(1 * GIB, host_args=words), deployment(), plain()) == "no_safe_estimate"


def test_partial_gpu_layers_need_declared_memory() -> None:
    assert code_of(facts(1 * GIB), deployment({"llamacpp": {"n_gpu_layers": 12}}), plain()) == "no_safe_estimate"


def test_a_context_above_the_trained_one_is_refused() -> None:
    assert code_of(facts(1 * GIB), deployment({"context_length": 8193}), plain()) == "invalid_config"
    stated = deployment({"context_length": 8193}, resources={"gpu": "8GiB", "ram": "2GiB"})
    assert code_of(facts(1 * GIB), stated, plain()) == "invalid_config"


@pytest.mark.parametrize(
    ("config", "more", "raised"),
    [
        ({}, {"resources": {"gpu": "540MiB", "ram": "540MiB"}}, "raise resources"),
        ({"memory": {"kv_cache": "2MiB"}}, {}, "raise engine_config.memory.kv_cache"),
        ({"memory": {"request": "1281MiB"}}, {}, "raise engine_config.memory.request"),
    ],
)
def test_what_is_to_be_raised_for_a_context_is_what_bounds_it(
    config: dict[str, Any], more: dict[str, Any], raised: str
) -> None:
    for context, line in (
        ({}, "of KV cache holds no 256 tokens"),
        ({"context_length": 8192}, "4 slots of 8192 tokens"),
    ):
        with pytest.raises(CapyError) as refused:
            derive_plan(facts(1 * GIB), deployment({**config, **context}, **more), plain())
        assert refused.value.code == "checkpoint_unusable"
        print(refused.value.message)
        assert line in refused.value.message
        assert refused.value.message.endswith(f", or {raised}")


def test_what_can_never_fit_is_refused_with_figures_at_once() -> None:
    assert code_of(facts(70 * GIB), deployment(), plain()) == "insufficient_resources"
    assert code_of(facts(44 * GIB), deployment(), cards()) == "insufficient_device_memory"


# --- for every model -------------------------------------------------------------------------------

shapes = st.builds(
    facts,
    st.integers(1 * MIB, 40 * GIB),
    layers=st.integers(1, 80),
    heads=st.integers(1, 16),
    length=st.sampled_from((32, 64, 96, 128, 256)),
    trained=st.integers(1, 1 << 18),
)
policies = st.sampled_from((plain(8 * GIB), plain(), spark(), cards()))
configs = st.fixed_dictionaries(
    {},
    optional={
        "context_length": st.integers(1, 1 << 18),
        "max_concurrent_requests": st.integers(1, 64),
        "kv_cache_dtype": st.sampled_from(sorted(kv_cache.TYPES)),
        "memory": st.fixed_dictionaries({}, optional={"kv_cache": st.integers(1, 8 << 10).map(lambda n: f"{n}MiB")}),
    },
)


@given(shapes, configs, policies)
@settings(derandomize=True, max_examples=300, suppress_health_check=[HealthCheck.filter_too_much])
def test_every_plan_holds_its_cache_and_fits_its_host(
    shape: dict[str, Any], config: dict[str, Any], policy: HostPolicy
) -> None:
    document = deployment(config)
    try:
        plan = derive_plan(shape, document, policy)
    except CapyError as error:
        refusals = {"checkpoint_unusable", "insufficient_resources", "insufficient_device_memory", "invalid_config"}
        assume(error.code not in refusals)  # any other refusal of a derivable model is a fault
        raise
    assert plan == derive_plan(shape, document, policy)
    assert 1 <= plan.context_tokens <= shape["context_trained"]
    assert (plan.context_reason is None) == (document.engine_config.context_length is not None)
    kind = document.engine_config.kv_cache_dtype or "f16"
    per_token = kv_cache.bytes_per_token(shape, kind, flash_attention=kind.startswith(("q", "i")))
    assert plan.slots * kv_cache.pad(plan.context_tokens) * per_token <= int(plan.facts["kv_cache_bytes"])
    for name, amount in plan.at(Phase.READY).bytes.items():
        assert plan.at(Phase.COLD).bytes[name] >= amount
        assert amount <= policy.domains[name].managed_bytes
    assert sum(plan.at(Phase.READY).bytes.values()) > shape["weight_bytes"] + int(plan.facts["kv_cache_bytes"])


@given(shapes, st.integers(1, 1 << 16), st.integers(1, 1 << 16), st.integers(1, 16), st.integers(0, 8 * GIB))
@settings(derandomize=True, max_examples=150)
def test_more_context_slots_or_weights_never_need_less(
    shape: dict[str, Any], one: int, two: int, slots: int, more: int
) -> None:
    shape["context_trained"] = 1 << 18
    low, high = sorted((one, two))

    def ready(tokens: int, count: int, extra: int = 0) -> int:
        grown = shape | {"weight_bytes": shape["weight_bytes"] + extra}
        config = {"context_length": tokens, "max_concurrent_requests": count}
        return on(derive_plan(grown, deployment(config), plain(1 << 50)), Phase.READY)

    assert ready(low, slots) <= ready(high, slots) <= ready(high, slots + 1) <= ready(high, slots + 1, more)


@given(shapes, st.integers(1, 4096), st.integers(0, 4096))
@settings(derandomize=True, max_examples=150)
def test_more_cache_never_fits_less_context(shape: dict[str, Any], cache: int, more: int) -> None:
    def fitted(mib: int) -> int:
        try:
            return derive_plan(shape, deployment({"memory": {"kv_cache": f"{mib}MiB"}}), plain(1 << 50)).context_tokens
        except CapyError:
            return 0

    assert fitted(cache) <= fitted(cache + more)


def test_a_cold_peak_above_the_limit_takes_the_whole_host() -> None:
    # Ready with its context placeholder fits exactly; nothing above it does.
    exact = derive_plan(facts(4 * GIB), deployment({"memory": {"kv_cache": "4GiB"}}), spark())
    policy = spark(on(exact, Phase.READY))
    assert derive_plan(facts(4 * GIB), deployment({"memory": {"kv_cache": "4GiB"}}), policy) == exact
    smaller = attrs.evolve(policy.domains[Domain("unified")], managed_bytes=Bytes(on(exact, Phase.READY) - 1))
    refusing = attrs.evolve(policy, domains={Domain("unified"): smaller})
    assert code_of(facts(4 * GIB), deployment({"memory": {"kv_cache": "4GiB"}}), refusing) == "insufficient_resources"


@pytest.mark.parametrize(
    ("weights", "engine_config", "way_out"),
    [
        (40, {"memory": {"kv_cache": "30GiB"}}, "Lower memory.kv_cache to 20GiB, or choose a smaller model"),
        (40, {"memory": {"request": "100GiB"}}, "Lower memory.request, or choose a smaller model"),
        (57, {"context_length": 8_192}, "Lower context_length, or choose a smaller model"),
        (57, {}, "State a lower context_length, or memory.kv_cache: 1GiB, or choose a smaller model"),
        (
            57,
            {"context_length": 8_192, "max_concurrent_requests": 5},
            "Lower context_length or max_concurrent_requests, or choose a smaller model",
        ),
        (70, {"memory": {"kv_cache": "30GiB"}}, "Choose a smaller model"),
        (70, {"memory": {"request": "100GiB"}}, "Choose a smaller model"),
        (70, {"context_length": 2_048}, "Choose a smaller model"),
        (70, {}, "Choose a smaller model"),
    ],
)
def test_what_never_fits_is_told_what_of_its_document_would_make_it_fit(
    weights: int, engine_config: dict[str, Any], way_out: str
) -> None:
    with pytest.raises(CapyError) as caught:
        derive_plan(facts(weights * GIB), deployment(engine_config), plain())
    assert caught.value.message.endswith(f" may be used there. {way_out}")
