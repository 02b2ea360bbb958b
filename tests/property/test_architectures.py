"""Real architectures: what is read of them is what their cards and papers say, and what is not modelled says so."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import test_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import tensors_of
from model_files import BITS, write_tensors
from model_zoo import MODELS, NEXT, V3, Model
from sizing_page import PAGE, facts_of, table, with_table

from capyctl.checkpoints import gguf, kv_cache, model_config
from capyctl.checkpoints.cache_shape import bounded_token_bytes, cache_of, token_bytes
from capyctl.checkpoints.config_values import DIMENSION_MAX
from capyctl.checkpoints.directory import list_files, pick_gguf
from capyctl.checkpoints.facts import gguf_facts
from capyctl.checkpoints.model_config import describe
from capyctl.checkpoints.tensor_facts import tensor_facts


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_a_model_is_read_as_it_was_published(model: Model) -> None:
    facts = facts_of(model.name)
    groups = cache_of(facts)
    assert groups is not None
    assert abs(facts["parameters"] - model.published) * 1000 <= model.close * model.published
    assert token_bytes(groups, 2) == model.cache
    assert bounded_token_bytes(groups, 2) == model.bounded
    assert facts["cache_values"] * 2 + facts["cache_fixed_bytes"] == model.cache
    if model.gib is not None:
        assert facts["weight_bytes"] / (1 << 30) == pytest.approx(model.gib, rel=0.01)
    if model.why_not is None:
        assert facts["not_derivable"] is None
    else:
        assert model.why_not in facts["not_derivable"]
    assert json.loads(json.dumps(facts)) == facts


def test_the_page_shows_what_the_code_reads() -> None:
    page = PAGE.read_text()
    assert page == with_table(page, table()), "stale: .venv/bin/python tests/property/sizing_page.py"


# --- what one rank holds ----------------------------------------------------------------------------


def groups_of(name: str) -> Any:
    return cache_of(facts_of(name))


def test_heads_are_shared_out_among_ranks_and_each_keeps_one_at_least() -> None:
    whole = 36 * 8 * 256 * 2
    held = [token_bytes(groups_of("Qwen3 8B"), 2, ranks) for ranks in (1, 2, 4, 8, 16)]
    assert held == [whole, whole // 2, whole // 4, whole // 8, whole // 8]


def test_a_latent_cache_is_the_same_on_every_rank() -> None:
    assert {token_bytes(groups_of("DeepSeek-V3, R1"), 2, ranks) for ranks in (1, 2, 8, 16)} == {70_272}
    assert token_bytes(groups_of("Kimi Linear 48B-A3B"), 2, 8) == 7 * 576 * 2


def test_a_sparse_latent_cache_has_an_index_and_scales_of_its_own() -> None:
    assert token_bytes(groups_of("DeepSeek-V3.2"), 2) == 61 * (1152 + 132)
    assert token_bytes(groups_of("DeepSeek-V3.2"), 1) == 61 * (656 + 132)
    assert token_bytes(groups_of("DeepSeek-V3, R1"), 1) == 61 * 576


def test_a_cache_of_one_byte_is_half_of_one_of_two() -> None:
    for name in ("Llama 3.1 8B", "Gemma 3 27B", "Qwen3-Next 80B-A3B"):
        assert token_bytes(groups_of(name), 1) * 2 == token_bytes(groups_of(name), 2)


def split_by_hand(model: Model) -> int:
    """The bytes that ranks share out, by the rule's own words, for a model whose layers are `model.layers.N`."""
    whole = ("mlp.gate.", ".router.", "q_a_proj", "kv_a_proj", ".indexer.", "shared_expert_gate", "moe.gate.")
    found = 0
    for name, (dtype, shape) in tensors_of(model.config, model.pack).items():
        if name.startswith("model.layers.") and len(shape) >= 2 and not any(word in name for word in whole):
            found += math.prod(shape) * BITS[dtype] // 8
    return found


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Mixtral 8x7B", "DeepSeek-V2-Lite", "GLM-4.7-Flash", "gpt-oss 20B",
                                  "Llama 3.1 8B NVFP4"])  # fmt: skip
def test_ranks_share_out_the_matrices_of_the_layers_and_nothing_else(name: str) -> None:
    model = next(model for model in MODELS if model.name == name)
    facts = facts_of(name)
    assert facts["sharded_bytes"] == split_by_hand(model)
    assert facts["layer_count"] == facts["layers"] + facts["mtp_layers"]
    assert facts["largest_layer_bytes"] * facts["layer_count"] >= facts["sharded_bytes"]
    assert facts["sharded_bytes"] < facts["tensor_bytes"] <= facts["weight_bytes"]


