"""What else is in a charge: ranks on several cards, states, stated sums, starts without a GPU, servers and tables."""

from __future__ import annotations

from typing import Any

import pytest
from sizing_values import (
    GIB,
    MIB,
    alike,
    args,
    cards,
    delta_net,
    deployment,
    host,
    layers_of,
    plain,
    planned,
    spark,
    tensors,
)

from capyctl.checkpoints.sizing import derive_plan
from capyctl.errors import CapyError
from capyctl.fsm.types import Domain, Phase, Residency
from capyctl.ledger.types import HostPolicy


def test_two_ranks_are_charged_on_a_card_each_and_on_the_ram_once() -> None:
    facts = tensors(
        40 * GIB, (layers_of(64),), sharded_bytes=36 * GIB, layer_count=64, largest_layer_bytes=36 * GIB // 64
    )
    document = deployment({"memory": {"kv_cache": "4GiB"}}, "sglang", topology={"tensor_parallel": 2})
    made = planned(facts, document, alike(4), Residency.HOST_BACKED)
    assert made is not None
    ready, each = made.at(Phase.READY), 36 * GIB // 2 + 4 * GIB
    assert dict(ready.bytes) == {
        "gpu0": -(-each * 11 // 10) + 4 * GIB + 5 * GIB // 4,
        "gpu1": -(-each * 11 // 10) + 4 * GIB + 5 * GIB // 4,
        "system": 4 * GIB + 3 * each,
    }
    assert [claim.device for claim in ready.claims] == ["gpu0", "gpu1"]
    assert made.at(Phase.PARKED).on(Domain("gpu1")) == GIB
    # Each rank keeps half of the heads, so the same bytes hold twice the tokens.
    assert made.pools["kv_tokens"] == 4 * GIB // (64 * 4 * 256 * 2)
    alone = planned(facts, deployment({"memory": {"kv_cache": "4GiB"}}, "sglang"), alike(4))
    assert alone is not None
    assert alone.pools["kv_tokens"] * 2 == made.pools["kv_tokens"]


def test_weights_that_are_loaded_as_wider_numbers_are_charged_as_such() -> None:
    facts = tensors(8 * GIB, (layers_of(36),), sharded_bytes=6 * GIB, layer_count=36, largest_layer_bytes=6 * GIB // 36)
    for engine in ("vllm", "sglang"):
        for ranks in ({}, {"topology": {"tensor_parallel": 2}}):
            narrow, wide = (
                planned(facts, deployment({"dtype": dtype, "memory": {"kv_cache": "2GiB"}}, engine, **ranks), alike(2))
                for dtype in ("bfloat16", "float32")
            )
            assert narrow is not None
            assert wide is not None
            assert wide.pools["weights"] == 2 * narrow.pools["weights"]
    wide32 = deployment({"dtype": "float32", "memory": {"kv_cache": "2GiB"}})
    for same in (facts | {"dtype": "float32"}, facts | {"quantization": "awq"}):
        kept = planned(same, wide32, alike(1))
        assert kept is not None
        assert kept.pools["weights"] == 8 * GIB


def test_vllm_shares_heads_out_evenly_or_does_not_start() -> None:
    facts = tensors(8 * GIB, (layers_of(36),)) | {"heads": 32}
    three = deployment({}, topology={"tensor_parallel": 3})
    with pytest.raises(CapyError, match="is 3; vLLM starts only where it divides the 32 attention heads") as caught:
        derive_plan(facts, three, alike(4), family="vllm")
    assert (caught.value.code, caught.value.message[-10:]) == ("invalid_config", "Use 1 or 2")
    assert planned(facts | {"heads": 48}, three, alike(4)) is not None
    assert planned(facts, deployment({}, "sglang", topology={"tensor_parallel": 3}), alike(4)) is not None
    otherwise = deployment(args("--hf-overrides", "{}"), topology={"tensor_parallel": 3})
    assert planned(facts, otherwise, alike(4)) is not None


def test_stages_are_charged_for_the_largest_of_them() -> None:
    facts = tensors(
        50 * GIB, (layers_of(50),), sharded_bytes=40 * GIB, layer_count=50, largest_layer_bytes=40 * GIB // 50
    )
    document = deployment({"memory": {"kv_cache": "4GiB"}}, "sglang", topology={"pipeline_parallel": 4})
    made = planned(facts, document, alike(4))
    assert made is not None
    assert made.pools["weights"] == 13 * (40 * GIB // 50) + 10 * GIB  # 13 of 50 layers
    assert made.pools["kv_tokens"] == 4 * GIB // (13 * 8 * 256 * 2)


def test_ranks_need_cards_of_one_size_and_an_engine_that_splits() -> None:
    def refused(engine: str, policy: HostPolicy, **fields: Any) -> tuple[str, str]:
        document = deployment({}, engine, topology={"tensor_parallel": 2}, **fields)
        with pytest.raises(CapyError) as caught:
            derive_plan(tensors(GIB, (layers_of(8),)), document, policy, family=engine)
        return caught.value.code, caught.value.message

    assert refused("vllm", cards()) == (
        "host_ineligible",
        "m: topology has 2 ranks, each on a card like the others'; box has 1 that are alike",
    )
    assert refused("sglang", spark())[0] == "host_ineligible"
    assert refused("llamacpp", alike(2))[0] == "multi_gpu_unsupported"
    named = {"devices": [{"id": "gpu0"}, {"id": "gpu1"}, {"id": "gpu2"}], "host": "box"}
    assert refused("vllm", alike(4), **named)[0] == "invalid_config"
    absent = {"devices": [{"id": "gpu0"}, {"id": "gpu7"}], "host": "box"}
    assert refused("vllm", alike(4), **absent) == ("host_ineligible", "box does not have the device gpu7")
    mixed = host(**alike(2).domains, gpu2=cards().domains[Domain("gpu1")], gpu3=cards().domains[Domain("gpu1")])
    held = [{"domain": name, "bytes": "8GiB"} for name in ("gpu1", "gpu2", "system")]
    block = {"allocations": held, "devices": [{}, {}]}
    code, said = refused("vllm", mixed, resources={"cold": block, "ready": block})
    assert (code, "resources hold memory on gpu1, gpu2, which are not alike on box" in said) == (
        "host_ineligible",
        True,
    )
    chosen = deployment({}, topology={"tensor_parallel": 2}, devices=[{"id": "gpu1"}, {"id": "gpu3"}], host="box")
    made = planned(tensors(GIB, (layers_of(8),)), chosen, alike(4))
    assert made is not None
    assert [claim.device for claim in made.at(Phase.COLD).claims] == ["gpu1", "gpu3"]


def test_states_come_out_of_a_stated_sum_before_the_cache_does() -> None:
    facts = tensors(20 * GIB, **delta_net())
    slot = 36 * (30_720 * 2 + 786_432 * 4)
    stated = planned(facts, deployment({"memory": {"request": "48GiB"}}, "sglang"), alike(1))
    assert stated is not None
    assert stated.pools["kv_cache"] == 48 * GIB - 22 * GIB - 41 * slot
    capped = planned(facts, deployment({}, "sglang", resources={"gpu": "48GiB", "ram": "4GiB"}), alike(1))
    assert capped is not None
    assert capped.pools["kv_cache"] == 48 * GIB - 5 * GIB // 4 - 22 * GIB - 41 * slot


def test_a_stated_cache_that_a_stated_sum_does_not_hold_is_refused_by_every_engine() -> None:
    header = {"weight_bytes": 8 * GIB, "kv_heads": [8] * 32, "key_length": 128, "value_length": 128}
    header |= {"context_trained": 1 << 17, "not_derivable": None}
    for engine, facts in (("llamacpp", header), ("vllm", tensors(8 * GIB, (layers_of(32),))), ("sglang", header)):
        for cache, fits in (("2GiB", True), ("3GiB", False)):
            memory = {"memory": {"request": "11GiB", "kv_cache": cache}}
            assert (planned(facts, deployment(memory, engine), alike(1)) is not None) == fits
            block = {"gpu": "11776MiB", "ram": "4GiB"}  # 11.5 GiB: 8 of weights, 1.25 of context, 2.25 are left
            capped = deployment({"memory": {"kv_cache": cache}}, engine, resources=block)
            assert (planned(facts, capped, alike(1)) is not None) == fits


def test_a_park_never_leaves_more_than_serving_holds() -> None:
    small = deployment({"memory": {"request": "256MiB", "kv_cache": "64MiB"}}, "sglang")
    made = planned(tensors(MIB, (layers_of(1),)), small, spark(), Residency.DEEP)
    assert made is not None
    assert made.at(Phase.PARKED).on(Domain("unified")) == made.at(Phase.READY).on(Domain("unified")) < 2 * GIB


def test_a_start_without_a_gpu_is_charged_what_is_stated() -> None:
    memory = {"memory": {"request": "3GiB", "kv_cache": "1GiB"}}
    made = planned(tensors(GIB, (layers_of(8),)), deployment(memory), plain())
    assert made is not None
    assert made.at(Phase.COLD) == made.at(Phase.READY)
    assert made.at(Phase.COLD).on(Domain("unified")) == 3 * GIB
    heavy = planned(tensors(3 * GIB // 2, (layers_of(8),)), deployment(memory), plain())
    assert heavy is not None
    assert heavy.at(Phase.COLD).on(Domain("unified")) == 3 * GIB // 2 * 9 // 4
    lazy = deployment(memory | {"vllm": {"safetensors_load_strategy": "eager"}})
    eager = planned(tensors(GIB, (layers_of(8),)), lazy, plain())
    assert eager is not None
    assert eager.at(Phase.COLD).on(Domain("unified")) == GIB + GIB * 26 // 10
    derived = planned(tensors(GIB, (layers_of(8),)), deployment(), plain())
    assert derived is not None
    assert derived.at(Phase.COLD).on(Domain("unified")) >= GIB * 9 // 4 + 8 * GIB


def test_a_cache_server_is_charged_in_every_phase_and_refused_where_nothing_is_qualified() -> None:
    offered = tensors(GIB, (layers_of(8),), cache_server=True)
    for policy, name in ((alike(1), "system"), (spark(), "unified")):
        without = planned(offered, deployment(lmcache="off"), policy)
        beside = planned(offered, deployment(lmcache_pool="2GiB"), policy)
        assert without is not None
        assert beside is not None
        for phase in beside.phases:
            assert beside.at(phase).on(Domain(name)) - without.at(phase).on(Domain(name)) == 5 * GIB // 2
        assert planned(offered, deployment(), policy, Residency.DEEP) == planned(
            offered, deployment(lmcache="off"), policy, Residency.DEEP
        )
    for facts, residency in ((offered, Residency.DEEP), (tensors(GIB, (layers_of(8),)), Residency.RESTART_ONLY)):
        with pytest.raises(CapyError, match="Use lmcache: auto") as caught:
            derive_plan(facts, deployment(lmcache="required"), spark(), family="vllm", residency=residency)
        assert caught.value.code == "capability_missing:lmcache"


def test_tables_that_stay_on_disk_leave_the_weights_and_their_cache_is_charged() -> None:
    facts = tensors(60 * GIB, (layers_of(8),), table_bytes=[15 * GIB, 15 * GIB])
    whole = planned(facts, deployment({}, "sglang"), spark(120 * GIB))
    kept = planned(facts, deployment(args("--ple-offload-backend", "file"), "sglang"), spark(120 * GIB))
    assert whole is not None
    assert kept is not None
    assert (whole.pools["weights"], kept.pools["weights"]) == (60 * GIB, 30 * GIB + 2 * 8 * GIB)
    inside = facts | {"sharded_bytes": 50 * GIB, "layer_count": 8, "largest_layer_bytes": 7 * GIB}
    ranks = deployment(args("--ple-offload-backend", "file"), "sglang", topology={"tensor_parallel": 2})
    two = planned(inside, ranks, alike(2))
    assert two is not None
    assert two.pools["weights"] == 20 * GIB // 2 + 26 * GIB  # 50 GiB less both tables are shared out


def test_a_drafter_that_a_deep_park_keeps_is_charged_in_ram() -> None:
    draft = {"weight_bytes": 2 * GIB, "cache_values": 2048, "layers": 1, "not_derivable": None}
    facts = tensors(8 * GIB, (layers_of(32),), draft=draft)
    beside = planned(facts, deployment(), alike(1), Residency.DEEP)
    assert beside is not None
    assert {beside.at(phase).on(Domain("system")) for phase in beside.phases} == {6 * GIB}
    pool = planned(facts, deployment(), spark(), Residency.DEEP)
    assert pool is not None
    assert pool.at(Phase.PARKED).on(Domain("unified")) == 4 * GIB
