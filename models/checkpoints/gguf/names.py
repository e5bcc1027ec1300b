"""Tables of GGUF's names for tensors and parameters, and Hugging Face's names for them.

``checkpoint.py`` and ``config.py`` handle differences in values (row order, norm weights, rotary
scaling).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from localrt.models.checkpoints.rows import Stack

INTERLEAVED_ROTARY = frozenset(
    {
        "eagle3",
        "ernie4_5",
        "ernie4_5-moe",
        "granite",
        "granite_swa",
        "granitehybrid",
        "granitemoe",
        "llama",
        "mistral3",
        "smollm3",
    }
)
"""Architectures whose files hold query and key rows in pairs (x0, y0, x1, y1, ...)."""

GEMMA = frozenset({"gemma", "gemma2", "gemma3"})
QWEN_DELTA = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})
"""Architectures whose files store norm weights plus 1, which Hugging Face adds at run time."""

_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's, after the last layer
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

_TENSORS_OF: Mapping[str, Mapping[str, str]] = {
    "dflash": {"fc": "model.fc", "enc.output_norm": "model.hidden_norm"},
    "eagle3": {"fc": "model.fc", "enc.output_norm": "model.fc_norm"},
    "gemma4-assistant": {
        "nextn.pre_projection": "model.pre_projection",
        "nextn.post_projection": "model.post_projection",
        "masked_embd_centroids": "model.masked_embedding.centroids",
    },
    "qwen4exp": {
        "per_layer_token_embd": "model.ngram_embedding",
        "output_hc_norm": "model.hyper_connection_mixer.hc_norm",
        "output_hc_down": "model.hyper_connection_mixer.input_mix_weight_down",
        "output_hc_up": "model.hyper_connection_mixer.input_mix_weight_up",
    },
}

_TENSOR_STACKS: Mapping[str, str] = {
    # (streams, rows, columns)
    "altup_proj": "altup_projections.{}",
    "altup_unembd_proj": "altup_unembed_projections.{}",
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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_latent_down": "mlp.latent_down",
    "ffn_latent_up": "mlp.latent_up",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
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

_STACKS_OF: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # shared experts: (rows of both, columns)
    "granite_swa": {
        "ffn_up_shexp": (_LAYER_TENSORS["ffn_gate_shexp"], _LAYER_TENSORS["ffn_up_shexp"])
    },
}

_WHOLE_NAMES: Mapping[str, str] = {
    # names without ".weight" or ".bias" in Hugging Face
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp.scale": "mlp.gate.norm.weight",
    "ffn_down_exps.scale": "mlp.gate.expert_scale",
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
}

_LATENT_ATTENTION: Mapping[str, str] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}

_SANDWICH_NORMS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_MLP_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""Names of the norm before the MLP that suggest attention."""

