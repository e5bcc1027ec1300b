"""Tiny random configs of models some of whose layers are recurrent, with sizes that fit nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm2VlConfig,
    Lfm3Config,
    Lfm3VlConfig,
    NemotronH_Omni_Reasoning_V3_Config,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
)

from tests.models.tiny_families import with_text

__all__ = ["hybrid_configs", "hybrid_mixtures"]

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
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
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

_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
}
_SHORT = ["conv", "full_attention", "conv"]
_MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
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


def hybrid_configs(sizes: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Those with dense MLPs, and with routers of another kind, by name."""
    return {
        "qwen3.5": lambda: Qwen3_5TextConfig(**sizes, **_DELTA),
        "lfm2": lambda: Lfm2Config(
            **sizes, layer_types=_SHORT, block_multiple_of=32, tie_word_embeddings=True
        ),
        "lfm2-bias": lambda: Lfm2Config(
            **sizes, layer_types=_SHORT, block_auto_adjust_ff_dim=False, conv_bias=True
        ),
        "granite-hybrid": lambda: GraniteMoeHybridConfig(
            **sizes,
            **_MAMBA,
            num_local_experts=0,
            shared_intermediate_size=80,
        ),
        "falcon-h1": lambda: FalconH1Config(**sizes, **_FALCON),
        "falcon-h1-normed": lambda: FalconH1Config(
            **sizes,
            **{**_FALCON, "mamba_d_ssm": None},
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            tie_word_embeddings=True,
        ),
        "nemotron-h": lambda: NemotronHConfig(
            **sizes,
            **_NEMOTRON,
            layers_block_type=["mlp", "linear_attention", "full_attention", "mlp", "mlp"],
        ),
        "lfm3": lambda: Lfm3Config(
            **{**sizes, "num_hidden_layers": 4},
            layer_types=["conv", "sliding_attention", "conv", "full_attention"],
            head_dim=48,
            sliding_window=8,
            conv_L_cache=7,
        ),
        "lfm3-plain": lambda: Lfm3Config(
            **sizes,
            layer_types=["conv", "full_attention", "sliding_attention"],
            head_dim=48,
            sliding_window=8,
            conv_bias=True,
            use_sandwich_norm=False,
            use_attention_gate=False,
        ),
        "lfm2-vl": lambda: with_text(
            Lfm2VlConfig,
            {
                **sizes,
                "model_type": "lfm2",
                "layer_types": _SHORT,
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": True,
            },
            **_VISION,
            model_type="siglip2_vision_model",
            num_patches=16,
        ),
        "lfm3-vl": lambda: with_text(
            Lfm3VlConfig,
            {
                **sizes,
                "model_type": "lfm3",
                "layer_types": ["conv", "full_attention", "sliding_attention"],
                "head_dim": 48,
                "sliding_window": 8,
                "tie_word_embeddings": False,
            },
            **_VISION,
            num_key_value_heads=1,
        ),
        "olmo-hybrid": lambda: OlmoHybridConfig(
            **sizes,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_key_head_dim=20,
            rope_parameters=None,
        ),
        "olmo-hybrid-rope": lambda: OlmoHybridConfig(
            **sizes,
            linear_allow_neg_eigval=False,
            linear_key_head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        ),
        # Its router does not choose by its scores alone
        "kimi-linear": lambda: KimiLinearConfig(
            **{**sizes, "num_key_value_heads": 4},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_head_dim=24,
            linear_num_heads=4,
            linear_conv_kernel_dim=3,
            kv_lora_rank=32,
            qk_nope_head_dim=48,
            qk_rope_head_dim=16,
            v_head_dim=32,
            num_local_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
        ),
    }


def hybrid_mixtures(sizes: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Those with mixtures of experts."""
    return {
        "lfm2-moe": lambda: Lfm2MoeConfig(
            **sizes,
            layer_types=_SHORT,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            num_dense_layers=1,
        ),
        "granite-hybrid-moe": lambda: GraniteMoeHybridConfig(
            **sizes,
            **_MAMBA,
            num_local_experts=8,
            num_experts_per_tok=3,
            shared_intermediate_size=80,
            position_embedding_type="rope",
        ),
        "nemotron-h-moe": lambda: NemotronHConfig(
            **sizes,
            **_NEMOTRON,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=96,
            routed_scaling_factor=1.5,
        ),
        "nemotron-h-omni": lambda: NemotronH_Omni_Reasoning_V3_Config(
            text_config=NemotronHConfig(
                **sizes,
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
        "nemotron-h-latent": lambda: NemotronHConfig(
            **sizes,
            **_NEMOTRON,
            layers_block_type=["linear_attention", "moe", "full_attention"],
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=64,
            moe_shared_expert_intermediate_size=96,
            moe_latent_size=32,
        ),
        "nemotron-h-groups": lambda: NemotronHConfig(
            **sizes,
            **_NEMOTRON,
            layers_block_type=["moe", "mlp", "full_attention", "linear_attention", "moe"],
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
            norm_topk_prob=False,
            use_bias=True,
            use_conv_bias=False,
        ),
        "qwen3-next": lambda: Qwen3NextConfig(
            **sizes,
            **_DELTA,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        ),
        "qwen3-next-dense-first": lambda: Qwen3NextConfig(
            **sizes,
            **_DELTA,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            mlp_only_layers=[0],
        ),
        "qwen4-exp": lambda: Qwen4ExpTextConfig(**_sparse(sizes), **_EXP, **_NGRAMS),
        # All is seen: beyond the budget llama.cpp sees parts of more blocks.
        "qwen4-exp-wide": lambda: Qwen4ExpTextConfig(
            **_sparse(sizes), **{**_EXP, "indexer_budget": 64}, **_NGRAMS
        ),
        "qwen4-exp-plain": lambda: Qwen4ExpTextConfig(
            **_sparse(sizes), **{**_EXP, "output_gate_type": None, "indexer_compress_ratio": 2}
        ),
        "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(
            **sizes,
            **_DELTA,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        ),
    }


def _sparse(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of models without a dense MLP."""
    return {key: value for key, value in sizes.items() if key != "intermediate_size"}
