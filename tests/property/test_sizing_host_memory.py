"""Host RAM that options take is charged where it lies, in every phase, or the document must state the whole."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from sizing_values import GIB, MIB, alike, args, cards, deployment, layers_of, planned, spark, tensors

from capyctl.checkpoints.residency import settle
from capyctl.checkpoints.sizing import derive_plan
from capyctl.errors import CapyError
from capyctl.fsm.types import Bytes, Domain, Phase, Residency
from capyctl.ledger.types import HostPolicy, Plan

FACTS = tensors(8 * GIB, (layers_of(32),))
SYSTEM, POOL, CARD = Domain("system"), Domain("unified"), Domain("gpu0")


def roomy(policy: HostPolicy, domain: Domain, limit: int = 64 * GIB) -> HostPolicy:
    """A machine that lets caches lie in its RAM."""
    limits = attrs.evolve(policy.domains[domain], host_kv_bytes=Bytes(limit))
    return attrs.evolve(policy, domains={**policy.domains, domain: limits})


def plan(
    words: tuple[str, ...], policy: HostPolicy, engine: str = "vllm", facts: dict[str, Any] = FACTS, **more: Any
) -> Plan:
    residency = more.pop("residency", Residency.DEEP)
    document = deployment(args(*words) if words else {}, engine, **more)
    return derive_plan(facts, document, policy, family=engine, residency=residency)


def refused(words: tuple[str, ...], policy: HostPolicy, engine: str = "vllm", **more: Any) -> CapyError:
    with pytest.raises(CapyError) as caught:
        plan(words, policy, engine, **more)
    assert "\n" not in caught.value.message
    return caught.value


def added(words: tuple[str, ...], policy: HostPolicy, domain: Domain, **more: Any) -> set[tuple[int, int]]:
    """(bytes, bytes of KV cache) that the words add to one domain, over all phases."""
    told, plain = plan(words, policy, **more), plan((), policy, **more)
    assert set(told.phases) == set(plain.phases)
    return {
        (told.at(phase).on(domain) - plain.at(phase).on(domain), told.at(phase).host_kv.get(domain, 0))
        for phase in told.phases
    }


@pytest.mark.parametrize(
    "words", [("--kv-offloading-size", "6.5"), ("--kv_offloading_size=6.5",), ("--kv-offloading-s=6.5",)]
)
def test_a_cache_in_host_ram_is_charged_there_in_every_phase_and_never_on_the_card(words: tuple[str, ...]) -> None:
    size = 13 * GIB // 2
    box, pool = roomy(alike(1), SYSTEM), roomy(spark(), POOL)
    assert added(words, box, SYSTEM) == {(size, size)}
    assert added(words, box, CARD) == {(0, 0)}
    assert added(words, pool, POOL) == {(size, size)}
    assert plan(words, pool).pools["host"] == size
    assert plan(words, box).facts["host_options"] == "6.5 GiB of RAM for --kv-offloading-size"


def test_the_size_of_an_offloaded_cache_is_of_all_ranks_together() -> None:
    four = {"topology": {"tensor_parallel": 4}}
    assert added(("--kv-offloading-size", "8"), roomy(alike(4), SYSTEM), SYSTEM, **four) == {(8 * GIB, 8 * GIB)}


def test_what_the_profile_fixes_is_charged_as_well() -> None:
    fixed = FACTS | {"host_args": ["--kv-offloading-size", "8"]}
    made = plan((), roomy(alike(1), SYSTEM), facts=fixed)
    assert made.at(Phase.PARKED).host_kv == {SYSTEM: 8 * GIB}


def test_a_cache_in_host_ram_above_the_limit_of_the_host_is_refused_with_figures() -> None:
    error = refused(("--kv-offloading-size", "65"), roomy(alike(1), SYSTEM))
    assert error.code == "category_limit"
    assert "65.0 GiB of KV cache in host memory on system" in error.message
    assert "64.0 GiB" in error.message


@pytest.mark.parametrize("said", ["0", "-1", "nan", "inf", "1e30", "much", ""])
def test_a_size_that_is_none_is_refused_naming_the_option(said: str) -> None:
    error = refused(("--kv-offloading-size=" + said,), roomy(alike(1), SYSTEM))
    assert (error.code, "--kv-offloading-size" in error.message) == ("invalid_config", True)


def test_a_cache_server_that_nobody_runs_is_refused_with_the_way_out() -> None:
    words = ("--kv-offloading-size", "8", "--kv-offloading-backend", "lmcache")
    error = refused(words, roomy(alike(1), SYSTEM))
    assert (error.code, "native" in error.message) == ("invalid_config", True)


def test_a_connector_that_says_its_bytes_is_charged_them() -> None:
    told = '{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}}'
    box = roomy(alike(1), SYSTEM)
    assert added(("--kv-transfer-config", told), box, SYSTEM) == {(GIB, GIB)}
    simple = '{"kv_connector": "SimpleCPUOffloadConnector"}'
    assert added(("--kv-transfer-config", simple), box, SYSTEM) == {(8 * GIB, 8 * GIB)}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", ("--kv-transfer-config", '{"kv_connector": "OffloadingConnector"}')),
        ("vllm", ("--kv-transfer-config", '{"kv_connector": "Another"}')),
        ("vllm", ("--kv-t", "nonsense")),
        ("vllm", ("--kv-transfer-config.kv_connector", "OffloadingConnector")),
        ("vllm", ("--ec-transfer-config", "{}")),
        ("sglang", ("--enable-hisparse",)),
        ("sglang", ("--kt-weight-path", "/w")),
        ("sglang", ("--enable-paged-experts",)),
    ],
)
def test_what_says_no_figure_needs_resources(engine: str, words: tuple[str, ...]) -> None:
    error = refused(words, roomy(alike(1), SYSTEM), engine)
    assert error.code == "no_safe_estimate"
    assert "State resources" in error.message
    stated = plan(words, alike(1), engine, resources={"gpu": "60GiB", "ram": "40GiB"}, residency=Residency.RESTART_ONLY)
    assert stated.at(Phase.READY).on(SYSTEM) == 40 * GIB


def test_resources_must_hold_what_their_own_options_take() -> None:
    words, few = ("--kv-offloading-size", "8"), {"gpu": "60GiB", "ram": "6GiB"}
    error = refused(words, alike(1), resources=few, residency=Residency.RESTART_ONLY)
    assert error.code == "invalid_config"
    assert "--kv-offloading-size take 8.0 GiB of host memory" in error.message
    assert "6.0 GiB on system" in error.message


def test_one_pool_leaves_its_engine_what_the_options_do_not_take() -> None:
    stated: dict[str, Any] = {"resources": {"gpu": "40GiB", "ram": "20GiB"}, "residency": Residency.RESTART_ONLY}
    told, plain = plan(("--kv-offloading-size", "8"), spark(), **stated), plan((), spark(), **stated)
    assert told.at(Phase.READY) == plain.at(Phase.READY)
    assert plain.pools["kv_cache"] - told.pools["kv_cache"] == 8 * GIB


def test_caches_of_media_are_charged_where_their_size_is_stated() -> None:
    assert added(("--mm-processor-cache-gb", "6"), alike(1), SYSTEM) == {(12 * GIB, 0)}
    assert added(("--mm-processor-cache-gb", "0"), alike(1), SYSTEM) == {(0, 0)}
    assert added(("--enable-shm-tensor-arena",), alike(1), SYSTEM) == {(2 * GIB, 0)}
    assert added(("--no-enable-shm-tensor-arena",), alike(1), SYSTEM) == {(0, 0)}
    assert added(("--mm-preprocess-cache-size-mb", "512"), alike(1), SYSTEM, engine="sglang") == {(512 * MIB, 0)}


def test_tables_that_are_pinned_in_host_ram_are_charged_there() -> None:
    facts = tensors(30 * GIB, (layers_of(8),), table_bytes=[10 * GIB])
    more: dict[str, Any] = {"engine": "sglang", "facts": facts}
    assert added(("--ple-offload-embedding",), alike(1), SYSTEM, **more) == {(10 * GIB, 0)}


def test_other_engines_and_cards_without_options_are_charged_nothing_more() -> None:
    made = planned(FACTS, deployment({}), cards(), Residency.DEEP)
    assert made is not None
    assert not any(made.at(phase).host_kv for phase in made.phases)
    assert "host_options" not in made.facts


def test_a_copy_of_the_weights_is_chosen_only_where_it_has_room_beside_what_options_take() -> None:
    def settled(*words: str) -> Residency:
        document = deployment(args(*words) if words else {})
        return settle(FACTS, document, roomy(alike(1, ram=80 * GIB), SYSTEM), family="vllm", provisional=Residency.DEEP)

    assert settled() is Residency.HOST_BACKED  # 12 GiB of copy and 4 GiB of 20 GiB
    assert settled("--kv-offloading-size", "4") is Residency.HOST_BACKED
    assert settled("--kv-offloading-size", "5") is Residency.DEEP


def test_what_media_take_of_the_cache_on_a_card_is_charged_once_and_leaves_a_shorter_context() -> None:
    told, plain = plan(("--mm-ipc-gpu-memory-gb", "1"), alike(1)), plan((), alike(1))
    assert told.phases == plain.phases
    assert told.pools == plain.pools
    assert plain.context_tokens - told.context_tokens == plain.pools["kv_tokens"] // 4, "a quarter of 4 GiB"
    assert refused(("--mm-ipc-gpu-memory-gb", "5"), alike(1)).code == "checkpoint_unusable"
