"""The context of an engine that loads safetensors: what its document says, else what its cache holds. Pure.

The cache is a budget in bytes on each rank; a token takes its bytes in every layer that keeps a cache there. What
cannot be read of a model's shape falls back to a small context, with the reason.

Source: memory 5.4, 6, 6.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.checkpoints import cache_shape, shares, vllm_blocks
from capyctl.checkpoints.arguments import arguments, said
from capyctl.checkpoints.model_config import DTYPE_BYTES
from capyctl.documents.deployment import Deployment
from capyctl.errors import Refusal
from capyctl.units import gib

BLOCK_TOKENS = 16
FALLBACK_CONTEXT = 4096
SGLANG_KEEPS_TOKENS = 7
"""SGLang refuses an input of its context less six tokens, or more."""
_LATENT_BYTES: Mapping[str, int] = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""vLLM's own layouts of a latent cache: bytes of one token in one layer."""


@attrs.frozen(kw_only=True)
class Context:
    """A context in tokens, why it is that when the document does not say, and notes for status."""

    tokens: int
    reason: str | None = None
    notes: Mapping[str, str] = attrs.field(factory=dict)


def fit(facts: Mapping[str, Any], document: Deployment, cache: int, family: str, running: int) -> Context:
    """The context for `cache` bytes on each rank, with `running` requests at once.

    Raises: Refusal `checkpoint_unusable` when the cache holds not one block.
    """
    held = _held(facts, document, cache, family, running)
    context = _chosen(facts, document, cache, family, held)
    if family != "sglang":
        return context
    longest = min(context.tokens, held.tokens) if held.tokens is not None else context.tokens
    return attrs.evolve(context, notes={**context.notes, "longest_input": str(max(0, longest - SGLANG_KEEPS_TOKENS))})


@attrs.frozen(kw_only=True)
class _Held:
    """Tokens that a cache holds, whole blocks; None and why where nobody can say. `needs` holds one block."""

    tokens: int | None
    why: str | None = None
    exact: bool = True
    needs: int = 0


