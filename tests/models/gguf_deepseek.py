"""Tiny DeepSeek models as GGUF files, in the form of llama.cpp's converter and in its older one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints.make_gguf import write_gguf

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ALWAYS_F32 = ("_norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias")


def write_deepseek(
    path: Path, model: Any, *, absorbed: bool = True, kind: str = "f32", groups: bool = True
) -> Path:
    """``model`` is transformers' own. ``absorbed`` writes ``attn_k_b`` and ``attn_v_b``.

    Matrices are of the ggml type ``kind``. Without ``groups`` the file is silent on them.
    """
    config = model.config
    metadata = {f"deepseek2.{key}": value for key, value in _keys(config, absorbed).items()}
    if not groups:
        metadata = {k: v for k, v in metadata.items() if "group" not in k}
    metadata["tokenizer.ggml.model"] = "no_vocab"
    tensors: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        tensors.update(_converted(name, value.float().numpy(), config, absorbed))
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    typed = {
        name: (array, "f32" if array.ndim == 1 or name.endswith(_ALWAYS_F32) else kind)
        for name, array in tensors.items()
    }
    return write_gguf(path, "deepseek2", metadata, typed)[0]


def _keys(config: Any, absorbed: bool) -> dict[str, Any]:
    head, rotary = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1 if absorbed else config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + rotary if absorbed else head,
        "attention.value_length": config.kv_lora_rank if absorbed else config.v_head_dim,
        "rope.dimension_count": rotary,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob) and config.model_type != "deepseek_v2",
        "expert_gating_func": 2 if config.model_type != "deepseek_v2" else 1,
    }
    if absorbed:
        keys["attention.key_length_mla"] = head
        keys["attention.value_length_mla"] = config.v_head_dim
    if config.q_lora_rank:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.n_group:
        keys["expert_group_count"] = config.n_group
        keys["expert_group_used_count"] = config.topk_group
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.type"] = "yarn"
        keys["rope.scaling.factor"] = float(rope["factor"])
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return keys


def _converted(name: str, value: np.ndarray, config: Any, absorbed: bool) -> dict[str, np.ndarray]:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return {f"{_TOP[stem]}.{kind}": value}
    _, _, layer, part = name.split(".", 3)
    block = f"blk.{layer}"
    if part == "mlp.gate.e_score_correction_bias":
        return {f"{block}.exp_probs_b.bias": value}
    if part == "mlp.experts.gate_up_proj":
        gate, up = np.split(value, 2, axis=1)
        return {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
    if part == "mlp.experts.down_proj":
        return {f"{block}.ffn_down_exps.weight": value}
    if part == "self_attn.kv_b_proj.weight" and absorbed:
        both = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(both, [config.qk_nope_head_dim], axis=1)
        return {
            f"{block}.attn_k_b.weight": np.ascontiguousarray(keys.swapaxes(1, 2)),
            f"{block}.attn_v_b.weight": np.ascontiguousarray(values),
        }
    return {f"{block}.{_LAYER[part.rpartition('.')[0]]}.{kind}": value}
