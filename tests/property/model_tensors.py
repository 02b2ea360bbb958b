"""The tensors of real architectures from the dimensions of their `config.json`: names, shapes and types as stored.

`tensors_of(config)` gives what a checkpoint of that description holds. Nothing here looks at how the product reads
such a checkpoint, so that the two can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

Config = dict[str, Any]
Shape = tuple[int, ...]
Tensors = dict[str, tuple[str, Shape]]


class Build:
    """Tensors under way: `dtype` is that of what is not quantised, `pack` stores a matrix in another way."""

    def __init__(self, dtype: str, pack: Callable[[str, int, int], Iterator[tuple[str, str, Shape]]] | None) -> None:
        self.dtype, self.pack = dtype, pack
        self.tensors: Tensors = {}

    def add(self, name: str, *shape: int, dtype: str | None = None) -> None:
        assert name not in self.tensors, name
        self.tensors[name] = (dtype or self.dtype, shape)

    def matrix(self, name: str, out: int, into: int, *, bias: bool = False, packed: bool = True) -> None:
        """A weight of a linear layer, stored as the quantisation says unless it is left out of it."""
        if packed and self.pack is not None:
            for part, dtype, shape in self.pack(name, out, into):
                self.add(part, *shape, dtype=dtype)
        else:
            self.add(f"{name}.weight", out, into)
        if bias:
            self.add(f"{name}.bias", out)

    def norm(self, name: str, size: int, *, bias: bool = False) -> None:
        self.add(f"{name}.weight", size)
        if bias:
            self.add(f"{name}.bias", size)


# --- quantised storage ------------------------------------------------------------------------------


def block_fp8(name: str, out: int, into: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{name}.weight", "F8_E4M3", (out, into)
    yield f"{name}.weight_scale_inv", "F32", (-(-out // 128), -(-into // 128))


def channel_fp8(name: str, out: int, into: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{name}.weight", "F8_E4M3", (out, into)
    yield f"{name}.weight_scale", "BF16", (out, 1)


def awq(name: str, out: int, into: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{name}.qweight", "I32", (into, out // 8)
    yield f"{name}.qzeros", "I32", (into // 128, out // 8)
    yield f"{name}.scales", "F16", (into // 128, out)


def gptq(name: str, out: int, into: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{name}.qweight", "I32", (into // 8, out)
    yield f"{name}.qzeros", "I32", (into // 128, out // 8)
    yield f"{name}.scales", "F16", (into // 128, out)
    yield f"{name}.g_idx", "I32", (into,)


def packed_int4(name: str, out: int, into: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{name}.weight_packed", "I32", (out, into // 8)
    yield f"{name}.weight_scale", "BF16", (out, into // 128)
    yield f"{name}.weight_shape", "I64", (2,)


def nvfp4(name: str, out: int, into: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{name}.weight", "U8", (out, into // 2)
    yield f"{name}.weight_scale", "F8_E4M3", (out, into // 16)
    yield f"{name}.weight_scale_2", "F32", ()
    yield f"{name}.input_scale", "F32", ()


def nf4(name: str, out: int, into: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{name}.weight", "U8", (out * into // 2, 1)
    yield f"{name}.weight.absmax", "U8", (out * into // 64,)
    yield f"{name}.weight.quant_map", "F32", (16,)
    yield f"{name}.weight.nested_absmax", "F32", (-(-out * into // 64 // 256),)
    yield f"{name}.weight.nested_quant_map", "F32", (256,)
    yield f"{name}.weight.quant_state.bitsandbytes__nf4", "U8", (120,)


# --- attention --------------------------------------------------------------------------------------


def grouped(b: Build, at: str, c: Config, *, bias: str = "", qk_norm: int = 0, gate: bool = False) -> None:
    """Grouped-query attention. `bias` names the projections that have one, by their letters."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    kv, length = c.get("num_key_value_heads", heads), c.get("head_dim") or hidden // heads
    b.matrix(f"{at}.q_proj", heads * length * (2 if gate else 1), hidden, bias="q" in bias)
    b.matrix(f"{at}.k_proj", kv * length, hidden, bias="k" in bias)
    b.matrix(f"{at}.v_proj", kv * length, hidden, bias="v" in bias)
    b.matrix(f"{at}.o_proj", hidden, heads * length, bias="o" in bias)
    if qk_norm:
        b.norm(f"{at}.q_norm", length if qk_norm == 1 else heads * length)
        b.norm(f"{at}.k_norm", length if qk_norm == 1 else kv * length)


