"""The sums of llama.cpp: a cache that is allocated whole at start, from a GGUF's header. Pure.

Source: memory 5.12; engines 9.3; decisions 3, 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capyctl.checkpoints import kv_cache
from capyctl.checkpoints.arguments import arguments
from capyctl.checkpoints.machines import GIB, MIB, Machine
from capyctl.checkpoints.phases import Needs
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.ledger.types import Allocation
from capyctl.units import gib, larger

DEFAULT_SLOTS = 4
FALLBACK_CONTEXT = 4096
_INT_MAX = 2**31 - 1


def margin(machine: Machine, weights: int) -> int:
    """What the engine needs beside weights and cache. On a card the weights are scaled instead."""
    if machine.card:
        return -(-weights // 10)
    if not machine.has_gpu:
        return max(256 * MIB, -(-weights // 10))
    return max(8 * GIB, -(-weights * 15 // 100) + 4 * GIB)


def needs(facts: Mapping[str, Any], document: Deployment, machine: Machine) -> Needs:
    """Request, start peak and context of a document that states no `resources`.

    Raises: Refusal as `sizing.derive_plan`.
    """
    slots = document.engine_config.max_concurrent_requests or DEFAULT_SLOTS
    memory = document.engine_config.memory
    weights = _weights(facts)
    per_token, why = _per_token(facts, document)
    if per_token is None and memory.kv_cache is None:
        raise Refusal(
            "no_safe_estimate",
            f"the memory of {document.name} cannot be derived: {why}. "
            "State engine_config.memory.kv_cache, or resources",
        )
    declared = _declared_context(facts, document, slots)
    beside = margin(machine, weights)
    default = int(facts.get("default_kv_bytes") or 0)
    budget, cache = _budget(document, machine, weights, declared, slots, per_token, default)
    context, reason = _fit(facts, document, declared, slots, per_token, budget, why)
    if cache is None:
        # Neither is stated: the engine allocates what the context needs, and that is what is charged.
        cache = slots * kv_cache.pad(context) * (per_token or 0)
    request = memory.request.bytes if memory.request is not None else weights + cache + beside
    startup = memory.startup.bytes if memory.startup is not None else request
    if startup < request:
        raise Refusal(
            "invalid_config",
            f"engine_config.memory.startup: {gib(startup)} is less than the {gib(request)} it needs once it serves",
        )
    return Needs(
        request=request,
        startup=startup,
        cache=cache,
        context=context,
        reason=reason,
        slots=slots,
        weights=weights,
        declared_request=memory.request is not None,
        declared_startup=memory.startup is not None,
    )


def beside_resources(facts: Mapping[str, Any], document: Deployment, machine: Machine, ready: Allocation) -> Needs:
    """Context and slots beside a `resources` block: its ready phase is a cap, the GPU's context included.

    Raises: Refusal `checkpoint_unusable` when that leaves no cache, or less than is stated for it.
    """
    slots = document.engine_config.max_concurrent_requests or DEFAULT_SLOTS
    weights = _weights(facts)
    per_token, why = _per_token(facts, document)
    declared = _declared_context(facts, document, slots)
    # Layers that are kept off the card are in RAM: there the sums cannot be told apart.
    whole = per_token is not None or not machine.card
    held = ready.on(machine.domain) if whole else sum(ready.bytes.values())
    for_context = f", {gib(machine.context_bytes)} of it for the GPU's context" if machine.context_bytes else ""
    words = f"the ready phase of resources ({gib(held)}{for_context})"
    budget = _within(held - machine.context_bytes, words, document, machine, weights, phases=True)
    context, reason = _fit(facts, document, declared, slots, per_token, budget, why)
    return Needs(
        request=held,
        startup=held,
        cache=None,
        context=context,
        reason=reason,
        slots=slots,
        weights=weights,
        declared_request=True,
        declared_startup=True,
    )


def _within(
    total: int, words: str, document: Deployment, machine: Machine, weights: int, *, phases: bool = False
) -> int:
    """Bytes that the cache may take inside the operator's own sum.

    With a stated cache nothing else comes out of the sum but the weights, scaled on a card.

    Args:
      phases: the sum is of a `resources` block, which overrides every derivation. The margin is what is left to it,
        and nothing where the document says what the cache is to hold.
    """
    asked = document.engine_config.memory.kv_cache
    overhead = margin(machine, weights) if asked is None or (machine.card and not phases) else 0
    if phases:
        says = asked is not None or document.engine_config.context_length is not None
        overhead = 0 if says else min(overhead, max(0, total - weights) // 2)
    left = total - weights - overhead
    details = {"weight_bytes": weights, "margin_bytes": overhead, "left_bytes": max(left, 0)}
    beside = f"{gib(weights)} of weights" + (f" and {gib(overhead)} of margin" if overhead else "")
    if asked is not None and asked.bytes > left:
        raise Refusal(
            "checkpoint_unusable",
            f"engine_config.memory.kv_cache of {gib(asked.bytes)} does not fit into {words} beside {beside}. "
            "Lower it, or raise the other",
            details=details,
        )
    if left <= 0:
        raise Refusal(
            "checkpoint_unusable",
            f"{words} leaves no KV cache beside {beside}. Raise it, or choose a smaller model",
            details=details,
        )
    return asked.bytes if asked is not None else left


def _weights(facts: Mapping[str, Any]) -> int:
    """W: the files of the pick, and a draft model's. Source: memory 5.12."""
    return int(facts["weight_bytes"]) + int((facts.get("draft") or {}).get("weight_bytes", 0))


