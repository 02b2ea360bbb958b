"""The sums of engines that load safetensors: vLLM and SGLang, and the context of those with declared memory. Pure.

Figures are of one rank: all of an engine on one card, else what each of its cards holds. The cache is a budget in
bytes, stated or derived; the context is fitted to it. Whatever an engine is told of its memory lies inside what it is
charged when ready, the GPU's context beside it.

Source: memory 5.3-5.8, 5.10, 5.11; engines 7.2, 13.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.checkpoints import contexts, hybrid_state, shares, token_bytes
from capyctl.checkpoints.arguments import arguments, counted, said
from capyctl.checkpoints.hybrid_state import State
from capyctl.checkpoints.longest_context import OTHER_DESCRIPTION
from capyctl.checkpoints.machines import GIB, Machine
from capyctl.checkpoints.phases import Needs
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.fsm.types import Residency
from capyctl.ledger.types import Allocation
from capyctl.units import gib

GRAPH_BYTES = 5 * GIB // 4
EAGER_BYTES_MAX = 32 * GIB
START_BYTES = 8 * GIB
"""What a start takes on one memory for GPU and CPU besides the weights on their way in."""
OWN_ALLOCATIONS_BYTES = 3 * GIB
CARD_ALLOWANCE_BYTES = GIB
"""What SGLang takes out of its static pool for itself: on one pool, and on a card."""
SLOTS: Mapping[str, int] = {"vllm": 32, "sglang": 32, "tensorfold": 8}
SLOTS_MAX = 65_536
TABLE_CACHE_BYTES: Mapping[str, int] = {"sglang": 8 * GIB, "tensorfold": GIB}
"""What is kept in memory of each n-gram table that an option leaves on disk."""


@attrs.frozen(kw_only=True)
class _Sum:
    """What is stated for everything that an engine is told: R, and how messages call it.

    `phases`: it is of a `resources` block, which overrides every derivation: the margin is what is left to it.
    """

    bytes: int
    words: str
    phases: bool = False


def margin(machine: Machine, weights: int) -> int:
    """What an engine needs beside weights and cache. On a card the weights are scaled instead."""
    if machine.card:
        return -(-weights // 10)
    return max(8 * GIB, -(-weights * 15 // 100) + 4 * GIB)


def rank_weights(facts: Mapping[str, Any], document: Deployment, family: str) -> int:
    """W of one rank: its share of the weight files and of a drafter's, tables that stay on disk left out, and twice
    that where a document has 16-bit weights loaded as 32-bit ones.

    Source: memory 5.1-5.4.
    """
    weights = int(facts["weight_bytes"]) + int((facts.get("draft") or {}).get("weight_bytes", 0))
    tables = [int(size) for size in facts.get("table_bytes") or ()]
    split, beside = shares.tensors_of(facts), 0
    if tables and _tables_stay_on_disk(arguments(facts, document), family):
        weights, beside = max(0, weights - sum(tables)), len(tables) * TABLE_CACHE_BYTES[family]
        if split is not None:  # what is not loaded is not shared out either, wherever it stands in the files
            split = attrs.evolve(split, sharded_bytes=max(0, split.sharded_bytes - sum(tables)))
    if _is_widened(facts, document):
        weights *= 2
        if split is not None:
            wide = {"sharded_bytes": 2 * split.sharded_bytes, "largest_layer_bytes": 2 * split.largest_layer_bytes}
            split = attrs.evolve(split, **wide)
    return shares.share(weights + beside, document.topology, split)


def _is_widened(facts: Mapping[str, Any], document: Deployment) -> bool:
    """Whether an engine makes wider numbers of the weights than the files have. Packed ones stay as they are."""
    plain = facts.get("quantization") is None and document.engine_config.quantization is None
    return plain and document.engine_config.dtype == "float32" and facts.get("dtype") in ("bfloat16", "float16")


def check_heads(facts: Mapping[str, Any], document: Deployment) -> None:
    """Refuse ranks that vLLM does not start with: each has as many of the model's attention heads as the others.

    Raises: Refusal `invalid_config`.
    """
    heads, ranks = facts.get("heads"), document.topology.tensor_parallel
    described_otherwise = any(said(arguments(facts, document), name) is not None for name in OTHER_DESCRIPTION["vllm"])
    if heads and heads % ranks and not described_otherwise:
        fine = [str(count) for count in range(1, ranks + 1) if heads % count == 0]
        raise Refusal(
            "invalid_config",
            f"{document.name}: topology.tensor_parallel: is {ranks}; vLLM starts only where it divides the {heads} "
            f"attention heads of the model. Use {' or '.join(fine[-2:])}",
            details={"heads": heads, "tensor_parallel": ranks},
        )


def _tables_stay_on_disk(args: list[str], family: str) -> bool:
    if family == "sglang":
        return said(args, "--ple-offload-backend") == "file"
    return family == "tensorfold" and said(args, "--ple-on-ssd") is not None


def needs(facts: Mapping[str, Any], document: Deployment, machine: Machine, family: str, residency: Residency) -> Needs:
    """Request, start peak, context and pools of a document that states no `resources`.

    Raises: Refusal `checkpoint_unusable` when what is stated leaves no cache or no room for its requests' state;
      `invalid_config` for a start peak below the request.
    """
    memory = document.engine_config.memory
    weights = rank_weights(facts, document, family)
    state = hybrid_state.state_of(facts, document, family)
    if memory.request is not None:
        stated = _Sum(bytes=memory.request.bytes, words=f"engine_config.memory.request of {gib(memory.request.bytes)}")
        cache, running = _within(stated, facts, document, machine, family, state, weights)
        request = stated.bytes
    else:
        cache, running = _cache_and_running(facts, document, machine, family, state, weights)
        request = _request(weights, cache, state.bytes(running) if state is not None else 0, machine, family)
    if memory.startup is not None:
        startup = memory.startup.bytes
    else:
        startup = _startup(request, weights, facts, document, machine, family, residency)
    if startup < request:
        raise Refusal(
            "invalid_config",
            f"engine_config.memory.startup: {gib(startup)} is less than the {gib(request)} it needs once it serves",
        )
    context = contexts.fit(facts, document, cache, family, running, gpu=machine.has_gpu)
    notes = dict(context.notes)
    if state is not None and running < (document.engine_config.max_concurrent_requests or hybrid_state.RUNNING):
        notes["running_limited"] = f"Running limited to {running} requests by the state cache"
    return Needs(
        request=request,
        startup=startup,
        cache=cache,
        context=context.tokens,
        reason=context.reason,
        slots=running,
        weights=weights,
        declared_request=memory.request is not None,
        declared_startup=memory.startup is not None,
        pools=_pools(facts, document, machine, request, cache, state, running, family, weights),
        notes=notes,
        kept_bytes=_kept(facts, machine, family, residency),
    )


def beside_resources(
    facts: Mapping[str, Any], document: Deployment, machine: Machine, ready: Allocation, family: str
) -> Needs:
    """Context, slots and pools beside a `resources` block: its ready phase is a cap, the GPU's context included.

    Raises: Refusal `checkpoint_unusable` when that leaves no cache, or less than is stated for it.
    """
    weights = rank_weights(facts, document, family)
    state = hybrid_state.state_of(facts, document, family)
    domain = min(machine.domains, key=ready.on)
    held = int(ready.on(domain))
    budget = held - machine.context_bytes
    if family in ("vllm", "sglang"):
        for_context = f", {gib(machine.context_bytes)} of it for the GPU's context" if machine.context_bytes else ""
        words = f"the ready phase of resources ({gib(held)} on {domain}{for_context})"
        stated = _Sum(bytes=budget, words=words, phases=True)
        cache, running = _within(stated, facts, document, machine, family, state, weights)
    else:
        # TensorFold is told its cap and nothing of a cache; what is left is what a warning may say of its context.
        cache = max(budget - weights - margin(machine, weights), 0)
        running = _slots(facts, document, family, state)
    context = contexts.fit(facts, document, cache, family, running, gpu=machine.has_gpu)
    return Needs(
        request=held,
        startup=held,
        cache=cache or None,
        context=context.tokens,
        reason=context.reason,
        slots=running,
        weights=weights,
        declared_request=True,
        declared_startup=True,
        pools=_pools(facts, document, machine, budget, cache, state, running, family, weights),
        notes=context.notes,
    )


# --- cache, requests, state -------------------------------------------------------------------------


def _request(weights: int, cache: int, state: int, machine: Machine, family: str) -> int:
    """R where nobody states it. Source: memory 5.7."""
    if not machine.card:
        return weights + cache + margin(machine, weights) + state
    request = -(-(weights + state) * 11 // 10) + cache
    return max(request, -(-machine.policy.capacity_bytes * 3 // 4)) if family == "vllm" else request


def _cache_and_running(
    facts: Mapping[str, Any], document: Deployment, machine: Machine, family: str, state: State | None, weights: int
) -> tuple[int, int]:
    """(bytes of KV cache, running requests) where the request is derived from them."""
    memory = document.engine_config.memory
    wanted = _slots(facts, document, family, state)
    default = int(facts.get("default_kv_bytes") or machine.default_kv_bytes)
    cache = memory.kv_cache.bytes if memory.kv_cache is not None else default
    if state is None:
        return cache, wanted
    fixed = weights + cache + margin(machine, weights) + machine.context_bytes + (0 if machine.card else GRAPH_BYTES)
    room = machine.most_bytes - fixed
    return cache, state.most_running(wanted, room * 10 // 11 if machine.card else room) or 1


def _within(
    stated: _Sum,
    facts: Mapping[str, Any],
    document: Deployment,
    machine: Machine,
    family: str,
    state: State | None,
    weights: int,
) -> tuple[int, int]:
    """(bytes of KV cache, running requests) inside the operator's own sum.

    With a stated cache nothing else comes out of it but the weights, scaled on a card, and the states.
    """
    config = document.engine_config
    asked = config.memory.kv_cache.bytes if config.memory.kv_cache is not None else None
    overhead = margin(machine, weights) if asked is None or (machine.card and not stated.phases) else 0
    if stated.phases:
        overhead = min(overhead, max(0, stated.bytes - weights) // 2)
    left = stated.bytes - weights - overhead
    running = _slots(facts, document, family, state)
    if state is not None:
        strict = config.max_concurrent_requests is not None
        fits = state.most_running(running, left - (asked or 1))
        if fits is None or (strict and fits < running):
            least = running if strict else 1
            smallest = stated.bytes - left + (asked or 1) + state.bytes(least)
            raise Refusal(
                "checkpoint_unusable",
                f"{stated.words} leaves no room beside {gib(weights)} of weights{_and(overhead)} for the state of "
                f"{least} running request{'s' if least > 1 else ''} ({gib(state.bytes(least))}); "
                f"{gib(smallest)} is the least that fits",
                details={"state_bytes": state.bytes(least), "needs_bytes": smallest},
            )
        running = fits
        left -= state.bytes(running)
    details = {"weight_bytes": weights, "margin_bytes": overhead, "left_bytes": max(left, 0)}
    if asked is not None and asked > left:
        raise Refusal(
            "checkpoint_unusable",
            f"engine_config.memory.kv_cache of {gib(asked)} does not fit into {stated.words} beside "
            f"{gib(weights)} of weights{_and(overhead)}. Lower it, or raise the other",
            details=details,
        )
    if left <= 0:
        raise Refusal(
            "checkpoint_unusable",
            f"{stated.words} leaves no KV cache beside {gib(weights)} of weights{_and(overhead)}. "
            + ("Raise it, or state engine_config.memory.kv_cache" if stated.bytes > weights else "Raise it"),
            details=details,
        )
    return asked if asked is not None else left, running


def _and(overhead: int) -> str:
    return f" and {gib(overhead)} of margin" if overhead else ""


def _slots(facts: Mapping[str, Any], document: Deployment, family: str, state: State | None) -> int:
    stated = document.engine_config.max_concurrent_requests
    if stated is not None:
        return stated
    option = {"vllm": "--max-num-seqs", "tensorfold": "--parallel"}.get(family)
    fixed = None if option is None else counted(arguments(facts, document), option)
    if fixed is not None and 0 < fixed <= SLOTS_MAX:
        return fixed
    if state is not None:
        return hybrid_state.RUNNING
    return SLOTS.get(family, 32)


# --- start and pools --------------------------------------------------------------------------------


def _startup(
    request: int,
    weights: int,
    facts: Mapping[str, Any],
    document: Deployment,
    machine: Machine,
    family: str,
    residency: Residency,
) -> int:
    """S where nobody states it. Source: memory 5.8."""
    if machine.card:
        return request
    # Without a GPU nothing is compiled or staged for one: a stated request says what serving takes, and a start
    # takes more only while the weights are on their way in.
    beside = START_BYTES if machine.has_gpu or document.engine_config.memory.request is None else 0
    captured = 0 if document.engine_config.cuda_graphs is False or not machine.has_gpu else 1
    graphs = captured * GRAPH_BYTES * (2 if facts.get("draft") else 1)
    if family == "vllm" and _eager(document, residency):
        return max(request + graphs, weights + min(weights * 26 // 10, EAGER_BYTES_MAX) + beside)
    return max(request + graphs, weights * 9 // 4 + beside)


def _kept(facts: Mapping[str, Any], machine: Machine, family: str, residency: Residency) -> int:
    """Host RAM that a deep park of vLLM keeps: a drafter's weights, which no reload would bring back (memory 5.4)."""
    if family != "vllm" or residency is not Residency.DEEP:
        return 0
    return int((facts.get("draft") or {}).get("weight_bytes", 0)) * len(machine.domains)


