"""Tables of GGUF's names for tensors and parameters, and Hugging Face's names for them.

These are shared by several families; those of one family are in its ``Family``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from localrt.models.architectures.family import Family
from localrt.models.config import CHOICE_BIAS
from localrt.models.row_order import Stack

_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's, after the last layer
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

_LAYER_TENSORS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_gate": "self_attn.g_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": CHOICE_BIAS,  # Hy3's
    "ffn_latent_down": "mlp.latent_down",
    "ffn_latent_up": "mlp.latent_up",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    # inputs that each layer has of its own
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    # Mamba 2
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}

_EXPERT_TENSORS: Mapping[str, str] = {
    # early Mixtral files: one tensor per expert, with its number before "weight"
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}

_EXPERT_STACKS: Mapping[str, tuple[str, ...]] = {
    # (experts, rows, columns)
    "ffn_gate_exps": (_EXPERT_TENSORS["ffn_gate"],),
    "ffn_up_exps": (_EXPERT_TENSORS["ffn_up"],),
    "ffn_gate_up_exps": (_EXPERT_TENSORS["ffn_gate"], _EXPERT_TENSORS["ffn_up"]),
    "ffn_down_exps": (_EXPERT_TENSORS["ffn_down"],),
}

_WHOLE_NAMES: Mapping[str, str] = {
    # names without ".weight" or ".bias" in Hugging Face
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp.scale": "mlp.gate.norm.weight",
    "ffn_down_exps.scale": "mlp.gate.expert_scale",
    "layer_output_scale.weight": "layer_scalar",
}

_NO_KIND = ("exp_probs_b", "ssm_a", "ssm_d", "ssm_dt", "attn_conv_base", "ffn_conv_base")
"""Tensors without ``.weight`` or ``.bias`` in Hugging Face's names."""
_WEIGHTS_OF_NO_KIND = ("ffn_norm",)
"""Tensors without ``.weight`` in files of Falcon-H1."""

RECURRENT_KEYS: Mapping[str, str] = {
    # recurrent layers; after the architecture's name and a dot
    "ssm.conv_kernel": "taps",
    "ssm.group_count": "key_heads",
    "ssm.inner_size": "inner",
    "ssm.state_size": "key_size",
    "ssm.time_step_rank": "heads",
}

CONFIG_KEYS: Mapping[str, str] = {
    # after the architecture's name and a dot
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.scale": "attention_multiplier",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window": "sliding_window",
    "attention.temperature_scale": "llama_4_scaling_beta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "embedding_scale": "embedding_multiplier",
    "expert_count": "num_local_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_scale": "routed_scaling_factor",
    "feed_forward_length": "intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "interleave_moe_layer_step": "moe_layer_interval",
    "leading_dense_block_count": "first_k_dense_replace",
    "logit_scale": "logits_scaling",
    "full_attention_interval": "full_attention_interval",
    "shortconv.l_cache": "conv_L_cache",
    "residual_scale": "residual_multiplier",
    "rope.dimension_count": "rope_dim",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "swiglu_clamp_exp": "swiglu_limits",
    "swiglu_clamp_shexp": "swiglu_limits_shared",
    "vocab_size": "vocab_size",
}

SCORING: Mapping[int, str] = dict(
    enumerate(("softmax", "sigmoid", "softmax-chosen", "sqrtsoftplus"), 1)
)
"""The values of ``<architecture>.expert_gating_func`` as ``scoring_func``."""

ROPE_SCALING_KEYS: Mapping[str, str] = {
    # after the architecture's name and ".rope.scaling."
    "attn_factor": "attention_factor",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}

TOKEN_KEYS: Mapping[str, str] = {
    # after "tokenizer.ggml."; each of the three ends a text
    "bos_token_id": "bos_token_id",
    "padding_token_id": "pad_token_id",
    "eos_token_id": "eos_token_id",
    "eot_token_id": "eos_token_id",
    "eom_token_id": "eos_token_id",
}

SAMPLING_KEYS: Mapping[str, str] = {
    # after "general.sampling."
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}

_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<stem>(?:(?:shortconv|indexer|enc|nextn)\.)?[a-z0-9_]+)"
    r"(?:\.(?P<expert>\d{1,9}))?(?:\.(?P<kind>weight|bias|scale))?"
)


def hf_tensor_name(family: Family, name: str) -> str:
    """Hugging Face's name of a GGUF tensor, or the same name if there is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, expert, kind = match["layer"], match["stem"], match["expert"], match["kind"]
    if kind is None and stem in _WEIGHTS_OF_NO_KIND:
        kind = "weight"
    if layer is None:
        plain = family.gguf_top.get(stem) or _TENSORS.get(stem)
        known = plain is not None and expert is None and kind is not None
        return f"{plain}.{kind}" if known else name
    if (whole := _WHOLE_NAMES.get(f"{stem}.{kind}")) is not None and expert is None:
        return f"model.layers.{int(layer)}.{whole}"
    if expert is not None:
        hf_stem = _EXPERT_TENSORS.get(stem, "").format(int(expert))
    else:
        hf_stem = family.gguf_layer.get(stem) or _LAYER_TENSORS.get(stem, "")
    if not hf_stem or (kind is None and stem not in _NO_KIND):
        return name
    return f"model.layers.{int(layer)}.{hf_stem}{'' if stem in _NO_KIND else f'.{kind}'}"


def expert_stack(family: Family, name: str) -> tuple[str, Stack] | None:
    """For a stacked tensor of a layer's experts, its ``Stack`` and the prefix of its parts' names.

    Also for tensors of shared experts.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["layer"] is None or match["expert"] is not None:
        return None
    if match["kind"] == "scale":
        return None
    stems = family.gguf_stacks.get(match["stem"]) or _EXPERT_STACKS.get(match["stem"])
    if stems is None:
        return None
    names = tuple(f"{stem}.{match['kind']}" for stem in stems)
    return f"model.layers.{int(match['layer'])}.", Stack(names)
