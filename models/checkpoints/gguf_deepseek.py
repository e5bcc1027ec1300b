"""What GGUF's ``deepseek2`` calls DeepSeek-V2's and V3's tensors and parameters.

Newer files hold latent attention in its absorbed form: one key/value head, whose size is under the
plain keys; a head's own sizes are under keys that end in ``_mla``. Older ones have the latter under
the plain keys. It reads metadata; the model's parameters are Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localrt.models.checkpoints.gguf_metadata import GgufMetadata

__all__ = ["DEEPSEEK_TENSORS", "add_deepseek"]

DEEPSEEK_TENSORS: Mapping[str, str] = {
    # of a layer
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}

_KEYS: Mapping[str, str] = {
    # after the architecture's name and a dot
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "expert_count": "n_routed_experts",
    "rope.dimension_count": "qk_rope_head_dim",
}


def add_deepseek(config: dict[str, Any], architecture: str, metadata: GgufMetadata) -> None:
    """The keys of ``config`` that are DeepSeek's own.

    Raises:
        CheckpointError: a parameter is of a wrong type.
    """
    for key, name in _KEYS.items():
        value = metadata.number(f"{architecture}.{key}")
        if value:
            config[name] = value

    def head_size(kind: str) -> int | None:
        stem = f"{architecture}.attention.{kind}_length"
        return metadata.integer(f"{stem}_mla") or metadata.integer(stem)

    size, rotary = head_size("key"), config.get("qk_rope_head_dim")
    if size is not None and isinstance(rotary, int):
        config["qk_nope_head_dim"] = size - rotary
    if (value := head_size("value")) is not None:
        config["v_head_dim"] = value
    config["rope_interleave"] = True
    config.pop("head_dim", None)
    config.pop("partial_rotary_factor", None)
    scoring = config.setdefault("scoring_func", "softmax")
    # The file names no method: a group's best, or with sigmoids and a bias its best two.
    config["topk_method"] = "noaux_tc" if scoring == "sigmoid" else "group_limited_greedy"
    config.setdefault("norm_topk_prob", False)
    if not config.get("routed_scaling_factor"):  # 0 says none, as not to say
        config.pop("routed_scaling_factor", None)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "mscale_all_dim" in scaling:
        # The file has a tenth of it; the two factors are the same in all published models.
        scaling["mscale_all_dim"] = scaling["mscale"] = 10 * scaling["mscale_all_dim"]
