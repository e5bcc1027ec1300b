"""Configs of tiny random models, of every architecture, with sizes that fit nothing else."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any


class _Transformers:
    """Hugging Face transformers, imported when a class is asked for: that takes seconds."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():  # pytest looks for marks in all that a module has
            raise AttributeError(name)
        import transformers

        return getattr(transformers, name)


hf = _Transformers()

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 16

_WIDE: dict[str, Any] = {
    **SIZES,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
}


def _made(kind: str, /, **values: Any) -> Callable[[], Any]:
    """What makes a config, of transformers' class ``kind``, which may change its values."""
    return lambda: getattr(hf, f"{kind}Config")(**deepcopy(values))


def _sized(kind: str, /, **values: Any) -> Callable[[], Any]:
    return _made(kind, **{**SIZES, **values})


def _wide(kind: str, /, **values: Any) -> Callable[[], Any]:
    return _made(kind, **{**_WIDE, **values})


def _seeing(kind: str, text: dict[str, Any], **vision: Any) -> Callable[[], Any]:
    return lambda: with_text(getattr(hf, f"{kind}Config"), deepcopy(text), **deepcopy(vision))


_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.3 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}


_DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,  # like no other size here
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_DENSE = {**_DEEPSEEK, "first_k_dense_replace": 3}
_DEEPSEEK_YARN: dict[str, Any] = {
    **_YARN,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_OTHER_MSCALE = {**_DEEPSEEK_YARN, "mscale": 1.0}
_GROUPS = {"n_group": 4, "topk_group": 2}

DEEPSEEK_DENSE: dict[str, Callable[[], Any]] = {
    "deepseek-v2-dense": _made("DeepseekV2", **_DENSE, rope_parameters=_DEEPSEEK_YARN),
    "deepseek-v3-dense": _made("DeepseekV3", **_DENSE, rope_parameters=_OTHER_MSCALE),
    "deepseek-v3-halves": _made("DeepseekV3", **_DENSE, rope_interleave=False),
}
"""Without experts: what attention does alone."""

DEEPSEEK_SPARSE: dict[str, Callable[[], Any]] = {
    "deepseek-v2": _made(
        "DeepseekV2",
        **_DEEPSEEK,
        **_GROUPS,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        rope_parameters=_DEEPSEEK_YARN,
    ),
    "deepseek-v2-lite": _made(
        "DeepseekV2",
        **{**_DEEPSEEK, "q_lora_rank": None},
        topk_method="greedy",
        tie_word_embeddings=True,
    ),
    "deepseek-v3": _made("DeepseekV3", **_DEEPSEEK, **_GROUPS, rope_parameters=_DEEPSEEK_YARN),
    "deepseek-v3-plain": _made(
        "DeepseekV3", **_DEEPSEEK, n_group=1, topk_group=1, norm_topk_prob=False
    ),
}

_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_MINISTRAL: dict[str, Any] = {
    **_YARN,
    "original_max_position_embeddings": 8,  # so that queries grow within a short text
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
_TOWER = {**_VISION, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
_PIXTRAL = {**_TOWER, "model_type": "pixtral"}
_QWEN_VISION = {
    **{k: v for k, v in _VISION.items() if k != "num_attention_heads"},
    "num_heads": 2,
    "depth": 1,
    "out_hidden_size": 96,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_GLM_VISION = {**_QWEN_VISION, "image_size": 28}
_MROPE = {"rope_type": "default", "rope_theta": 50000.0, "mrope_section": [4, 2, 2]}
_HALF = {**_MROPE, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
_OCR = {**_HALF, "mrope_section": [2, 3, 3]}
_MUSE: dict[str, Any] = {
    "model_type": "muse_glimmer_text",
    **_WIDE,
    "head_dim": 32,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 3.0,
    "output_multiplier": 0.4,
}
_MUSE_VISION = {**_VISION, "num_hidden_layers": 1, "pos_emb_height": 4, "pos_emb_width": 4}
_AFMOE: dict[str, Any] = {
    **_WIDE,
    **_EXPERTS,
    "num_hidden_layers": 5,
    "head_dim": 32,
    "sliding_window": WINDOW,
    "route_scale": 1.7,
}
_LLAMA4: dict[str, Any] = {
    **_WIDE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 160,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "floor_scale": 8,  # so that queries grow within a short text
    "attn_scale": 0.3,
}
_LLAMA4_VISION: dict[str, Any] = {
    **_VISION,
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 8,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
_LAGUNA: dict[str, Any] = {
    **_WIDE,
    **_EXPERTS,
    "head_dim": 32,
    "sliding_window": WINDOW,
    "shared_expert_intermediate_size": 64,
}
_GLM: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
}
_ERNIE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "moe_k": 3,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
}
_COHERE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "sliding_window": WINDOW,
    "logit_scale": 0.3,
}
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


_STEP: dict[str, Any] = {
    **_WIDE,
    "pad_token_id": 0,
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "sliding_window": WINDOW,
}
_STEP_VISION: dict[str, Any] = {**_VISION, "num_hidden_layers": 1, "image_size": 56}


_LING: dict[str, Any] = {
    **_WIDE,
    "num_key_value_heads": 6,
    "pad_token_id": 0,
    "head_dim": 24,
    "layer_group_size": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}


def _two_bases(full: dict[str, Any], sliding: float) -> dict[str, Any]:
    """The rotary parameters of layers without a window, and the base of those with one."""
    return {
        "full_attention": full,
        "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
    }


def _text(**own: Any) -> dict[str, Any]:
    """The text model of a multimodal one."""
    return {**_WIDE, "tie_word_embeddings": False, **own}


def with_text(config: Any, text: Any, **vision: Any) -> Any:
    """A multimodal config around a text model's; both say the same of the head."""
    found = config(text_config=text, vision_config=vision)
    found.tie_word_embeddings = text.get("tie_word_embeddings", False)
    return found


def _muse(text: dict[str, Any]) -> Any:
    """Muse-Glimmer's config, whose pictures have a small adapter."""
    found = with_text(hf.MuseGlimmerConfig, text, **_MUSE_VISION)
    found.out_hidden_size, found.projector_hidden_size = 128, 64
    return found


FAMILIES: dict[str, Callable[[], Any]] = {
    "ministral3": _wide("Ministral3", head_dim=32, rope_parameters=_MINISTRAL),
    "mistral3": _seeing(
        "Mistral3",
        _text(model_type="ministral3", head_dim=32, rope_parameters=_MINISTRAL),
        **_PIXTRAL,
    ),
    "llava": _seeing(
        "Llava", _text(model_type="mistral", head_dim=32, sliding_window=None), **_PIXTRAL
    ),
    "idefics3": _seeing("Idefics3", _text(model_type="llama", rms_norm_eps=1e-5), **_TOWER),
    "smolvlm": _seeing(
        "SmolVLM", _text(model_type="llama", head_dim=32, tie_word_embeddings=True), **_TOWER
    ),
    "olmo2": _wide("Olmo2"),
    "olmo3-yarn": _wide(
        "Olmo3",
        num_hidden_layers=5,
        sliding_window=WINDOW,
        rope_parameters={
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "exaone4": _wide("Exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "exaone4-window": _wide(
        "Exaone4", sliding_window=WINDOW, sliding_window_pattern=2, tie_word_embeddings=True
    ),
    "seed-oss": _wide("SeedOss", head_dim=32),
    "granite": _wide("Granite", **_FACTORS),
    "granite-swa": _wide(
        "GraniteSWA", **_FACTORS, sliding_window=WINDOW, layer_rope_theta=[0, 10000.0, 10000.0]
    ),
    "hunyuan": _wide(
        "HunYuanDenseV1",
        head_dim=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    ),
    "ernie": _wide("Ernie4_5", head_dim=32),
    "qwen3-vl": _seeing(
        "Qwen3VL", {**_WIDE, "head_dim": 16, "rope_parameters": _MROPE}, **_QWEN_VISION
    ),
    "qwen2.5-vl": _seeing(
        "Qwen2_5_VL",
        {**_WIDE, "rope_parameters": _MROPE},
        **{**_VISION, "num_heads": 2, "depth": 1, "out_hidden_size": 96},
    ),
    "paddleocr-vl": _seeing(
        "PaddleOCRVL",
        {**_WIDE, "head_dim": 16, "rope_parameters": _MROPE},
        **{**_VISION, "num_hidden_layers": 1, "image_size": 28},
    ),
    "gemma3-images": _seeing(
        "Gemma3",
        _text(
            head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24, tie_word_embeddings=True
        ),
        **_TOWER,
    ),
    "glm4": _wide("Glm4", head_dim=48, rope_parameters={**_YARN, "partial_rotary_factor": 0.5}),
    "glm4v": _seeing("Glm4v", {**_WIDE, "rope_parameters": _HALF}, **_GLM_VISION),
    "glm-ocr": _seeing("GlmOcr", {**_WIDE, "head_dim": 32, "rope_parameters": _OCR}, **_GLM_VISION),
    "muse-glimmer": lambda: _muse(_MUSE),
    "glm4-moe": _wide("Glm4Moe", **_GLM, head_dim=32, attention_bias=True),
    "glm4-moe-norms": _wide(
        "Glm4Moe", **_GLM, use_qk_norm=True, norm_topk_prob=False, first_k_dense_replace=2
    ),
    "glm4v-moe": _seeing("Glm4vMoe", {**_WIDE, **_GLM, "rope_parameters": _HALF}, **_GLM_VISION),
    "glm4-moe-lite": _wide("Glm4MoeLite", num_key_value_heads=6, **_GLM, **_LATENT),
    "glm-dsa": _wide(
        "GlmMoeDsa",
        num_key_value_heads=6,
        **_GLM,
        **_LATENT,
        first_k_dense_replace=1,
        index_n_heads=4,
        index_head_dim=64,
        indexer_types=["full", "shared", "full"],
    ),
    "kimi-k2.5": _seeing(
        "Kimi_K25",
        {
            **{**_DEEPSEEK, **_GROUPS, "model_type": "deepseek_v3"},
            "rope_parameters": _DEEPSEEK_YARN,
        },
        **_VISION,
        num_hidden_layers=1,
    ),
    "ernie-moe": _wide("Ernie4_5_Moe", **_ERNIE),
    "cohere2": _wide(
        "Cohere2",
        num_hidden_layers=5,
        sliding_window=WINDOW,
        logit_scale=0.3,
        tie_word_embeddings=True,
    ),
    "cohere2-moe-dense-first": _wide(
        "Cohere2Moe",
        **_COHERE,
        head_dim=32,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        prefix_dense_intermediate_size=128,
        expert_selection_fn="sigmoid",
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "minimax-m2": _wide(
        "MiniMaxM2",
        **_LOCAL_EXPERTS,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    ),
    "hunyuan-moe": _wide(
        "HunYuanMoEV1",
        head_dim=32,
        num_experts=8,
        moe_topk=3,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    ),
    "exaone4.5": _seeing(
        "Exaone4_5_",
        _text(model_type="exaone4", sliding_window=WINDOW, layer_types=_KINDS),
        **{**_VISION, "num_heads": 2, "num_key_value_heads": 1, "depth": 1, "out_hidden_size": 96},
    ),
    "exaone-moe": _wide(
        "ExaoneMoe", **_EXPERTS, sliding_window=WINDOW, layer_types=_KINDS, num_shared_experts=2
    ),
    "solar-open": _wide("SolarOpen", **_GLM, head_dim=32),
    "step": _seeing(
        "Step3p7",
        {
            **_STEP,
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "num_sliding_attention_heads": 8,
            "moe_router_scaling_factor": 1.7,
            "swiglu_limits": [0.0, 0.0, 0.0, None, 0.02],
            "swiglu_limits_shared": [0.0, 0.03, 0.0, 0.0, 0.04],
            "rope_parameters": _two_bases(
                {**_LLAMA3, "rope_theta": 50000.0, "partial_rotary_factor": 0.5}, 20000.0
            ),
        },
        **_STEP_VISION,
    ),
    "hy-v3": _wide(
        "HYV3", **_EXPERTS, head_dim=32, num_shared_experts=2, router_scaling_factor=1.7
    ),
    "apertus": _wide("Apertus", rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
}

FAMILIES |= {
    "afmoe": _made("Afmoe", **_AFMOE, mup_enabled=True, num_dense_layers=1),
    "afmoe-two": _made(
        "Afmoe",
        **{**_AFMOE, "num_shared_experts": 1, "num_hidden_layers": 3, "head_dim": 48},
        num_dense_layers=2,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "laguna": _made(
        "Laguna",
        **_LAGUNA,
        num_attention_heads_per_layer=[6, 8, 4],
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {**_YARN, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "mistral4": _made(
        "Mistral4", **{**_DEEPSEEK, "first_k_dense_replace": 0}, rope_parameters=_MINISTRAL
    ),
    "mistral4-text": _seeing(
        "Mistral3",
        {
            **_DEEPSEEK,
            **_GROUPS,
            "model_type": "mistral4",
            "routed_scaling_factor": 1.6,
            "rope_interleave": False,
            "rope_parameters": _MINISTRAL,
            "tie_word_embeddings": False,
        },
        **_PIXTRAL,
    ),
    "llama4": _made(
        "Llama4Text",
        **_LLAMA4,
        attention_chunk_size=7,
        interleave_moe_layer_step=2,
        rope_parameters=_LLAMA3,
    ),
    "llama4-text": _seeing(
        "Llama4",
        {
            **_LLAMA4,
            "num_hidden_layers": 3,
            "use_qk_norm": False,
            "attention_chunk_size": 16,
            "no_rope_layers": [0, 1, 0],
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
            "moe_layers": [1],
            "tie_word_embeddings": False,
        },
        **_LLAMA4_VISION,
    ),
    "llama4-whole": _made(
        "Llama4Text", **_LLAMA4, attention_chunk_size=8192, attn_temperature_tuning=False
    ),
}

# Whose routers choose by their scores alone
FAMILY_MIXTURES: dict[str, Callable[[], Any]] = {
    "cohere2-moe": _wide(
        "Cohere2Moe", num_hidden_layers=5, **_COHERE, head_dim=16, tie_word_embeddings=True
    ),
    "granite-moe-swa": _wide(
        "GraniteMoeSWA",
        **_FACTORS,
        **_LOCAL_EXPERTS,
        shared_intermediate_size=64,
        sliding_window=WINDOW,
    ),
    "mellum": _wide(
        "Mellum",
        **_EXPERTS,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=_KINDS,
        rope_parameters=_two_bases(_YARN, 10000.0),
    ),
    "qwen3-vl-moe": _seeing(
        "Qwen3VLMoe", _text(head_dim=16, rope_parameters=_MROPE, **_EXPERTS), **_QWEN_VISION
    ),
}

_SPARSE = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}


_EXP: dict[str, Any] = {
    **_DELTA,
    "linear_num_value_heads": 4,
    **_EXPERTS,
    "shared_expert_intermediate_size": 64,
    "hc_count": 3,
    "hc_lowrank": 20,
    "output_gate_type": "sigmoid",
    "indexer_n_heads": 8,  # no block is left without a score
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_NGRAMS: dict[str, Any] = {
    "ple_layer_ids": [3],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 90,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 4,
}

_SHORT = ["conv", "full_attention", "conv"]
_MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    **_FACTORS,
}

_FALCON: dict[str, Any] = {
    "head_dim": 32,
    "mamba_n_heads": 8,
    "mamba_d_ssm": 96,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_conv": 3,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.35, 0.25, 1.4, 0.5, 0.8],
    "mlp_multipliers": [0.9, 0.6],
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.3,
}
_NEMOTRON: dict[str, Any] = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 20,
    "conv_kernel": 3,
}


HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3.5": _sized("Qwen3_5Text", **_DELTA),
    "minicpm-v": _seeing(
        "MiniCPMV4_6",
        {**SIZES, **_DELTA, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
        **{**_VISION, "num_hidden_layers": 1, "image_size": 28},
    ),
    "lfm2": _sized("Lfm2", layer_types=_SHORT, block_multiple_of=32, tie_word_embeddings=True),
    "granite-hybrid": _sized(
        "GraniteMoeHybrid", **_MAMBA, num_local_experts=0, shared_intermediate_size=80
    ),
    "falcon-h1": _sized("FalconH1", **_FALCON),
    "nemotron-h": _sized(
        "NemotronH",
        **_NEMOTRON,
        layers_block_type=["mlp", "linear_attention", "full_attention", "mlp", "mlp"],
    ),
    "lfm3": _sized(
        "Lfm3",
        num_hidden_layers=4,
        layer_types=["conv", "sliding_attention", "conv", "full_attention"],
        head_dim=48,
        sliding_window=8,
        conv_L_cache=7,
    ),
    "lfm2-vl": _seeing(
        "Lfm2Vl",
        {
            **SIZES,
            "model_type": "lfm2",
            "layer_types": _SHORT,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
        **{**_TOWER, "model_type": "siglip2_vision_model", "num_patches": 16},
    ),
    "internvl": _seeing("InternVL", _text(model_type="qwen2"), **_TOWER),
    "lfm3-vl": _seeing(
        "Lfm3Vl",
        {
            **SIZES,
            "model_type": "lfm3",
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "head_dim": 48,
            "sliding_window": 8,
            "tie_word_embeddings": False,
        },
        **{**_TOWER, "num_key_value_heads": 1},
    ),
    "olmo-hybrid": _sized(
        "OlmoHybrid",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_key_head_dim=20,
        rope_parameters=None,
    ),
    # Its router does not choose by its scores alone
    "ling": _made("BailingHybrid", **_LING, n_group=4, topk_group=2),
    "ling-ranked": _made(
        "BailingHybrid",
        **{**_LING, "kda_lower_bound": -2.5, "first_k_dense_replace": 0},
        q_lora_rank=48,
        n_group=1,
        topk_group=1,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    ),
    "kimi-linear": _sized(
        "KimiLinear",
        num_key_value_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_head_dim=24,
        linear_num_heads=4,
        linear_conv_kernel_dim=3,
        kv_lora_rank=32,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=32,
        **_LOCAL_EXPERTS,
        moe_intermediate_size=32,
    ),
}


HYBRID_MIXTURES: dict[str, Callable[[], Any]] = {
    "lfm2-moe": _sized("Lfm2Moe", **_EXPERTS, layer_types=_SHORT, num_dense_layers=1),
    "granite-hybrid-moe": _sized(
        "GraniteMoeHybrid",
        **_MAMBA,
        **_LOCAL_EXPERTS,
        shared_intermediate_size=80,
        position_embedding_type="rope",
    ),
    "nemotron-h-moe": _sized(
        "NemotronH",
        **_NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=96,
        routed_scaling_factor=1.5,
    ),
    "nemotron-h-omni": lambda: hf.NemotronH_Omni_Reasoning_V3_Config(
        text_config=hf.NemotronHConfig(
            **SIZES,
            **_NEMOTRON,
            layers_block_type=["moe", "full_attention", "linear_attention"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ).to_dict(),
        vision_config={
            **{"model_type": "radio", "hidden_size": 32, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "video_temporal_patch_size": 2},
        },
        vision_hidden_size=32,
        projector_hidden_size=32,
    ),
    "nemotron-h-latent": _sized(
        "NemotronH",
        **_NEMOTRON,
        layers_block_type=["linear_attention", "moe", "full_attention"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=96,
        moe_latent_size=32,
    ),
    "qwen3-next": _sized("Qwen3Next", **_DELTA, **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen4-exp": _made("Qwen4ExpText", **_SPARSE, **_EXP, **_NGRAMS),
    # All is seen: beyond the budget llama.cpp sees parts of more blocks.
    "qwen4-exp-wide": _made("Qwen4ExpText", **_SPARSE, **{**_EXP, "indexer_budget": 64}, **_NGRAMS),
    "qwen3.5-moe": _sized(
        "Qwen3_5MoeText", **_DELTA, **_EXPERTS, shared_expert_intermediate_size=64
    ),
}

_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA4: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 48,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,  # what llama.cpp takes a file to have that says none
    # Layers that share come behind a sliding and a full one, as in llama.cpp's code
    "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _FULL],
}
_INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 211}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _sized("Llama", tie_word_embeddings=False),
    "llama-tied-bias": _sized("Llama", tie_word_embeddings=True, attention_bias=True, head_dim=32),
    "llama-3.1": _sized("Llama", rope_parameters=_LLAMA3),
    "llama-yarn": _sized("Llama", rope_parameters=_YARN),
    "mistral": _sized("Mistral", sliding_window=None),
    "mistral-window": _sized("Mistral", sliding_window=WINDOW),
    "qwen2": _sized("Qwen2"),
    "qwen2-window": _sized(
        "Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": _sized("Qwen3", head_dim=32),
    "gemma3": _sized("Gemma3Text", head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32),
    "gemma2": _sized(
        "Gemma2",
        head_dim=32,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma4": _made("Gemma4Text", **_GEMMA4, **_INPUTS, num_kv_shared_layers=3),
    "gemma4-double-wide": _made(
        "Gemma4Text",
        **{**_GEMMA4, "final_logit_softcapping": 3.0},
        **_INPUTS,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "gemma4-keys-as-values": _made(
        "Gemma4Text",
        **_GEMMA4,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4-unified": _made(
        "Gemma4UnifiedText",
        **_GEMMA4,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gemma4-unified-whole": _made(
        "Gemma4Unified",  # All layers have the same heads
        text_config={**_GEMMA4, "global_head_dim": 16, "pad_token_id": 0},
        vision_config={"patch_size": 2, "mm_embed_dim": 24, "output_proj_dims": 24},
        audio_config={"audio_embed_dim": 20},
        image_token_id=1000,
        video_token_id=1001,
        audio_token_id=1002,
    ),
    "phi3": _sized("Phi3", sliding_window=None),
    "phi3-longrope": _sized("Phi3", rope_parameters=_LONGROPE, original_max_position_embeddings=48),
    "smollm3": _sized("SmolLM3", tie_word_embeddings=True),
    **DEEPSEEK_DENSE,
    **DEEPSEEK_SPARSE,
    **FAMILIES,
    **HYBRIDS,
}


# Of more tokens than a window, several blocks, and more entries than the indexer chooses.
_V4: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "sliding_window": WINDOW,
    "o_lora_rank": 24,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 5,
}
_V4_SPARSE, _V4_HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
DEEPSEEK_V4: dict[str, Callable[[], Any]] = {
    "deepseek-v4": _made(
        "DeepseekV4",
        **{**_V4, "num_hidden_layers": 4},
        layer_types=["sliding_attention", _V4_SPARSE, _V4_HEAVY, _V4_SPARSE],
        compress_rates={_V4_SPARSE: 4, _V4_HEAVY: 8},
        num_hash_layers=1,
        o_groups=2,
        hc_mult=3,
        swiglu_limit=0.5,
        rope_parameters={**_YARN, "beta_fast": 32, "beta_slow": 1},
    ),
    "deepseek-v4-file": _made(
        "DeepseekV4",
        **{**_V4, "num_hidden_layers": 4, "head_dim": 64, "index_head_dim": 64},
        layer_types=["sliding_attention", _V4_SPARSE, _V4_HEAVY, _V4_SPARSE],
        num_hash_layers=2,
        o_groups=2,
        rope_parameters={**_YARN, "beta_fast": 32, "beta_slow": 1},
    ),
}


# Of more tokens than the indexer chooses, in several blocks.
_GLM5: dict[str, Any] = {
    **{**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 4},
    **{**_GLM, **_LATENT, "qk_rope_head_dim": 0},
    "layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "linear_head_dim": 24,
    "linear_num_heads": 4,
    "index_n_heads": 16,  # so that no scores are equal: 0
    "index_head_dim": 16,
    "index_kpool": 4,
    "index_topk": 12,
    "swiglu_limit": 0.5,
}
_GLM5_VISION = {**_GLM_VISION, "num_heads": 2, "out_hidden_size": 64}
GLM5_NEXT: dict[str, Callable[[], Any]] = {
    "glm5-next": _seeing(
        "Glm5Next",
        {
            **_GLM5,
            "indexer_types": ["full", "full", "shared", "full"],
            "n_group": 2,
            "hc_mult": 3,
            "linear_lower_bound": -2.5,
            "linear_conv_kernel_dim": 3,
        },
        **_GLM5_VISION,
    ),
    "glm5-next-file": _seeing(
        "Glm5Next", {**_GLM5, "mlp_layer_types": ["dense", *["sparse"] * 3]}, **_GLM5_VISION
    ),
}


_GRANITE: dict[str, Any] = {**_LOCAL_EXPERTS, **_FACTORS}
_GPT_OSS: dict[str, Any] = {**_LOCAL_EXPERTS, "head_dim": 32, "sliding_window": WINDOW}

# Mixtures of experts, which not every implementation of ``Ops`` computes.
MIXTURES: dict[str, Callable[[], Any]] = {
    "mixtral": _sized("Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "qwen2-moe": _sized("Qwen2Moe", **_EXPERTS, shared_expert_intermediate_size=64),
    "qwen3-moe": _sized(
        "Qwen3Moe", **_EXPERTS, head_dim=32, norm_topk_prob=True, mlp_only_layers=[]
    ),
    "olmoe": _sized("Olmoe", num_key_value_heads=4, num_experts=8, num_experts_per_tok=3),
    "granite-moe": _sized("GraniteMoe", **_GRANITE, tie_word_embeddings=True),
    "granite-moe-shared": _sized("GraniteMoeShared", **_GRANITE, shared_intermediate_size=32),
    "gemma4-moe": _made(
        "Gemma4Text",
        **_GEMMA4,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=32,
    ),
    "gpt-oss": _sized("GptOss", **_GPT_OSS),
    **FAMILY_MIXTURES,
    **HYBRID_MIXTURES,
    **DEEPSEEK_V4,
    **GLM5_NEXT,
}
