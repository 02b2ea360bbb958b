"""How a checkpoint's own weights are packed: the words for it, and how many weights a stored value holds.

Source: memory 5.15; engines 6.1, 7.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from capyctl.checkpoints.config_values import Block, block_of, count, word
from capyctl.checkpoints.safetensors import BITS, Tensor

# What stands beside packed weights and is no weight itself.
_BESIDE = frozenset({
    "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", "scales", "qzeros", "g_idx", "weight_g_idx",
    "weight_zero_point", "input_zero_point", "weight_shape", "weight_global_scale", "input_global_scale", "k_scale",
    "v_scale", "q_scale", "output_scale", "scale", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB",
    "weight_format", "inv_freq", "masked_bias",
})  # fmt: skip
_PACKED = frozenset({"qweight", "weight_packed"})
_INTEGERS = frozenset({"I8", "U8", "I32", "U32"})


@attrs.frozen(kw_only=True)
class Quantization:
    """What `config.json` says. `bits` of one packed weight; 0 when it does not say."""

    method: str
    algorithm: str | None = None
    bits: int = 0
    cache: str | None = None

    @property
    def words(self) -> str:
        return f"{self.method} {self.algorithm}" if self.algorithm else self.method


def quantization_of(*blocks: Block) -> Quantization | None:
    """The quantization that the first of these blocks states, or None."""
    for block in blocks:
        for name in ("quantization_config", "compression_config"):
            said = block_of(block, name)
            if said:
                return _read(said)
    return None


def _read(said: Block) -> Quantization:
    method = word(said, "quant_method") or ("modelopt" if word(said, "quant_algo") else "unknown")
    weights = _scheme(said)
    bits = count(said, "bits", "w_bit", "weight_bits") or count(weights, "num_bits")
    if said.get("load_in_4bit") is True or method == "mxfp4" or "FP4" in (word(said, "quant_algo") or "").upper():
        bits = 4
    elif said.get("load_in_8bit") is True or method == "fp8":
        bits = 8
    stored = block_of(said, "kv_cache_scheme")
    cache = word(said, "kv_cache_quant_algo") or (f"{count(stored, 'num_bits')} bits" if stored else None)
    return Quantization(method=method, algorithm=word(said, "quant_algo"), bits=bits if bits <= 64 else 0, cache=cache)


def _scheme(said: Block) -> Block:
    """How weights are stored by the first group of a compressed-tensors description."""
    groups = block_of(said, "config_groups")
    first = next(iter(groups.values()), None)
    return block_of(first, "weights") if isinstance(first, Mapping) else {}


def parameters(tensors: Iterable[tuple[str, Tensor]], bits: int) -> int | None:
    """Weights that these tensors hold, unpacked; None when they are packed and nobody says how.

    Scales, zero points and tables beside the weights are not counted.
    """
    whole = 0
    for name, tensor in tensors:
        last = name.rpartition(".")[2]
        # bitsandbytes keeps its tables under the weight's name: `q_proj.weight.absmax`.
        if last in _BESIDE or last.endswith("_scales") or ".weight." in name:
            continue
        elements = tensor.size_bytes * 8 // BITS[tensor.dtype]
        packed = last in _PACKED or last.endswith("_blocks") or (tensor.dtype == "U8" and last.endswith("weight"))
        if packed and tensor.dtype in _INTEGERS:
            width = BITS[tensor.dtype]
            if bits not in range(1, width + 1):
                return None
            elements = elements * width // bits
        whole += elements
    return whole
