"""Checkpoints of models with recurrent layers, by family."""

from __future__ import annotations

from model_tensors import (
    Build,
    Config,
    delta_net,
    embedding,
    experts,
    grouped,
    kimi_delta,
    latent,
    layers,
    mamba,
    mamba2,
    mlp,
    norms,
    qwen_vision,
)


def qwen3_next(b: Build, c: Config) -> None:
    _gated_hybrid(b, "model.", c, fused=True)
    _mtp(b, c)
    embedding(b, "model.", c)


def _gated_hybrid(b: Build, at: str, c: Config, *, fused: bool) -> None:
    for number in layers(c):
        layer = f"{at}layers.{number}"
        if (number + 1) % c["full_attention_interval"]:
            delta_net(b, f"{layer}.linear_attn", c, fused=fused)
        else:
            grouped(b, f"{layer}.self_attn", c, qk_norm=1, gate=True)
        _gated_mlp(b, f"{layer}.mlp", c)
        norms(b, layer, c["hidden_size"])


def _gated_mlp(b: Build, at: str, c: Config) -> None:
    hidden = c["hidden_size"]
    if not c.get("num_experts"):
        mlp(b, at, hidden, c["intermediate_size"])
        return
    b.matrix(f"{at}.gate", c["num_experts"], hidden, packed=False)
    experts(b, f"{at}.experts", c["num_experts"], hidden, c["moe_intermediate_size"])
    mlp(b, f"{at}.shared_expert", hidden, c["shared_expert_intermediate_size"])
    b.matrix(f"{at}.shared_expert_gate", 1, hidden, packed=False)


