"""The context of an engine that loads safetensors: what its document says, else what its cache holds. Pure.

The cache is a budget in bytes on each rank; a token takes its bytes in every layer that keeps a cache there. What
cannot be read of a model's shape falls back to a small context, with the reason.

vLLM does not start when its cache cannot hold one request of the whole context, so a document that states more than
that is refused; SGLang starts, and refuses the requests that are too long. Neither starts with more than it takes for
the model at all (`longest_context`).

Source: memory 5.4, 6, 6.1; the start checks of both engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.checkpoints import cache_shape, host_memory, longest_context, shares, token_bytes, vllm_blocks
from capyctl.checkpoints.arguments import arguments, counted, said
from capyctl.checkpoints.model_config import DTYPE_BYTES
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.units import format_size, gib, larger

BLOCK_TOKENS = 16
WIDE_BLOCK_TOKENS = 128
"""The longest block that vLLM chooses by itself: on a processor, but for latent attention; and for that on a card."""
LEAST_BATCH_TOKENS = 2048
"""What vLLM takes into one step at least, where nobody states `max_num_batched_tokens`."""
FALLBACK_CONTEXT = 4096
TITLES: Mapping[str, str] = {"vllm": "vLLM", "sglang": "SGLang"}
_STATED_TOKENS = "engine_config.sglang.max_total_tokens"
SGLANG_KEEPS_TOKENS = 7
"""SGLang refuses an input of its context less six tokens, or more."""


@attrs.frozen(kw_only=True)
class Context:
    """A context in tokens, why it is that when the document does not say, and notes for status."""

    tokens: int
    reason: str | None = None
    notes: Mapping[str, str] = attrs.field(factory=dict)


def fit(
    facts: Mapping[str, Any], document: Deployment, cache: int, family: str, running: int, *, gpu: bool = True
) -> Context:
    """The context for `cache` bytes on each rank, with `running` requests at once.

    Args:
      gpu: whether the engine runs on one; the blocks of vLLM are longer without.
    Raises: Refusal `checkpoint_unusable` when the cache holds not one block, or not the context that is stated and
      the engine would not start; `invalid_config` for a context above the longest that the engine takes.
    """
    declared = document.engine_config.context_length
    cache = max(0, cache - host_memory.kept_of_card_cache(facts, document, family))
    if declared is not None:
        _check_longest(facts, document, family, declared)
    held = _held(facts, document, cache, family, running, gpu)
    if declared is not None and family == "vllm":
        _check_held(facts, document, cache, running, declared, held, gpu)
    context = _chosen(facts, document, cache, family, held)
    if family != "sglang":
        return context
    longest = min(context.tokens, held.tokens) if held.tokens is not None else context.tokens
    return attrs.evolve(context, notes={**context.notes, "longest_input": str(max(0, longest - SGLANG_KEEPS_TOKENS))})


@attrs.frozen(kw_only=True)
class _Held:
    """Tokens that a cache holds, whole blocks; None and why where nobody can say. `needs` holds one block.

    `stated`: the number of tokens that the document lowers it to, where that is less.
    """

    tokens: int | None
    why: str | None = None
    exact: bool = True
    needs: int = 0
    block: int = BLOCK_TOKENS
    stated: int | None = None


def _held(facts: Mapping[str, Any], document: Deployment, cache: int, family: str, running: int, gpu: bool) -> _Held:
    per_token, why = token_bytes.kv_bytes_per_token(facts, document, family)
    if per_token is None:
        return _Held(tokens=None, why=why)
    if family == "vllm" and facts.get("attention") == "hybrid":
        hybrid = token_bytes.hybrid_shape(facts, document, token_bytes.cache_dtype(facts, document))
        if hybrid is None:
            return _Held(tokens=None, why="its pages are shared with recurrent layers")
        found = vllm_blocks.held(
            hybrid,
            cache,
            sequences=running,
            block_size=_stated_block(document),
            draft_tokens=token_bytes.draft_tokens(facts, document),
        )
        return _Held(tokens=found.tokens, why=found.why)
    page = counted(arguments(facts, document), "--page-size") if family == "sglang" else None
    wide = family == "vllm" and (not gpu or facts.get("attention") == "latent")
    block = _stated_block(document) or page or (WIDE_BLOCK_TOKENS if wide else BLOCK_TOKENS)
    tokens = fitted_tokens(cache, per_token, family, block)
    stated = document.engine_config.sglang.max_total_tokens if document.engine_config.sglang is not None else None
    lowered = stated is not None and stated // block * block < tokens
    if stated is not None and lowered:
        tokens = stated // block * block
    # A window bounds what a long request keeps: its layers are counted as full ones, never too little.
    exact = facts.get("attention") != "sliding"
    blocks_kept = 2 if family == "vllm" else 1
    needs = blocks_kept * block * per_token
    return _Held(tokens=tokens, exact=exact, needs=needs, block=block, stated=stated if lowered else None)


def _stated_block(document: Deployment) -> int | None:
    own = document.engine_config.vllm
    return own.block_size_tokens if own is not None else None


def _check_longest(facts: Mapping[str, Any], document: Deployment, family: str, declared: int) -> None:
    most = longest_context.longest(facts, document, family)
    if most is None or declared <= most.tokens:
        return
    raise Refusal(
        "invalid_config",
        f"engine_config.context_length: {declared} is above the {most.tokens} tokens that "
        f"{TITLES[family]} derives for {most.whose} from its config.json, and it does not start with more. Lower it, "
        f"or state engine_config.env: {most.variable}: '1' if {most.whose} is good for more",
        details={"context_tokens": declared, "longest_tokens": most.tokens},
    )


def _check_held(
    facts: Mapping[str, Any],
    document: Deployment,
    cache: int,
    running: int,
    declared: int,
    held: _Held,
    gpu: bool,
) -> None:
    """Refuse what vLLM's own check would: not one request of that length has room.

    What the check needs at least is counted, whatever is not known of the model.
    """
    least = _least_bytes(facts, document, declared, gpu)
    if least is None or least <= cache:
        return
    sure = max(least, _planned_bytes(facts, document, running, declared, held))
    needs, there = larger(sure, cache)
    fits = f"; that holds {held.tokens} tokens" if held.tokens and held.exact else ""
    lower = f"Lower it to {held.tokens}" if held.tokens and held.exact else "Lower it"
    raise Refusal(
        "checkpoint_unusable",
        f"engine_config.context_length: {declared} tokens need {needs} of KV cache, and there is "
        f"{there}{fits}. vLLM does not start with less. {lower}, or {_more(document, sure, cache)}",
        details={"context_tokens": declared, "needs_bytes": sure, "budget_bytes": cache, "held_tokens": held.tokens},
    )


def _more(document: Deployment, needs: int, cache: int) -> str:
    """What to raise for a larger cache, in the words of the field that bounds it now."""
    memory, mib = document.engine_config.memory, 1 << 20
    whole = -(-needs // mib) * mib
    missing = format_size(-(-(needs - cache) // mib) * mib)
    if memory.kv_cache is not None:
        beside = " with the memory around it" if memory.request is not None or document.resources is not None else ""
        return f"raise engine_config.memory.kv_cache to {format_size(whole)}{beside}"
    if document.resources is not None:
        return f"raise the phases of resources by {missing}"
    if memory.request is not None:
        return f"raise engine_config.memory.request by {missing}"
    return f"state engine_config.memory.kv_cache: {format_size(whole)}"


def _planned_bytes(facts: Mapping[str, Any], document: Deployment, running: int, tokens: int, held: _Held) -> int:
    """What a context of that length is planned with: a cache of so much is large enough for certain."""
    per_token, _ = token_bytes.kv_bytes_per_token(facts, document, "vllm")
    if facts.get("attention") == "hybrid":
        hybrid = token_bytes.hybrid_shape(facts, document, token_bytes.cache_dtype(facts, document))
        if hybrid is None:
            return 0
        return vllm_blocks.needed_bytes(
            hybrid,
            tokens,
            sequences=running,
            block_size=_stated_block(document),
            draft_tokens=token_bytes.draft_tokens(facts, document),
        )
    return (-(-tokens // held.block) + 1) * held.block * (per_token or 0)


def _least_bytes(facts: Mapping[str, Any], document: Deployment, tokens: int, gpu: bool) -> int | None:
    """What vLLM's start check needs at the very least for one request of that length; None when nobody can say."""
    per_token, _ = token_bytes.kv_bytes_per_token(facts, document, "vllm")
    if per_token is None:
        return None
    tokens = -(-tokens // (counted(arguments(facts, document), "--decode-context-parallel-size") or 1))
    dtype, groups = token_bytes.least_dtype(facts, document), cache_shape.cache_of(facts)
    if facts.get("attention") == "hybrid":
        hybrid = token_bytes.hybrid_shape(facts, document, dtype)
        if hybrid is None:
            return None
        return vllm_blocks.least_bytes(
            hybrid, tokens, block_size=_stated_block(document), draft_tokens=token_bytes.draft_tokens(facts, document)
        )
    narrow = gpu or facts.get("attention") == "latent"
    block, topology = _stated_block(document) or (BLOCK_TOKENS if narrow else WIDE_BLOCK_TOKENS), document.topology
    whole = -(-tokens // block) * block
    if groups is None:
        return whole * shares.cached_values(facts, topology) * DTYPE_BYTES.get(dtype, 2)
    own = document.engine_config.vllm
    batch = (own.max_num_batched_tokens if own is not None else None) or LEAST_BATCH_TOKENS
    total = 0
    for group in groups:
        kept = whole if group.window is None else min(whole, group.window + min(batch, LEAST_BATCH_TOKENS))
        total += group.layers * token_bytes.layer_bytes(group, dtype, topology.tensor_parallel) * kept
    total = -(-total // topology.pipeline_parallel)  # the largest stage holds an even part at least
    if any(group.window is not None for group in groups) or topology.pipeline_parallel > 1:
        return total
    drafted = token_bytes.draft_values(facts, document, "vllm") or 0
    return total + block * total // whole + drafted * (token_bytes.draft_size(facts, document) or 1) * whole


def _chosen(facts: Mapping[str, Any], document: Deployment, cache: int, family: str, held: _Held) -> Context:
    declared, trained = document.engine_config.context_length, longest_context.trained(facts, family)
    most = longest_context.longest(facts, document, family)
    if most is not None and (trained is None or most.tokens < trained):
        trained = most.tokens
    step = _whole_step(facts, document, family)
    if step is not None and held.tokens is not None and step < min(held.tokens, trained or step + 1):
        return Context(tokens=step, reason=f"the {step} tokens of a step, since prompts are not cut into pieces")
    if declared is not None:
        if held.tokens is None or not held.exact or declared <= held.tokens:
            return Context(tokens=declared)
        hold = f"{gib(cache)} of KV cache hold" if family in TITLES else f"the {gib(cache)} beside its weights would"
        short = f"{declared} tokens are more than the {held.tokens} that {_of_stated(held) or hold}"
        if cache == 0:
            short = "nothing is left for it beside the weights"
        return Context(tokens=declared, notes={"context_warning": short})
    if held.tokens is None:
        tokens = min(FALLBACK_CONTEXT, trained or FALLBACK_CONTEXT)
        return Context(tokens=tokens, reason=f"since {held.why}")
    if held.tokens < BLOCK_TOKENS and held.stated is not None:
        raise Refusal(
            "checkpoint_unusable",
            f"{_STATED_TOKENS}: {held.stated} is less than a block of {held.block} tokens. Raise it",
        )
    if held.tokens < BLOCK_TOKENS:
        raise Refusal(
            "checkpoint_unusable",
            f"{gib(cache)} of KV cache holds no {held.block} tokens; {-(-held.needs // 1024)} KiB would. "
            "Raise engine_config.memory.kv_cache",
            details={"budget_bytes": cache, "needs_bytes": held.needs},
        )
    if trained is not None and trained <= held.tokens:
        if most is not None and most.tokens == trained and most.whose != "the model":
            return Context(tokens=trained, reason=f"the {trained} tokens that {most.whose} takes")
        return Context(tokens=trained, reason=f"the {trained} tokens that the model was trained on")
    counted = ", the draft model counted" if facts.get("draft") else ""
    what = f"{_STATED_TOKENS}, {held.stated}" if held.stated is not None else f"{gib(cache)} of KV cache{counted}"
    return Context(tokens=held.tokens, reason=f"fitted to {what}")


def _of_stated(held: _Held) -> str | None:
    return None if held.stated is None else f"{_STATED_TOKENS}, {held.stated}, allows"


def _whole_step(facts: Mapping[str, Any], document: Deployment, family: str) -> int | None:
    """Tokens of a step of vLLM where a whole prompt has to fit into one; None elsewhere."""
    own = document.engine_config.vllm
    if family != "vllm" or own is None or document.engine_config.context_length is not None:
        return None
    cut = said(arguments(facts, document), "--no-enable-chunked-prefill") is None
    return None if cut else own.max_num_batched_tokens


def fitted_tokens(cache: int, per_token: int, family: str, block: int = BLOCK_TOKENS) -> int:
    """Whole blocks of tokens that the cache holds; vLLM keeps one block for itself."""
    blocks = cache // per_token // block - (1 if family == "vllm" else 0)
    return max(blocks, 0) * block
