"""Whole checkpoints by family: which tensors a description of that `model_type` comes with."""

from __future__ import annotations

from model_hybrids import (
    falcon_h1,
    falcon_mamba,
    granite_hybrid,
    jamba,
    kimi_linear,
    lfm2,
    nemotron_h,
    pure_mamba2,
    qwen3_5,
    qwen3_next,
)
from model_tensors import (
    Build,
    Config,
    Tensors,
    awq,
    block_fp8,
    channel_fp8,
    deepseek_moe,
    embedding,
    experts,
    gptq,
    grouped,
    latent,
    layers,
    mlp,
    nf4,
    norms,
    nvfp4,
    packed_int4,
    pixtral,
    qwen_vision,
    siglip,
)

PACKS = {
    "block fp8": block_fp8, "channel fp8": channel_fp8, "awq": awq, "gptq": gptq, "packed int4": packed_int4,
    "nvfp4": nvfp4, "nf4": nf4, "": None, "mxfp4": None,
}  # fmt: skip


def tensors_of(config: Config, pack: str = "") -> Tensors:
    """The tensors of a checkpoint with this `config.json`, its matrices stored as `pack` says."""
    b = Build("F16" if pack in ("awq", "gptq") else "BF16", PACKS[pack])
    FAMILIES[config["model_type"]](b, config)
    return b.tensors


def _plain(
    b: Build, c: Config, *, at: str = "model.", bias: str = "", qk: int = 0, extra: tuple[str, ...] = ()
) -> None:
    """A dense decoder of Llama's make."""
    for number in layers(c):
        layer = f"{at}layers.{number}"
        grouped(b, f"{layer}.self_attn", c, bias=bias, qk_norm=qk)
        mlp(b, f"{layer}.mlp", c["hidden_size"], c["intermediate_size"])
        norms(b, layer, c["hidden_size"], *extra)


def llama(b: Build, c: Config) -> None:
    _plain(b, c)
    embedding(b, "model.", c)


def qwen2(b: Build, c: Config) -> None:
    _plain(b, c, bias="qkv")
    embedding(b, "model.", c)


def qwen3(b: Build, c: Config) -> None:
    _plain(b, c, qk=1)
    embedding(b, "model.", c)
    if c["tie_word_embeddings"] and c.get("_head_stored"):
        b.add("lm_head.weight", c["vocab_size"], c["hidden_size"])


def gemma2(b: Build, c: Config) -> None:
    four = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    qk = 1 if c["model_type"].startswith("gemma3") else 0
    _plain(b, c, at=c.get("_at", "model."), qk=qk, extra=four)
    embedding(b, c.get("_at", "model."), {**c, "tie_word_embeddings": True})


