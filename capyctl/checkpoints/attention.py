"""The caches of a model by its `config.json`: grouped heads, latent attention, windows, and what is not modelled.

Every way here is one that the engines' own code reads the same way; what they store in a manner of their own is
named as the reason why nothing is derived.

Source: memory 6, 6.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from capyctl.checkpoints.cache_shape import Attention, CacheLayers
from capyctl.checkpoints.config_values import LAYERS_MAX, Block, block_of, count, dimension, numbers, tokens, word
from capyctl.checkpoints.layer_kinds import Kind, layer_kinds
from capyctl.checkpoints.recurrent import Recurrence, StateLayers, state_layers

# Families whose latent attention engines cache compressed. Others expand it into heads first, each engine its own way.
_LATENT = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_mtp", "kimi_k2", "kimi_linear", "glm4_moe_lite",
    "glm_moe_dsa",
})  # fmt: skip
_ENCODERS = frozenset({
    "bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "new", "electra", "deberta-v2", "distilbert",
    "eurobert", "neobert", "siglip", "clip", "vit",
})  # fmt: skip
_DIFFUSION = frozenset({"llada", "llada2_moe", "dream", "sdar", "sdar_moe", "rnd1"})
# Names that change what is cached in a way that is not modelled, and the words for it.
_UNMODELLED = (
    ("compress_ratios", "attention that compresses its cache by layer"),
    ("compress_rates", "attention that compresses its cache by layer"),
    ("use_cla", "layers that share a cache (CLA)"),
    ("sparse_attention_config", "sparse attention of a kind of its own"),
    ("attention_other_setting", "layers with other heads than the rest"),
    ("mb_per_layer", "layers that share one cache beside recurrent ones"),
    ("hybrid_layer_ids", "an attention block that several layers share"),
    ("cross_attention_layers", "layers that attend to images"),
)


@attrs.frozen(kw_only=True)
class Caches:
    """What a model keeps. `why_not` says why the cache of a context cannot be derived, None when it can.

    `kind` is `full`, `sliding`, `latent` or `hybrid`, None when it cannot be read. `groups` may be known even
    where `why_not` stands: then it is the states beside the caches that are not sized.
    """

    kind: str | None = None
    groups: tuple[CacheLayers, ...] = ()
    states: StateLayers | None = None
    why_not: str | None = None


def caches(config: Block, text: Block, layers: int | None) -> Caches:
    """Read what the layers of a model keep. `text` is the language model's own block of `config`."""
    if (other := _no_decoder(config, text)) is not None:
        return Caches(why_not=other)
    if not layers or layers > LAYERS_MAX:
        return Caches(why_not="config.json does not say how many layers the model has")
    for name, words in _UNMODELLED:
        if text.get(name):
            return Caches(why_not=f"the model has {words}")
    kinds = layer_kinds(text, layers)
    if kinds is None:
        return Caches(kind="hybrid", why_not="the model has recurrent layers of an unknown kind")
    kept = kinds[: layers - _shared(text, layers)]
    recurrent = sum(kind in (Kind.RECURRENT, Kind.BOTH) for kind in kinds)
    attending = sum(kind not in (Kind.RECURRENT, Kind.NOTHING) for kind in kept)
    if not attending and not recurrent:
        return Caches(why_not="config.json names no layer that keeps anything")
    states = state_layers(text, recurrent) if recurrent else None
    latent = dimension(text, "kv_lora_rank") is not None
    if not latent and any(text.get(name) for name in ("index_head_dim", "indexer_head_dim")):
        return Caches(states=states, why_not="the model has an indexer beside its heads")
    groups = (_latent(text, attending) if latent else _grouped(text, kept)) if attending else ()
    if groups is None:
        return Caches(kind="hybrid" if recurrent else None, states=states, why_not=_undescribed(text, latent))
    if states is not None:
        return Caches(kind="hybrid", groups=groups, states=states, why_not=_unsized(states, latent))
    windows = any(group.window is not None for group in groups)
    return Caches(kind="latent" if latent else "sliding" if windows else "full", groups=groups)


def _no_decoder(config: Block, text: Block) -> str | None:
    family = word(config, "model_type") or ""
    if config.get("is_encoder_decoder") is True or text.get("is_encoder_decoder") is True:
        return "the model has an encoder whose output every layer keeps"
    if family in _ENCODERS or family.endswith("_vision_model"):
        return "the model is an encoder, which keeps no cache"
    if family in _DIFFUSION:
        return "the model writes by diffusion, which keeps no causal cache"
    return None


def _undescribed(text: Block, latent: bool) -> str:
    if latent and word(text, "model_type") not in _LATENT:
        return "the model has latent attention that engines store in ways of their own"
    return "config.json does not describe the model's attention"


