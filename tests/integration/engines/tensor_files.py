"""Small safetensors checkpoints, written without any library; large ones are holes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def header(tensors: Mapping[str, tuple[str, list[int], int]], **more: Any) -> bytes:
    """The header of tensors laid one after another: name to (dtype, shape, bytes)."""
    entries: dict[str, Any] = dict(more)
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def write_file(path: Path, tensors: Mapping[str, tuple[str, list[int], int]], **more: Any) -> Path:
    """A file whose tensor data is a hole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = header(tensors, **more)
    with open(path, "wb") as stream:
        stream.write(text)
        stream.truncate(len(text) + sum(size for _, _, size in tensors.values()))
    return path


def write_checkpoint(directory: Path, config: Mapping[str, Any] = QWEN, weight_bytes: int = 4096) -> Path:
    """One weight file with one tensor, `config.json` and a tokenizer."""
    write_file(directory / "model.safetensors", {"w": ("U8", [weight_bytes], weight_bytes)})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    return directory
