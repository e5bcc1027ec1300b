"""Tiny Nemotron-H and Falcon-H1 as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints.make_gguf import Array, write_gguf

__all__ = ["MAMBA_FILES", "write_mamba"]

MAMBA_FILES = {
    "falcon-h1": "falcon-h1",
    "falcon-h1-normed": "falcon-h1",
    "nemotron-h": "nemotron_h",
    "nemotron-h-moe": "nemotron_h_moe",
    "nemotron-h-latent": "nemotron_h_moe",
}
"""What each tiny config's file calls its architecture."""

_TOP = {
    "model.embeddings.weight": "token_embd.weight",
    "model.norm_f.weight": "output_norm.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_NAMES = {
    "norm.weight": "attn_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "pre_ff_layernorm.weight": "ffn_norm",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mixer.gate_proj.weight": "ffn_gate.weight",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
}
_MIXERS = ("self_attn.", "mamba.", "feed_forward.")  # what Nemotron-H calls alike


def write_mamba(theirs: Any, path: Path, name: str, *, predicts: bool = False) -> Path:
    """transformers' model, of the tiny config ``name``, as the file ``path``.

    ``predicts``: there is one block more, which predicts further tokens.
    """
    architecture, config = MAMBA_FILES[name], theirs.config
    tensors: dict[str, Array] = {}
    for key, value in theirs.state_dict().items():
        values = value.float().numpy()
        if architecture == "falcon-h1":
            values = _multiplied(key, values, config)
        if key in _TOP:
            tensors[_TOP[key]] = values
            continue
        _, _, layer, stem = key.split(".", 3)
        for mixer in _MIXERS:
            stem = stem.replace(mixer, "mixer.")
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        tensors[f"blk.{layer}.{_NAMES[stem]}"] = _stored(stem, values, groups)
    described = _falcon(config) if architecture == "falcon-h1" else _nemotron(config)
    metadata: dict[str, Any] = {f"{architecture}.{key}": v for key, v in described.items()}
    if predicts:
        blocks = metadata[f"{architecture}.block_count"]
        metadata[f"{architecture}.nextn_predict_layers"] = 1
        metadata[f"{architecture}.block_count"] = blocks + 1
        for key in ("attention.head_count_kv", "feed_forward_length"):
            each = metadata[f"{architecture}.{key}"]
            each.append(max(each))
        for part in ("nextn.eh_proj", "nextn.enorm", "attn_q", "ffn_up_exps"):
            tensors[f"blk.{blocks}.{part}.weight"] = np.ones((32, 32), np.float32)
    metadata["tokenizer.ggml.model"] = "no_vocab"
    files = write_gguf(path, architecture, metadata, {n: (t, "f32") for n, t in tensors.items()})
    return files[0]


def _stored(stem: str, value: Array, groups: int) -> Array:
    if stem.endswith("A_log"):
        return -np.exp(value)[:, None]
    if stem.endswith(".D"):
        return value[:, None]
    if stem.endswith("conv1d.weight"):
        return value[:, 0]
    return value.reshape(groups, -1) if stem == "mixer.norm.weight" else value


def _multiplied(key: str, value: Array, config: Any) -> Array:
    """Falcon-H1's factors are in the weights of a file."""
    module = key.removesuffix(".weight").split(".")[-1]
    factors = {
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "in_proj": config.ssm_in_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
    }
    value = value * np.float32(factors.get(module, 1.0))
    if module == "in_proj":
        keys = config.mamba_n_groups * config.mamba_d_state
        inner = _inner(config)
        sizes = (inner, inner, keys, keys, config.mamba_n_heads)
        value *= np.repeat(np.float32(config.ssm_multipliers), sizes)[:, None]
    return value


def _inner(config: Any) -> int:
    return int(config.mamba_d_ssm or config.mamba_expand * config.hidden_size)


def _falcon(config: Any) -> Mapping[str, Any]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": _inner(config),
    }


def _nemotron(config: Any) -> Mapping[str, Any]:
    kinds = config.layers_block_type
    sparse = "moe" in kinds
    groups, width = config.num_key_value_heads, config.intermediate_size
    if sparse:
        width = config.moe_intermediate_size
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": len(kinds),
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [groups * (kind == "full_attention") for kind in kinds],
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "rope.dimension_count": config.head_dim,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }
    if sparse:
        found |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group,
        }
        if config.moe_latent_size:
            found["moe_latent_size"] = config.moe_latent_size
    return found