def _per_token(facts: Mapping[str, Any], document: Deployment) -> tuple[int | None, str | None]:
    """Cache bytes per token and slot, or None and why not."""
    config = document.engine_config
    args = arguments(facts, document)
    gpu_layers = config.llamacpp.n_gpu_layers if config.llamacpp is not None else "all"
    cache_type = config.kv_cache_dtype or kv_cache.DEFAULT_TYPE
    flash = kv_cache.flash_attention_on(cache_type, args)
    why = kv_cache.unaccounted(facts, gpu_layers, args)
    if why is not None:
        return None, why
    return kv_cache.bytes_per_token(facts, cache_type, flash_attention=flash), None


def _budget(
    document: Deployment,
    machine: Machine,
    weights: int,
    declared: int | None,
    slots: int,
    per_token: int | None,
    default: int,
) -> tuple[int, int | None]:
    """(bytes that the context may be fitted to, bytes to charge when they are stated).

    `default`: what a setting of the host states for documents that say nothing; 0 for none.
    """
    memory = document.engine_config.memory
    if memory.request is not None:
        words = f"engine_config.memory.request of {gib(memory.request.bytes)}"
        left = _within(memory.request.bytes, words, document, machine, weights)
        return left, left
    if memory.kv_cache is not None:
        return memory.kv_cache.bytes, memory.kv_cache.bytes
    if declared is not None and per_token is not None:
        return slots * kv_cache.pad(declared) * per_token, None
    return default or machine.default_kv_bytes, None


def _declared_context(facts: Mapping[str, Any], document: Deployment, slots: int) -> int | None:
    context, trained = document.engine_config.context_length, facts.get("context_trained")
    if context is None:
        return None
    if trained is not None and context > trained:
        raise Refusal(
            "invalid_config",
            f"engine_config.context_length: {context} is above the {trained} that the model was trained on",
        )
    if slots * kv_cache.pad(context) > _INT_MAX:
        raise Refusal(
            "invalid_config", f"engine_config: {slots} slots of {context} tokens are more than the engine can count"
        )
    return context


def _more(document: Deployment) -> str:
    """What to raise for a larger cache: the field that bounds it now."""
    memory = document.engine_config.memory
    if memory.kv_cache is not None:
        bounded = memory.request is not None or document.resources is not None
        return f"raise engine_config.memory.kv_cache{' with the memory around it' if bounded else ''}"
    if document.resources is not None:
        return "raise resources"
    if memory.request is not None:
        return "raise engine_config.memory.request"
    return "state a larger engine_config.memory.kv_cache"


def _fit(
    facts: Mapping[str, Any],
    document: Deployment,
    declared: int | None,
    slots: int,
    per_token: int | None,
    budget: int,
    why: str | None,
) -> tuple[int, str | None]:
    """The context of one slot, and why it is that when the document does not say. Source: memory 6."""
    trained = facts.get("context_trained")
    if per_token is None:
        if declared is not None:
            return declared, None
        context = min(FALLBACK_CONTEXT, trained or FALLBACK_CONTEXT)
        return context, f"since the cache cannot be derived: {why}"
    if declared is not None:
        needed = slots * kv_cache.pad(declared) * per_token
        if needed > budget:
            needs, left = larger(needed, budget)
            raise Refusal(
                "checkpoint_unusable",
                f"{slots} slots of {declared} tokens need {needs} of KV cache and {left} is left for it. "
                f"Lower context_length or max_concurrent_requests, or {_more(document)}",
                details={"needs_bytes": needed, "budget_bytes": budget},
            )
        return declared, None
    tokens = budget // (slots * per_token)
    tokens = min(tokens, _INT_MAX // slots) // kv_cache.CONTEXT_STEP * kv_cache.CONTEXT_STEP
    if tokens < kv_cache.CONTEXT_STEP:
        needed = slots * kv_cache.CONTEXT_STEP * per_token
        raise Refusal(
            "checkpoint_unusable",
            f"{gib(budget)} of KV cache holds no {kv_cache.CONTEXT_STEP} tokens in each of {slots} slots; "
            f"{gib(needed)} would. Lower max_concurrent_requests, or {_more(document)}",
            details={"needs_bytes": needed, "budget_bytes": budget},
        )
    if trained is not None and trained <= tokens:
        return trained, f"the {trained} tokens that the model was trained on, in each of {slots} slots"
    return tokens, f"fitted to {gib(budget)} of KV cache over {slots} slots"