_DELTA_NET = {
    **_MLP_NORM,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_NET_TOGETHER = {
    **_DELTA_NET,
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",  # early files; others have four tensors
}
_CONNECTED_DELTA_NET = {
    **_DELTA_NET,
    **{
        f"hc_{ours}_{stem}": f"{theirs}_hyper_connection.{name}"
        for ours, theirs in (("attn", "attn"), ("ffn", "mlp"))
        for stem, name in (
            ("norm", "hc_norm"),
            ("down", "input_mix_weight_down"),
            ("up", "input_mix_weight_up"),
            ("inject", "block_inject_weight"),
        )
    },
    "indexer.q_proj": "self_attn.indexer.q_proj",
    "indexer.k_proj": "self_attn.indexer.k_proj",
    "indexer.q_norm": "self_attn.indexer.q_layernorm",
    "indexer.k_norm": "self_attn.indexer.k_layernorm",
    "ple_key": "ple.key_proj",
    "ple_value": "ple.value_proj",
    "ple_norm_key": "ple.norm_key",
    "ple_norm_query": "ple.norm_query",
    "ple_norm_conv": "ple.norm_conv",
    "ple_conv1d": "ple.conv1d",
}
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_SHORT_CONVOLUTION = {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_KIMI_DELTA = {
    **_LATENT_ATTENTION,
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_NO_KIND = ("ssm_a", "ssm_d", "ssm_dt")
"""Tensors without ``.weight`` or ``.bias`` in Hugging Face's names."""
_WEIGHTS_OF_NO_KIND = ("ffn_norm",)
"""Tensors without ``.weight`` in files of Falcon-H1."""

_LAYER_INPUTS: Mapping[str, str] = {
    **_SANDWICH_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}

_STREAMS: Mapping[str, str] = {
    **_LAYER_INPUTS,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}

_EXPERTS_BESIDE: Mapping[str, str] = {
    **_LAYER_INPUTS,
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}

_LAYER_TENSORS_OF: Mapping[str, Mapping[str, str]] = {
    "deepseek2": _LATENT_ATTENTION,
    "eagle3": {"attn_norm_2": "hidden_norm"},
    "exaone4": _SANDWICH_NORMS,
    "gemma2": _SANDWICH_NORMS,
    "gemma3": _SANDWICH_NORMS,
    "gemma3n": _STREAMS,
    "gemma4": _EXPERTS_BESIDE,
    "gemma4-assistant": _SANDWICH_NORMS,
    "glm4moe": _MLP_NORM,
    "gpt-oss": _MLP_NORM,
    "olmo2": _SANDWICH_NORMS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "seed_oss": _MLP_NORM,
    "falcon-h1": _MAMBA,
    "granitehybrid": _MAMBA,
    "nemotron_h": _MAMBA,
    "nemotron_h_moe": _MAMBA,
    "kimi-linear": _KIMI_DELTA,
    "lfm2": _SHORT_CONVOLUTION,
    "lfm2moe": _SHORT_CONVOLUTION,
    "qwen3next": _DELTA_NET_TOGETHER,
    "qwen35": _DELTA_NET,
    "qwen35moe": _DELTA_NET,
    "qwen4exp": _CONNECTED_DELTA_NET,
}

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
    "altup.active_idx": "altup_active_idx",
    "altup.num_inputs": "altup_num_inputs",
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
    "vocab_size": "vocab_size",
}

CONNECTION_KEYS: Mapping[str, str] = {
    # Qwen3.8-Flash-Next; after the architecture's name and a dot
    "hyper_connection.count": "hc_count",
    "hyper_connection.low_rank": "hc_lowrank",
    "attention.indexer.head_count": "indexer_n_heads",
    "attention.indexer.key_length": "indexer_head_dim",
    "attention.indexer.top_k": "indexer_budget",
    "ple.ngram_size": "ngram_size",
    "ple.heads_per_ngram": "heads_per_ngram",
    "ple.conv_kernel": "ple_conv_kernel_size",
    "ple.eos_token_id": "eos_token_id",
}

DEEPSEEK_KEYS: Mapping[str, str] = {
    # latent attention; after the architecture's name and a dot
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}

SCORING: Mapping[int, str] = {1: "softmax", 2: "sigmoid", 3: "softmax-chosen"}
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


def hf_tensor_name(architecture: str, name: str) -> str:
    """Hugging Face's name of a GGUF tensor, or the same name if there is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, expert, kind = match["layer"], match["stem"], match["expert"], match["kind"]
    if kind is None and stem in _WEIGHTS_OF_NO_KIND:
        kind = "weight"
    if layer is None:
        plain = _TENSORS_OF.get(architecture, {}).get(stem) or _TENSORS.get(stem)
        known = plain is not None and expert is None and kind is not None
        return f"{plain}.{kind}" if known else name
    if (whole := _WHOLE_NAMES.get(f"{stem}.{kind}")) is not None and expert is None:
        return f"model.layers.{int(layer)}.{whole}"
    if expert is not None:
        hf_stem = _EXPERT_TENSORS.get(stem, "").format(int(expert))
    else:
        hf_stem = _LAYER_TENSORS_OF.get(architecture, {}).get(stem) or _LAYER_TENSORS.get(stem, "")
    if not hf_stem or (kind is None and stem not in _NO_KIND):
        return name
    return f"model.layers.{int(layer)}.{hf_stem}{'' if stem in _NO_KIND else f'.{kind}'}"


def expert_stack(architecture: str, name: str) -> tuple[str, Stack] | None:
    """For a stacked tensor of a layer's experts, its ``Stack`` and the prefix of its parts' names.

    Also for tensors of all residual streams or of shared experts.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["expert"] is not None or match["kind"] == "scale":
        return None
    if match["layer"] is None:
        stem = _TENSOR_STACKS.get(match["stem"])
        return ("model.", Stack((f"{stem}.weight",))) if stem else None
    own = _STACKS_OF.get(architecture, {})
    stems = own.get(match["stem"]) or _EXPERT_STACKS.get(match["stem"])
    if stems is None:
        return None
    names = tuple(f"{stem}.{match['kind']}" for stem in stems)
    return f"model.layers.{int(match['layer'])}.", Stack(names)
