"""Which layers of a model attend to everything, to a window, or keep a state: one word per layer.

Families say it in ways of their own: a list of words, a pattern of letters, a period, lists of layer numbers.
What nobody here has read about is `None`, never a guess.

Source: memory 6.1.
"""

from __future__ import annotations

import enum
import re

from capyctl.checkpoints.config_values import Block, block_of, dimension, numbers, tokens, word, words


class Kind(enum.Enum):
    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"
    BOTH = "both"  # attention and a state side by side in one layer
    NOTHING = "nothing"  # a layer that is an MLP alone


_WORDS = {
    "full_attention": Kind.FULL, "attention": Kind.FULL, "global": Kind.FULL, "sliding_attention": Kind.SLIDING,
    "sliding_window_attention": Kind.SLIDING, "local": Kind.SLIDING, "chunked_attention": Kind.CHUNKED,
    "linear_attention": Kind.RECURRENT, "mamba": Kind.RECURRENT, "mamba2": Kind.RECURRENT, "conv": Kind.RECURRENT,
    "recurrent": Kind.RECURRENT, "hybrid": Kind.BOTH, "mlp": Kind.NOTHING, "moe": Kind.NOTHING,
}  # fmt: skip
_LETTERS = {"M": Kind.RECURRENT, "*": Kind.FULL, "-": Kind.NOTHING, "E": Kind.NOTHING}
# Said of models with recurrent layers; with none of the ways below to tell which, they are of an unknown kind.
_RECURRENT_SIGNS = (
    "ssm_state_size", "mamba_d_state", "mamba_num_heads", "mamba_d_conv", "ssm_cfg", "state_size", "mb_per_layer",
    "hybrid_override_pattern", "layers_block_type", "attn_layer_indices", "linear_attn_config", "attn_type_list",
    "rwkv", "lightning_attention", "conv_L_cache", "block_types", "mamba_config", "head_size_divisor", "mamba_step",
    "layer_group_size",
)  # fmt: skip
_PURE = frozenset({"mamba", "mamba2", "falcon_mamba"})


def layer_kinds(text: Block, layers: int) -> list[Kind] | None:
    """The kind of each layer, or None when it is said in a way that is not known."""
    for read in (_listed, _pattern, _numbered, _periodic, _pure):
        found = read(text, layers)
        if found is not None:
            return found if len(found) == layers and None not in found else None  # type: ignore[return-value]
    if any(text.get(name) for name in _RECURRENT_SIGNS):
        return None
    return _windows(text, layers)


_Kinds = list[Kind | None] | None


def _listed(text: Block, layers: int) -> _Kinds:
    for name in ("layer_types", "layers_block_type"):
        if text.get(name):
            said = words(text, name, layers)
            return [None] if said is None else [_WORDS.get(one) for one in said]
    return None


def _pattern(text: Block, layers: int) -> _Kinds:
    said = text.get("hybrid_override_pattern")
    if isinstance(said, str) and said:
        return [_LETTERS.get(letter) for letter in said[: layers + 1]]
    if text.get("hybrid_layer_pattern"):  # 1 where the layer has a window
        flags = numbers(text, "hybrid_layer_pattern", layers)
        return [None] if flags is None else [Kind.SLIDING if flag else Kind.FULL for flag in flags]
    if text.get("attn_type_list"):  # 1 where the layer attends, 0 where it carries a state
        flags = numbers(text, "attn_type_list", layers)
        return [None] if flags is None else [Kind.FULL if flag else Kind.RECURRENT for flag in flags]
    return None


def _numbered(text: Block, layers: int) -> _Kinds:
    """Lists of the numbers of those layers that attend."""
    block = block_of(text, "linear_attn_config")
    for place, name, first in (
        (block, "full_attn_layers", 1),
        (text, "attn_layer_indices", 0),
        (text, "full_attn_idxs", 0),
    ):
        said = place.get(name)
        if isinstance(said, list) and said:
            if not all(type(one) is int and first <= one < layers + first for one in said):
                return [None]
            chosen = {one - first for one in said}
            other = Kind.BOTH if word(text, "model_type") == "falcon_h1" else Kind.RECURRENT
            return [Kind.FULL if number in chosen else other for number in range(layers)]
    return None


def _periodic(text: Block, layers: int) -> _Kinds:
    if (period := dimension(text, "attn_layer_period")) is not None:
        offset = text.get("attn_layer_offset", 0)
        if type(offset) is not int or not 0 <= offset < period:
            return [None]
        return [Kind.FULL if number % period == offset else Kind.RECURRENT for number in range(layers)]
    interval = dimension(text, "full_attention_interval")
    if interval is not None and dimension(text, "linear_num_value_heads"):
        return [Kind.RECURRENT if (number + 1) % interval else Kind.FULL for number in range(layers)]
    if word(text, "model_type") == "falcon_h1":
        return [Kind.BOTH] * layers
    return None


def _pure(text: Block, layers: int) -> _Kinds:
    return [Kind.RECURRENT] * layers if word(text, "model_type") in _PURE else None


def _windows(text: Block, layers: int) -> list[Kind] | None:
    """Attention alone: which layers are bounded."""
    if tokens(text, "attention_chunk_size"):
        every = text.get("no_rope_layers")
        if isinstance(every, list) and every:  # 1 where positions are rotated, which are the layers in pieces
            flags = numbers(text, "no_rope_layers", layers)
            return None if flags is None else [Kind.CHUNKED if flag else Kind.FULL for flag in flags]
        interval = dimension(text, "no_rope_layer_interval") or 4
        return [Kind.CHUNKED if (number + 1) % interval else Kind.FULL for number in range(layers)]
    if not tokens(text, "sliding_window") or text.get("use_sliding_window") is False:
        return [Kind.FULL] * layers
    if text.get("use_sliding_window") is True and (first := text.get("max_window_layers")) is not None:
        if type(first) is not int or first < 0:
            return None
        return [Kind.FULL if number < first else Kind.SLIDING for number in range(layers)]
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, str):
        if not re.fullmatch("[LG]{1,64}", pattern):
            return None
        return [Kind.SLIDING if pattern[number % len(pattern)] == "L" else Kind.FULL for number in range(layers)]
    period = dimension(text, "sliding_window_pattern")
    if period is None:
        return [Kind.SLIDING] * layers
    return [Kind.SLIDING if (number + 1) % period else Kind.FULL for number in range(layers)]
