"""The sums of engines that load safetensors: vLLM and SGLang, and the context of those with declared memory. Pure.

The cache is a budget in bytes, stated or derived; the context is fitted to it. What cannot be read of a model's
shape leaves the budget as it is and falls back to a small context, with the reason.

Source: memory 5.4-5.8, 5.10, 6; engines 7.2, 13.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capyctl.checkpoints.model_config import DTYPE_BYTES
from capyctl.checkpoints.phases import GIB, Machine, Needs
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.fsm.types import Residency
from capyctl.ledger.types import Allocation
from capyctl.units import gib

BLOCK_TOKENS = 16
FALLBACK_CONTEXT = 4096
GRAPH_BYTES = 5 * GIB // 4
EAGER_BYTES_MAX = 32 * GIB
OWN_ALLOCATIONS_BYTES = 3 * GIB
CARD_ALLOWANCE_BYTES = GIB
"""What SGLang takes out of its static pool for itself: on one pool, and on a card."""
SLOTS: Mapping[str, int] = {"vllm": 32, "sglang": 32, "tensorfold": 8}
HYBRID_SLOTS = 8
_STATE_CONVOLUTION_BYTES = 2  # bfloat16
_STATE_DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@attrs.frozen(kw_only=True)
class _State:
    """What each running request of a hybrid model keeps besides its cache. `slot` is bytes of one state."""

    slot: int
    per_request: int  # slots of the pool per running request
    draft_tokens: int

    def slots(self, running: int) -> int:
        return self.per_request * running

    def bytes(self, running: int) -> int:
        return (self.slots(running) + 1) * self.slot + (running + 1) * self.draft_tokens * self.slot


def margin(machine: Machine, weights: int) -> int:
    """What an engine needs beside weights and cache. On a card the weights are scaled instead."""
    if machine.card:
        return -(-weights // 10)
    return max(8 * GIB, -(-weights * 15 // 100) + 4 * GIB)


def needs(facts: Mapping[str, Any], document: Deployment, machine: Machine, family: str, residency: Residency) -> Needs:
    """Request, start peak, context and pools of a document that states no `resources`.

    Raises: Refusal `checkpoint_unusable` when what is stated leaves no cache or no room for its requests' state;
      `invalid_config` for a start peak below the request.
    """
    memory = document.engine_config.memory
    weights = _weights(facts)
    beside = margin(machine, weights)
    state = _state(facts, document, family)
    stated = memory.request.bytes if memory.request is not None else None
    cache, running = _cache_and_running(facts, document, machine, family, state, beside)
    state_bytes = state.bytes(running) if state is not None else 0
    if stated is not None:
        request = stated
    elif machine.card:
        request = -(-(weights + state_bytes) * 11 // 10) + cache
        if family == "vllm":
            request = max(request, -(-machine.policy.capacity_bytes * 3 // 4))
    else:
        request = weights + cache + beside + state_bytes
    startup = (
        memory.startup.bytes
        if memory.startup is not None
        else _startup(request, weights, facts, document, machine, family, residency)
    )
    if startup < request:
        raise Refusal(
            "invalid_config",
            f"engine_config.memory.startup: {gib(startup)} is less than the {gib(request)} it needs once it serves",
        )
    context, reason, notes = _context(facts, document, cache, family)
    if state is not None and running < (document.engine_config.max_concurrent_requests or HYBRID_SLOTS):
        notes["running_limited"] = f"Running limited to {running} requests by the state cache"
    return Needs(
        request=request,
        startup=startup,
        cache=cache,
        context=context,
        reason=reason,
        slots=running,
        declared_request=stated is not None,
        declared_startup=memory.startup is not None,
        pools=_pools(facts, document, machine, request, cache, state, running, family),
        notes=notes,
    )


def beside_resources(
    facts: Mapping[str, Any], document: Deployment, machine: Machine, ready: Allocation, family: str
) -> Needs:
    """Context, slots and pools beside a `resources` block, which states the operator's own sums."""
    weights = _weights(facts)
    stated = document.engine_config.memory.kv_cache
    state = _state(facts, document, family)
    running = _slots(facts, document, family, state)
    held = ready.on(machine.domain)
    left = held - weights - margin(machine, weights) - (state.bytes(running) if state is not None else 0)
    cache = stated.bytes if stated is not None else max(left, 0)
    if family in ("vllm", "sglang") and cache <= 0:
        raise Refusal(
            "checkpoint_unusable",
            f"the ready phase of resources is {gib(held)} on {machine.domain}, which leaves no KV cache beside "
            f"{gib(weights)} of weights. Raise it, or state engine_config.memory.kv_cache",
        )
    context, reason, notes = _context(facts, document, cache, family)
    return Needs(
        request=held,
        startup=held,
        cache=cache or None,
        context=context,
        reason=reason,
        slots=running,
        declared_request=True,
        declared_startup=True,
        pools=_pools(facts, document, machine, held, cache, state, running, family),
        notes=notes,
    )


