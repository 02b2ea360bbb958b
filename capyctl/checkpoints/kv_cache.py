"""How much cache llama.cpp allocates per token, and which models or options make that unknowable.

The engine allocates the whole cache at start: every slot's share of the context, padded to 256 tokens,
in every layer that keeps one.
Source: memory 5.12; engines 9.1, 9.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capyctl.errors import Refusal

CONTEXT_STEP = 256
DEFAULT_TYPE = "f16"

# Values per block and bytes per block of each cache type that llama.cpp takes.
TYPES: Mapping[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}

# Options that move weights or cache elsewhere, lock them, or add a second model: any of these spellings,
# and the value that matters (None: whatever the value is).
_UNACCOUNTED: tuple[tuple[frozenset[str], str | None, str], ...] = (
    (frozenset({"--override-tensor", "-ot"}), None, "--override-tensor"),
    (frozenset({"--cpu-moe", "-cmoe"}), None, "--cpu-moe"),
    (frozenset({"--n-cpu-moe", "-ncmoe"}), None, "--n-cpu-moe"),
    (frozenset({"--n-cpu-ffn", "-ncffn"}), None, "--n-cpu-ffn"),
    (frozenset({"--no-kv-offload", "-nkvo"}), None, "--no-kv-offload"),
    (frozenset({"--load-mode", "-lm"}), "mlock", "--load-mode with mlock"),
    (frozenset({"--mlock"}), None, "--mlock"),
    (frozenset({"--spec-type"}), "draft", "--spec-type draft-…"),
    (frozenset({"--model-draft", "--spec-draft-model", "-md"}), None, "--model-draft"),
)


def pad(tokens: int) -> int:
    """A slot's context as the engine allocates it: up to the next 256."""
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP


def bytes_per_token(facts: Mapping[str, Any], cache_type: str, *, flash_attention: bool) -> int:
    """Cache bytes of one token of one slot, over all layers.

    Args:
      facts: as `gguf_facts` gives them, with `not_derivable` None.
      flash_attention: whether it is certainly on. Else V is transposed and padded to its widest layer.
    Raises: Refusal `invalid_config` for a quantised cache whose blocks do not divide the heads.
    """
    values, size = TYPES[cache_type]
    key_length, value_length = int(facts["key_length"]), int(facts["value_length"])
    for what, length in (("key", key_length), ("value", value_length)):
        if length % values:
            raise Refusal(
                "invalid_config",
                f"engine_config.kv_cache_dtype: {cache_type} packs {values} values; "
                f"this model's {what} heads have {length}",
            )
    heads = [int(number) for number in facts["kv_heads"]]
    widest = max(heads)
    # A quantised V is possible with flash attention only, so it is never padded.
    padded = not flash_attention and values == 1
    return sum((h * key_length + (widest if padded else h) * value_length) // values * size for h in heads)


def unaccounted(facts: Mapping[str, Any], gpu_layers: int | str, args: Sequence[str]) -> str | None:
    """Why the cache and the weights cannot be derived from the checkpoint, or None.

    Args:
      args: host-fixed and extra arguments, in the order the engine gets them.
    """
    if facts.get("not_derivable"):
        return f"the model has {facts['not_derivable']}"
    if gpu_layers != "all":
        return f"llamacpp.n_gpu_layers is {gpu_layers}, not all"
    for index, word in enumerate(args):
        name = word.partition("=")[0].replace("_", "-")
        following = args[index + 1] if index + 1 < len(args) else ""
        for names, marker, shown in _UNACCOUNTED:
            if name in names and (marker is None or marker in following):
                return f"{shown} is given"
    return None


def flash_attention_on(cache_type: str, args: Sequence[str]) -> bool:
    """Whether flash attention is certain: asked for, or forced by a quantised V."""
    asked = [
        args[index + 1] for index, word in enumerate(args[:-1]) if word.replace("_", "-") in ("--flash-attn", "-fa")
    ]
    if asked and asked[-1] == "off" and TYPES[cache_type][0] > 1:
        raise Refusal(
            "invalid_config",
            f"engine_config.kv_cache_dtype: {cache_type} needs flash attention, and --flash-attn off is given",
        )
    return TYPES[cache_type][0] > 1 or bool(asked and asked[-1] in ("on", "1", "true", "enabled"))