def latent(b: Build, at: str, c: Config) -> None:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    if c.get("q_lora_rank"):
        b.matrix(f"{at}.q_a_proj", c["q_lora_rank"], hidden)
        b.norm(f"{at}.q_a_layernorm", c["q_lora_rank"])
        b.matrix(f"{at}.q_b_proj", heads * (nope + rope), c["q_lora_rank"])
    else:
        b.matrix(f"{at}.q_proj", heads * (nope + rope), hidden)
    b.matrix(f"{at}.kv_a_proj_with_mqa", rank + rope, hidden)
    b.norm(f"{at}.kv_a_layernorm", rank)
    b.matrix(f"{at}.kv_b_proj", heads * (nope + value), rank)
    b.matrix(f"{at}.o_proj", hidden, heads * value)
    if c.get("index_head_dim"):
        length = c["index_head_dim"]
        b.matrix(f"{at}.indexer.wq_b", c["index_n_heads"] * length, c["q_lora_rank"])
        b.matrix(f"{at}.indexer.wk", length, hidden)
        b.norm(f"{at}.indexer.k_norm", length, bias=True)
        b.matrix(f"{at}.indexer.weights_proj", c["index_n_heads"], hidden, packed=False)


# --- recurrence -------------------------------------------------------------------------------------


def delta_net(b: Build, at: str, c: Config, *, fused: bool) -> None:
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    value = heads * c["linear_value_head_dim"]
    if fused:
        b.matrix(f"{at}.in_proj_qkvz", 2 * key + 2 * value, hidden)
        b.matrix(f"{at}.in_proj_ba", 2 * heads, hidden)
    else:
        for name, out in (("qkv", 2 * key + value), ("z", value), ("b", heads), ("a", heads)):
            b.matrix(f"{at}.in_proj_{name}", out, hidden)
    b.add(f"{at}.conv1d.weight", 2 * key + value, 1, c["linear_conv_kernel_dim"])
    b.add(f"{at}.dt_bias", heads)
    b.add(f"{at}.A_log", heads)
    b.norm(f"{at}.norm", c["linear_value_head_dim"])
    b.matrix(f"{at}.out_proj", hidden, value)


def kimi_delta(b: Build, at: str, c: Config) -> None:
    hidden, said = c["hidden_size"], c["linear_attn_config"]
    heads, length = said["num_heads"], said["head_dim"]
    inner = heads * length
    for name in "qkv":
        b.matrix(f"{at}.{name}_proj", inner, hidden)
        b.add(f"{at}.{name}_conv1d.weight", inner, 1, said["short_conv_kernel_size"])
    for name in "fg":
        b.matrix(f"{at}.{name}_a_proj", length, hidden)
        b.matrix(f"{at}.{name}_b_proj", inner, length)
    b.add(f"{at}.A_log", 1, 1, heads, 1, dtype="F32")
    b.add(f"{at}.dt_bias", inner)
    b.matrix(f"{at}.b_proj", heads, hidden)
    b.norm(f"{at}.o_norm", length)
    b.matrix(f"{at}.o_proj", hidden, inner)


def mamba(b: Build, at: str, *, hidden: int, inner: int, state: int, kernel: int, rank: int, norms: bool) -> None:
    b.matrix(f"{at}.in_proj", 2 * inner, hidden)
    b.add(f"{at}.conv1d.weight", inner, 1, kernel)
    b.add(f"{at}.conv1d.bias", inner)
    b.matrix(f"{at}.x_proj", rank + 2 * state, inner)
    b.matrix(f"{at}.dt_proj", inner, rank, bias=True)
    b.add(f"{at}.A_log", inner, state)
    b.add(f"{at}.D", inner)
    if norms:
        for name, size in (("dt", rank), ("b", state), ("c", state)):
            b.norm(f"{at}.{name}_layernorm", size)
    b.matrix(f"{at}.out_proj", hidden, inner)


def mamba2(
    b: Build, at: str, *, hidden: int, heads: int, length: int, groups: int, state: int, kernel: int, norm: bool = True
) -> None:
    inner = heads * length
    b.matrix(f"{at}.in_proj", 2 * inner + 2 * groups * state + heads, hidden)
    b.add(f"{at}.conv1d.weight", inner + 2 * groups * state, 1, kernel)
    b.add(f"{at}.conv1d.bias", inner + 2 * groups * state)
    for name in ("A_log", "D", "dt_bias"):
        b.add(f"{at}.{name}", heads)
    if norm:
        b.norm(f"{at}.norm", inner)
    b.matrix(f"{at}.out_proj", hidden, inner)


# --- feed forward -----------------------------------------------------------------------------------


def mlp(b: Build, at: str, hidden: int, inner: int, names: str = "gate_proj up_proj down_proj") -> None:
    *outs, back = names.split()
    for name in outs:
        b.matrix(f"{at}.{name}", inner, hidden)
    b.matrix(f"{at}.{back}", hidden, inner)


def experts(b: Build, at: str, count: int, hidden: int, inner: int, names: str = "gate_proj up_proj down_proj") -> None:
    for number in range(count):
        mlp(b, f"{at}.{number}", hidden, inner, names)


def deepseek_moe(b: Build, at: str, c: Config, *, correction: bool) -> None:
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    b.matrix(f"{at}.gate", c["n_routed_experts"], hidden, packed=False)
    if correction:
        b.add(f"{at}.gate.e_score_correction_bias", c["n_routed_experts"], dtype="F32")
    experts(b, f"{at}.experts", c["n_routed_experts"], hidden, inner)
    if c.get("n_shared_experts"):
        mlp(b, f"{at}.shared_experts", hidden, inner * c["n_shared_experts"])


