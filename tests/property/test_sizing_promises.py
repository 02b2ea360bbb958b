"""What the sums promise for every checkpoint, document and machine, under the numbers of the memory invariants."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sizing_values import (
    GIB,
    MIB,
    alike,
    checkpoints,
    deployment,
    documents,
    domain,
    host,
    machines,
    plain,
    plan_of,
    planned,
    spark,
)

from capyctl.checkpoints import kv_cache, token_bytes
from capyctl.checkpoints.shares import Tensors, share
from capyctl.checkpoints.sizing import derive_plan
from capyctl.documents.deployment import Deployment, Topology, parse_deployment
from capyctl.engines.tensorfold.render import memory_cap
from capyctl.errors import CapyError
from capyctl.fsm.types import Bytes, Domain, Phase, Residency
from capyctl.ledger.estimates import with_measured
from capyctl.ledger.types import DomainKind, HostPolicy, Plan
from capyctl.units import parse_size

many = settings(
    derandomize=True,
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
families = st.sampled_from(("vllm", "sglang"))


def context_of(policy: HostPolicy, name: str) -> int:
    return 5 * GIB // 4 if policy.domains[Domain(name)].device is not None else 0


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], Deployment, HostPolicy, Residency]:
    policy = draw(machines())
    document = draw(documents(policy, draw(families)))
    return draw(checkpoints()), document, policy, draw(st.sampled_from(Residency))


@given(cases())
@many
def test_what_an_engine_is_told_fits_its_ready_charge_with_weights_and_context_beside_it(
    case: tuple[dict[str, Any], Deployment, HostPolicy, Residency],
) -> None:
    facts, document, policy, residency = case
    made = plan_of(facts, document, policy, residency)
    ready, pools = made.at(Phase.READY), made.pools
    held = [name for name in ready.bytes if name != "system"]
    assert len(held) == document.topology.ranks
    # What CapyCTL derives of a card leaves a tenth of the weights free; a block of the operator's own may not.
    on_card = policy.domains[held[0]].kind is DomainKind.DEVICE
    scale = 11 if on_card and document.resources is None else 10
    told = pools["kv_cache"] + pools.get("state", 0)
    for name in held:
        context = context_of(policy, name)
        assert pools["context"] == context
        assert pools["weights"] * scale // 10 + told + context <= ready.on(name)
        if document.family == "sglang":
            assert pools["static"] + context <= ready.on(name)
            assert pools["static"] >= min(pools["weights"] + told, ready.on(name) - context)
    per_token, _ = token_bytes.kv_bytes_per_token(facts, document, document.family)
    assert ("kv_tokens" in pools) == (per_token is not None)
    if per_token is not None:
        assert pools["kv_tokens"] * per_token <= pools["kv_cache"]


@given(
    weights=st.integers(1 * MIB, 60 * GIB),
    layers=st.integers(1, 80),
    policy=machines(),
    config=st.fixed_dictionaries(
        {},
        optional={
            "context_length": st.integers(1, 1 << 17),
            "max_concurrent_requests": st.integers(1, 64),
            "memory": st.fixed_dictionaries(
                {},
                optional={
                    "kv_cache": st.integers(1, 8 << 10).map(lambda n: f"{n}MiB"),
                    "request": st.integers(9 << 10, 90 << 10).map(lambda n: f"{n}MiB"),
                },
            ),
        },
    ),
    stated=st.none() | st.integers(1, 90 << 10),
)
@many
def test_what_llama_cpp_allocates_fits_its_ready_charge_with_weights_and_context_beside_it(
    weights: int, layers: int, policy: HostPolicy, config: dict[str, Any], stated: int | None
) -> None:
    facts = {"weight_bytes": weights, "kv_heads": [8] * layers, "key_length": 128, "value_length": 128}
    facts |= {"context_trained": 1 << 17, "not_derivable": None}
    fields: dict[str, Any] = {}
    if stated is not None:
        config = {**config, "memory": {k: v for k, v in config.get("memory", {}).items() if k != "request"}}
        fields["resources"] = {"gpu": f"{stated}MiB", "ram": "1GiB"}
        cache = config["memory"].get("kv_cache")
        assume(cache is None or parse_size(cache).bytes < (stated + 1024) << 20)
    document = deployment(config, "llamacpp", **fields)
    made = plan_of(facts, document, policy)
    per_token = kv_cache.bytes_per_token(facts, "f16", flash_attention=False)
    allocated = made.slots * kv_cache.pad(made.context_tokens) * per_token
    name = next(name for name in made.at(Phase.READY).bytes if name != "system")
    scale = 11 if policy.domains[name].kind is DomainKind.DEVICE and stated is None else 10
    assert weights * scale // 10 + allocated + context_of(policy, name) <= made.at(Phase.READY).on(name)


@given(cases())
@many
def test_m5_a_start_holds_what_serving_does_and_a_park_leaves_no_more_than_that(
    case: tuple[dict[str, Any], Deployment, HostPolicy, Residency],
) -> None:
    facts, document, policy, residency = case
    made = plan_of(facts, document, policy, residency)
    for name, ready in made.at(Phase.READY).bytes.items():
        limits = policy.domains[name]
        assert made.at(Phase.COLD).on(name) >= ready > 0
        assert made.at(Phase.PARKED).on(name) <= ready
        assert ready <= min(limits.managed_bytes, limits.capacity_bytes - limits.reserve_bytes)
        if Phase.PARKED in made.phases:
            assert made.at(Phase.PARKING) == made.at(Phase.WAKE) == made.at(Phase.READY)
            assert made.at(Phase.PARKED).claims == ()
    copied = residency is Residency.HOST_BACKED and Domain("system") in policy.domains and document.resources is None
    if copied:  # the copy is held in every phase
        least = 4 * GIB + made.pools["weights"] * 3 // 2
        assert all(made.at(phase).on(Domain("system")) >= least for phase in made.phases)


@given(cases(), st.integers(0, 1 << 40))
@many
def test_m6_what_a_park_was_seen_to_leave_is_charged_between_placeholder_and_ready(
    case: tuple[dict[str, Any], Deployment, HostPolicy, Residency], seen: int
) -> None:
    facts, document, policy, _ = case
    made = plan_of(facts, document, policy, Residency.DEEP)
    name = next(name for name in made.at(Phase.READY).bytes if name != "system")
    after = with_measured(made, policy, Phase.PARKED, {name: Bytes(seen)})
    assert made.at(Phase.PARKED).on(name) <= after.at(Phase.PARKED).on(name) <= made.at(Phase.READY).on(name)
    if document.resources is not None:
        assert after.at(Phase.PARKED) == made.at(Phase.PARKED)


@given(cases())
@many
def test_m9_and_m10_a_plan_follows_from_what_is_stored_of_it_and_from_nothing_else(
    case: tuple[dict[str, Any], Deployment, HostPolicy, Residency],
) -> None:
    facts, document, policy, residency = case
    made = planned(facts, document, policy, residency)
    stored = parse_deployment(json.loads(document.canonical()), "stored")
    again = json.loads(json.dumps(facts, sort_keys=True))
    turned = host(**{str(name): policy.domains[name] for name in reversed(policy.domains)})
    assert planned(again, stored, turned, residency) == made


@given(
    weights=st.integers(0, 1 << 42),
    tensor=st.integers(1, 16),
    pipeline=st.integers(1, 16),
    sharded=st.none() | st.integers(0, 1 << 42),
    layers=st.integers(1, 128),
    largest=st.integers(0, 1 << 40),
)
@many
def test_m11_shares_add_up_to_the_weights_at_least_and_none_is_more_than_all(
    weights: int, tensor: int, pipeline: int, sharded: int | None, layers: int, largest: int
) -> None:
    found = None
    if sharded is not None:
        found = Tensors(sharded_bytes=sharded, layer_count=layers, largest_layer_bytes=largest)

    def of(ranks: int, stages: int) -> int:
        return share(weights, Topology(tensor_parallel=ranks, pipeline_parallel=stages), found)

    one = of(tensor, pipeline)
    assert one * tensor * pipeline >= weights
    assert one <= weights == of(1, 1)
    assert of(tensor + 1, pipeline) <= one


@given(st.integers(1 * MIB, 1 << 40))
@many
def test_m17_the_cap_of_tensorfold_is_its_ready_allocation_in_whole_mib(ready: int) -> None:
    for name in ("gpu0", "unified"):
        cap = memory_cap({name: ready, "system": 4 * GIB})
        assert cap is not None
        whole, _, part = cap.partition(".")
        mib = int(whole) * 1024 + round(int(part or 0) * 1024 / 10 ** len(part))
        assert mib == ready // MIB
        assert "E" not in cap.upper()


@given(cases())
@many
def test_m18_and_m19_a_fitted_context_is_a_block_at_least_and_fits_its_cache(
    case: tuple[dict[str, Any], Deployment, HostPolicy, Residency],
) -> None:
    facts, document, policy, residency = case
    made = plan_of(facts, document, policy, residency)
    assert made.pools["kv_cache"] > 0
    declared, trained = document.engine_config.context_length, facts["context_trained"]
    assert (made.context_reason is None) == (declared is not None)
    if declared is not None:
        assert made.context_tokens == declared
        return
    assert made.context_tokens >= min(16, trained or 16)
    assert made.context_tokens <= (trained or made.context_tokens)
    per_token, _ = token_bytes.kv_bytes_per_token(facts, document, document.family)
    if per_token is not None and "since" not in (made.context_reason or ""):
        assert made.context_tokens * per_token <= made.pools["kv_cache"]


# --- more of something -----------------------------------------------------------------------------


def charged(made: Plan) -> dict[str, int]:
    return {f"{phase.value} {name}": n for phase, one in made.phases.items() for name, n in one.bytes.items()}


@given(checkpoints(40 * GIB), st.integers(0, 40 * GIB), families, st.sampled_from(Residency), st.integers(1, 4))
@many
def test_more_weights_are_never_charged_less(
    facts: dict[str, Any], more: int, engine: str, residency: Residency, ranks: int
) -> None:
    facts.pop("draft", None)
    topology = {"topology": {"tensor_parallel": ranks}} if ranks > 1 else {}
    document = deployment({"memory": {"kv_cache": "2GiB"}}, engine, **topology)
    for policy in (plain(1 << 50), spark(120 * GIB), alike(4, 1 << 45, 1 << 50)):
        if ranks > 1 and len(policy.domains) == 1:
            continue
        made = planned(facts, document, policy, residency)
        grown = planned(facts | {"weight_bytes": facts["weight_bytes"] + more}, document, policy, residency)
        if made is None:
            assert grown is None
        elif grown is not None and "whole_host" not in made.provenance.values():
            less = charged(made)
            assert all(amount >= less[name] for name, amount in charged(grown).items())


@given(checkpoints(40 * GIB), st.integers(1, 1 << 17), st.integers(1, 1 << 17), families)
@many
def test_a_longer_context_never_has_less_cache(facts: dict[str, Any], one: int, two: int, engine: str) -> None:
    short, long = (planned(facts, deployment({"context_length": n}, engine), spark()) for n in sorted((one, two)))
    if short is None or engine == "sglang":  # vLLM is refused a context that its cache cannot hold
        assert (short is None) == (long is None)
    if short is not None and long is not None:
        assert short.pools["kv_cache"] <= long.pools["kv_cache"]


@given(
    checkpoints(120 * GIB),
    families,
    st.sampled_from(Residency),
    st.integers(8 * GIB, 200 * GIB),
    st.integers(0, 200 * GIB),
    st.sampled_from((None, "gpu0")),
    st.booleans(),
)
@many
def test_more_managed_memory_never_turns_a_fit_into_a_refusal(
    facts: dict[str, Any],
    engine: str,
    residency: Residency,
    managed: int,
    more: int,
    device: str | None,
    card: bool,
) -> None:
    def policy(amount: int) -> HostPolicy:
        if not card:
            return host(unified=domain(DomainKind.UNIFIED, 500 * GIB, amount, device=device))
        gpu = domain(DomainKind.DEVICE, 400 * GIB, amount, device="gpu0")
        return host(system=domain(DomainKind.DISTINCT, 1 << 42, 1 << 41), gpu0=gpu)

    document = deployment({}, engine)
    if planned(facts, document, policy(managed), residency) is not None:
        assert planned(facts, document, policy(managed + more), residency) is not None


@given(checkpoints(), st.integers(40, 80), families, st.sampled_from(Residency))
@many
def test_sums_that_64_bits_do_not_hold_are_refused(
    facts: dict[str, Any], power: int, engine: str, residency: Residency
) -> None:
    facts["weight_bytes"] = 1 << power
    for policy in (plain(1 << 62), spark(), alike(1, 1 << 61, 1 << 62)):
        made = planned(facts, deployment({}, engine), policy, residency)
        if made is not None:
            assert all(amount < 1 << 63 for amount in charged(made).values())
    stated = deployment({"memory": {"kv_cache": f"{(1 << 63) - (1 << 20)}B"}}, engine)
    assert planned(facts, stated, plain(1 << 62), residency) is None


@given(
    st.integers(1 * MIB, 60 * GIB),
    st.integers(1, 80),
    st.none() | st.integers(1, 1 << 17),
    st.integers(1, 64),
    st.integers(1 * GIB, 100 * GIB),
    st.integers(0, 100 * GIB),
    st.sampled_from((None, "gpu0")),
)
@many
def test_more_managed_memory_never_costs_llama_cpp_its_place_or_its_context(
    weights: int, layers: int, context: int | None, slots: int, managed: int, more: int, device: str | None
) -> None:
    facts = {"weight_bytes": weights, "kv_heads": [8] * layers, "key_length": 128, "value_length": 128}
    facts |= {"context_trained": 1 << 17, "not_derivable": None}
    config: dict[str, Any] = {"max_concurrent_requests": slots}
    document = deployment(config if context is None else config | {"context_length": context}, "llamacpp")
    small, large = (
        planned(facts, document, host(unified=domain(DomainKind.UNIFIED, 500 * GIB, amount, device=device)))
        for amount in (managed, managed + more)
    )
    if small is not None:
        assert large is not None
        assert large.context_tokens >= small.context_tokens


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "tensorfold", "custom"])
def test_stated_sums_that_64_bits_do_not_hold_are_refused_in_figures(engine: str) -> None:
    facts = {"weight_bytes": MIB, "kv_heads": [1], "key_length": 1, "value_length": 1, "context_trained": 512}
    config = {"context_length": 512} if engine == "tensorfold" else {}
    document = deployment(config, engine, resources={"gpu": f"{(1 << 63) - 1}B", "ram": "1GiB"})
    with pytest.raises(CapyError, match="more than any machine has") as caught:
        derive_plan(facts, document, plain(1 << 62), family=engine)
    assert (caught.value.code, caught.value.retryable) == ("insufficient_resources", False)
