"""Sparse checkpoints: valid safetensors headers, config and tokenizer files of a stated size, and no disk blocks.

    write_checkpoint(models / "qwen", weights=14 << 30)         # 14 GiB to look at, some kilobytes on disk

Hashing one reads its zeros: a gigabyte takes about half a second to a second, so tests that deploy one want
it small, and tests of sizing alone may have it as large as they like.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
QWEN3_5: dict[str, Any] = {  # gated delta net: a quarter of the layers keeps a cache
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
    "eos_token_id": 248044,
}
LLAMA: dict[str, Any] = QWEN3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MLA: dict[str, Any] = QWEN3 | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
SLIDING: dict[str, Any] = QWEN3 | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 6,
}  # fmt: skip
GPT_OSS: dict[str, Any] = SLIDING | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
JSON_TOOLS = '{% if tools %}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>{% endif %}'
XML_TOOLS = "{% if tools %}<tool_call>\n<function=name>\n</function>\n</tool_call>{% endif %}"
THINKING = "{% if enable_thinking %}<think>\n{% endif %}"


def write_checkpoint(
    place: Path,
    *,
    config: dict[str, Any] | None = None,
    weights: int = 64 << 20,
    shards: int = 1,
    template: str | None = TEMPLATE + JSON_TOOLS + THINKING,
    dtype: str = "BF16",
    draft_layers: int = 0,
    **changes: Any,
) -> Path:
    """A checkpoint directory of `weights` tensor bytes in `shards` sparse files; returns `place`.

    Args:
      config: `config.json`; QWEN3 by default. `changes` go over it, None removes a key.
      template: the chat template; None for a model without one.
      draft_layers: MTP layers, with tensors under `mtp.` of their share.
    """
    place.mkdir(parents=True, exist_ok=True)
    described = {**(config or QWEN3), **changes}
    described = {name: value for name, value in described.items() if value is not None}
    if draft_layers:
        described["mtp_num_hidden_layers"] = draft_layers
    (place / "config.json").write_text(json.dumps(described, indent=2))
    (place / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_p": 0.8}))
    tokenizer: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 131072,
        "eos_token": "<|im_end|>",
    }
    if template is not None:
        tokenizer["chat_template"] = template
    (place / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (place / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    )
    names = tensor_names(described, draft_layers)
    sizes = _sizes(names, weights, described)
    index: dict[str, str] = {}
    for number in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = {name: sizes[name] for name in names[number::shards]}
        write_safetensors(place / file, mine, dtype)
        index |= dict.fromkeys(mine, file)
    if shards > 1:
        body = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (place / "model.safetensors.index.json").write_text(json.dumps(body))
    return place


def tensor_names(config: dict[str, Any], draft_layers: int = 0) -> list[str]:
    """Names as such a checkpoint has them: embedding, per layer attention and MLP, norm, head."""
    kinds = config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])
    names = ["model.embed_tokens.weight"]
    for layer, kind in enumerate(kinds):
        block = f"model.layers.{layer}"
        part = "linear_attn" if kind == "linear_attention" else "self_attn"
        heads = ("in_proj_qkvz", "out_proj") if kind == "linear_attention" else ("q_proj", "k_proj", "v_proj", "o_proj")
        names += [f"{block}.{part}.{name}.weight" for name in heads]
        names += [f"{block}.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
        names += [f"{block}.input_layernorm.weight", f"{block}.post_attention_layernorm.weight"]
    names += ["model.norm.weight", "lm_head.weight"]
    return names + [
        f"mtp.layers.{layer}.mlp.{name}.weight" for layer in range(draft_layers) for name in ("up_proj", "down_proj")
    ]


def _sizes(names: list[str], total: int, config: dict[str, Any]) -> dict[str, int]:
    """Bytes per tensor: norms by the hidden size, the rest shared evenly; the sum is exactly `total`."""
    norm = int(config.get("hidden_size", 64)) * 2
    norms = [name for name in names if "norm" in name]
    if norm * len(norms) > total // 2:
        norm = 2
    rest = [name for name in names if name not in norms]
    left = total - norm * len(norms)
    each = left // len(rest) // 256 * 256 or 2
    sizes = dict.fromkeys(names, each) | dict.fromkeys(norms, norm)
    sizes[rest[-1]] += left - each * len(rest)
    return sizes


def write_safetensors(path: Path, sizes: dict[str, int], dtype: str = "BF16") -> None:
    """One file whose header lists tensors of these byte sizes, and whose data is a hole."""
    width = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, size in sizes.items():
        count = size // width
        # A matrix: its second dimension the largest power of two that divides it, up to the square root.
        side = min(1 << (int(math.log2(count)) // 2), count & -count) if count > 1 else 1
        shape = [count // side, side] if "norm" not in name else [count]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count * width]}
        at += count * width
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        stream.truncate(8 + len(raw) + at)
