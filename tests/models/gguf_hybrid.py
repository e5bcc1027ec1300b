"""Tiny models with recurrent layers as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localrt.models.checkpoints.gguf.names import QWEN_DELTA
from localrt.models.layers.ngrams import NgramHash, NgramSpec
from tests.checkpoints.make_gguf import Array, in_pairs, write_gguf
from tests.models.gguf_mamba import MAMBA_FILES, write_mamba

__all__ = ["HYBRID_FILES", "hybrid_metadata", "hybrid_tensors", "write_hybrid"]

HYBRID_FILES = {
    **MAMBA_FILES,
    "kimi-linear": "kimi-linear",
    "qwen3-next": "qwen3next",
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
    "qwen4-exp-wide": "qwen4exp",
    "lfm2": "lfm2",
    "lfm2-moe": "lfm2moe",
    "granite-hybrid": "granitehybrid",
    "granite-hybrid-moe": "granitehybrid",
}
"""What each tiny config's file calls its architecture."""

_NAMES = {
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "attn_hyper_connection.hc_norm": "hc_attn_norm",
    "attn_hyper_connection.input_mix_weight_down": "hc_attn_down",
    "attn_hyper_connection.input_mix_weight_up": "hc_attn_up",
    "attn_hyper_connection.block_inject_weight": "hc_attn_inject",
    "mlp_hyper_connection.hc_norm": "hc_ffn_norm",
    "mlp_hyper_connection.input_mix_weight_down": "hc_ffn_down",
    "mlp_hyper_connection.input_mix_weight_up": "hc_ffn_up",
    "mlp_hyper_connection.block_inject_weight": "hc_ffn_inject",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query",
    "ple.norm_conv": "ple_norm_conv",
    "ple.conv1d": "ple_conv1d",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "lm_head.weight": "output.weight",
    "model.hyper_connection_mixer.hc_norm.weight": "output_hc_norm.weight",
    "model.hyper_connection_mixer.input_mix_weight_down.weight": "output_hc_down.weight",
    "model.hyper_connection_mixer.input_mix_weight_up.weight": "output_hc_up.weight",
}
_EXPERTS = re.compile(r"(mlp|feed_forward|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)")


def write_hybrid(theirs: Any, path: Path, name: str, *, together: bool = False) -> Path:
    """transformers' model, of the tiny config ``name``, as the file ``path``.

    ``together`` leaves DeltaNet's projections in one matrix, as the first files of Qwen3-Next do.
    """
    if name in MAMBA_FILES:
        return write_mamba(theirs, path, name)
    architecture = HYBRID_FILES[name]
    state = {key: value.float().numpy() for key, value in theirs.state_dict().items()}
    whole = [key for key in state if together and key.endswith("in_proj_qkvz.weight")]
    tensors = {f"blk.{key.split('.')[2]}.ssm_in.weight": state.pop(key) for key in whole}
    tensors |= hybrid_tensors(state, architecture, theirs.config)
    metadata = hybrid_metadata(architecture, theirs.config) | {"tokenizer.ggml.model": "no_vocab"}
    files = write_gguf(path, architecture, metadata, {n: (t, "f32") for n, t in tensors.items()})
    return files[0]


def hybrid_tensors(
    state: Mapping[str, Array], architecture: str, config: Any
) -> Mapping[str, Array]:
    """A file's tensors, from transformers' by their names there."""
    tensors: dict[str, Array] = {}
    for key, value in state.items():
        tensors |= _tensor(key, value, architecture, config)
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    return tensors


def hybrid_metadata(architecture: str, config: Any) -> dict[str, Any]:
    """A file's keys, but for the tokenizer's."""
    return {f"{architecture}.{key}": value for key, value in _metadata(config).items()}


