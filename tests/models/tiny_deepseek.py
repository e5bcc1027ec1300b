"""Tiny DeepSeek configs: latent attention alone, and with each way of choosing experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config

__all__ = ["DEEPSEEK_CONFIGS", "DEEPSEEK_DENSE", "DEEPSEEK_SPARSE"]

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
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
_DENSE = {**_SIZES, "first_k_dense_replace": 3}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_OTHER_MSCALE = {**_YARN, "mscale": 1.0}
_GROUPS = {"n_group": 4, "topk_group": 2}

DEEPSEEK_DENSE: dict[str, Callable[[], Any]] = {
    "deepseek-v2-dense": lambda: DeepseekV2Config(**_DENSE, rope_parameters=dict(_YARN)),
    "deepseek-v2-lite-dense": lambda: DeepseekV2Config(**{**_DENSE, "q_lora_rank": None}),
    "deepseek-v3-dense": lambda: DeepseekV3Config(**_DENSE, rope_parameters=dict(_OTHER_MSCALE)),
    "deepseek-v3-halves": lambda: DeepseekV3Config(**_DENSE, rope_interleave=False),
}
"""Without experts: what attention does alone."""

DEEPSEEK_SPARSE: dict[str, Callable[[], Any]] = {
    "deepseek-v2": lambda: DeepseekV2Config(
        **_SIZES,
        **_GROUPS,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        rope_parameters=dict(_YARN),
    ),
    "deepseek-v2-lite": lambda: DeepseekV2Config(
        **{**_SIZES, "q_lora_rank": None}, topk_method="greedy", tie_word_embeddings=True
    ),
    "deepseek-v3": lambda: DeepseekV3Config(**_SIZES, **_GROUPS, rope_parameters=dict(_YARN)),
    "deepseek-v3-plain": lambda: DeepseekV3Config(
        **_SIZES, n_group=1, topk_group=1, norm_topk_prob=False
    ),
}

DEEPSEEK_CONFIGS = {**DEEPSEEK_DENSE, **DEEPSEEK_SPARSE}