def _weights(facts: Mapping[str, Any]) -> int:
    return int(facts["weight_bytes"]) + int((facts.get("draft") or {}).get("weight_bytes", 0))


def arguments(facts: Mapping[str, Any], document: Deployment) -> list[str]:
    """Host-fixed and extra arguments, in the order the engine gets them."""
    return [*map(str, facts.get("host_args") or ()), *document.engine_config.extra_args]


def said(args: Sequence[str], name: str) -> str | None:
    """The last value given to a long option, "" for one without a value, None when it is not given.

    Abbreviations count: the engines' parsers take any unambiguous prefix.
    """
    found = None
    for index, word in enumerate(args):
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if option != name and not (len(option) >= 8 and name.startswith(option)):
            continue
        following = args[index + 1] if index + 1 < len(args) else ""
        found = value if equals else ("" if following.startswith("--") else following)
    return found


# --- cache, requests, state -------------------------------------------------------------------------


def _cache_and_running(
    facts: Mapping[str, Any],
    document: Deployment,
    machine: Machine,
    family: str,
    state: _State | None,
    beside: int,
) -> tuple[int, int]:
    """(bytes of KV cache, running requests): what is stated, else what fits beside it."""
    memory = document.engine_config.memory
    weights = _weights(facts)
    wanted = _slots(facts, document, family, state)
    if memory.request is None:
        cache = memory.kv_cache.bytes if memory.kv_cache is not None else machine.default_kv_bytes
        if state is None:
            return cache, wanted
        fixed = weights + cache + beside + machine.context_bytes + (0 if machine.card else GRAPH_BYTES)
        room = machine.most_bytes - fixed
        return cache, _most_running(state, wanted, room * 10 // 11 if machine.card else room) or 1
    # A stated request is the operator's own sum: with a stated cache nothing else comes out of it but weights.
    overhead = -(-weights // 10) if machine.card else (beside if memory.kv_cache is None else 0)
    left = memory.request.bytes - weights - overhead
    cache = memory.kv_cache.bytes if memory.kv_cache is not None else 0
    running = wanted
    if state is not None:
        strict = document.engine_config.max_concurrent_requests is not None
        least_cache = cache or 1
        fits = _most_running(state, wanted, left - least_cache)
        if fits is None or (strict and fits < wanted):
            least = wanted if strict else 1
            smallest = memory.request.bytes - left + least_cache + state.bytes(least)
            raise Refusal(
                "checkpoint_unusable",
                f"engine_config.memory.request of {gib(memory.request.bytes)} leaves no room for the state of "
                f"{least} running requests ({gib(state.bytes(least))}); {gib(smallest)} is the least that fits",
                details={"state_bytes": state.bytes(least), "needs_bytes": smallest},
            )
        running = fits
        left -= state.bytes(running)
    if memory.kv_cache is not None:
        if cache > left:
            raise Refusal(
                "checkpoint_unusable",
                f"engine_config.memory.kv_cache of {gib(cache)} does not fit into memory.request of "
                f"{gib(memory.request.bytes)} beside {gib(weights)} of weights",
                details={"weight_bytes": weights, "left_bytes": left},
            )
        return cache, running
    if left <= 0:
        raise Refusal(
            "checkpoint_unusable",
            f"engine_config.memory.request of {gib(memory.request.bytes)} leaves no KV cache beside "
            f"{gib(weights)} of weights and {gib(overhead)} of margin",
            details={"weight_bytes": weights, "margin_bytes": overhead},
        )
    return left, running


def _slots(facts: Mapping[str, Any], document: Deployment, family: str, state: _State | None) -> int:
    stated = document.engine_config.max_concurrent_requests
    if stated is not None:
        return stated
    if family == "vllm":
        fixed = said(arguments(facts, document), "--max-num-seqs")
        if fixed is not None and fixed.isdecimal() and 0 < int(fixed) <= 65_536:
            return int(fixed)
    if state is not None:
        return HYBRID_SLOTS
    return SLOTS.get(family, 32)


def _most_running(state: _State, wanted: int, room: int) -> int | None:
    """The most requests, up to `wanted`, whose state fits into `room` bytes; None when not even one does."""
    per_request = state.bytes(2) - state.bytes(1)
    fixed = state.bytes(1) - per_request
    fitting = min(wanted, (room - fixed) // per_request)
    return fitting if fitting >= 1 else None


def _state(facts: Mapping[str, Any], document: Deployment, family: str) -> _State | None:
    """The state of a gated-delta-net hybrid on SGLang; None where there is none, or its size is not ours to say."""
    values = facts.get("state_slot_values")
    if family != "sglang" or not values:
        return None
    args = arguments(facts, document)
    if said(args, "--max-mamba-cache-size") is not None or said(args, "--mamba-full-memory-ratio") is not None:
        return None  # whoever sizes the pool in arguments has the last word
    draft_tokens = 0
    if said(args, "--speculative-algorithm") is not None and said(args, "--enable-linear-replayssm-spec") is None:
        number = said(args, "--speculative-num-draft-tokens")
        if number is None or not number.isdecimal():
            return None
        draft_tokens = int(number)
    dtype = said(args, "--mamba-ssm-dtype") or str(facts.get("state_dtype") or "float32")
    if dtype not in _STATE_DTYPES:
        return None
    convolution, temporal = (int(number) for number in values)
    slot = convolution * _STATE_CONVOLUTION_BYTES + temporal * _STATE_DTYPES[dtype]
    return _State(slot=slot, per_request=_per_request(args), draft_tokens=draft_tokens)


def _per_request(args: Sequence[str]) -> int:
    """State slots per running request. Source: memory 5.10."""
    if said(args, "--disable-radix-cache") is not None:
        return 1
    strategy = said(args, "--mamba-radix-cache-strategy")
    overlap_off = said(args, "--disable-overlap-schedule") is not None
    if strategy == "no_buffer":
        return 3
    if strategy == "extra_buffer_lazy" or overlap_off:
        return 4
    return 5


# --- start, context, pools --------------------------------------------------------------------------


def _startup(
    request: int,
    weights: int,
    facts: Mapping[str, Any],
    document: Deployment,
    machine: Machine,
    family: str,
    residency: Residency,
) -> int:
    if machine.card:
        return request
    captured = 0 if document.engine_config.cuda_graphs is False or not machine.has_gpu else 1
    graphs = captured * GRAPH_BYTES * (2 if facts.get("draft") else 1)
    if family == "vllm" and _eager(document, residency):
        return max(request + graphs, weights + min(weights * 26 // 10, EAGER_BYTES_MAX) + 8 * GIB)
    return max(request + graphs, weights * 9 // 4 + 8 * GIB)


def _eager(document: Deployment, residency: Residency) -> bool:
    """Whether vLLM is told to read whole shards first: its default while it parks."""
    block = document.engine_config.vllm
    strategy = block.safetensors_load_strategy if block is not None else None
    return strategy == "eager" or (strategy is None and residency.parks)


def _context(
    facts: Mapping[str, Any], document: Deployment, cache: int, family: str
) -> tuple[int, str | None, dict[str, str]]:
    """(context, why it is that when the document does not say, notes for status). Source: memory 6."""
    declared = document.engine_config.context_length
    trained = facts.get("context_trained")
    per_token, why = kv_bytes_per_token(facts, document)
    if per_token is not None and family == "vllm" and facts.get("attention") == "hybrid":
        per_token, why = None, "its pages are shared with recurrent layers"
    tokens = fitted_tokens(cache, per_token, family) if per_token else None
    if declared is not None:
        if tokens is None or declared <= tokens:
            return declared, None, {}
        short = f"{declared} tokens are more than the {tokens} that {gib(cache)} of KV cache hold"
        return declared, None, {"context_warning": short}
    if tokens is None:
        context = min(FALLBACK_CONTEXT, trained or FALLBACK_CONTEXT)
        return context, f"{context} tokens, since the cache per token cannot be derived: {why}", {}
    if tokens < BLOCK_TOKENS:
        assert per_token is not None
        raise Refusal(
            "checkpoint_unusable",
            f"{gib(cache)} of KV cache holds no {BLOCK_TOKENS} tokens of {per_token} bytes each. "
            "Raise engine_config.memory.kv_cache",
            details={"budget_bytes": cache, "bytes_per_token": per_token},
        )
    if trained is not None and trained <= tokens:
        return trained, f"the {trained} tokens that the model was trained on", {}
    counted = ", the draft model counted" if facts.get("draft") else ""
    return tokens, f"fitted to {gib(cache)} of KV cache{counted}", {}


def fitted_tokens(cache: int, per_token: int, family: str) -> int:
    """Whole blocks of tokens that the cache holds; vLLM keeps one block for itself."""
    blocks = cache // per_token // BLOCK_TOKENS - (1 if family == "vllm" else 0)
    return max(blocks, 0) * BLOCK_TOKENS


def kv_bytes_per_token(facts: Mapping[str, Any], document: Deployment) -> tuple[int | None, str | None]:
    """Cache bytes of one token over all layers, a drafter's included; None and why when that is not known."""
    if facts.get("not_derivable"):
        return None, str(facts["not_derivable"])
    values = int(facts.get("cache_values") or 0)
    if not values:
        return None, "the model's shape is not known"
    draft = facts.get("draft")
    if draft:
        if draft.get("not_derivable") or not draft.get("cache_values"):
            return None, "the draft model's shape is not known"
        values += int(draft["cache_values"])
    config = document.engine_config
    words = (config.kv_cache_dtype, config.dtype, facts.get("dtype"))
    dtype = next((str(word) for word in words if word and word != "auto"), "bfloat16")
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        return None, f"the size of a {dtype} cache is not known"
    return values * size, None


def _pools(
    facts: Mapping[str, Any],
    document: Deployment,
    machine: Machine,
    request: int,
    cache: int,
    state: _State | None,
    running: int,
    family: str,
) -> dict[str, int]:
    """What the engine is told. Absent figures are the engine's own to decide."""
    pools = {"weights": _weights(facts)}
    if cache:
        pools["kv_cache"] = cache
        per_token, _ = kv_bytes_per_token(facts, document)
        if per_token:
            pools["kv_tokens"] = cache // per_token
    if state is not None:
        pools |= {"state": state.bytes(running), "state_slots": state.slots(running), "running": running}
    if family == "sglang":
        pools["static"] = _static_pool(pools, machine, request)
    return pools


def _static_pool(pools: Mapping[str, int], machine: Machine, request: int) -> int:
    """What SGLang may set aside for weights, state and cache together. Source: memory 5.11; engines 7.2."""
    cache, weights = pools.get("kv_cache", 0), pools["weights"]
    whole = weights + cache + pools.get("state", 0)
    if machine.card:
        return whole + CARD_ALLOWANCE_BYTES if "kv_tokens" in pools else request
    least = whole + OWN_ALLOCATIONS_BYTES if "kv_tokens" in pools else cache
    return min(request, max(least, request - margin(machine, weights)))