def test_towers_and_heads_for_speculation_are_kept_whole() -> None:
    plain, seeing = facts_of("Qwen3 8B"), facts_of("Qwen3-VL 8B")
    assert seeing["sharded_bytes"] == plain["sharded_bytes"]
    assert facts_of("Qwen3-Next 80B-A3B")["layer_count"] == 48
    assert facts_of("DeepSeek-V3, R1")["layer_count"] == 62  # its head stands among the numbered layers


# --- states, packed weights, tied heads ------------------------------------------------------------


def test_states_are_those_of_the_papers_and_of_the_engines() -> None:
    assert facts_of("Qwen3-Next 80B-A3B")["state_slot_values"] == [36 * 3 * 8192, 36 * 32 * 128 * 128]
    assert facts_of("Qwen3.5 27B")["state_dtype"] == "float32"
    kept = {name: facts_of(name)["states"] for name in ("Jamba v0.1", "Nemotron Nano 9B v2", "Kimi Linear 48B-A3B")}
    assert kept["Jamba v0.1"] == {
        "recurrence": "Mamba", "layers": 28, "convolution": 3 * 8192, "temporal": 8192 * 16,
    }  # fmt: skip
    assert kept["Nemotron Nano 9B v2"] == {
        "recurrence": "Mamba-2", "layers": 27, "convolution": 3 * (10240 + 2048), "temporal": 10240 * 128,
    }  # fmt: skip
    assert kept["Kimi Linear 48B-A3B"] == {
        "recurrence": "Kimi delta attention", "layers": 20, "convolution": 3 * 3 * 4096, "temporal": 32 * 128 * 128,
    }  # fmt: skip
    assert facts_of("Falcon-H1 7B")["states"]["layers"] == 44  # beside the attention of each layer
    assert facts_of("Llama 3.1 8B")["states"] is None


def test_a_head_that_is_stored_although_it_is_tied_is_counted_once_and_named() -> None:
    facts = facts_of("Qwen3 0.6B")
    assert facts["tied_twice_bytes"] == 1024 * 151936 * 2
    assert facts["weight_bytes"] > facts["parameters"] * 2 + facts["tied_twice_bytes"]
    assert facts_of("Llama 3.2 1B")["tied_twice_bytes"] == 0
    assert facts_of("Llama 3.1 8B")["tied"] is False
    assert facts_of("Gemma 2 9B")["tied"] is True  # by the family's code: the file does not say


@pytest.mark.parametrize(
    ("name", "words", "bits"),
    [
        ("Qwen2.5 7B AWQ", "awq", 4),
        ("Qwen2.5 7B GPTQ Int4", "gptq", 4),
        ("Llama 3.1 8B w4a16", "compressed-tensors", 4),
        ("Llama 3.1 8B FP8", "compressed-tensors", 8),
        ("Llama 3.1 8B NVFP4", "modelopt NVFP4", 4),
        ("Llama 3.1 8B NF4", "bitsandbytes", 4),
        ("gpt-oss 20B", "mxfp4", 4),
        ("DeepSeek-V3, R1", "fp8", 8),
        ("Llama 3.1 8B", None, 0),
    ],
)
def test_a_quantisation_is_named_and_unpacked(name: str, words: str | None, bits: int) -> None:
    facts = facts_of(name)
    assert (facts["quantization"], facts["quantized_bits"]) == (words, bits)


def test_modelopts_own_file_says_how_its_weights_are_packed(tmp_path: Path) -> None:
    model = next(model for model in MODELS if model.name == "Llama 3.1 8B NVFP4")
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    write_tensors(tmp_path / "model.safetensors", tensors_of(model.config, model.pack))
    facts = tensor_facts(list_files(tmp_path))
    assert (facts["quantization"], facts["quantized_cache"]) == ("modelopt NVFP4", "FP8")
    assert facts["parameters"] == model.published


def test_tables_that_an_option_leaves_on_disk_are_facts(tmp_path: Path) -> None:
    table = "model.language_model.layers.{}.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    tensors = {table.format(1, part): ("F8_E4M3", (1000, 64)) for part in range(3)}
    tensors |= {table.format(4, part): ("F8_E4M3", (500, 64)) for part in range(2)}
    tensors["model.embed_tokens.weight"] = ("BF16", (10, 64))
    write_tensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    assert tensor_facts(list_files(tmp_path))["table_bytes"] == [3 * 64_000, 2 * 32_000]


