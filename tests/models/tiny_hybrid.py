"""Tiny random configs of models some of whose layers are recurrent, with sizes that fit nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

__all__ = ["hybrid_configs", "hybrid_mixtures"]

_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}


def hybrid_configs(sizes: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Those with dense MLPs, by name."""
    return {"qwen3.5": lambda: Qwen3_5TextConfig(**sizes, **_DELTA)}


def hybrid_mixtures(sizes: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Those with mixtures of experts."""
    return {
        "qwen3.5-moe": lambda: Qwen3_5MoeTextConfig(
            **sizes,
            **_DELTA,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
        )
    }
