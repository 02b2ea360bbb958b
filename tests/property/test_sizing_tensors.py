"""The memory of engines that park: worked values of the reference, residencies, limits, and what is refused."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sizing_values import GIB, cards, domain, host, plain, spark

from capyctl.checkpoints.residency import one_for_all, settle
from capyctl.checkpoints.sizing import derive_plan
from capyctl.documents.deployment import Deployment, parse_deployment
from capyctl.errors import CapyError
from capyctl.fsm.types import Bytes, Domain, Phase, Residency
from capyctl.host.cards import Card
from capyctl.host.policy import card_policy
from capyctl.ledger.types import DomainKind, HostPolicy, Plan

X = 5 * GIB // 4
DEEP, HOST_BACKED, RESTART = Residency.DEEP, Residency.HOST_BACKED, Residency.RESTART_ONLY


def facts(weights: int, **more: Any) -> dict[str, Any]:
    return {
        "weight_bytes": weights,
        "cache_values": 32 * 8 * 256,
        "attention": "full",
        "state_slot_values": None,
        "context_trained": 32_768,
        "dtype": "bfloat16",
        "not_derivable": None,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **more,
    }


HYBRID = {"attention": "hybrid", "state_slot_values": [48 * 30_720, 48 * 786_432]}


def deployment(engine_config: dict[str, Any] | None = None, engine: str = "vllm", **fields: Any) -> Deployment:
    block = {"name": "m", "engine": engine, "model": "m", "engine_config": engine_config or {}, **fields}
    return parse_deployment(block, "test")


def plan(
    given_facts: dict[str, Any],
    document: Deployment,
    policy: HostPolicy,
    residency: Residency = DEEP,
    **more: Any,
) -> Plan:
    return derive_plan(given_facts, document, policy, family=document.family, residency=residency, **more)


def on(made: Plan, phase: Phase, name: str = "unified") -> int:
    return made.at(phase).on(Domain(name))


def refused(code: str, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CapyError) as caught:
        plan(*args, **kwargs)
    assert caught.value.code == code
    assert "\n" not in caught.value.message
    return caught.value.message


# --- worked values ---------------------------------------------------------------------------------


def test_the_reference_values_of_one_pool_come_out() -> None:
    weights = 2042 * GIB // 100
    kv = {"memory": {"kv_cache": "4GiB"}}
    lazy = plan(facts(weights), deployment(kv | {"vllm": {"safetensors_load_strategy": "lazy"}}), spark())
    assert round(on(lazy, Phase.READY) / GIB, 2) == 33.67
    assert round(on(lazy, Phase.COLD) / GIB, 1) == 55.2
    eager = plan(facts(weights), deployment(kv), spark())
    assert round(on(eager, Phase.COLD) / GIB, 1) == 61.7
    assert on(plan(facts(weights), deployment(kv), spark(), RESTART), Phase.COLD) == on(lazy, Phase.COLD)
    big = host(unified=domain(DomainKind.UNIFIED, 400 * GIB, 300 * GIB, device="gpu0"))
    assert on(plan(facts(71 * GIB), deployment(kv), big), Phase.COLD) == 111 * GIB + X  # 112.25
    assert on(plan(facts(64 * GIB), deployment(kv), big), Phase.COLD) == 104 * GIB + X
    assert on(plan(facts(64 * GIB), deployment(kv), big, RESTART), Phase.COLD) == 152 * GIB + X
    assert on(plan(facts(64 * GIB), deployment(kv, "sglang"), big), Phase.COLD) == 152 * GIB + X
    drafted = facts(23 * GIB, draft={"weight_bytes": GIB, "cache_values": 2048, "not_derivable": None})
    made = plan(drafted, deployment({"memory": {"kv_cache": "16GiB"}}), spark())
    assert on(made, Phase.READY) == 48 * GIB + X  # 49.25


def test_a_card_of_16_gb_is_charged_what_was_published() -> None:
    total = 1599 * GIB // 100
    limits = card_policy(Card(index=0, uuid="GPU-1", name="a", total_bytes=total, free_bytes=total))
    assert round(limits.reserve_bytes / GIB, 2) == 1.28
    assert round(limits.managed_bytes / GIB, 2) == 14.71
    policy = host(system=domain(DomainKind.DISTINCT, 64 * GIB, 32 * GIB), gpu0=limits)
    made = plan(facts(2 * GIB), deployment(), policy)
    assert round(made.pools["kv_cache"] / GIB, 2) == 3.68
    assert round(on(made, Phase.READY, "gpu0") / GIB, 2) in (13.24, 13.25)  # three quarters of it, and the context
    refused("insufficient_device_memory", facts(10 * GIB), deployment(), policy)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("config", [{}, {"context_length": 2_048}, {"memory": {"kv_cache": "4GiB"}}])
def test_what_is_too_large_for_a_card_by_its_cache_is_told_a_cache_that_fits(
    engine: str, config: dict[str, Any]
) -> None:
    policy = host(
        system=domain(DomainKind.DISTINCT, 64 * GIB, 32 * GIB),
        gpu0=domain(DomainKind.DEVICE, 24 * GIB, 22 * GIB, device="gpu0"),
    )
    weights = 18 * 10**9
    said = refused("insufficient_device_memory", facts(weights), deployment(config, engine), policy)
    what = "Lower memory.kv_cache to 2GiB" if "memory" in config else "State engine_config.memory.kv_cache: 2GiB"
    assert said.endswith(f"may be used there. {what}, or choose a smaller model")
    plan(facts(weights), deployment(config | {"memory": {"kv_cache": "2GiB"}}, engine), policy)
    heavy = refused("insufficient_device_memory", facts(30 * GIB), deployment(config, engine), policy)
    assert heavy.endswith("may be used there. Choose a smaller model")


def test_a_context_that_the_smaller_cache_cannot_hold_and_cards_that_are_free_are_named() -> None:
    policy = host(
        system=domain(DomainKind.DISTINCT, 256 * GIB, 128 * GIB),
        gpu0=domain(DomainKind.DEVICE, 24 * GIB, 22 * GIB, device="gpu0"),
        gpu1=domain(DomainKind.DEVICE, 24 * GIB, 22 * GIB, device="gpu1"),
    )
    long = {"context_length": 32_768, "kv_cache_dtype": "auto"}
    said = refused("insufficient_device_memory", facts(18 * 10**9), deployment(long), policy)
    assert said.endswith(
        "State engine_config.memory.kv_cache: 2GiB with a lower context_length, or choose a smaller model, "
        "or more cards in topology"
    )


def test_a_start_larger_than_the_limit_takes_the_whole_host() -> None:
    made = plan(facts(60 * GIB), deployment({"memory": {"kv_cache": "4GiB"}}), spark())
    assert (on(made, Phase.COLD), made.provenance[Phase.COLD]) == (97 * GIB, "whole_host")


def test_a_card_is_charged_what_the_reference_says() -> None:
    small = 1471 * GIB // 100
    policy = host(
        system=domain(DomainKind.DISTINCT, 64 * GIB, 32 * GIB),
        gpu0=domain(DomainKind.DEVICE, 16 * GIB, small, device="gpu0"),
    )
    vllm = plan(facts(2 * GIB), deployment(), policy)
    assert int(vllm.facts["kv_cache_bytes"]) == small // 4
    assert on(vllm, Phase.READY, "gpu0") == 12 * GIB + X  # never below three quarters of the card
    sglang = plan(facts(2 * GIB), deployment(engine="sglang"), policy)
    assert on(sglang, Phase.READY, "gpu0") == -(-2 * GIB * 11 // 10) + small // 4 + X


def test_what_parks_is_charged_in_every_phase() -> None:
    made = plan(facts(4 * GIB), deployment(), spark())
    for phase in (Phase.PARKING, Phase.WAKE):
        assert made.at(phase) == made.at(Phase.READY)
    assert on(made, Phase.PARKED) == 2 * GIB
    assert made.at(Phase.PARKED).claims == ()
    assert made.provenance[Phase.PARKED] == "placeholder"
    assert set(plan(facts(4 * GIB), deployment(), spark(), RESTART).phases) == {Phase.COLD, Phase.READY}


def test_a_host_copy_is_charged_for_the_whole_life_of_the_engine() -> None:
    made = plan(facts(6 * GIB), deployment(), cards(), HOST_BACKED)
    for phase in (Phase.COLD, Phase.READY, Phase.PARKING, Phase.PARKED, Phase.WAKE):
        assert on(made, phase, "system") == 4 * GIB + 9 * GIB
    assert on(made, Phase.PARKED, "gpu1") == GIB
    deep = plan(facts(6 * GIB), deployment(), cards(), DEEP)
    assert {on(deep, phase, "system") for phase in deep.phases} == {4 * GIB}


def test_stated_memory_is_charged_as_it_is_stated() -> None:
    memory = {"request": "24GiB", "kv_cache": "6GiB", "startup": "40GiB"}
    made = plan(facts(10 * GIB), deployment({"memory": memory}), spark())
    assert (on(made, Phase.COLD), on(made, Phase.READY)) == (40 * GIB + X, 24 * GIB + X)
    assert made.pools["kv_cache"] == 6 * GIB
    left = plan(facts(10 * GIB), deployment({"memory": {"request": "24GiB"}}), spark())
    assert left.pools["kv_cache"] == 6 * GIB
    refused("checkpoint_unusable", facts(16 * GIB), deployment({"memory": {"request": "24GiB"}}), spark())
    refused(
        "checkpoint_unusable",
        facts(20 * GIB),
        deployment({"memory": {"request": "24GiB", "kv_cache": "6GiB"}}),
        spark(),
    )
    refused("invalid_config", facts(10 * GIB), deployment({"memory": {"startup": "1GiB"}}), spark())


def test_declared_phases_are_kept_and_a_parked_engine_claims_no_device() -> None:
    def phase(size: str, **more: Any) -> dict[str, Any]:
        return {"allocations": [{"domain": "unified", "bytes": size, **more}], "devices": [{}]}

    stated = {
        "cold": phase("20GiB"),
        "ready": phase("16GiB", host_kv_bytes="1GiB"),
        "parking": phase("17GiB"),
        "parked": phase("3GiB"),
        "wake": phase("18GiB"),
    }
    box = spark()
    pool = attrs.evolve(box.domains[Domain("unified")], host_kv_bytes=Bytes(GIB))
    made = plan(facts(4 * GIB), deployment(resources=stated), attrs.evolve(box, domains={Domain("unified"): pool}))
    assert [on(made, one) // GIB for one in (Phase.COLD, Phase.READY, Phase.PARKING, Phase.PARKED, Phase.WAKE)] == [
        20,
        16,
        17,
        3,
        18,
    ]
    assert made.at(Phase.READY).host_kv == {Domain("unified"): GIB}
    assert [claim.device for claim in made.at(Phase.WAKE).claims] == ["gpu0"]
    assert made.at(Phase.PARKED).claims == ()
    assert set(made.provenance.values()) == {"declared"}


def test_contexts_are_fitted_to_whole_blocks_of_the_cache() -> None:
    per_token = 32 * 8 * 256 * 2
    kv = {"memory": {"kv_cache": "1GiB"}}
    sglang = plan(facts(4 * GIB), deployment(kv, engine="sglang"), spark())
    assert sglang.context_tokens == GIB // per_token // 16 * 16
    assert plan(facts(4 * GIB), deployment(kv), spark()).context_tokens == sglang.context_tokens - 16
    half = deployment(kv | {"kv_cache_dtype": "fp8"}, engine="sglang")
    assert plan(facts(4 * GIB), half, spark()).context_tokens == 2 * sglang.context_tokens
    draft = facts(4 * GIB, draft={"weight_bytes": GIB, "cache_values": 32 * 8 * 256, "not_derivable": None})
    counted = plan(draft, deployment(kv, engine="sglang"), spark())
    assert counted.context_tokens == sglang.context_tokens // 2
    assert "the draft model counted" in (counted.context_reason or "")
    odd = plan(facts(4 * GIB, not_derivable="the model has recurrent layers"), deployment(kv), spark())
    assert (odd.context_tokens, "recurrent" in (odd.context_reason or "")) == (4096, True)
    beyond = plan(facts(4 * GIB), deployment(kv | {"context_length": 20_000}, engine="sglang"), spark())
    assert (beyond.context_tokens, beyond.context_reason) == (20_000, None)
    assert "20000 tokens are more than" in beyond.facts["context_warning"]
    refused("checkpoint_unusable", facts(4 * GIB), deployment({"memory": {"kv_cache": "1MiB"}}), spark())


def test_the_state_of_a_hybrid_is_part_of_the_request() -> None:
    made = plan(facts(20 * GIB, **HYBRID), deployment(engine="sglang"), spark())
    slot = 48 * (30_720 * 2 + 786_432 * 4)
    assert (made.slots, made.pools["state_slots"], made.pools["state"]) == (8, 40, 41 * slot)
    assert on(made, Phase.READY) == 20 * GIB + 4 * GIB + 8 * GIB + 41 * slot + X
    speculative = deployment(
        {
            "accept_extra_args": True,
            "extra_args": ["--speculative-algorithm", "NEXTN", "--speculative-num-draft-tokens", "8"],
        },
        engine="sglang",
    )
    assert plan(facts(20 * GIB, **HYBRID), speculative, spark(), RESTART).pools["state"] == 113 * slot
    own = deployment({"accept_extra_args": True, "extra_args": ["--max-mamba-cache-size", "9"]}, engine="sglang")
    assert "state" not in plan(facts(20 * GIB, **HYBRID), own, spark()).pools


def test_a_stated_request_that_is_too_small_for_the_state_names_the_least() -> None:
    def asked(request: str, **more: Any) -> Deployment:
        return deployment({"memory": {"request": request, "kv_cache": "2GiB"}, **more}, engine="sglang")

    tight = plan(facts(20 * GIB, **HYBRID), asked("24GiB"), spark())
    assert 1 <= tight.slots < 8
    assert tight.facts["running_limited"] == f"Running limited to {tight.slots} requests by the state cache"
    message = refused(
        "checkpoint_unusable", facts(20 * GIB, **HYBRID), asked("24GiB", max_concurrent_requests=8), spark()
    )
    assert "27.9 GiB is the least that fits" in message
    refused("checkpoint_unusable", facts(20 * GIB, **HYBRID), asked("22529MiB"), spark())


def test_first_starts_of_engines_that_compile_have_more_time() -> None:
    for engine in ("vllm", "sglang"):
        made = plan(facts(10 * 10**9), deployment(engine=engine), spark())
        assert (made.initialize_ms, made.wake_ms) == (700_000, 110_000)
        capped = plan(facts(40 * 10**9), deployment(engine=engine), spark(), request_deadline_ms=600_000)
        assert capped.initialize_ms == 600_000
    folded = deployment({"context_length": 512}, engine="tensorfold", resources={"gpu": "20GiB", "ram": "1GiB"})
    made = plan(facts(GIB), folded, spark(), RESTART, request_deadline_ms=600_000)
    assert (made.initialize_ms, made.slots, made.context_tokens) == (1_800_000, 8, 512)


# --- residency -------------------------------------------------------------------------------------


def settled(
    policy: HostPolicy,
    given_facts: dict[str, Any] | None = None,
    provisional: Residency = DEEP,
    engine: str = "vllm",
    **fields: Any,
) -> Residency:
    document = deployment(engine=engine, **fields)
    return settle(given_facts or facts(4 * GIB), document, policy, family=engine, provisional=provisional)


def roomy() -> HostPolicy:
    return host(
        system=domain(DomainKind.DISTINCT, 128 * GIB, 64 * GIB, parked=32 * GIB),
        gpu0=domain(DomainKind.DEVICE, 48 * GIB, 44 * GIB, device="gpu0"),
    )


def test_the_hardware_decides_where_nothing_is_declared() -> None:
    assert settled(spark()) is DEEP
    assert settled(plain()) is RESTART
    assert settled(roomy()) is HOST_BACKED
    assert settled(roomy(), facts(19 * GIB)) is DEEP
    assert settled(spark(), provisional=RESTART) is RESTART
    assert settled(spark(), resources={"gpu": "8GiB", "ram": "2GiB"}) is RESTART


def test_models_that_do_not_wake_are_restarted_or_refused() -> None:
    oss = facts(4 * GIB, model_type="gpt_oss", architectures=["GptOssForCausalLM"])
    for engine in ("vllm", "sglang"):
        assert settled(spark(), oss, engine=engine) is RESTART
        with pytest.raises(CapyError, match="Use residency: restart_only") as caught:
            settled(spark(), oss, engine=engine, residency="deep")
        assert caught.value.code == "capability_missing:deep_park"
    nemotron = facts(4 * GIB, model_type="nemotron_h_super_vl", architectures=["NemotronSuperVLForCausalLM"])
    assert settled(spark(), nemotron) is RESTART
    assert settled(spark(), facts(4 * GIB, quantization="modelopt NVFP4"), engine="sglang") is RESTART
    assert settled(spark(), facts(4 * GIB, quantization="modelopt NVFP4")) is DEEP


def test_a_declared_host_copy_needs_a_card_and_room() -> None:
    assert settled(roomy(), provisional=HOST_BACKED, residency="host_backed") is HOST_BACKED
    for policy, weights in ((spark(), 1), (roomy(), 19 * GIB)):
        with pytest.raises(CapyError) as caught:
            settled(policy, facts(weights), provisional=HOST_BACKED, residency="host_backed")
        assert caught.value.code == "host_backed_unavailable"
        assert "residency: deep" in caught.value.message


def test_hosts_that_differ_share_the_tier_that_each_can_keep() -> None:
    assert one_for_all([HOST_BACKED, HOST_BACKED]) is HOST_BACKED
    assert one_for_all([HOST_BACKED, DEEP]) is DEEP
    assert one_for_all([DEEP, RESTART, HOST_BACKED]) is RESTART


# --- for every model -------------------------------------------------------------------------------

shapes = st.builds(
    facts,
    st.integers(1 << 20, 40 * GIB),
    cache_values=st.integers(0, 1 << 22),
    context_trained=st.none() | st.integers(1, 1 << 20),
    state_slot_values=st.sampled_from((None, HYBRID["state_slot_values"])),
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "context_length": st.integers(1, 1 << 18),
        "max_concurrent_requests": st.integers(1, 64),
        "memory": st.fixed_dictionaries(
            {},
            optional={
                "kv_cache": st.integers(1, 8 << 10).map(lambda n: f"{n}MiB"),
                "request": st.integers(9 << 10, 60 << 10).map(lambda n: f"{n}MiB"),
            },
        ),
    },
)


@given(
    shapes,
    configs,
    st.sampled_from((plain(), spark(), cards(), roomy())),
    st.sampled_from(("vllm", "sglang")),
    st.sampled_from(Residency),
)
@settings(derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
def test_every_plan_is_ordered_and_the_same_again(
    shape: dict[str, Any], config: dict[str, Any], policy: HostPolicy, engine: str, residency: Residency
) -> None:
    document = deployment(config, engine=engine)
    try:
        made = plan(shape, document, policy, residency)
    except CapyError as error:
        refusals = {"checkpoint_unusable", "insufficient_resources", "insufficient_device_memory"}
        assume(error.code not in refusals)  # any other refusal of a sized model is a fault
        raise
    assert made == plan(shape, document, policy, residency)
    assert made.slots >= 1
    assert made.context_tokens >= 1
    assert made.pools["kv_cache"] > 0
    for name in made.at(Phase.READY).bytes:
        assert made.at(Phase.COLD).on(name) >= made.at(Phase.READY).on(name)
        assert made.at(Phase.PARKED).on(name) <= made.at(Phase.READY).on(name)
        if residency.parks:
            assert made.at(Phase.PARKED).on(name) > 0


def test_llama_cpp_is_sized_by_its_own_sums_whatever_the_residency_says() -> None:
    document = deployment(engine="llamacpp")
    header = {"weight_bytes": 4 * GIB, "kv_heads": [8] * 32, "key_length": 128, "value_length": 128}
    made = derive_plan(header, document, spark(), family="llamacpp")
    assert set(made.phases) == {Phase.COLD, Phase.READY}
