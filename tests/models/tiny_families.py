"""Tiny configs of families that differ from Llama and Qwen by names and small parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GraniteConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HunYuanDenseV1Config,
    LlavaConfig,
    Ministral3Config,
    Mistral3Config,
    Olmo2Config,
    Olmo3Config,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
)

__all__ = ["FAMILIES", "FAMILY_MIXTURES", "with_text"]

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = 16
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
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
_PIXTRAL = {**_VISION, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
_QWEN_VISION = {
    **{k: v for k, v in _VISION.items() if k != "num_attention_heads"},
    "num_heads": 2,
    "depth": 1,
    "out_hidden_size": 96,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_MROPE = {"rope_type": "default", "rope_theta": 50000.0, "mrope_section": [4, 2, 2]}
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
_LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def with_text(config: Any, text: Any, **vision: Any) -> Any:
    """A multimodal config around a text model's; both say the same of the head."""
    found = config(text_config=text, vision_config=vision)
    found.tie_word_embeddings = text.get("tie_word_embeddings", False)
    return found


FAMILIES: dict[str, Callable[[], Any]] = {
    "ministral3": lambda: Ministral3Config(**_SIZES, head_dim=32, rope_parameters=_MINISTRAL),
    "mistral3": lambda: with_text(
        Mistral3Config,
        {
            "model_type": "ministral3",
            **_SIZES,
            "head_dim": 32,
            "rope_parameters": _MINISTRAL,
            "tie_word_embeddings": False,
        },
        model_type="pixtral",
        **_PIXTRAL,
    ),
    "mistral3-small": lambda: with_text(
        Mistral3Config,
        {"model_type": "mistral", **_SIZES, "sliding_window": None, "tie_word_embeddings": True},
        model_type="pixtral",
        **_PIXTRAL,
    ),
    "llava": lambda: with_text(
        LlavaConfig,
        {
            "model_type": "mistral",
            **_SIZES,
            "head_dim": 32,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        model_type="pixtral",
        **_PIXTRAL,
    ),
    "olmo2": lambda: Olmo2Config(**_SIZES),
    "olmo3": lambda: Olmo3Config(**_SIZES, sliding_window=_WINDOW, layer_types=_KINDS),
    "olmo3-yarn": lambda: Olmo3Config(
        **{**_SIZES, "num_hidden_layers": 5},
        sliding_window=_WINDOW,
        rope_parameters={
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "exaone4": lambda: Exaone4Config(
        **_SIZES, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "exaone4-window": lambda: Exaone4Config(
        **_SIZES, sliding_window=_WINDOW, sliding_window_pattern=2, tie_word_embeddings=True
    ),
    "seed-oss": lambda: SeedOssConfig(**_SIZES, head_dim=32),
    "seed-oss-out-bias": lambda: SeedOssConfig(**_SIZES, head_dim=32, attention_out_bias=True),
    "granite": lambda: GraniteConfig(**_SIZES, **_FACTORS),
    "granite-swa": lambda: GraniteSWAConfig(
        **_SIZES, **_FACTORS, sliding_window=_WINDOW, layer_rope_theta=[0, 10000.0, 10000.0]
    ),
    "granite-swa-bases": lambda: GraniteSWAConfig(
        **_SIZES, **_FACTORS, sliding_window=_WINDOW, layer_rope_theta=[500.0, 10000.0, 0]
    ),
    "hunyuan": lambda: HunYuanDenseV1Config(
        **_SIZES,
        head_dim=32,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    ),
    "hunyuan-yarn": lambda: HunYuanDenseV1Config(
        **_SIZES, head_dim=16, rope_parameters=_YARN, tie_word_embeddings=True, attention_bias=True
    ),
    "ernie": lambda: Ernie4_5Config(**_SIZES, head_dim=32),
    "qwen3-vl": lambda: with_text(
        Qwen3VLConfig, {**_SIZES, "head_dim": 16, "rope_parameters": _MROPE}, **_QWEN_VISION
    ),
    "qwen2.5-vl": lambda: with_text(
        Qwen2_5_VLConfig,
        {**_SIZES, "rope_parameters": _MROPE},
        **_VISION,
        num_heads=2,
        depth=1,
        out_hidden_size=96,
    ),
    "gemma3-images": lambda: with_text(
        Gemma3Config,
        {
            **_SIZES,
            "head_dim": 32,
            "sliding_window": _WINDOW,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
        },
        **_PIXTRAL,
    ),
    "glm4-moe": lambda: Glm4MoeConfig(**_SIZES, **_GLM, head_dim=32, attention_bias=True),
    "glm4-moe-groups": lambda: Glm4MoeConfig(**_SIZES, **_GLM, n_group=2, topk_group=1),
    "glm4-moe-norms": lambda: Glm4MoeConfig(
        **_SIZES, **_GLM, use_qk_norm=True, norm_topk_prob=False, first_k_dense_replace=2
    ),
    "glm4-moe-lite": lambda: Glm4MoeLiteConfig(
        **{**_SIZES, "num_key_value_heads": 6}, **_GLM, **_LATENT
    ),
    "ernie-moe": lambda: Ernie4_5_MoeConfig(**_SIZES, **_ERNIE),
    "ernie-moe-some": lambda: Ernie4_5_MoeConfig(
        **{**_SIZES, "num_hidden_layers": 5},
        **_ERNIE,
        moe_layer_end_index=3,
        moe_layer_interval=2,
    ),
}

# Whose routers choose by their scores alone
FAMILY_MIXTURES: dict[str, Callable[[], Any]] = {
    "granite-moe-swa": lambda: GraniteMoeSWAConfig(
        **_SIZES,
        **_FACTORS,
        num_local_experts=8,
        num_experts_per_tok=3,
        shared_intermediate_size=64,
        sliding_window=_WINDOW,
    ),
    "qwen3-vl-moe": lambda: with_text(
        Qwen3VLMoeConfig,
        {
            **_SIZES,
            "head_dim": 16,
            "rope_parameters": _MROPE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": False,
        },
        **_QWEN_VISION,
    ),
}
