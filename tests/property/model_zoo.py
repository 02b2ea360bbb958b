"""Real models by their published `config.json` and figures: what sizing is compared with.

`published` is the number of parameters as the model's card or paper states it, exactly where the hub counts it, else
rounded as people print it, and `close` how far a count may be off (in thousandths). `cache` is the hand calculation of
the bytes that a token takes in a cache of two bytes per value: layers x heads x (key + value) x 2.
"""

from __future__ import annotations

from typing import Any

import attrs
from model_tensors import Config, per_period

B = 1_000_000_000


@attrs.frozen(kw_only=True)
class Model:
    """One model. `words` names where its figures come from; `why_not` a part of the reason why nothing is fitted."""

    name: str
    config: Config
    published: int
    cache: int
    attention: str
    words: str = "hub"
    close: int = 0
    bounded: int = 0
    pack: str = ""
    quantization: dict[str, Any] | None = None
    files: int = 1
    gib: float | None = None
    why_not: str | None = None


def _llama(hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, **more: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "intermediate_size": inner, "vocab_size": vocab, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def _qwen(hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, **more: Any) -> Config:
    kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False,
            "sliding_window": 131072, "max_window_layers": layers, "max_position_embeddings": 32768}  # fmt: skip
    return _llama(hidden, layers, heads, kv, inner, vocab, **{**kind, **more})


def _qwen3(hidden: int, layers: int, heads: int, kv: int, inner: int, **more: Any) -> Config:
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
            "max_position_embeddings": 40960}  # fmt: skip
    return _qwen(hidden, layers, heads, kv, inner, 151936, **{**kind, **more})


def _qwen3_moe(hidden: int, layers: int, heads: int, inner: int) -> Config:
    more = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128,
            "num_experts_per_tok": 8, "moe_intermediate_size": inner, "decoder_sparse_step": 1,
            "mlp_only_layers": []}  # fmt: skip
    return _qwen3(hidden, layers, heads, 4, 4 * inner, **more)


def _gemma(kind: str, hidden: int, layers: int, heads: int, kv: int, length: int, inner: int, **more: Any) -> Config:
    name = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}[kind]
    found = _llama(hidden, layers, heads, kv, inner, 256000, architectures=[name], model_type=kind, head_dim=length)
    del found["tie_word_embeddings"]  # the family's code ties them without a word here
    return found | more


