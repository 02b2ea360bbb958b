"""A real but tiny llama model, written with the reference writer: 0.4 MB of seeded random weights.

Only letters and digits have an output row, so what it answers is text that any client can show.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

EMBEDDING, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 2, 128, 2048


def vocabulary() -> tuple[list[bytes], list[float], list[int]]:
    tokens: list[bytes] = [b"<unk>", b"<s>", b"</s>"]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    tokens += [f"<0x{byte:02X}>".encode() for byte in range(256)]
    types += [gguf.TokenType.BYTE] * 256
    letters = [chr(code).encode() for code in range(128) if chr(code).isalnum()]
    tokens += letters
    types += [gguf.TokenType.NORMAL] * len(letters)
    return tokens, [0.0] * len(tokens), [int(kind) for kind in types]


def write_tiny(path: Path, *, seed: int = 0, architecture: str = "llama", **overrides: int) -> Path:
    """Write the model to `path`. `overrides` replace or add numbers below the architecture's name."""
    draw = np.random.default_rng(seed)
    tokens, scores, types = vocabulary()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name(f"tiny-{seed}")
    numbers = {
        "context_length": CONTEXT,
        "embedding_length": EMBEDDING,
        "block_count": LAYERS,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.dimension_count": EMBEDDING // HEADS,
        **{name.replace("__", "."): value for name, value in overrides.items()},
    }
    for name, value in numbers.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def weight(*shape: int) -> np.ndarray:
        return (draw.standard_normal(shape) * 0.2).astype(np.float32)

    output = weight(len(tokens), EMBEDDING)
    for row, token in enumerate(tokens):
        if not (len(token) == 1 and token.isalnum()):
            output[row] = 0
    writer.add_tensor("token_embd.weight", weight(len(tokens), EMBEDDING))
    writer.add_tensor("output.weight", output)
    writer.add_tensor("output_norm.weight", np.ones(EMBEDDING, np.float32))
    kv = EMBEDDING // HEADS * KV_HEADS
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", np.ones(EMBEDDING, np.float32))
        writer.add_tensor(f"{block}.ffn_norm.weight", np.ones(EMBEDDING, np.float32))
        for name, rows, columns in (
            ("attn_q", EMBEDDING, EMBEDDING),
            ("attn_k", kv, EMBEDDING),
            ("attn_v", kv, EMBEDDING),
            ("attn_output", EMBEDDING, EMBEDDING),
            ("ffn_gate", FEED_FORWARD, EMBEDDING),
            ("ffn_up", FEED_FORWARD, EMBEDDING),
            ("ffn_down", EMBEDDING, FEED_FORWARD),
        ):
            writer.add_tensor(f"{block}.{name}.weight", weight(rows, columns))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