def gemma3(b: Build, c: Config) -> None:
    text, v = c["text_config"], c["vision_config"]
    left_out = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    gemma2(b, {**left_out, **text, "_at": "language_model.model."})
    siglip(
        b,
        "vision_tower.vision_model",
        hidden=v["hidden_size"],
        inner=v["intermediate_size"],
        layers=v["num_hidden_layers"],
        patch=v["patch_size"],
        positions=(v["image_size"] // v["patch_size"]) ** 2,
    )
    b.add("multi_modal_projector.mm_input_projection_weight", v["hidden_size"], text["hidden_size"])
    b.norm("multi_modal_projector.mm_soft_emb_norm", v["hidden_size"])


def gemma3n(b: Build, c: Config) -> None:
    """The language model alone: its towers are another half a billion."""
    text = c["text_config"]
    hidden, own, at = text["hidden_size"], text["hidden_size_per_layer_input"], "model.language_model."
    count, inputs = text["num_hidden_layers"], text["altup_num_inputs"]
    for number in layers(text):
        layer = f"{at}layers.{number}"
        grouped(b, f"{layer}.self_attn", text, qk_norm=1)
        mlp(b, f"{layer}.mlp", hidden, text["intermediate_size"][number])
        norms(
            b, layer, hidden, "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
            "post_feedforward_layernorm", "post_per_layer_input_norm",
        )  # fmt: skip
        b.matrix(f"{layer}.laurel.linear_left", text["laurel_rank"], hidden)
        b.matrix(f"{layer}.laurel.linear_right", hidden, text["laurel_rank"])
        b.norm(f"{layer}.laurel.post_laurel_norm", hidden)
        b.matrix(f"{layer}.per_layer_input_gate", own, hidden)
        b.matrix(f"{layer}.per_layer_projection", hidden, own)
        b.add(f"{layer}.altup.correct_output_scale", hidden)
        b.matrix(f"{layer}.altup.correction_coefs", inputs, inputs)
        b.matrix(f"{layer}.altup.prediction_coefs", inputs**2, inputs)
        b.matrix(f"{layer}.altup.modality_router", inputs, hidden)
        b.norm(f"{layer}.altup.router_norm", hidden)
    for number in range(inputs - 1):
        b.matrix(f"{at}altup_projections.{number}", hidden, hidden)
        b.matrix(f"{at}altup_unembed_projections.{number}", hidden, hidden)
    b.matrix(f"{at}per_layer_model_projection", own * count, hidden)
    b.norm(f"{at}per_layer_projection_norm", own)
    b.add(f"{at}embed_tokens_per_layer.weight", text["vocab_size_per_layer_input"], own * count)
    embedding(b, at, {**text, "tie_word_embeddings": True})


def phi3(b: Build, c: Config) -> None:
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    length = hidden // heads
    for number in layers(c):
        layer = f"model.layers.{number}"
        b.matrix(f"{layer}.self_attn.qkv_proj", (heads + 2 * kv) * length, hidden)
        b.matrix(f"{layer}.self_attn.o_proj", hidden, hidden)
        b.matrix(f"{layer}.mlp.gate_up_proj", 2 * c["intermediate_size"], hidden)
        b.matrix(f"{layer}.mlp.down_proj", hidden, c["intermediate_size"])
        norms(b, layer, hidden)
    embedding(b, "model.", c)


def phi(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    for number in layers(c):
        layer = f"model.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "dense"):
            b.matrix(f"{layer}.self_attn.{name}", hidden, hidden, bias=True)
        b.matrix(f"{layer}.mlp.fc1", c["intermediate_size"], hidden, bias=True)
        b.matrix(f"{layer}.mlp.fc2", hidden, c["intermediate_size"], bias=True)
        b.norm(f"{layer}.input_layernorm", hidden, bias=True)
    b.add("model.embed_tokens.weight", c["vocab_size"], hidden)
    b.norm("model.final_layernorm", hidden, bias=True)
    b.matrix("lm_head", c["vocab_size"], hidden, bias=True)


def falcon(b: Build, c: Config) -> None:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    for number in layers(c):
        layer = f"transformer.h.{number}"
        b.matrix(f"{layer}.self_attention.query_key_value", (heads + 2) * (hidden // heads), hidden)
        b.matrix(f"{layer}.self_attention.dense", hidden, hidden)
        b.matrix(f"{layer}.mlp.dense_h_to_4h", 4 * hidden, hidden)
        b.matrix(f"{layer}.mlp.dense_4h_to_h", hidden, 4 * hidden)
        b.norm(f"{layer}.input_layernorm", hidden, bias=True)
    b.add("transformer.word_embeddings.weight", c["vocab_size"], hidden)
    b.norm("transformer.ln_f", hidden, bias=True)
    b.add("lm_head.weight", c["vocab_size"], hidden)


def cohere2(b: Build, c: Config) -> None:
    _plain(b, c, extra=("input_layernorm",))
    embedding(b, "model.", c)


def olmo3(b: Build, c: Config) -> None:
    _plain(b, c, qk=2, extra=("post_attention_layernorm", "post_feedforward_layernorm"))
    embedding(b, "model.", c)


def exaone4(b: Build, c: Config) -> None:
    _plain(b, c, qk=1, extra=("post_attention_layernorm", "post_feedforward_layernorm"))
    embedding(b, "model.", c)


def mixtral(b: Build, c: Config) -> None:
    for number in layers(c):
        layer = f"model.layers.{number}"
        grouped(b, f"{layer}.self_attn", c)
        moe = f"{layer}.block_sparse_moe"
        b.matrix(f"{moe}.gate", c["num_local_experts"], c["hidden_size"], packed=False)
        experts(b, f"{moe}.experts", c["num_local_experts"], c["hidden_size"], c["intermediate_size"], "w1 w3 w2")
        norms(b, layer, c["hidden_size"])
    embedding(b, "model.", c)


def minimax_m2(b: Build, c: Config) -> None:
    for number in layers(c):
        layer = f"model.layers.{number}"
        grouped(b, f"{layer}.self_attn", c, qk_norm=2)
        moe, count = f"{layer}.block_sparse_moe", c["num_local_experts"]
        b.matrix(f"{moe}.gate", count, c["hidden_size"], packed=False)
        b.add(f"{moe}.e_score_correction_bias", count, dtype="F32")
        experts(b, f"{moe}.experts", count, c["hidden_size"], c["intermediate_size"], "w1 w3 w2")
        norms(b, layer, c["hidden_size"])
    embedding(b, "model.", c)


def qwen3_moe(b: Build, c: Config) -> None:
    for number in layers(c):
        layer = f"model.layers.{number}"
        grouped(b, f"{layer}.self_attn", c, qk_norm=1)
        b.matrix(f"{layer}.mlp.gate", c["num_experts"], c["hidden_size"], packed=False)
        experts(b, f"{layer}.mlp.experts", c["num_experts"], c["hidden_size"], c["moe_intermediate_size"])
        norms(b, layer, c["hidden_size"])
    embedding(b, "model.", c)


def gpt_oss(b: Build, c: Config) -> None:
    hidden, inner, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    for number in layers(c):
        layer = f"model.layers.{number}"
        grouped(b, f"{layer}.self_attn", c, bias="qkvo")
        b.add(f"{layer}.self_attn.sinks", c["num_attention_heads"])
        b.matrix(f"{layer}.mlp.router", count, hidden, bias=True)
        for name, out, into in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            b.add(f"{layer}.mlp.experts.{name}_blocks", count, out, into // 32, 16, dtype="U8")
            b.add(f"{layer}.mlp.experts.{name}_scales", count, out, into // 32, dtype="U8")
            b.add(f"{layer}.mlp.experts.{name}_bias", count, out)
        norms(b, layer, hidden)
    embedding(b, "model.", c)


def deepseek(b: Build, c: Config) -> None:
    """DeepSeek V2 and V3, Kimi K2, GLM with latent attention; the last layers are heads for speculation."""
    hidden, extra = c["hidden_size"], c.get("num_nextn_predict_layers", 0)
    correction = c["model_type"] != "deepseek_v2"
    for number in range(c["num_hidden_layers"] + extra):
        layer = f"model.layers.{number}"
        latent(b, f"{layer}.self_attn", c)
        if number < c["first_k_dense_replace"]:
            mlp(b, f"{layer}.mlp", hidden, c["intermediate_size"])
        else:
            deepseek_moe(b, f"{layer}.mlp", c, correction=correction)
        norms(b, layer, hidden)
        if number >= c["num_hidden_layers"]:
            _speculates(b, layer, c)
    embedding(b, "model.", c)


def _speculates(b: Build, layer: str, c: Config) -> None:
    hidden = c["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        b.norm(f"{layer}.{name}", hidden)
    b.matrix(f"{layer}.eh_proj", hidden, 2 * hidden, packed=False)
    b.add(f"{layer}.embed_tokens.weight", c["vocab_size"], hidden)
    b.add(f"{layer}.shared_head.head.weight", c["vocab_size"], hidden)


def glm4_moe(b: Build, c: Config) -> None:
    hidden = c["hidden_size"]
    for number in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        layer = f"model.layers.{number}"
        grouped(b, f"{layer}.self_attn", c, bias="qkv", qk_norm=1 if c["use_qk_norm"] else 0)
        if number < c["first_k_dense_replace"]:
            mlp(b, f"{layer}.mlp", hidden, c["intermediate_size"])
        else:
            deepseek_moe(b, f"{layer}.mlp", c, correction=True)
        norms(b, layer, hidden)
        if number >= c["num_hidden_layers"]:
            _speculates(b, layer, c)
    embedding(b, "model.", c)


def qwen2_5_vl(b: Build, c: Config) -> None:
    qwen2(b, {**c, "model_type": "qwen2"})
    qwen_vision(b, "visual", c["vision_config"], gated=True)


def qwen3_vl(b: Build, c: Config) -> None:
    _plain(b, c["text_config"], at="model.language_model.", qk=1)
    embedding(b, "model.language_model.", c["text_config"])
    qwen_vision(b, "model.visual", c["vision_config"], gated=False)


def mistral3(b: Build, c: Config) -> None:
    text, v = c["text_config"], c["vision_config"]
    _plain(b, text, at="language_model.model.")
    embedding(b, "language_model.model.", text, "language_model.lm_head")
    pixtral(b, "vision_tower", v)
    b.norm("multi_modal_projector.norm", v["hidden_size"])
    b.matrix("multi_modal_projector.patch_merger.merging_layer", v["hidden_size"], 4 * v["hidden_size"])
    b.matrix("multi_modal_projector.linear_1", text["hidden_size"], v["hidden_size"])
    b.matrix("multi_modal_projector.linear_2", text["hidden_size"], text["hidden_size"])


def llama4(b: Build, c: Config) -> None:
    text, v = c["text_config"], c["vision_config"]
    hidden, inner, count = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    for number in layers(text):
        layer = f"language_model.model.layers.{number}"
        grouped(b, f"{layer}.self_attn", text)
        b.add(f"{layer}.feed_forward.experts.gate_up_proj", count, hidden, 2 * inner)
        b.add(f"{layer}.feed_forward.experts.down_proj", count, inner, hidden)
        b.matrix(f"{layer}.feed_forward.router", count, hidden)
        mlp(b, f"{layer}.feed_forward.shared_expert", hidden, inner)
        norms(b, layer, hidden)
    embedding(b, "language_model.model.", text, "language_model.lm_head")
    own, wide = v["hidden_size"], v["intermediate_size"]
    b.add("vision_model.class_embedding", own)
    b.add("vision_model.positional_embedding_vlm", (v["image_size"] // v["patch_size"]) ** 2 + 1, own)
    b.matrix("vision_model.patch_embedding.linear", own, 3 * v["patch_size"] ** 2)
    for name in ("layernorm_pre", "layernorm_post"):
        b.norm(f"vision_model.{name}", own, bias=True)
    for number in range(v["num_hidden_layers"]):
        layer = f"vision_model.model.layers.{number}"
        for name in "qkvo":
            b.matrix(f"{layer}.self_attn.{name}_proj", own, own, bias=True)
        b.matrix(f"{layer}.mlp.fc1", wide, own, bias=True)
        b.matrix(f"{layer}.mlp.fc2", own, wide, bias=True)
        for name in ("input_layernorm", "post_attention_layernorm"):
            b.norm(f"{layer}.{name}", own, bias=True)
    b.matrix("vision_model.vision_adapter.mlp.fc1", v["projector_input_dim"], wide)
    b.matrix("vision_model.vision_adapter.mlp.fc2", v["projector_output_dim"], v["projector_output_dim"])
    b.matrix("multi_modal_projector.linear_1", hidden, v["vision_output_dim"])


FAMILIES = {
    "llama": llama, "mistral": llama, "smollm3": llama, "qwen2": qwen2, "seed_oss": qwen2, "qwen3": qwen3,
    "gemma2": gemma2, "gemma3_text": gemma2, "gemma3": gemma3, "gemma3n": gemma3n, "phi3": phi3, "phi": phi,
    "falcon": falcon, "cohere2": cohere2, "olmo3": olmo3, "exaone4": exaone4, "mixtral": mixtral,
    "minimax_m2": minimax_m2, "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss, "deepseek_v2": deepseek,
    "deepseek_v3": deepseek, "deepseek_v32": deepseek, "kimi_k2": deepseek, "glm_moe_dsa": deepseek,
    "glm4_moe_lite": deepseek, "glm4_moe": glm4_moe, "qwen3_next": qwen3_next, "qwen3_5": qwen3_5,
    "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl, "mistral3": mistral3, "llama4": llama4, "jamba": jamba,
    "falcon_mamba": falcon_mamba, "mamba2": pure_mamba2, "nemotron_h": nemotron_h, "falcon_h1": falcon_h1,
    "granitemoehybrid": granite_hybrid, "kimi_linear": kimi_linear, "lfm2": lfm2,
}  # fmt: skip