def _gemma3_seeing(hidden: int, layers: int, inner: int, **more: Any) -> Config:
    """As published: what is the family's default is left out, the length of heads among it."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {"model_type": "gemma3_text", "hidden_size": hidden, "num_hidden_layers": layers,
                        "intermediate_size": inner, "sliding_window": 1024, **more},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                          "patch_size": 14, "image_size": 896, "model_type": "siglip_vision_model"},
    }  # fmt: skip


def _latent(kind: str, hidden: int, layers: int, heads: int, **more: Any) -> Config:
    return _llama(hidden, layers, heads, heads, 0, 129280, model_type=kind, n_shared_experts=1, **{
        "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, **more,
    })  # fmt: skip


V3 = _latent(
    "deepseek_v3", 7168, 61, 128, q_lora_rank=1536, intermediate_size=18432, moe_intermediate_size=2048,
    n_routed_experts=256, first_k_dense_replace=3, num_nextn_predict_layers=1, max_position_embeddings=163840,
)  # fmt: skip
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LLAMA_8B = _llama(4096, 32, 32, 8, 14336, 128256)
QWEN25_7B = _qwen(3584, 28, 28, 4, 18944, 152064)
NEXT = _llama(
    2048, 48, 16, 2, 5120, 151936, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", head_dim=256,
    full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=512, num_experts_per_tok=10,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, max_position_embeddings=262144,
)  # fmt: skip
QWEN_VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
}  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Config:
    return _llama(
        2880, layers, 64, 8, 2880, 201088, architectures=["GptOssForCausalLM"], model_type="gpt_oss", head_dim=64,
        num_local_experts=experts, num_experts_per_tok=4, sliding_window=128, attention_bias=True,
        layer_types=per_period(layers, 2, "full_attention", "sliding_attention"),
    )  # fmt: skip


def _glm4(hidden: int, layers: int, inner: int, moe: int, experts: int, dense: int, *, norm: bool) -> Config:
    return _llama(
        hidden, layers, 96, 8, inner, 151552, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe",
        head_dim=128, attention_bias=True, use_qk_norm=norm, moe_intermediate_size=moe, n_routed_experts=experts,
        n_shared_experts=1, first_k_dense_replace=dense, num_nextn_predict_layers=1,
    )  # fmt: skip


def _granite(hidden: int, heads: int, kv: int, mamba: int, experts: int, inner: int, shared: int) -> Config:
    return _llama(
        hidden, 40, heads, kv, inner, 100352, architectures=["GraniteMoeHybridForCausalLM"],
        model_type="granitemoehybrid", num_local_experts=experts, shared_intermediate_size=shared,
        layer_types=["attention" if number in (5, 15, 25, 35) else "mamba" for number in range(40)],
        mamba_n_heads=mamba, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2,
        tie_word_embeddings=True,
    )  # fmt: skip


DENSE = (
    Model(name="Llama 3.1 8B", config=LLAMA_8B, published=8_030_261_248, cache=32 * 8 * 256 * 2, attention="full"),
    Model(
        name="Llama 3.1 70B", config=_llama(8192, 80, 64, 8, 28672, 128256), published=70_553_706_496,
        cache=80 * 8 * 256 * 2, attention="full", files=8,
    ),
    Model(
        name="Llama 3.1 405B", config=_llama(16384, 126, 128, 8, 53248, 128256), published=405_853_388_800,
        cache=516_096, attention="full", words="hub; cache 516.096 KB: DeepSeek-V3 hardware paper", files=8,
    ),
    Model(
        name="Llama 3.2 1B", config=_llama(2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
        published=1_235_814_400, cache=16 * 8 * 128 * 2, attention="full",
    ),
    Model(name="Qwen2.5 7B", config=QWEN25_7B, published=7_615_616_512, cache=28 * 4 * 256 * 2, attention="full"),
    Model(
        name="Qwen2.5 72B", config=_qwen(8192, 80, 64, 8, 29568, 152064), published=72_706_203_648, cache=327_680,
        attention="full", words="hub; cache 327.680 KB: DeepSeek-V3 hardware paper", files=8,
    ),
    Model(
        name="Qwen3 0.6B", config=_qwen3(1024, 28, 16, 8, 3072, tie_word_embeddings=True, _head_stored=True),
        published=596_049_920, cache=28 * 8 * 256 * 2, attention="full", words="model card (0.6B); head stored twice",
    ),
    Model(
        name="Qwen3 8B", config=_qwen3(4096, 36, 32, 8, 12288), published=8_190_735_360, cache=36 * 8 * 256 * 2,
        attention="full",
    ),
    Model(
        name="Seed-OSS 36B", published=36_151_104_512, cache=64 * 8 * 256 * 2, attention="full",
        config=_llama(5120, 64, 80, 8, 27648, 155136, model_type="seed_oss", head_dim=128,
                      architectures=["SeedOssForCausalLM"], max_position_embeddings=524288),
    ),
    Model(
        name="SmolLM3 3B", published=3_075_098_624, cache=36 * 4 * 256 * 2, attention="full",
        config=_llama(2048, 36, 16, 4, 11008, 128256, model_type="smollm3", architectures=["SmolLM3ForCausalLM"],
                      tie_word_embeddings=True, use_sliding_window=False, sliding_window=None),
    ),
    Model(
        name="Phi-4", published=14_659_507_200, cache=40 * 10 * 256 * 2, attention="full",
        config=_llama(5120, 40, 40, 10, 17920, 100352, model_type="phi3", architectures=["Phi3ForCausalLM"],
                      max_position_embeddings=16384, sliding_window=None),
    ),
    Model(
        name="Phi-2", published=2_779_683_840, cache=32 * 32 * 160 * 2, attention="full",
        words="hub; all heads are KV heads",
        config=_llama(2560, 32, 32, 32, 10240, 51200, model_type="phi", architectures=["PhiForCausalLM"],
                      max_position_embeddings=2048),
    ),
    Model(
        name="Falcon 7B", published=7_217_189_760, cache=32 * 1 * 128 * 2, attention="full", close=1,
        words="model card (7B); one KV head",
        config={"architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544,
                "num_attention_heads": 71, "num_kv_heads": 71, "num_hidden_layers": 32, "multi_query": True,
                "new_decoder_architecture": False, "vocab_size": 65024, "max_position_embeddings": 2048,
                "torch_dtype": "bfloat16"},
    ),
)  # fmt: skip

WINDOWS = (
    Model(
        name="Mistral 7B v0.1", published=7_241_732_096, cache=32 * 8 * 256 * 2, bounded=32 * 8 * 256 * 2,
        attention="sliding",
        config=_llama(4096, 32, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096,
                      architectures=["MistralForCausalLM"], max_position_embeddings=32768),
    ),
    Model(
        name="Gemma 2 9B", published=9_241_705_984, cache=42 * 8 * 512 * 2, bounded=21 * 8 * 512 * 2,
        attention="sliding",
        config=_gemma("gemma2", 3584, 42, 16, 8, 256, 14336, sliding_window=4096, max_position_embeddings=8192),
    ),
    Model(
        name="Gemma 3 1B", published=999_885_952, cache=26 * 1 * 512 * 2, bounded=22 * 1 * 512 * 2,
        attention="sliding",
        config=_gemma("gemma3_text", 1152, 26, 4, 1, 256, 6912, vocab_size=262144, sliding_window=512,
                      sliding_window_pattern=6, max_position_embeddings=32768),
    ),
    Model(
        name="Gemma 3 4B", published=4_300_079_472, cache=34 * 4 * 512 * 2, bounded=29 * 4 * 512 * 2,
        attention="sliding", config=_gemma3_seeing(2560, 34, 10240),
    ),
    Model(
        name="Gemma 3 12B", published=12_187_325_040, cache=48 * 8 * 512 * 2, bounded=40 * 8 * 512 * 2,
        attention="sliding",
        config=_gemma3_seeing(3840, 48, 15360, num_attention_heads=16, num_key_value_heads=8),
    ),
    Model(
        name="Gemma 3 27B", published=27_432_406_640, cache=62 * 16 * 256 * 2, bounded=52 * 16 * 256 * 2,
        attention="sliding", files=4,
        config={"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "torch_dtype": "bfloat16",
                "text_config": _gemma("gemma3_text", 5376, 62, 32, 16, 128, 21504, vocab_size=262208,
                                      sliding_window=1024),
                "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
                                  "patch_size": 14, "image_size": 896, "model_type": "siglip_vision_model"}},
    ),
    Model(
        name="Gemma 3n E4B", published=7_849_978_192, close=140, cache=20 * 2 * 512 * 2, bounded=16 * 2 * 512 * 2,
        attention="sliding, 15 of 35 layers share", words="model card (8B); counted without its towers",
        config={"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
                "torch_dtype": "bfloat16", "text_config": {
                    "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35,
                    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "laurel_rank": 64,
                    "intermediate_size": [16384] * 35, "altup_num_inputs": 4, "hidden_size_per_layer_input": 256,
                    "vocab_size": 262400, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 15,
                    "sliding_window": 512, "max_position_embeddings": 32768,
                    "layer_types": per_period(35, 5, "full_attention", "sliding_attention")}},
    ),
    Model(
        name="gpt-oss 20B", config=_gpt_oss(24, 32), published=20_914_757_184, cache=24 * 8 * 128 * 2,
        bounded=12 * 8 * 128 * 2, attention="sliding", gib=12.8, words="model card: 20.9B, 12.8 GiB", pack="mxfp4",
        quantization={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    ),
    Model(
        name="gpt-oss 120B", config=_gpt_oss(36, 128), published=116_829_156_672, cache=36 * 8 * 128 * 2,
        bounded=18 * 8 * 128 * 2, attention="sliding", gib=60.8, words="model card: 116.8B, 60.8 GiB", pack="mxfp4",
        quantization={"quant_method": "mxfp4"}, files=4,
    ),
    Model(
        name="Command R7B", published=8_028_033_024, cache=32 * 8 * 256 * 2, bounded=24 * 8 * 256 * 2,
        attention="sliding",
        config=_llama(4096, 32, 32, 8, 14336, 256000, model_type="cohere2", architectures=["Cohere2ForCausalLM"],
                      sliding_window=4096, sliding_window_pattern=4, tie_word_embeddings=True),
    ),
    Model(
        name="Olmo 3 7B", published=7_298_011_136, cache=32 * 32 * 256 * 2, bounded=24 * 32 * 256 * 2,
        attention="sliding",
        config=_llama(4096, 32, 32, 32, 11008, 100278, model_type="olmo3", architectures=["Olmo3ForCausalLM"],
                      sliding_window=4096, max_position_embeddings=65536,
                      layer_types=per_period(32, 4, "full_attention", "sliding_attention")),
    ),
    Model(
        name="EXAONE 4.0 32B", published=32 * B, close=10, cache=64 * 8 * 256 * 2, bounded=48 * 8 * 256 * 2,
        attention="sliding",
        config=_llama(5120, 64, 40, 8, 27392, 102400, model_type="exaone4", architectures=["Exaone4ForCausalLM"],
                      head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG"),
    ),
    Model(
        name="Llama 4 Scout", published=108_641_793_536, cache=48 * 8 * 256 * 2, bounded=36 * 8 * 256 * 2,
        attention="in pieces", files=4,
        config={"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
                "torch_dtype": "bfloat16",
                "text_config": _llama(5120, 48, 40, 8, 8192, 202048, model_type="llama4_text", head_dim=128,
                                      intermediate_size_mlp=16384, num_local_experts=16, attention_chunk_size=8192,
                                      no_rope_layers=[], max_position_embeddings=10485760),
                "vision_config": {"hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34,
                                  "image_size": 336, "patch_size": 14, "projector_input_dim": 4096,
                                  "projector_output_dim": 4096, "vision_output_dim": 4096}},
    ),
)  # fmt: skip

EXPERTS = (
    Model(
        name="Mixtral 8x7B", published=46_702_792_704, cache=32 * 8 * 256 * 2, attention="full", files=4,
        config=_llama(4096, 32, 32, 8, 14336, 32000, model_type="mixtral", architectures=["MixtralForCausalLM"],
                      num_local_experts=8, num_experts_per_tok=2, sliding_window=None, max_position_embeddings=32768),
    ),
    Model(
        name="Qwen3 30B-A3B", config=_qwen3_moe(2048, 48, 32, 768), published=30_532_122_624,
        cache=48 * 4 * 256 * 2, attention="full", files=4,
    ),
    Model(
        name="Qwen3 235B-A22B", config=_qwen3_moe(4096, 94, 64, 1536), published=235_093_634_560,
        cache=94 * 4 * 256 * 2, attention="full", files=4,
    ),
    Model(
        name="GLM-4.5-Air", config=_glm4(4096, 46, 10944, 1408, 128, 1, norm=False), published=110_468_824_832,
        cache=46 * 8 * 256 * 2, attention="full", words="model card (106B, and a head for speculation)", files=4,
    ),
    Model(
        name="GLM-4.5", config=_glm4(5120, 92, 12288, 1536, 160, 3, norm=True), published=358_337_791_296,
        cache=92 * 8 * 256 * 2, attention="full", words="model card (355B, and a head for speculation)", files=4,
    ),
    Model(
        name="MiniMax-M2", published=228_703_644_928, close=1, cache=62 * 8 * 256 * 2, attention="full",
        words="hub, which counts scales too", pack="block fp8", quantization=FP8_BLOCKS, files=4,
        config=_llama(3072, 62, 48, 8, 1536, 200064, model_type="minimax_m2", head_dim=128, num_local_experts=256,
                      architectures=["MiniMaxM2ForCausalLM"], max_position_embeddings=196608),
    ),
)  # fmt: skip

LATENT = (
    Model(
        name="DeepSeek-V2-Lite", published=15_706_484_224, cache=27 * 576 * 2, attention="latent",
        config=_latent("deepseek_v2", 2048, 27, 16, q_lora_rank=None, intermediate_size=10944, vocab_size=102400,
                       moe_intermediate_size=1408, n_routed_experts=64, first_k_dense_replace=1,
                       architectures=["DeepseekV2ForCausalLM"]) | {"n_shared_experts": 2},
    ),
    Model(
        name="DeepSeek-V2", published=235_741_434_880, cache=60 * 576 * 2, attention="latent", files=4,
        config=_latent("deepseek_v2", 5120, 60, 128, q_lora_rank=1536, intermediate_size=12288, vocab_size=102400,
                       moe_intermediate_size=1536, n_routed_experts=160, first_k_dense_replace=1,
                       architectures=["DeepseekV2ForCausalLM"]) | {"n_shared_experts": 2},
    ),
    Model(
        name="DeepSeek-V3, R1", config=V3, published=684_531_386_000, close=1, cache=70_272, attention="latent",
        words="hub, which counts scales too (card: 671B + 14B); cache 70.272 KB: DeepSeek-V3 hardware paper",
        pack="block fp8", quantization=FP8_BLOCKS, gib=641.3, files=8,
    ),
    Model(
        name="DeepSeek-V3.2", published=685 * B, close=3, cache=61 * (576 * 2 + 132), attention="sparse latent",
        config=V3 | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"],
                     "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
        words="model card (685B)", pack="block fp8", quantization=FP8_BLOCKS, files=8,
    ),
    Model(
        name="Kimi K2", published=1_000 * B, close=27, cache=61 * 576 * 2, attention="latent",
        words="model card (1T)", pack="block fp8", quantization=FP8_BLOCKS, files=8,
        config=V3 | {"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
                     "n_routed_experts": 384, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
                     "vocab_size": 163840, "max_position_embeddings": 131072},
    ),
    Model(
        name="GLM-5", published=744 * B, close=17, cache=78 * (576 * 2 + 132), attention="sparse latent",
        words="model card (744B, and a head for speculation)", files=8,
        config=_latent("glm_moe_dsa", 6144, 78, 64, q_lora_rank=2048, intermediate_size=12288, vocab_size=154880,
                       moe_intermediate_size=2048, n_routed_experts=256, first_k_dense_replace=3,
                       num_nextn_predict_layers=1, architectures=["GlmMoeDsaForCausalLM"], index_n_heads=32,
                       index_head_dim=128, index_topk=2048) | {"qk_nope_head_dim": 192, "v_head_dim": 256},
    ),
    Model(
        name="GLM-4.7-Flash", published=31_221_488_576, close=2, cache=47 * 576 * 2, attention="latent",
        words="model card (30B-A3B)",
        config=_latent("glm4_moe_lite", 2048, 47, 20, q_lora_rank=768, intermediate_size=10240, vocab_size=154880,
                       moe_intermediate_size=1536, n_routed_experts=64, first_k_dense_replace=1,
                       num_nextn_predict_layers=1, architectures=["Glm4MoeLiteForCausalLM"])
        | {"qk_nope_head_dim": 192, "v_head_dim": 256},
    ),
)  # fmt: skip

HYBRID = (
    Model(
        name="Qwen3-Next 80B-A3B", config=NEXT, published=81_324_862_720, cache=12 * 2 * 512 * 2,
        attention="hybrid", words="model card (80B, and a head for speculation)", files=4,
    ),
    Model(
        name="Qwen3.5 27B", published=27_781_427_952, cache=16 * 4 * 512 * 2, attention="hybrid", files=4,
        config={"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "bfloat16",
                "text_config": _llama(5120, 64, 24, 4, 17408, 248320, model_type="qwen3_5_text", head_dim=256,
                                      full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=48,
                                      linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
                                      mamba_ssm_dtype="float32", max_position_embeddings=262144,
                                      mtp_num_hidden_layers=1,
                                      layer_types=per_period(64, 4, "full_attention", "linear_attention")),
                "vision_config": {**QWEN_VISION, "out_hidden_size": 5120, "deepstack_visual_indexes": []}},
    ),
    Model(
        name="Jamba v0.1", published=51_570_323_328, cache=4 * 8 * 256 * 2, attention="hybrid", files=4,
        words="model card (52B); cache 4 GB for 256K: Jamba paper", why_not="Mamba layers",
        config={"architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_size": 4096,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                "intermediate_size": 14336, "vocab_size": 65536, "max_position_embeddings": 262144,
                "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attn_layer_period": 8,
                "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 16,
                "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256},
    ),
    Model(
        name="Nemotron Nano 9B v2", published=8_888_227_328, cache=4 * 8 * 256 * 2, attention="hybrid",
        why_not="Mamba-2 layers",
        config={"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4480,
                "num_hidden_layers": 56, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
                "intermediate_size": 15680, "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8,
                "ssm_state_size": 128, "conv_kernel": 4, "vocab_size": 131072, "max_position_embeddings": 131072,
                "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    Model(
        name="Nemotron 3 Nano 30B-A3B", published=31_577_937_344, close=1, cache=6 * 2 * 256 * 2, attention="hybrid",
        why_not="Mamba-2 layers", files=4,
        config={"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688,
                "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
                "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
                "intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
                "n_routed_experts": 128, "n_shared_experts": 1, "mamba_num_heads": 64, "mamba_head_dim": 64,
                "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "vocab_size": 131072,
                "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "tie_word_embeddings": False,
                "dtype": "bfloat16"},
    ),
    Model(
        name="Falcon-H1 7B", published=7_585_654_720, close=1, cache=44 * 2 * 256 * 2, attention="hybrid",
        words="model card (7B)", why_not="Mamba-2 layers",
        config={"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_size": 3072,
                "num_hidden_layers": 44, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
                "intermediate_size": 12288, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128,
                "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_rms_norm": False,
                "attn_layer_indices": None, "vocab_size": 130048, "max_position_embeddings": 262144,
                "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    Model(
        name="Granite 4.0 H Small", config=_granite(4096, 32, 8, 128, 72, 768, 1536), published=32 * B, close=10,
        cache=4 * 8 * 256 * 2, attention="hybrid", words="model card (32B)", why_not="Mamba-2 layers", files=4,
    ),
    Model(
        name="Granite 4.0 H Tiny", config=_granite(1536, 12, 4, 48, 64, 512, 1024), published=6_939_037_248,
        close=1, cache=4 * 4 * 256 * 2, attention="hybrid", words="model card (7B)", why_not="Mamba-2 layers",
    ),
    Model(
        name="Kimi Linear 48B-A3B", published=49_122_681_728, close=2, cache=7 * 576 * 2, attention="hybrid, latent",
        words="model card (48B)", why_not="Kimi delta attention layers", files=4,
        config={"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
                "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
                "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_experts": 256,
                "num_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512,
                "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
                "model_max_length": 1048576, "tie_word_embeddings": False, "dtype": "bfloat16",
                "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
                                       "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                                       "kda_layers": [n for n in range(1, 27) if n % 4]}},
    ),
    Model(
        name="LFM2 1.2B", published=1_170_340_608, cache=6 * 8 * 128 * 2, attention="hybrid",
        why_not="short convolution layers",
        config={"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048,
                "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
                "block_ff_dim": 12288, "block_auto_adjust_ff_dim": True, "_feed_forward": 8192, "vocab_size": 65536,
                "layer_types": ["full_attention" if n in (2, 5, 8, 10, 12, 14) else "conv" for n in range(16)],
                "max_position_embeddings": 128000, "tie_embedding": True, "torch_dtype": "bfloat16"},
    ),
    Model(
        name="Falcon Mamba 7B", published=7_272_665_088, cache=0, attention="none", why_not="Mamba layers",
        config={"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", "hidden_size": 4096,
                "num_hidden_layers": 64, "intermediate_size": 8192, "state_size": 16, "conv_kernel": 4,
                "time_step_rank": 256, "vocab_size": 65024, "tie_word_embeddings": False,
                "torch_dtype": "bfloat16"},
    ),
    Model(
        name="Codestral Mamba 7B", published=7_285_403_648, cache=0, attention="none", why_not="Mamba-2 layers",
        config={"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 4096,
                "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8,
                "conv_kernel": 4, "expand": 2, "vocab_size": 32768, "tie_word_embeddings": False,
                "torch_dtype": "bfloat16"},
    ),
)  # fmt: skip

IMAGES = (
    Model(
        name="Qwen2.5-VL 7B", published=8_292_166_656, cache=28 * 4 * 256 * 2, attention="full",
        config=QWEN25_7B | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
                            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420,
                                              "out_hidden_size": 3584, "patch_size": 14}},
    ),
    Model(
        name="Qwen3-VL 8B", published=8_767_123_696, cache=36 * 8 * 256 * 2, attention="full",
        config={"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
                "tie_word_embeddings": False, "text_config": _qwen3(4096, 36, 32, 8, 12288, model_type="qwen3_vl_text"),
                "vision_config": {**QWEN_VISION, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]}},
    ),
    Model(
        name="Mistral Small 3.1 24B", published=24_011_361_280, cache=40 * 8 * 256 * 2, attention="full",
        config={"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
                "torch_dtype": "bfloat16",
                "text_config": _llama(5120, 40, 32, 8, 32768, 131072, model_type="mistral", head_dim=128,
                                      sliding_window=None),
                "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                                  "patch_size": 14, "image_size": 1540, "model_type": "pixtral"}},
    ),
)  # fmt: skip


def _packed(name: str, pack: str, said: dict[str, Any], config: Config, published: int, gib: float) -> Model:
    text = config["num_hidden_layers"] * config["num_key_value_heads"] * 256 * 2
    words = f"{published / B:.2f}B; {gib} GiB of files on the hub"
    return Model(name=name, config=config, published=published, cache=text, attention="full", pack=pack,
                 quantization=said, gib=gib, words=words)  # fmt: skip


_GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}}
_CHANNELS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
PACKED = (
    _packed("Qwen2.5 7B AWQ", "awq", {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
            QWEN25_7B, 7_615_616_512, 5.19),
    _packed("Qwen2.5 7B GPTQ Int4", "gptq", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
            QWEN25_7B, 7_615_616_512, 5.20),
    _packed("Llama 3.1 8B w4a16", "packed int4",
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": _GROUPS},
            LLAMA_8B, 8_030_261_248, 5.34),
    _packed("Llama 3.1 8B FP8", "channel fp8",
            {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": _CHANNELS},
            LLAMA_8B, 8_030_261_248, 8.46),
    _packed("Llama 3.1 8B NVFP4", "nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            LLAMA_8B, 8_030_261_248, 5.62),
    _packed("Llama 3.1 8B NF4", "nf4",
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            LLAMA_8B, 8_030_261_248, 5.31),
)  # fmt: skip

MODELS = (*DENSE, *WINDOWS, *EXPERTS, *LATENT, *HYBRID, *IMAGES, *PACKED)