# --- towers -----------------------------------------------------------------------------------------


def siglip(b: Build, at: str, *, hidden: int, inner: int, layers: int, patch: int, positions: int) -> None:
    b.add(f"{at}.embeddings.patch_embedding.weight", hidden, 3, patch, patch)
    b.add(f"{at}.embeddings.patch_embedding.bias", hidden)
    b.add(f"{at}.embeddings.position_embedding.weight", positions, hidden)
    for number in range(layers):
        layer = f"{at}.encoder.layers.{number}"
        for name in ("layer_norm1", "layer_norm2"):
            b.norm(f"{layer}.{name}", hidden, bias=True)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            b.matrix(f"{layer}.self_attn.{name}", hidden, hidden, bias=True, packed=False)
        b.matrix(f"{layer}.mlp.fc1", inner, hidden, bias=True, packed=False)
        b.matrix(f"{layer}.mlp.fc2", hidden, inner, bias=True, packed=False)
    b.norm(f"{at}.post_layernorm", hidden, bias=True)


def qwen_vision(b: Build, at: str, v: Config, *, gated: bool) -> None:
    """The tower of Qwen2.5-VL (gated, RMS norms) and of Qwen3-VL (plain, with biases)."""
    hidden, inner, out = v["hidden_size"], v["intermediate_size"], v["out_hidden_size"]
    bias = not gated
    b.add(f"{at}.patch_embed.proj.weight", hidden, 3, 2, v["patch_size"], v["patch_size"])
    if bias:
        b.add(f"{at}.patch_embed.proj.bias", hidden)
        b.add(f"{at}.pos_embed.weight", v["num_position_embeddings"], hidden)
    for number in range(v["depth"]):
        block = f"{at}.blocks.{number}"
        b.norm(f"{block}.norm1", hidden, bias=bias)
        b.norm(f"{block}.norm2", hidden, bias=bias)
        b.matrix(f"{block}.attn.qkv", 3 * hidden, hidden, bias=True, packed=False)
        b.matrix(f"{block}.attn.proj", hidden, hidden, bias=True, packed=False)
        ways = ("gate_proj", "up_proj", "down_proj") if gated else ("linear_fc1", "linear_fc2")
        for name in ways[:-1]:
            b.matrix(f"{block}.mlp.{name}", inner, hidden, bias=True, packed=False)
        b.matrix(f"{block}.mlp.{ways[-1]}", hidden, inner, bias=True, packed=False)
    four = 4 * hidden
    if gated:
        b.norm(f"{at}.merger.ln_q", hidden)
        b.matrix(f"{at}.merger.mlp.0", four, four, bias=True, packed=False)
        b.matrix(f"{at}.merger.mlp.2", out, four, bias=True, packed=False)
        return
    mergers = [(f"{at}.merger", hidden)]
    mergers += [(f"{at}.deepstack_merger_list.{n}", four) for n in range(len(v.get("deepstack_visual_indexes", ())))]
    for name, size in mergers:
        b.norm(f"{name}.norm", size, bias=True)
        b.matrix(f"{name}.linear_fc1", four, four, bias=True, packed=False)
        b.matrix(f"{name}.linear_fc2", out, four, bias=True, packed=False)


def pixtral(b: Build, at: str, v: Config) -> None:
    hidden, inner = v["hidden_size"], v["intermediate_size"]
    b.add(f"{at}.patch_conv.weight", hidden, 3, v["patch_size"], v["patch_size"])
    b.norm(f"{at}.ln_pre", hidden)
    for number in range(v["num_hidden_layers"]):
        layer = f"{at}.transformer.layers.{number}"
        for name in "qkvo":
            b.matrix(f"{layer}.attention.{name}_proj", hidden, hidden, packed=False)
        for name, out, into in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            b.matrix(f"{layer}.feed_forward.{name}", out, into, packed=False)
        for name in ("attention_norm", "ffn_norm"):
            b.norm(f"{layer}.{name}", hidden)


def embedding(b: Build, at: str, c: Config, head: str | None = "lm_head") -> None:
    """Embedding, final norm and, where it is not the embedding, the output head."""
    b.add(f"{at}embed_tokens.weight", c["vocab_size"], c["hidden_size"])
    b.norm(f"{at}norm", c["hidden_size"])
    if head is not None and not c.get("tie_word_embeddings", False):
        b.add(f"{head}.weight", c["vocab_size"], c["hidden_size"])


def norms(b: Build, layer: str, hidden: int, *names: str) -> None:
    for name in names or ("input_layernorm", "post_attention_layernorm"):
        b.norm(f"{layer}.{name}", hidden)


def layers(c: Config) -> range:
    return range(c["num_hidden_layers"])


def per_period(count: int, period: int, last: str, other: str) -> list[str]:
    """A word per layer: `last` for each `period`-th one."""
    return list(itertools.islice(itertools.cycle([other] * (period - 1) + [last]), count))
