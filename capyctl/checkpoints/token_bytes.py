"""Cache bytes of one token of a model in safetensors files, on one rank: its layers, and those that draft. Pure.

Source: memory 5.4, 6, 6.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from capyctl.checkpoints import cache_shape, shares, vllm_blocks
from capyctl.checkpoints.arguments import arguments, counted, said
from capyctl.checkpoints.model_config import DTYPE_BYTES
from capyctl.documents.deployment import Deployment

_LATENT_BYTES: Mapping[str, int] = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""vLLM's own layouts of a latent cache: bytes of one token in one layer."""


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
    drafted = draft_values(facts, document, family)
    if drafted is None:
        return None, f"{unknown}the draft model's shape is not known"
    heads = own_heads_bytes(facts, document, family, dtype)
    return own + heads + drafted * max(size or 1, draft_size(facts, document)), None


def _rank_bytes(facts: Mapping[str, Any], document: Deployment, dtype: str) -> int:
    """Bytes of one token in the layers of the largest stage, on one of its ranks; 0 when the shape is not known."""
    topology = document.topology
    groups = cache_shape.cache_of(facts)
    if groups is None:
        return shares.cached_values(facts, topology) * DTYPE_BYTES.get(dtype, 2)
    left = shares.stage_layers(facts, topology)
    total = 0
    per_layer = [(layer_bytes(group, dtype, topology.tensor_parallel), group.layers) for group in groups]
    for amount, layers in sorted(per_layer, reverse=True):  # the stage may hold the layers that keep most
        taken = layers if left is None else min(layers, left)
        left = None if left is None else left - taken
        total += amount * taken
    return total


def own_heads_bytes(facts: Mapping[str, Any], document: Deployment, family: str, dtype: str) -> int:
    """Bytes of one token in the heads for speculation inside the checkpoint, where they are put to use.

    Each is a layer with a cache of its own, like the largest of the others, which both engines count.
    """
    heads, groups = facts.get("mtp_layers"), cache_shape.cache_of(facts)
    if not heads or not groups or facts.get("draft") or not _uses_own_heads(facts, document, family):
        return 0
    return int(heads) * max(layer_bytes(group, dtype, document.topology.tensor_parallel) for group in groups)


def _uses_own_heads(facts: Mapping[str, Any], document: Deployment, family: str) -> bool:
    args = arguments(facts, document)
    if family == "sglang":
        named = said(args, "--speculative-draft-model-path") or said(args, "--speculative-draft-model")
        return not named and (said(args, "--speculative-algorithm") or "").upper() in ("NEXTN", "EAGLE")
    if family != "vllm":
        return False
    method = speculation(facts, document).get("method") or said(args, "--spec-method") or ""
    named = speculation(facts, document).get("model") or said(args, "--spec-model")
    return not named and isinstance(method, str) and method.lower().endswith("mtp")


def layer_bytes(group: cache_shape.CacheLayers, dtype: str, ranks: int) -> int:
    one = attrs.evolve(group, layers=1)
    if dtype in _LATENT_BYTES:
        return _LATENT_BYTES[dtype] + one.token_bytes(0, ranks)
    return one.token_bytes(DTYPE_BYTES[dtype], ranks)


def cache_dtype(facts: Mapping[str, Any], document: Deployment) -> str:
    """The type of the cache: the document's, else the type that it loads the model in, else the checkpoint's."""
    config = document.engine_config
    stated = config.kv_cache_dtype
    if said(arguments(facts, document), "--kv-cache-dtype-skip-layers") is not None:
        stated = None  # the layers that are left out keep the type of the model: counted for all, never too little
    words = (stated, config.dtype, facts.get("dtype"))
    return next((str(word) for word in words if word and word != "auto"), "bfloat16")


def least_dtype(facts: Mapping[str, Any], document: Deployment) -> str:
    """The narrowest type that the cache may have: the checkpoint may ask for one, and nothing loads in float32."""
    config = document.engine_config
    if config.kv_cache_dtype not in (None, "auto"):
        word, latent = str(config.kv_cache_dtype), facts.get("attention") == "latent"
        return word if word in DTYPE_BYTES or (latent and word in _LATENT_BYTES) else "fp8"
    if facts.get("quantized_cache") or any(group.index for group in cache_shape.cache_of(facts) or ()):
        return "fp8"
    stated = config.dtype not in (None, "auto")
    return cache_dtype(facts, document) if stated or facts.get("dtype") not in ("float32", "float") else "bfloat16"


def draft_values(facts: Mapping[str, Any], document: Deployment, family: str) -> int | None:
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


def draft_size(facts: Mapping[str, Any], document: Deployment) -> int:
    """Bytes of one cached value of the drafter where an option says so, else 0: it is as the target's."""
    return DTYPE_BYTES.get(said(arguments(facts, document), "--speculative-draft-kv-cache-dtype") or "", 0)


def speculation(facts: Mapping[str, Any], document: Deployment) -> Mapping[str, Any]:
    """What vLLM is told of speculation; empty without it."""
    try:
        config = json.loads(said(arguments(facts, document), "--speculative-config") or "null")
    except (ValueError, RecursionError):
        return {}  # the option policy refuses what is no flat object
    return config if isinstance(config, dict) else {}


def draft_tokens(facts: Mapping[str, Any], document: Deployment) -> int:
    """What vLLM is asked to speculate at a time; 0 without speculation."""
    number = speculation(facts, document).get("num_speculative_tokens")
    if number is None:
        number = counted(arguments(facts, document), "--spec-tokens")
    return number if type(number) is int and 0 < number < 1024 else 0


def hybrid_shape(facts: Mapping[str, Any], document: Deployment, dtype: str) -> vllm_blocks.Hybrid | None:
    """What vLLM's pool holds of a gated-delta-net hybrid; None for another one, or beside a drafter's own layers."""
    groups, states = cache_shape.cache_of(facts), facts.get("states")
    if not groups or not states or not facts.get("state_slot_values") or facts.get("draft"):
        return None
    if any(group.window is not None for group in groups):
        return None
    args, ranks = arguments(facts, document), document.topology.tensor_parallel
    kernel = DTYPE_BYTES.get(document.engine_config.dtype or "", DTYPE_BYTES.get(str(facts.get("dtype")), 2))
    recurrent = said(args, "--mamba-ssm-cache-dtype") or str(facts.get("state_dtype") or "float32")
    convolution = int(states["convolution"]) * kernel * (1 + draft_tokens(facts, document))
    temporal = int(states["temporal"]) * DTYPE_BYTES.get(recurrent, 4)
    heads = int(facts.get("mtp_layers") or 0) if own_heads_bytes(facts, document, "vllm", dtype) else 0
    return vllm_blocks.Hybrid(
        attention_layers=sum(group.layers for group in groups) + heads,
        token_bytes=max(layer_bytes(group, dtype, ranks) for group in groups),
        state_layers=int(states["layers"]),
        state_bytes=-(-(convolution + temporal) // ranks),
        latent=any(group.attention is cache_shape.Attention.LATENT for group in groups),
    )