# --- what is not modelled says why -----------------------------------------------------------------

PLAIN = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "how many layers"),
        ({"num_hidden_layers": 4}, "does not describe the model's attention"),
        (PLAIN | {"num_hidden_layers": 5000}, "how many layers"),
        (PLAIN | {"model_type": "bert"}, "is an encoder"),
        (PLAIN | {"model_type": "t5", "is_encoder_decoder": True}, "has an encoder"),
        (PLAIN | {"model_type": "llada"}, "diffusion"),
        (PLAIN | {"model_type": "deepseek_v4", "compress_ratios": [0, 0, 4, 128]}, "compresses its cache"),
        (PLAIN | {"model_type": "hunyuan", "use_cla": True}, "share a cache"),
        (PLAIN | {"model_type": "longcat_flash", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "ways of their own"),
        (PLAIN | {"model_type": "bailing_moe_linear", "layer_group_size": 5}, "recurrent layers of an unknown kind"),
        (PLAIN | {"model_type": "minicpm3", "kv_lora_rank": 256, "qk_rope_head_dim": 32}, "ways of their own"),
        (PLAIN | {"model_type": "deepseek_v3", "kv_lora_rank": 512}, "does not describe"),
        (PLAIN | {"model_type": "qwen4_exp_text", "indexer_head_dim": 128}, "an indexer"),
        (PLAIN | {"model_type": "minimax_m3", "index_head_dim": 128}, "an indexer"),
        (PLAIN | {"model_type": "step3p5", "attention_other_setting": {"num_attention_heads": 4}}, "other heads"),
        ({"model_type": "mllama", "text_config": PLAIN | {"cross_attention_layers": [1, 3]}}, "attend to images"),
        (PLAIN | {"model_type": "rwkv7", "head_size_divisor": 8}, "recurrent layers of an unknown kind"),
        (PLAIN | {"model_type": "zamba2", "hybrid_layer_ids": [1, 2]}, "several layers share"),
        (PLAIN | {"layer_types": ["full_attention"] * 3 + ["new_attention"]}, "unknown kind"),
        (PLAIN | {"layer_types": ["full_attention"] * 3}, "unknown kind"),
        (PLAIN | {"hybrid_override_pattern": "M-*"}, "unknown kind"),
        (PLAIN | {"hybrid_override_pattern": "M-*?"}, "unknown kind"),
        (PLAIN | {"num_kv_shared_layers": 4}, "no layer that keeps anything"),
        (PLAIN | {"hybrid_override_pattern": "----"}, "no layer that keeps anything"),
        (PLAIN | {"num_key_value_heads": [2, 2]}, "does not describe the model's attention"),
        (PLAIN | {"attn_type_list": [0, 1, 0, 1], "head_dim": 32}, "lightning attention layers"),
    ],
)
def test_what_is_not_modelled_says_why(config: dict[str, Any], words: str) -> None:
    facts = describe(config)
    assert words in facts["not_derivable"]


def test_heads_may_differ_by_layer_and_by_kind() -> None:
    by_layer = describe(PLAIN | {"num_key_value_heads": [2, 4, 0, 4]})
    assert by_layer["cache_values"] == (2 + 4 + 4) * 64
    wide = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128, "head_dim": 32,
            "global_head_dim": 64, "num_global_key_value_heads": 1}  # fmt: skip
    assert describe(PLAIN | wide)["cache_values"] == 2 * 2 * 64 + 2 * 1 * 128
    flags = {"hybrid_layer_pattern": [0, 1, 1, 1], "sliding_window": 128, "swa_num_key_value_heads": 4,
             "head_dim": 192, "v_head_dim": 128, "swa_head_dim": 192, "swa_v_head_dim": 128}  # fmt: skip
    assert describe(PLAIN | flags)["cache_values"] == 2 * 320 + 3 * 4 * 320
    blocks = [{"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": True}},
              {"attention": {"n_heads_in_group": 2}}, {"attention": {"replace_with_linear": True}}]  # fmt: skip
    searched = describe(PLAIN | {"num_key_value_heads": None, "block_configs": blocks})
    assert searched["cache_values"] == (2 + 4) * 64