def _mtp(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    b.matrix("mtp.fc", hidden, 2 * hidden)
    for name in ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        b.norm(name, hidden)
    grouped(b, "mtp.layers.0.self_attn", c, qk_norm=1, gate=True)
    _gated_mlp(b, "mtp.layers.0.mlp", c)
    norms(b, "mtp.layers.0", hidden)


def qwen3_5(b: Build, c: Config) -> None:
    text = c["text_config"]
    _gated_hybrid(b, "model.language_model.", text, fused=False)
    _mtp(b, text)
    embedding(b, "model.language_model.", text)
    qwen_vision(b, "model.visual", c["vision_config"], gated=False)


def _ends(b: Build, c: Config, words: str, norm: str) -> None:
    """What stands before and behind the layers: the embedding, the last norm, and a head of its own."""
    b.add(f"{words}.weight", c["vocab_size"], c["hidden_size"])
    b.norm(norm, c["hidden_size"])
    b.add("lm_head.weight", c["vocab_size"], c["hidden_size"])


def jamba(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    for number in layers(c):
        layer = f"model.layers.{number}"
        if number % c["attn_layer_period"] == c["attn_layer_offset"]:
            grouped(b, f"{layer}.self_attn", c)
        else:
            mamba(
                b,
                f"{layer}.mamba",
                hidden=hidden,
                inner=hidden * c["mamba_expand"],
                state=c["mamba_d_state"],
                kernel=c["mamba_d_conv"],
                rank=c["mamba_dt_rank"],
                norms=True,
            )
        if number % c["expert_layer_period"] == c["expert_layer_offset"]:
            b.matrix(f"{layer}.feed_forward.router", c["num_experts"], hidden)
            experts(b, f"{layer}.feed_forward.experts", c["num_experts"], hidden, c["intermediate_size"])
        else:
            mlp(b, f"{layer}.feed_forward", hidden, c["intermediate_size"])
        norms(b, layer, hidden, "input_layernorm", "pre_ff_layernorm")
    _ends(b, c, "model.embed_tokens", "model.final_layernorm")


def falcon_mamba(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    for number in layers(c):
        layer = f"backbone.layers.{number}"
        b.norm(f"{layer}.norm", hidden)
        mamba(
            b,
            f"{layer}.mixer",
            hidden=hidden,
            inner=c["intermediate_size"],
            state=c["state_size"],
            kernel=c["conv_kernel"],
            rank=c["time_step_rank"],
            norms=False,
        )
    _ends(b, c, "backbone.embeddings", "backbone.norm_f")


def pure_mamba2(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    for number in layers(c):
        layer = f"backbone.layers.{number}"
        b.norm(f"{layer}.norm", hidden)
        mamba2(
            b,
            f"{layer}.mixer",
            hidden=hidden,
            heads=c["num_heads"],
            length=c["head_dim"],
            groups=c["n_groups"],
            state=c["state_size"],
            kernel=c["conv_kernel"],
        )
    _ends(b, c, "backbone.embeddings", "backbone.norm_f")


def nemotron_h(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    for number, letter in enumerate(c["hybrid_override_pattern"]):
        layer = f"backbone.layers.{number}"
        b.norm(f"{layer}.norm", hidden)
        at = f"{layer}.mixer"
        if letter == "M":
            mamba2(
                b,
                at,
                hidden=hidden,
                heads=c["mamba_num_heads"],
                length=c["mamba_head_dim"],
                groups=c["n_groups"],
                state=c["ssm_state_size"],
                kernel=c["conv_kernel"],
            )
        elif letter == "*":
            grouped(b, at, c)
        elif letter == "-":
            mlp(b, at, hidden, c["intermediate_size"], "up_proj down_proj")
        else:
            count = c["n_routed_experts"]
            b.matrix(f"{at}.gate", count, hidden)
            b.add(f"{at}.gate.e_score_correction_bias", count, dtype="F32")
            experts(b, f"{at}.experts", count, hidden, c["moe_intermediate_size"], "up_proj down_proj")
            mlp(b, f"{at}.shared_experts", hidden, c["moe_shared_expert_intermediate_size"], "up_proj down_proj")
    _ends(b, c, "backbone.embeddings", "backbone.norm_f")


def falcon_h1(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    for number in layers(c):
        layer = f"model.layers.{number}"
        grouped(b, f"{layer}.self_attn", c)
        mamba2(
            b,
            f"{layer}.mamba",
            hidden=hidden,
            heads=c["mamba_n_heads"],
            length=c["mamba_d_head"],
            groups=c["mamba_n_groups"],
            state=c["mamba_d_state"],
            kernel=c["mamba_d_conv"],
            norm=c["mamba_rms_norm"],
        )
        mlp(b, f"{layer}.feed_forward", hidden, c["intermediate_size"])
        norms(b, layer, hidden, "input_layernorm", "pre_ff_layernorm")
    _ends(b, c, "model.embed_tokens", "model.final_layernorm")


def granite_hybrid(b: Build, c: Config) -> None:
    hidden, inner, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    for number, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{number}"
        if kind == "attention":
            grouped(b, f"{layer}.self_attn", c)
        else:
            mamba2(
                b,
                f"{layer}.mamba",
                hidden=hidden,
                heads=c["mamba_n_heads"],
                length=c["mamba_d_head"],
                groups=c["mamba_n_groups"],
                state=c["mamba_d_state"],
                kernel=c["mamba_d_conv"],
            )
        b.add(f"{layer}.block_sparse_moe.input_linear.weight", count, 2 * inner, hidden)
        b.add(f"{layer}.block_sparse_moe.output_linear.weight", count, hidden, inner)
        b.matrix(f"{layer}.block_sparse_moe.router.layer", count, hidden)
        b.matrix(f"{layer}.shared_mlp.input_linear", 2 * c["shared_intermediate_size"], hidden)
        b.matrix(f"{layer}.shared_mlp.output_linear", hidden, c["shared_intermediate_size"])
        norms(b, layer, hidden)
    embedding(b, "model.", c)


def kimi_linear(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    full = set(c["linear_attn_config"]["full_attn_layers"])
    for number in layers(c):
        layer = f"model.layers.{number}"
        if number + 1 in full:
            latent(b, f"{layer}.self_attn", c)
        else:
            kimi_delta(b, f"{layer}.self_attn", c)
        if number < c["first_k_dense_replace"]:
            mlp(b, f"{layer}.mlp", hidden, c["intermediate_size"])
        else:
            moe, count = f"{layer}.block_sparse_moe", c["num_experts"]
            b.matrix(f"{moe}.gate", count, hidden)
            b.add(f"{moe}.gate.e_score_correction_bias", count, dtype="F32")
            experts(b, f"{moe}.experts", count, hidden, c["moe_intermediate_size"], "w1 w3 w2")
            mlp(b, f"{moe}.shared_experts", hidden, c["moe_intermediate_size"] * c["num_shared_experts"])
        norms(b, layer, hidden)
    embedding(b, "model.", c)


def lfm2(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    for number, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{number}"
        if kind == "conv":
            b.matrix(f"{layer}.conv.in_proj", 3 * hidden, hidden)
            b.add(f"{layer}.conv.conv.weight", hidden, 1, c["conv_L_cache"])
            b.matrix(f"{layer}.conv.out_proj", hidden, hidden)
        else:
            heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
            length = hidden // heads
            for name, out in (
                ("q_proj", hidden),
                ("k_proj", kv * length),
                ("v_proj", kv * length),
                ("out_proj", hidden),
            ):
                b.matrix(f"{layer}.self_attn.{name}", out, hidden)
            for name in ("q_layernorm", "k_layernorm"):
                b.norm(f"{layer}.self_attn.{name}", length)
        mlp(b, f"{layer}.feed_forward", hidden, c["_feed_forward"], "w1 w3 w2")
        norms(b, layer, hidden, "operator_norm", "ffn_norm")
    b.add("model.embed_tokens.weight", c["vocab_size"], hidden)
    b.norm("model.embedding_norm", hidden)
