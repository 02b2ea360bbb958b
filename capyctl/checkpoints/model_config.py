"""What `config.json` says about a model's shape, as far as sizing needs it. Untrusted input, read tolerantly.

A file that is no JSON object is refused; a description that does not add up only leaves the cache unsized,
with the reason. Multimodal models keep the language model's shape in a block of its own.

Source: memory 5.10, 6, 6.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capyctl.checkpoints.attention import Caches, caches, kv_heads
from capyctl.checkpoints.cache_shape import recorded, token_bytes
from capyctl.checkpoints.config_values import Block, block_of, count, dimension, tokens, word
from capyctl.checkpoints.family_defaults import with_defaults
from capyctl.checkpoints.longest_context import limits_of
from capyctl.checkpoints.quantization import quantization_of
from capyctl.checkpoints.recurrent import Recurrence

_TEXT_BLOCKS = ("text_config", "llm_config", "language_config", "language_model_config")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_transformer_layers")
_CONTEXT = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "model_max_length",
)  # fmt: skip

# Bytes of one cached value, by the words that documents and checkpoints use.
DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4, "bf16": 2, "fp16": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1,
}  # fmt: skip


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of a model, JSON-able.

    Returns: `model_type`, `architectures`, `quantization` (the checkpoint's own, or None), `quantized_bits`,
      `quantized_cache`, `dtype`, `context_trained`, `context_limits` (see `longest_context`), `layers`, `mtp_layers`
      (heads for speculation inside the checkpoint), `tied` (whether the output head is the embedding; None when it
      does not say), `hidden_size`, `heads`, `kv_heads`, and what its layers keep:
      `attention` (`full`, `sliding`, `latent`, `hybrid`, or None when it cannot be read), `cache` (groups of layers,
      see `cache_shape`), `cache_values` (cached values per token over all of them), `cache_fixed_bytes` (what each
      token costs beside them, whatever the type of a value), `states` (see `recurrent`), `state_slot_values`
      (convolution and temporal values of one request over all gated-delta-net layers, else None), `state_dtype`,
      `not_derivable` (None, or why a context cannot be fitted).
    """
    text = with_defaults(_text(config))
    layers = dimension(text, *_LAYERS)
    architectures = config.get("architectures")
    listed = architectures[:4] if isinstance(architectures, list) else []
    names = [name for one in listed if (name := word({"": one}, "")) is not None]
    packed = quantization_of(config, text)
    shape: dict[str, Any] = {
        "model_type": word(config, "model_type") or "",
        "architectures": names,
        "quantization": packed.words if packed is not None else None,
        "quantized_bits": packed.bits if packed is not None else 0,
        "quantized_cache": packed.cache if packed is not None else None,
        "dtype": word(text, "dtype", "torch_dtype") or word(config, "dtype", "torch_dtype"),
        "context_trained": tokens(text, *_CONTEXT),
        "context_limits": limits_of(text),
        "layers": layers,
        "mtp_layers": count(text, "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
        "tied": _tied(config, text),
        "hidden_size": dimension(text, "hidden_size", "n_embd", "d_model"),
        "heads": dimension(text, "num_attention_heads", "n_head", "num_heads", "n_heads"),
        "kv_heads": kv_heads(text),
    }
    return shape | _kept(caches(config, text, layers), text)


def _text(config: Block) -> Block:
    """The block that describes the language model."""
    for place in (config, block_of(config, "thinker_config")):
        for name in _TEXT_BLOCKS:
            block = block_of(place, name)
            if dimension(block, *_LAYERS):
                return block
    return config


def _tied(config: Block, text: Block) -> bool | None:
    for block in (text, config):
        said = block.get("tie_word_embeddings")
        if isinstance(said, bool):
            return said
    return None


def _kept(found: Caches, text: Block) -> dict[str, Any]:
    states = found.states
    slot = None
    if states is not None and states.recurrence is Recurrence.DELTA_NET:
        slot = [states.layers * states.convolution, states.layers * states.temporal]
    return {
        "attention": found.kind,
        "cache": recorded(found.groups),
        "cache_values": sum(group.values for group in found.groups),
        "cache_fixed_bytes": token_bytes(found.groups, 0),
        "states": states.recorded() if states is not None else None,
        "state_slot_values": slot,
        "state_dtype": word(text, "mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
        "not_derivable": found.why_not,
    }
