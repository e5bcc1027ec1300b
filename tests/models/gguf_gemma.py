"""Tiny Gemma 3n and 4 as GGUF files, as llama.cpp's converter would write them, from folders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.checkpoints.make_gguf import Array, write_gguf

__all__ = ["ARCHITECTURES", "gemma_metadata", "gemma_tensors", "write_gemma"]

ARCHITECTURES = {
    "gemma3n-gguf": "gemma3n",
    "gemma4": "gemma4",
    "gemma4-double-wide": "gemma4",
    "gemma4-keys-as-values": "gemma4",
    "gemma4-moe": "gemma4",
}

_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "altup_active_idx": "altup.active_idx",
    "altup_num_inputs": "altup.num_inputs",
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "vocab_size": "vocab_size",
}
_FLOATS = ("epsilon", "softcapping")

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_STACKS = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.correction_coefs.weight": "altup_correct_coef.weight",
    "altup.prediction_coefs.weight": "altup_predict_coef.weight",
    "altup.modality_router.weight": "altup_router.weight",
    "altup.router_norm.weight": "altup_router_norm.weight",
    "laurel.linear_left.weight": "laurel_l.weight",
    "laurel.linear_right.weight": "laurel_r.weight",
    "laurel.post_laurel_norm.weight": "laurel_post_norm.weight",
}


def write_gemma(folder: Path, path: Path, architecture: str) -> Path:
    """The Hugging Face model in ``folder`` as the GGUF file ``path``."""
    config = json.loads((folder / "config.json").read_text())
    tensors = gemma_tensors(load_file(folder / "model.safetensors"), architecture, config)
    metadata = gemma_metadata(architecture, config) | {"tokenizer.ggml.model": "no_vocab"}
    (file,) = write_gguf(path, architecture, metadata, {n: (t, "f32") for n, t in tensors.items()})
    return file


def gemma_metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A file's keys, but for the tokenizer's."""
    found: dict[str, Any] = {}
    for key, ours in _KEYS.items():
        value = config.get(key)
        if value is not None:
            found[f"{architecture}.{ours}"] = float(value) if ours.endswith(_FLOATS) else value
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    attention, rope = f"{architecture}.attention.", config["rope_parameters"]
    found[f"{attention}sliding_window_pattern"] = windowed
    found[f"{architecture}.rope.freq_base"] = float(rope["full_attention"]["rope_theta"])
    sizes = {True: config["head_dim"], False: config["head_dim"]}
    if architecture == "gemma4":
        full = _full_layer(config)
        sizes[False] = full["head_dim"]
        found[f"{attention}key_length_swa"] = found[f"{attention}value_length_swa"] = sizes[True]
        found[f"{architecture}.rope.dimension_count_swa"] = sizes[True]
        found[f"{architecture}.rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        found.setdefault(f"{architecture}.embedding_length_per_layer_input", 0)
        if "num_key_value_heads" in full:
            heads = {True: config["num_key_value_heads"], False: full["num_key_value_heads"]}
            found[f"{attention}head_count_kv"] = [heads[sliding] for sliding in windowed]
        if config["use_double_wide_mlp"]:
            own = len(windowed) - config["num_kv_shared_layers"]
            size = config["intermediate_size"]
            found[f"{architecture}.feed_forward_length"] = [
                size if layer < own else 2 * size for layer in range(len(windowed))
            ]
    else:
        found[f"{architecture}.activation_sparsity_scale"] = [
            NormalDist().inv_cdf(share) if share else -math.inf
            for share in config["activation_sparsity_pattern"]
        ]
    found[f"{attention}key_length"] = found[f"{attention}value_length"] = sizes[False]
    found[f"{architecture}.rope.dimension_count"] = sizes[False]
    return found


def _full_layer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a layer without a window has of its own."""
    first = config["layer_types"].index("full_attention")
    own: Mapping[str, Mapping[str, Any]] = config["per_layer_config"]
    return next(values for number, values in own.items() if int(number) == first)


def _divisors(config: Mapping[str, Any]) -> Array:
    """What the rotary frequencies of full layers are divided by."""
    pairs = _full_layer(config)["head_dim"] // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    values = np.full(pairs, 1e30, np.float32)
    values[: int(pairs * share)] = 1.0
    return values


def gemma_tensors(
    state: Mapping[str, Array], architecture: str, config: Mapping[str, Any]
) -> dict[str, Array]:
    """A file's tensors, from transformers' by their names there."""
    tensors: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, values in state.items():
        if name == "lm_head.weight":  # tied
            continue
        if name in _TOP:
            tensors[_TOP[name]] = values
            continue
        _, module, number, stem = name.split(".", 3)
        if module in _STACKS:
            stacks.setdefault(f"{_STACKS[module]}.weight", {})[int(number)] = values
        else:
            tensors[f"blk.{number}.{_NAMES[stem]}"] = values
    for name, parts in stacks.items():
        tensors[name] = np.stack([parts[number] for number in sorted(parts)])
    if architecture == "gemma4":
        tensors["rope_freqs.weight"] = _divisors(config)
    return tensors
