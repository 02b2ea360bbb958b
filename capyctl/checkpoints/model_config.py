"""What `config.json` says about a model's shape, as far as sizing needs it. Untrusted input, read tolerantly.

A file that is no JSON object is refused; a description that does not add up only leaves the cache unsized,
with the reason. Multimodal models keep the language model's shape in a block of its own.

Source: memory 5.10, 6, 6.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS_MAX = 4096
_COUNT_MAX = 1 << 31
_TEXT_BLOCKS = ("text_config", "llm_config", "language_config", "language_model_config")

# Bytes of one cached value, by the words that documents and checkpoints use.
DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4, "bf16": 2, "fp16": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1,
}  # fmt: skip


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of a model, JSON-able.

    Returns: `model_type`, `architectures`, `quantization` (the checkpoint's own, or None), `dtype`,
      `context_trained`, `layers`, `hidden_size`, `heads`, `kv_heads`, `attention` (one of `full`, `sliding`,
      `latent`, `hybrid`, or None when it cannot be read), `cache_values` (cached values per token over all
      layers that keep a cache), `state_slot_values` (see `_delta_net`), `not_derivable` (None, or why).
    """
    text = _text(config)
    layers = _count(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _count(text, "num_attention_heads", "n_head")
    kv_heads = _count(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    hidden = _count(text, "hidden_size", "n_embd", "d_model")
    architectures = config.get("architectures")
    names = [str(name)[:128] for name in architectures[:4]] if isinstance(architectures, list) else []
    shape: dict[str, Any] = {
        "model_type": _word(config, "model_type") or "",
        "architectures": names,
        "quantization": _quantization(config, text),
        "dtype": _word(text, "dtype", "torch_dtype") or _word(config, "dtype", "torch_dtype"),
        "context_trained": _count(text, "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"),
        "layers": layers,
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
    }
    return shape | _cache(text, layers, heads, kv_heads, hidden)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block that describes the language model."""
    for place in (config, config.get("thinker_config")):
        if not isinstance(place, Mapping):
            continue
        for name in _TEXT_BLOCKS:
            block = place.get(name)
            if isinstance(block, Mapping) and _count(block, "num_hidden_layers", "n_layer", "num_layers"):
                return block
    return config


def _cache(
    text: Mapping[str, Any], layers: int | None, heads: int | None, kv_heads: int | None, hidden: int | None
) -> dict[str, Any]:
    blank: dict[str, Any] = {"attention": None, "cache_values": 0, "state_slot_values": None}
    if not layers or layers > LAYERS_MAX:
        return {**blank, "not_derivable": "config.json does not say how many layers the model has"}
    rank, rope = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
    if rank and rope:
        if _count(text, "index_head_dim"):
            return {**blank, "attention": "latent", "not_derivable": "the model has an attention indexer"}
        latent = {"attention": "latent", "cache_values": layers * (rank + rope), "state_slot_values": None}
        return {**latent, "not_derivable": None}
    length = _count(text, "head_dim") or (hidden // heads if hidden and heads else 0)
    value = _count(text, "v_head_dim") or length
    if not kv_heads or not length or not value:
        return {**blank, "not_derivable": "config.json does not describe the model's attention"}
    kinds = _layer_kinds(text, layers)
    per_layer = kv_heads * (length + value)
    if kinds is None:
        return {**blank, "attention": "hybrid", "not_derivable": "the model has recurrent layers of an unknown kind"}
    full, sliding, linear = kinds
    if linear:
        slot = _delta_net(text, linear)
        known = {"attention": "hybrid", "cache_values": (full + sliding) * per_layer, "state_slot_values": slot}
        return {**known, "not_derivable": None if slot else "the model has recurrent layers of an unknown kind"}
    # A sliding window bounds what a long request keeps; counting its layers as full ones never counts too little.
    kind = "sliding" if sliding else "full"
    return {
        "attention": kind,
        "cache_values": layers * per_layer,
        "state_slot_values": None,
        "not_derivable": None,
    }


def _layer_kinds(text: Mapping[str, Any], layers: int) -> tuple[int, int, int] | None:
    """(full attention, sliding, linear) layers; None when something recurrent is said in another way."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        words = [str(kind) for kind in kinds[:layers]]
        linear = sum(word == "linear_attention" for word in words)
        sliding = sum("sliding" in word or "chunked" in word for word in words)
        full = sum(word in ("full_attention", "attention") for word in words)
        return (full, sliding, linear) if full + sliding + linear == layers else None
    interval = _count(text, "full_attention_interval")
    if interval and _count(text, "linear_num_value_heads"):
        full = layers // interval
        return full, 0, layers - full
    recurrent = ("ssm_state_size", "mamba_d_state", "mamba_num_heads", "mamba_d_conv", "ssm_cfg", "state_size",
                 "hybrid_override_pattern", "layers_block_type", "attn_layer_indices", "linear_attn_config",
                 "attn_type_list", "rwkv", "lightning_attention")  # fmt: skip
    if any(text.get(name) for name in recurrent):
        return None
    window = _count(text, "sliding_window")
    used = text.get("use_sliding_window")
    return (0, layers, 0) if window and used is not False else (layers, 0, 0)


def _delta_net(text: Mapping[str, Any], linear: int) -> list[int] | None:
    """[convolution values, temporal values] that one request keeps over all gated-delta-net layers, or None.

    The two are stored in types of their own (memory 5.10).
    """
    key_heads, value_heads = _count(text, "linear_num_key_heads"), _count(text, "linear_num_value_heads")
    key, value = _count(text, "linear_key_head_dim"), _count(text, "linear_value_head_dim")
    kernel = _count(text, "linear_conv_kernel_dim")
    if not key_heads or not value_heads or not key or not value or not kernel:
        return None
    convolution = (kernel - 1) * (2 * key_heads * key + value_heads * value)
    return [linear * convolution, linear * value_heads * key * value]


def _quantization(*blocks: Mapping[str, Any]) -> str | None:
    for block in blocks:
        said = block.get("quantization_config") or block.get("compression_config")
        if isinstance(said, Mapping):
            method = _word(said, "quant_method") or "unknown"
            algorithm = _word(said, "quant_algo")
            return f"{method} {algorithm}" if algorithm else method
    return None


def _count(block: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        number = block.get(name)
        if type(number) is int and 0 < number < _COUNT_MAX:
            return number
    return None


def _word(block: Mapping[str, Any], *names: str) -> str | None:
    for name in names:
        word = block.get(name)
        if isinstance(word, str) and word and len(word) <= 128 and word.isprintable():
            return word
    return None