def _unsized(states: StateLayers, latent: bool) -> str | None:
    if states.recurrence is Recurrence.DELTA_NET and not latent:
        return None
    if states.recurrence is Recurrence.UNKNOWN:
        return "the model has recurrent layers of an unknown kind"
    return f"the model has {states.recurrence.value} layers, whose state per request engines size themselves"


def _shared(text: Block, layers: int) -> int:
    """The last layers, which read the cache of one before them."""
    return min(count(text, "num_kv_shared_layers"), layers)


def _latent(text: Block, layers: int) -> tuple[CacheLayers, ...] | None:
    rank, rotated = dimension(text, "kv_lora_rank"), dimension(text, "qk_rope_head_dim")
    if not rank or not rotated or word(text, "model_type") not in _LATENT:
        return None
    index = count(text, "index_head_dim")
    return (CacheLayers(attention=Attention.LATENT, layers=layers, heads=1, key=rank, value=rotated, index=index),)


def _grouped(text: Block, kinds: Sequence[Kind]) -> tuple[CacheLayers, ...] | None:
    """Layers by kind and number of heads; None when the heads or their length are not described."""
    heads = _heads_by_layer(text, kinds)
    if heads is None:
        return None
    found: Counter[tuple[Attention, int, int, int, int | None]] = Counter()
    for kind, of_layer in zip(kinds, heads, strict=True):
        if kind in (Kind.RECURRENT, Kind.NOTHING) or of_layer == 0:
            continue
        shape = _lengths(text, kind)
        if shape is None:
            return None
        attention, window = _window(text, kind)
        found[(attention, of_layer, *shape, window)] += 1
    if not found:
        return None
    return tuple(
        CacheLayers(attention=attention, layers=layers, heads=number, key=key, value=value, window=window)
        for (attention, number, key, value, window), layers in found.items()
    )


def _window(text: Block, kind: Kind) -> tuple[Attention, int | None]:
    if kind is Kind.SLIDING and (window := tokens(text, "sliding_window", "sliding_window_size")) is not None:
        return Attention.SLIDING, window
    if kind is Kind.CHUNKED and (piece := tokens(text, "attention_chunk_size")) is not None:
        return Attention.CHUNKED, piece
    return Attention.FULL, None


def _heads_by_layer(text: Block, kinds: Sequence[Kind]) -> list[int] | None:
    """KV heads of each layer, 0 for one without attention."""
    layers = len(kinds)
    if isinstance(text.get("block_configs"), list):
        return _heads_of_blocks(text, layers)
    for name in ("num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer"):
        if isinstance(text.get(name), list):
            return numbers(text, name, layers)
    plain = kv_heads(text)
    if plain is None:
        return None
    sliding = dimension(text, "swa_num_key_value_heads") or plain
    full = dimension(text, "num_global_key_value_heads") or plain
    by_kind = {Kind.SLIDING: sliding, Kind.FULL: full}
    return [by_kind.get(kind, plain) for kind in kinds]


def kv_heads(text: Block) -> int | None:
    """The number of KV heads of an ordinary layer."""
    if text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
        return 1
    attention = block_of(text, "attn_config")
    heads = dimension(text, "num_attention_heads", "n_head", "num_heads", "n_heads")
    return (
        dimension(text, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
        or dimension(attention, "kv_n_heads")
        or heads
    )


def _heads_of_blocks(text: Block, layers: int) -> list[int] | None:
    """Blocks of a searched architecture: some without attention, some with other groups."""
    blocks, heads = text.get("block_configs"), dimension(text, "num_attention_heads")
    if not isinstance(blocks, list) or len(blocks) != layers or heads is None:
        return None
    found = []
    for block in blocks:
        attention = block_of(block, "attention") if isinstance(block, dict) else {}
        if attention.get("no_op") is True or attention.get("replace_with_linear") is True:
            found.append(0)
            continue
        own, group = dimension(attention, "num_key_value_heads"), dimension(attention, "n_heads_in_group")
        if own is None and (group is None or heads % group):
            return None
        found.append(own if own is not None else heads // (group or heads))
    return found


def _lengths(text: Block, kind: Kind) -> tuple[int, int] | None:
    """Values of a key and of a value per head."""
    hidden = dimension(text, "hidden_size", "n_embd", "d_model")
    heads = dimension(text, "num_attention_heads", "n_head", "num_heads", "n_heads")
    plain = dimension(text, "head_dim", "attention_head_dim", "kv_channels") or (
        hidden // heads if hidden and heads else 0
    )
    if kind is Kind.FULL and (wide := dimension(text, "global_head_dim")) is not None:
        return wide, wide
    if kind is Kind.SLIDING and (own := dimension(text, "swa_head_dim")) is not None:
        return own, dimension(text, "swa_v_head_dim") or own
    value = dimension(text, "v_head_dim") or plain
    return (plain, value) if plain and value else None