def _held(facts: Mapping[str, Any], document: Deployment, cache: int, family: str, running: int) -> _Held:
    per_token, why = kv_bytes_per_token(facts, document, family)
    if per_token is None:
        return _Held(tokens=None, why=why)
    if family == "vllm" and facts.get("attention") == "hybrid":
        hybrid = _hybrid(facts, document)
        if hybrid is None:
            return _Held(tokens=None, why="its pages are shared with recurrent layers")
        own = document.engine_config.vllm
        found = vllm_blocks.held(
            hybrid,
            cache,
            sequences=running,
            block_size=own.block_size_tokens if own is not None else None,
            draft_tokens=_draft_tokens(facts, document),
        )
        return _Held(tokens=found.tokens, why=found.why)
    tokens = fitted_tokens(cache, per_token, family)
    stated = document.engine_config.sglang.max_total_tokens if document.engine_config.sglang is not None else None
    if stated is not None:
        tokens = min(tokens, stated // BLOCK_TOKENS * BLOCK_TOKENS)
    # A window bounds what a long request keeps: its layers are counted as full ones, never too little.
    exact = facts.get("attention") != "sliding"
    blocks_kept = 2 if family == "vllm" else 1
    return _Held(tokens=tokens, exact=exact, needs=blocks_kept * BLOCK_TOKENS * per_token)


def _chosen(facts: Mapping[str, Any], document: Deployment, cache: int, family: str, held: _Held) -> Context:
    declared, trained = document.engine_config.context_length, facts.get("context_trained")
    if declared is not None:
        if held.tokens is None or not held.exact or declared <= held.tokens:
            return Context(tokens=declared)
        short = f"{declared} tokens are more than the {held.tokens} that {gib(cache)} of KV cache hold"
        return Context(tokens=declared, notes={"context_warning": short})
    if held.tokens is None:
        tokens = min(FALLBACK_CONTEXT, trained or FALLBACK_CONTEXT)
        return Context(tokens=tokens, reason=f"{tokens} tokens, since {held.why}")
    if held.tokens < BLOCK_TOKENS:
        raise Refusal(
            "checkpoint_unusable",
            f"{gib(cache)} of KV cache holds no {BLOCK_TOKENS} tokens; {-(-held.needs // 1024)} KiB would. "
            "Raise engine_config.memory.kv_cache",
            details={"budget_bytes": cache, "needs_bytes": held.needs},
        )
    if trained is not None and trained <= held.tokens:
        return Context(tokens=trained, reason=f"the {trained} tokens that the model was trained on")
    counted = ", the draft model counted" if facts.get("draft") else ""
    return Context(tokens=held.tokens, reason=f"fitted to {gib(cache)} of KV cache{counted}")


def fitted_tokens(cache: int, per_token: int, family: str) -> int:
    """Whole blocks of tokens that the cache holds; vLLM keeps one block for itself."""
    blocks = cache // per_token // BLOCK_TOKENS - (1 if family == "vllm" else 0)
    return max(blocks, 0) * BLOCK_TOKENS


def kv_bytes_per_token(facts: Mapping[str, Any], document: Deployment, family: str) -> tuple[int | None, str | None]:
    """Cache bytes of one token on one rank, a drafter's included; None and why when that is not known."""
    unknown = "the cache per token cannot be derived: "
    if facts.get("not_derivable"):
        return None, f"{unknown}{facts['not_derivable']}"
    dtype = cache_dtype(facts, document)
    size = DTYPE_BYTES.get(dtype)
    if size is None and (dtype not in _LATENT_BYTES or facts.get("attention") != "latent"):
        return None, f"{unknown}the size of a {dtype} cache is not known"
    own = _rank_bytes(facts, document, dtype)
    if not own:
        return None, f"{unknown}the model's shape is not known"
    drafted = _draft_values(facts, document, family)
    if drafted is None:
        return None, f"{unknown}the draft model's shape is not known"
    return own + drafted * max(size or 1, _draft_size(facts, document)), None


def _rank_bytes(facts: Mapping[str, Any], document: Deployment, dtype: str) -> int:
    """Bytes of one token in the layers of the largest stage, on one of its ranks; 0 when the shape is not known."""
    topology = document.topology
    groups = cache_shape.cache_of(facts)
    if groups is None:
        return shares.cached_values(facts, topology) * DTYPE_BYTES.get(dtype, 2)
    left = shares.stage_layers(facts, topology)
    total = 0
    per_layer = [(_layer_bytes(group, dtype, topology.tensor_parallel), group.layers) for group in groups]
    for amount, layers in sorted(per_layer, reverse=True):  # the stage may hold the layers that keep most
        taken = layers if left is None else min(layers, left)
        left = None if left is None else left - taken
        total += amount * taken
    return total


def _layer_bytes(group: cache_shape.CacheLayers, dtype: str, ranks: int) -> int:
    one = attrs.evolve(group, layers=1)
    if dtype in _LATENT_BYTES:
        return _LATENT_BYTES[dtype] + one.token_bytes(0, ranks)
    return one.token_bytes(DTYPE_BYTES[dtype], ranks)


def cache_dtype(facts: Mapping[str, Any], document: Deployment) -> str:
    """The type of the cache: the document's, else the type that it loads the model in, else the checkpoint's."""
    config = document.engine_config
    words = (config.kv_cache_dtype, config.dtype, facts.get("dtype"))
    return next((str(word) for word in words if word and word != "auto"), "bfloat16")


def _draft_values(facts: Mapping[str, Any], document: Deployment, family: str) -> int | None:
    """Cached values per token of the drafter, which every rank keeps whole; 0 without one, None when not known.

    SGLang itself sizes one of EAGLE or STANDALONE by the target's layers, so the larger of the two is counted.
    """
    draft = facts.get("draft")
    if not draft:
        return 0
    if draft.get("not_derivable") or not draft.get("cache_values"):
        return None
    own = int(draft["cache_values"])
    if family != "sglang":
        return own
    algorithm = (said(arguments(facts, document), "--speculative-algorithm") or "").upper()
    layers, of_target = facts.get("layers"), draft.get("layers")
    if algorithm in ("DFLASH", "DSPARK") or not layers or not of_target:
        return own
    return max(own, -(-int(facts["cache_values"]) * int(of_target) // int(layers)))


def _draft_size(facts: Mapping[str, Any], document: Deployment) -> int:
    """Bytes of one cached value of the drafter where an option says so, else 0: it is as the target's."""
    return DTYPE_BYTES.get(said(arguments(facts, document), "--speculative-draft-kv-cache-dtype") or "", 0)


def _draft_tokens(facts: Mapping[str, Any], document: Deployment) -> int:
    """What vLLM is asked to speculate at a time; 0 without speculation."""
    try:
        config = json.loads(said(arguments(facts, document), "--speculative-config") or "null")
    except (ValueError, RecursionError):
        return 0  # the option policy refuses what is no flat object
    number = config.get("num_speculative_tokens") if isinstance(config, dict) else None
    return number if type(number) is int and 0 < number < 1024 else 0


def _hybrid(facts: Mapping[str, Any], document: Deployment) -> vllm_blocks.Hybrid | None:
    """What vLLM's pool holds of a gated-delta-net hybrid; None for another one, or beside a drafter's own layers."""
    groups, states = cache_shape.cache_of(facts), facts.get("states")
    if not groups or not states or not facts.get("state_slot_values") or facts.get("draft"):
        return None
    if any(group.window is not None for group in groups):
        return None
    args, ranks = arguments(facts, document), document.topology.tensor_parallel
    kernel = DTYPE_BYTES.get(document.engine_config.dtype or "", DTYPE_BYTES.get(str(facts.get("dtype")), 2))
    recurrent = said(args, "--mamba-ssm-cache-dtype") or str(facts.get("state_dtype") or "float32")
    convolution = int(states["convolution"]) * kernel * (1 + _draft_tokens(facts, document))
    temporal = int(states["temporal"]) * DTYPE_BYTES.get(recurrent, 4)
    dtype = cache_dtype(facts, document)
    return vllm_blocks.Hybrid(
        attention_layers=sum(group.layers for group in groups),
        token_bytes=max(_layer_bytes(group, dtype, ranks) for group in groups),
        state_layers=int(states["layers"]),
        state_bytes=-(-(convolution + temporal) // ranks),
        latent=any(group.attention is cache_shape.Attention.LATENT for group in groups),
    )
