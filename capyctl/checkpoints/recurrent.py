"""Layers that keep one state per request instead of a cache that grows: how many values, by kind. Pure.

A state has two parts, stored in types of their own: the last inputs of a short convolution, and what the recurrence
carries on. Only the gated delta net is one whose pools we size (SGLang); of the others the size is a fact for
people, and the engine sets its own.

Source: memory 5.10, 6.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from capyctl.checkpoints.config_values import Block, block_of, count, dimension


class Recurrence(enum.Enum):
    DELTA_NET = "gated delta net"
    KIMI_DELTA = "Kimi delta attention"
    MAMBA = "Mamba"
    MAMBA2 = "Mamba-2"
    CONVOLUTION = "short convolution"
    LIGHTNING = "lightning attention"
    UNKNOWN = "recurrent"


@attrs.frozen(kw_only=True)
class StateLayers:
    """Layers of one kind. `convolution` and `temporal` are values of one request in one layer; 0 with `unknown`."""

    recurrence: Recurrence
    layers: int
    convolution: int = 0
    temporal: int = 0

    def recorded(self) -> dict[str, Any]:
        """As a fact, JSON-able."""
        return attrs.asdict(self) | {"recurrence": self.recurrence.value}


def state_layers(text: Block, layers: int) -> StateLayers:
    """What `layers` recurrent layers of this model keep per request; `UNKNOWN` when it is not described fully."""
    for read in (_delta_net, _kimi_delta, _mamba2, _mamba, _convolution, _lightning):
        found = read(text)
        if found is not None:
            recurrence, convolution, temporal = found
            return StateLayers(recurrence=recurrence, layers=layers, convolution=convolution, temporal=temporal)
    return StateLayers(recurrence=Recurrence.UNKNOWN, layers=layers)


_Found = tuple[Recurrence, int, int] | None


def _delta_net(text: Block) -> _Found:
    key_heads, value_heads = dimension(text, "linear_num_key_heads"), dimension(text, "linear_num_value_heads")
    key, value = dimension(text, "linear_key_head_dim"), dimension(text, "linear_value_head_dim")
    kernel = dimension(text, "linear_conv_kernel_dim")
    if not key_heads or not value_heads or not key or not value or not kernel:
        return None
    convolution = (kernel - 1) * (2 * key_heads * key + value_heads * value)
    return Recurrence.DELTA_NET, convolution, value_heads * key * value


def _kimi_delta(text: Block) -> _Found:
    block = block_of(text, "linear_attn_config")
    heads, length = dimension(block, "num_heads"), dimension(block, "head_dim")
    kernel = dimension(block, "short_conv_kernel_size")
    if not heads or not length or not kernel:
        return None
    return Recurrence.KIMI_DELTA, (kernel - 1) * 3 * heads * length, heads * length * length


def _mamba2(text: Block) -> _Found:
    heads = dimension(text, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
    length = dimension(text, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
    state = dimension(text, "ssm_state_size", "mamba_d_state", "mamba_state_dim")
    groups = dimension(text, "n_groups", "mamba_n_groups", "mamba_ngroups")
    kernel = dimension(text, "conv_kernel", "mamba_d_conv", "conv_kernel_size")
    if text.get("model_type") == "mamba2":  # the model without any attention, which has no prefixes
        heads, length = dimension(text, "num_heads"), dimension(text, "head_dim")
        state, groups = dimension(text, "state_size"), dimension(text, "n_groups")
    if not heads or not length or not state or not groups or not kernel:
        return None
    return Recurrence.MAMBA2, (kernel - 1) * (heads * length + 2 * groups * state), heads * length * state


def _mamba(text: Block) -> _Found:
    hidden, kernel = dimension(text, "hidden_size", "d_model"), dimension(text, "mamba_d_conv", "conv_kernel")
    state = dimension(text, "mamba_d_state", "state_size")
    inner = dimension(text, "intermediate_size") if text.get("model_type") in ("mamba", "falcon_mamba") else None
    if inner is None and hidden is not None:
        inner = hidden * count(text, "mamba_expand", "expand")
    if not inner or not kernel or not state or _mentions_mamba2(text):
        return None
    return Recurrence.MAMBA, (kernel - 1) * inner, inner * state


def _mentions_mamba2(text: Block) -> bool:
    return any(text.get(name) for name in ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "mamba_d_head"))


def _convolution(text: Block) -> _Found:
    hidden, length = dimension(text, "hidden_size"), dimension(text, "conv_L_cache")
    return (Recurrence.CONVOLUTION, (length - 1) * hidden, 0) if hidden and length else None


def _lightning(text: Block) -> _Found:
    heads, length = dimension(text, "num_attention_heads"), dimension(text, "head_dim")
    if not heads or not length or not text.get("attn_type_list"):
        return None
    return Recurrence.LIGHTNING, 0, heads * length * length