def _tensor(key: str, value: Array, architecture: str, config: Any) -> Mapping[str, Array]:
    if key in _TOP:
        one = architecture in QWEN_DELTA and "norm" in key
        return {_TOP[key]: value + 1 if one else value}
    _, _, layer, stem = key.split(".", 3)
    prefix = f"blk.{layer}."
    if (stacked := _EXPERTS.fullmatch(stem)) is not None:
        if stacked[2] == "down_proj":
            return {f"{prefix}ffn_down_exps.weight": value}
        gate, up = np.split(value, 2, axis=1)
        return {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
    if stem.startswith("shared_mlp."):
        shared = "_shexp" if config.num_local_experts else ""
        if "output" in stem:
            return {f"{prefix}ffn_down{shared}.weight": value}
        gate, up = np.split(value, 2)
        return {f"{prefix}ffn_gate{shared}.weight": gate, f"{prefix}ffn_up{shared}.weight": up}
    if stem == "post_attention_layernorm.weight":
        if architecture in QWEN_DELTA:
            return {f"{prefix}post_attention_norm.weight": value + 1}
        return {f"{prefix}ffn_norm.weight": value}
    if stem == "linear_attn.in_proj_qkvz.weight":
        return _apart(prefix, value, config)
    if stem.endswith("ngram_embedding.weight"):
        return {"per_layer_token_embd.weight": value}
    if ".ple_embedding." in stem:
        return {}
    if stem == "self_attn.indexer.index_qk_proj.weight":
        first = config.indexer_n_heads * config.indexer_head_dim
        return {
            f"{prefix}indexer.q_proj.weight": value[:first],
            f"{prefix}indexer.k_proj.weight": value[first:],
        }
    if architecture.startswith(("qwen35", "qwen4exp")):
        value = _value_heads_in_turns(stem, value, config)
    if architecture == "granitehybrid" and stem.startswith(("self_attn.q", "self_attn.k")):
        heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
        value = in_pairs(value, heads)
    if architecture == "kimi-linear" and (found := _kimi(prefix, stem, value, config)):
        return found
    module, _, kind = stem.rpartition(".")
    if kind == "A_log":
        rates = -np.exp(value)
        return {f"{prefix}ssm_a": rates[:, None] if architecture == "granitehybrid" else rates}
    if kind == "D":
        return {f"{prefix}ssm_d": value[:, None]}
    if kind == "dt_bias":
        return {f"{prefix}ssm_dt.bias": value}
    if stem == "feed_forward.expert_bias":
        return {f"{prefix}exp_probs_b.bias": value}
    if "conv" in module and value.ndim == 3:
        value = value[:, 0]
    if module == "mamba.norm":
        value = value.reshape(config.mamba_n_groups, -1)
    if module == "mlp.shared_expert_gate":
        value = value.reshape(-1)
    plain = module.rpartition(".")[2].find("norm") >= 0 and module != "linear_attn.norm"
    if architecture in QWEN_DELTA and plain:
        value = value + 1
    return {f"{prefix}{_NAMES[module]}.{kind}": value}


def _kimi(prefix: str, stem: str, value: Array, config: Any) -> Mapping[str, Array]:
    """What is no matrix or norm of one name; nothing of others."""
    if stem.endswith("A_log"):
        return {f"{prefix}ssm_a": -np.exp(value)}
    if stem.endswith("e_score_correction_bias"):
        return {f"{prefix}exp_probs_b.bias": value}
    if stem == "self_attn.conv1d.weight":
        parts = zip("qkv", np.split(value, 3), strict=True)
        return {f"{prefix}ssm_conv1d_{part}.weight": taps[None] for part, taps in parts}
    if stem == "self_attn.kv_b_proj.weight":
        heads = value.reshape(config.num_attention_heads, -1, value.shape[1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        keys = np.ascontiguousarray(keys.swapaxes(1, 2))
        return {f"{prefix}attn_k_b.weight": keys, f"{prefix}attn_v_b.weight": values}
    return {}


def _apart(prefix: str, value: Array, config: Any) -> Mapping[str, Array]:
    """Queries, keys and values of all key heads, and their gates."""
    groups, key = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // groups * config.linear_value_head_dim
    cuts = np.cumsum([key, key, values])
    parts = np.split(value.reshape(groups, -1, value.shape[1]), cuts, axis=1)
    *qkv, z = (part.reshape(-1, value.shape[1]) for part in parts)
    return {f"{prefix}attn_qkv.weight": np.concatenate(qkv), f"{prefix}attn_gate.weight": z}


def _value_heads_in_turns(stem: str, value: Array, config: Any) -> Array:
    """Value heads of each key head side by side, as llama.cpp's converter puts them."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    size, each = config.linear_value_head_dim, values // keys

    def turned(part: Array, width: int, axis: int = 0) -> Array:
        shape = part.shape
        split = (*shape[:axis], keys, each, width, *shape[axis + 1 :])
        return part.reshape(split).swapaxes(axis, axis + 1).reshape(shape)

    module = stem.removeprefix("linear_attn.").removesuffix(".weight")
    if module in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * config.linear_key_head_dim
        return np.concatenate([value[:first], turned(value[first:], size)])
    if module == "in_proj_z":
        return turned(value, size)
    if module == "out_proj" and "linear_attn" in stem:
        return turned(value, size, axis=1)
    if module in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return turned(value, 1)
    return value


def _metadata(config: Any) -> dict[str, Any]:
    eps = getattr(config, "rms_norm_eps", None) or config.norm_eps
    found: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": eps,
        "vocab_size": config.vocab_size,
    }
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or 1.0
    found |= {
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": int(head * share),
    }
    if "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    kinds = ["full_attention" if "indexed" in kind else kind for kind in config.layer_types]
    groups = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds]
    found["attention.head_count_kv"] = groups
    if hasattr(config, "intermediate_size"):
        found["feed_forward_length"] = config.intermediate_size
    if hasattr(config, "linear_num_key_heads"):
        found["attention.head_count_kv"] = config.num_key_value_heads
        found["full_attention_interval"] = kinds.index("full_attention") + 1
        found["rope.dimension_sections"] = [*config.rope_parameters["mrope_section"], 0]
        found |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        }
    if config.model_type == "qwen4_exp_text":
        found |= _connected(config, kinds)
    if config.model_type == "kimi_linear":
        latent, rotary = config.kv_lora_rank, config.qk_rope_head_dim
        found |= {
            "attention.head_count_kv": [int(kind == "full_attention") for kind in kinds],
            "attention.kv_lora_rank": latent,
            "attention.key_length": latent + rotary,
            "attention.key_length_mla": config.qk_nope_head_dim + rotary,
            "attention.value_length_mla": config.v_head_dim,
            "rope.dimension_count": rotary,
            "kda.head_dim": config.linear_head_dim,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "leading_dense_block_count": config.mlp_layer_types.count("dense"),
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_gating_func": 2,
        }
    if hasattr(config, "mamba_n_heads"):
        found |= {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.time_step_rank": config.mamba_n_heads,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "embedding_scale": config.embedding_multiplier,
            "attention.scale": config.attention_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
        }
        shared = config.shared_intermediate_size
        experts = config.num_local_experts
        found["expert_shared_feed_forward_length" if experts else "feed_forward_length"] = shared
    if hasattr(config, "conv_L_cache"):
        found["shortconv.l_cache"] = config.conv_L_cache
        found["feed_forward_length"] = _lfm2_width(config)
    if count := getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0):
        found |= {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        found["expert_feed_forward_length"] = inner
        if hasattr(config, "shared_expert_intermediate_size"):
            found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
        if hasattr(config, "num_dense_layers"):
            found["leading_dense_block_count"] = config.num_dense_layers
            found["expert_gating_func"] = 2
            found["expert_weights_scale"] = config.routed_scaling_factor
    return found


def _connected(config: Any, kinds: list[str]) -> dict[str, Any]:
    """Streams, indexer and n-grams of Qwen3.8-Flash-Next."""
    spec = NgramSpec(
        orders=config.ngram_size,
        heads=config.heads_per_ngram,
        rows_from=config.ngram_vocab_size_base,
        vocab=config.vocab_size,
        separator=config.eos_token_id,
    )
    hashed = NgramHash(spec)
    ratio = config.indexer_compress_ratio
    return {
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": config.indexer_n_heads,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.indexer.top_k": config.indexer_budget,
        "attention.compress_ratios": [ratio if kind == "full_attention" else 0 for kind in kinds],
        "ple.layers": [layer - 1 for layer in config.ple_layer_ids],
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
        "ple.layer_multipliers": hashed.multipliers.astype(np.uint64),
        "ple.head_offsets": hashed.offsets.astype(np.uint64),
        "ple.head_vocab_sizes": hashed.sizes.astype(np.uint64),
        "embedding_length_per_layer_input": config.ple_embed_dim // spec.rows_per_token,
    }


def _lfm2_width(config: Any) -> int:
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return int(config.intermediate_size)
    scaled = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
    return -(-scaled // config.block_multiple_of) * int(config.block_multiple_of)
