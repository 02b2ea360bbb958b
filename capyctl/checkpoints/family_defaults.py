"""What descriptions leave out because the family's own code has it as a default.

Whoever saves a model inside a multimodal one writes what differs from the defaults alone: a Gemma 3 of 12 billion
does not say how long its heads are, and dividing the hidden size by their number is wrong for it.

Source: memory 5.1; the families' public configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from capyctl.checkpoints.config_values import Block, word

_GEMMA: Final = {"head_dim": 256, "tie_word_embeddings": True}
_WITHOUT_WINDOWS: Final = (
    "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_moe",
)  # fmt: skip
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma": {**_GEMMA, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192},
    "gemma2": {
        **_GEMMA, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
        "sliding_window": 4096, "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        **_GEMMA, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    "gpt_oss": {
        "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "sliding_window": 128, "sliding_window_pattern": 2,
    },
    "qwen3": {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32, "use_sliding_window": False},
    **{name: {"use_sliding_window": False} for name in _WITHOUT_WINDOWS},
    "mistral": {"num_attention_heads": 32, "num_key_value_heads": 8},
    "mixtral": {"num_attention_heads": 32, "num_key_value_heads": 8},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
}  # fmt: skip


_POSITIONS: Final[Mapping[int, tuple[str, ...]]] = {
    1024: ("gpt2",),
    2048: (
        "llama", "phi", "gpt_neox", "opt", "falcon", "olmo", "olmo2", "olmo3", "granite", "granitemoe", "exaone4",
        "deepseek_v2",
    ),
    4096: ("phi3", "stablelm", "starcoder2", "olmoe", "deepseek_v3", "nemotron"),
    8192: ("cohere", "cohere2"),
    32768: (
        "qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text",
        "gemma3n_text", "smollm3",
    ),
    131072: ("mistral", "mixtral", "ministral", "phimoe", "llama4_text", "gemma4_text", "glm", "glm4", "glm4_moe"),
}  # fmt: skip
"""The longest context of families whose descriptions may leave it out, tokens."""
_LENGTH: Final = {family: length for length, families in _POSITIONS.items() for family in families}
_STATED_LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


def with_defaults(text: Block) -> Block:
    """The description with what it leaves out. What it states stays, null included."""
    family = word(text, "model_type") or ""
    found = {**_DEFAULTS.get(family, {}), **text}
    if family in _LENGTH and not any(name in found for name in _STATED_LENGTHS):
        found["max_position_embeddings"] = _LENGTH[family]
    return found