def _eager(document: Deployment, residency: Residency) -> bool:
    """Whether vLLM is told to read whole shards first: its default while it parks."""
    block = document.engine_config.vllm
    strategy = block.safetensors_load_strategy if block is not None else None
    return strategy == "eager" or (strategy is None and residency.parks)


def _pools(
    facts: Mapping[str, Any],
    document: Deployment,
    machine: Machine,
    request: int,
    cache: int,
    state: State | None,
    running: int,
    family: str,
    weights: int,
) -> dict[str, int]:
    """What the engine is told, on each rank. Absent figures are the engine's own to decide."""
    pools = {"weights": weights, "context": machine.context_bytes}
    if cache:
        pools["kv_cache"] = cache
        per_token, _ = token_bytes.kv_bytes_per_token(facts, document, family)
        if per_token:
            pools["kv_tokens"] = _told_tokens(document, cache // per_token)
    if state is not None:
        pools |= {"state": state.bytes(running), "state_slots": state.slots(running), "running": running}
    if family == "sglang":
        pools["static"] = _static_pool(pools, machine, request)
    return pools


def _told_tokens(document: Deployment, most: int) -> int:
    """Tokens of the cache; `max_total_tokens` lowers them, and never takes more than the cache that is charged."""
    block = document.engine_config.sglang
    stated = block.max_total_tokens if block is not None else None
    return most if stated is None else min(stated, most)


def _static_pool(pools: Mapping[str, int], machine: Machine, request: int) -> int:
    """What SGLang may set aside for weights, state and cache together. Source: memory 5.11; engines 7.2.

    Where it is told its tokens they bound the cache, and the pool may be larger by what it needs for itself. Where it
    is not, it takes the whole pool.
    """
    whole = pools["weights"] + pools.get("kv_cache", 0) + pools.get("state", 0)
    if machine.card:
        return min(request, whole + CARD_ALLOWANCE_BYTES) if "kv_tokens" in pools else whole
    least = whole + OWN_ALLOCATIONS_BYTES if "kv_tokens" in pools else whole
    return min(request, max(least, request - margin(machine, pools["weights"])))