def test_what_a_family_leaves_out_is_its_default_and_what_is_stated_stays() -> None:
    facts = facts_of("Gemma 3 12B")
    assert (facts["context_trained"], facts["heads"], facts["cache"][0]["key"]) == (131_072, 16, 256)
    assert (
        describe({"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 64})["cache_values"] == 6 * 4 * 128
    )
    unknown = describe({"model_type": "a_new_one", "num_hidden_layers": 6, "hidden_size": 256})
    assert "does not describe" in unknown["not_derivable"]


def test_a_window_that_is_not_used_bounds_nothing() -> None:
    unused = PLAIN | {"sliding_window": 4096, "use_sliding_window": False}
    assert (describe(unused)["attention"], describe(PLAIN | {"sliding_window": None})["attention"]) == ("full", "full")
    some = describe(PLAIN | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 3})
    assert [(row["attention"], row["layers"]) for row in some["cache"]] == [("full", 3), ("sliding", 1)]


@pytest.mark.parametrize("odd", [-1, 0, 1.5, 1e309, "8", True, None, [8], {"8": 8}, 2**40, DIMENSION_MAX + 1])
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_key_value_heads", "kv_lora_rank", "linear_num_key_heads"])
def test_an_odd_number_never_becomes_a_figure(name: str, odd: Any) -> None:
    config = {"kv_lora_rank": V3, "linear_num_key_heads": NEXT}.get(name, PLAIN)
    facts = describe({**config, name: odd})
    assert 0 <= facts["cache_values"] < 1 << 63
    assert facts["layers"] is None or 0 < facts["layers"] <= DIMENSION_MAX
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


# --- GGUF ---------------------------------------------------------------------------------------------


def gguf_of(place: Path, architecture: str, tensors: list[tuple[str, list[int], int]] = (), **keys: int) -> Any:  # type: ignore[assignment]
    """The facts of a GGUF with these keys below its architecture, and tensors of (name, shape, type)."""
    listed, at = [], 0
    for name, shape, kind in tensors:
        values, size = gguf.BLOCKS[kind][1:]
        listed.append(test_gguf.tensor(name, shape, kind, at))
        at += -(-math.prod(shape) // values * size // 32) * 32
    made = [test_gguf.key("general.architecture", test_gguf.STRING, test_gguf.text(architecture))]
    for name, number in keys.items():
        told = f"{architecture}.{name.replace('__', '.')}"
        made.append(test_gguf.key(told, test_gguf.U32, number.to_bytes(4, "little")))
    raw = test_gguf.build(made, listed)
    (place / "m.gguf").write_bytes(raw)
    os.truncate(place / "m.gguf", -(-len(raw) // 32) * 32 + at)
    listing = list_files(place)
    return gguf_facts(listing, pick_gguf(listing))


LLAMA_KEYS = {"block_count": 32, "context_length": 131072, "embedding_length": 4096, "attention__head_count": 32,
              "attention__head_count_kv": 8}  # fmt: skip


def test_a_gguf_of_llama_has_the_published_parameters_and_cache(tmp_path: Path) -> None:
    q4, f32 = 12, 0
    tensors = [("token_embd.weight", [4096, 128256], q4), ("output.weight", [4096, 128256], 14),
               ("output_norm.weight", [4096], f32)]  # fmt: skip
    for layer in range(32):
        at = f"blk.{layer}."
        tensors += [
            (f"{at}attn_{name}.weight", [4096, out], q4) for name, out in (("q", 4096), ("k", 1024), ("v", 1024))
        ]
        tensors += [(f"{at}attn_output.weight", [4096, 4096], q4), (f"{at}ffn_down.weight", [14336, 4096], q4)]
        tensors += [(f"{at}ffn_{name}.weight", [4096, 14336], q4) for name in ("gate", "up")]
        tensors += [(f"{at}{name}_norm.weight", [4096], f32) for name in ("attn", "ffn")]
    facts = gguf_of(tmp_path, "llama", tensors, **LLAMA_KEYS)
    assert facts["parameters"] == 8_030_261_248
    assert facts["not_derivable"] is None
    assert kv_cache.bytes_per_token(facts, "f16", flash_attention=True) == 131_072
    assert kv_cache.bytes_per_token(facts, "q8_0", flash_attention=True) == 131_072 * 34 // 64


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("gemma3", {"attention__sliding_window": 1024}, "sliding-window attention"),
        ("gpt-oss", {"attention__sliding_window": 128}, "sliding-window attention"),
        ("llama4", {"attention__chunk_size": 8192}, "sliding-window attention"),
        ("deepseek2", {"attention__kv_lora_rank": 512, "attention__key_length_mla": 192}, "latent attention (MLA)"),
        ("glm-dsa", {"attention__indexer__top_k": 2048}, "an attention indexer"),
        ("qwen3next", {"ssm__state_size": 128}, "recurrent layers"),
        ("a-new-hybrid", {"ssm__conv_kernel": 4}, "recurrent layers"),
        ("granitehybrid", {}, "recurrent layers"),
        ("bert", {}, "no decoder cache (an embedding or encoder model)"),
        ("llada", {}, "no causal cache (a diffusion model)"),
    ],
)
def test_a_gguf_whose_cache_is_not_plain_says_so(
    tmp_path: Path, architecture: str, keys: dict[str, int], words: str
) -> None:
    assert gguf_of(tmp_path, architecture, **LLAMA_KEYS, **keys)["not_derivable"] == words


def test_layers_of_a_gguf_that_share_a_cache_or_speculate_are_counted_out(tmp_path: Path) -> None:
    shared = {"attention__shared_kv_layers": 10, "nextn_predict_layers": 2}
    assert gguf_of(tmp_path, "llama", **LLAMA_KEYS, **shared)["kv_heads"] == [8] * 20


# --- drafters --------------------------------------------------------------------------------------


def test_an_eagle_head_is_a_model_of_one_layer(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
              "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
              "vocab_size": 128256, "draft_vocab_size": 32000, "torch_dtype": "bfloat16"}  # fmt: skip
    tensors = {
        "d2t": ("I64", (32000,)), "fc.weight": ("BF16", (4096, 12288)),
        "midlayer.self_attn.q_proj.weight": ("BF16", (4096, 8192)),
        "midlayer.self_attn.k_proj.weight": ("BF16", (1024, 8192)),
        "midlayer.self_attn.v_proj.weight": ("BF16", (1024, 8192)),
        "midlayer.self_attn.o_proj.weight": ("BF16", (4096, 4096)), "lm_head.weight": ("BF16", (32000, 4096)),
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "model.safetensors", tensors)
    facts = tensor_facts(list_files(tmp_path))
    assert (facts["cache_values"], facts["layers"], facts["sharded_bytes"]) == (8 * 256, 1, 0)
    assert facts["not_derivable"] is None


# --- anything under every name that is read ----------------------------------------------------------


class Asked(dict[str, Any]):
    """A description that notes which names somebody looks for."""

    names: set[str]

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


INSIDE = (
    "num_heads", "short_conv_kernel_size", "full_attn_layers", "attention", "no_op", "n_heads_in_group", "kv_n_heads",
    "quant_method", "bits", "config_groups", "weights", "num_bits", "kv_cache_scheme",
)  # fmt: skip


def names_read() -> list[str]:
    """Every name that is looked for in one of the models here, or in a small one of each odd kind."""
    Asked.names = set(INSIDE)
    odd = ({"conv_L_cache": 3}, {"attn_type_list": [1]}, {"block_configs": []}, {"attn_config": {}})
    plain = model_config.with_defaults
    model_config.with_defaults = lambda text: Asked(plain(text))
    try:
        for config in (*(model.config for model in MODELS), *(PLAIN | one for one in odd)):
            describe(Asked(config))
    finally:
        model_config.with_defaults = plain
    return sorted(Asked.names)


READ = names_read()
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
numbers = st.integers(-2, 12) | st.sampled_from([64, 128, 4096, 2**20, 2**31, 2**63])
junk = st.recursive(
    scalars | numbers,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(READ), inner, max_size=6),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(READ), junk, max_size=14), st.sampled_from([PLAIN, NEXT, V3, {}]), st.booleans())
@settings(derandomize=True, max_examples=400, deadline=None)
def test_whatever_stands_under_the_names_that_are_read_the_facts_are_sane(
    changes: dict[str, Any], base: dict[str, Any], nested: bool
) -> None:
    config: dict[str, Any] = {**base, **changes}
    facts = describe({"text_config": config} if nested else config)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    groups = cache_of(facts)
    assert groups is not None
    for ranks in (1, 8):
        assert 0 <= bounded_token_bytes(groups, 2, ranks) <= token_bytes(groups, 2, ranks) < 1 << 63
    assert token_bytes(groups, 1) <= token_bytes(groups, 2) <= token_bytes(groups, 4)
    assert facts["not_derivable"] or facts["cache_values"] > 0
