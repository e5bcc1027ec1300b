"""What tiny models' GGUF files say of them: a table of keys, and each architecture's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from localrt.models.layers.ngrams import NgramHash, NgramSpec

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_out": "backbone_hidden_size",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "expert_used_count": "num_experts_per_tok top_k_experts moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts moe_num_shared_experts num_shared_experts",
    "expert_weights_scale": "routed_scaling_factor router_scaling_factor route_scale "
    "moe_routed_scaling_factor moe_router_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace moe_layer_start_index num_dense_layers",
    "interleave_moe_layer_step": "moe_layer_interval",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "conv_kernel mamba_d_conv linear_conv_kernel_dim",
    "ssm.state_size": "ssm_state_size mamba_d_state linear_key_head_dim",
    "ssm.group_count": "n_groups mamba_n_groups linear_num_key_heads",
    "ssm.time_step_rank": "mamba_num_heads mamba_n_heads linear_num_value_heads",
    "moe_latent_size": "moe_latent_size",
    "hyper_connection.count": "hc_count hc_mult",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "hyper_connection.epsilon": "hc_eps",
    "hyper_connection.low_rank": "hc_lowrank",
    "attention.indexer.head_count": "indexer_n_heads index_n_heads",
    "attention.indexer.key_length": "indexer_head_dim index_head_dim",
    "attention.indexer.top_k": "indexer_budget index_topk",
    "ple.ngram_size": "ngram_size",
    "ple.heads_per_ngram": "heads_per_ngram",
    "ple.conv_kernel": "ple_conv_kernel_size",
}
"""A file's keys, and what configs call them: one or several names."""
_FLOATS = ("scale", "epsilon", "softcapping")
_SCALING = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale_all_dim": "yarn_log_multiplier",
}
_SILENT = {
    "expert_weights_norm": "llama qwen2moe qwen3moe olmoe granitemoe gpt-oss qwen35moe qwen3next "
    "lfm2moe granitehybrid qwen4exp kimi-linear mellum",
    "expert_shared_count": "hy_v3",
    "expert_group_count": "glm4moe kimi-linear",
    "expert_group_used_count": "glm4moe kimi-linear nemotron_h_moe",
}
"""What files of some architectures do not say."""
_SIGMOID = "bailingmoe3 cohere2moe exaone-moe glm4moe glm5-next hy_v3 kimi-linear laguna lfm2moe"
_SIGMOID += " minimax-m2 step35"
"""Whose files say that experts are scored by sigmoids."""
_ONE_WIDTH = "gpt-oss granitehybrid granitemoe hunyuan-moe llama4 minimax-m2"
"""Whose experts' width is the config's only one."""
_SHARED = "ernie4_5-moe exaone-moe hy_v3"
"""Whose shared experts are each as wide as the others."""


def falcon_inner(config: Any) -> int:
    """Width of Falcon-H1's recurrent layers."""
    return int(config.mamba_d_ssm or config.mamba_expand * config.hidden_size)


def full_layer(config: Any) -> Mapping[str, Any]:
    """What Gemma 4's layers without a window have of their own."""
    first = config.layer_types.index("full_attention")
    found = (own for n, own in config.per_layer_config.items() if int(n) == first)
    return next(found, {"head_dim": config.head_dim})


def gguf_keys(architecture: str, config: Any, *, absorbed: bool) -> dict[str, Any]:
    """A model's keys in the file's form, below the architecture's name."""
    values = vars(config)
    found: dict[str, Any] = {}
    for ours, names in _KEYS.items():
        known = (values[name] for name in names.split() if values.get(name) is not None)
        value = next(known, None)
        if value is not None and architecture not in _SILENT.get(ours, "").split():
            found[ours] = float(value) if ours.endswith(_FLOATS) else value
    heads, hidden = config.num_attention_heads, config.hidden_size
    head = values.get("head_dim") or hidden // heads
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found["attention.key_length"] = found["attention.value_length"] = head
    found["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1.0))
    if "rope_theta" in rope:
        found["rope.freq_base"] = rope["rope_theta"] * rope.get("alpha", 1.0) ** (head / (head - 2))
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.type"] = "yarn"
        for key, ours in _SCALING.items():
            if (value := rope.get(key)) is not None:
                found[f"rope.scaling.{ours}"] = value if "length" in ours else float(value)
    if rope.get("rope_type") == "longrope":
        original, whole = config.original_max_position_embeddings, config.max_position_embeddings
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = math.sqrt(
            1 + math.log(whole / original) / math.log(original)
        )
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    kinds = [
        "full_attention" if "indexed" in kind else kind for kind in values.get("layer_types") or ()
    ]
    if values.get("sliding_window") and kinds and architecture != "gpt-oss":
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
    if architecture in _SIGMOID.split():
        found["expert_gating_func"] = 2
    if architecture in _ONE_WIDTH.split() and found.get("expert_count"):
        found["expert_feed_forward_length"] = config.intermediate_size
    if architecture in _SHARED.split():
        count = values.get("moe_num_shared_experts") or config.num_shared_experts
        found["expert_shared_feed_forward_length"] = count * config.moe_intermediate_size
    if change := _CHANGES.get(architecture):
        found |= change(config, rope, kinds)
    if absorbed and architecture in ("deepseek2", "glm-dsa", "mistral4"):
        found |= _absorbed(found, config)
    return {key: value for key, value in found.items() if value is not None}


def _gemma4(config: Any, rope: Any, kinds: Any) -> Any:
    full = full_layer(config)
    size, wide = config.head_dim, full["head_dim"]
    own = {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": size,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": getattr(config, "hidden_size_per_layer_input", 0) or 0,
    }
    if (groups := full.get("num_key_value_heads")) is not None:
        counts = {"sliding_attention": config.num_key_value_heads, "full_attention": groups}
        own["attention.head_count_kv"] = [counts[kind] for kind in kinds]
    if config.use_double_wide_mlp:
        first, inner = len(kinds) - config.num_kv_shared_layers, config.intermediate_size
        own["feed_forward_length"] = [inner * (1 + (n >= first)) for n in range(len(kinds))]
    return own


def _deepseek(config: Any, rope: Any, kinds: Any) -> Any:
    v2 = config.model_type == "deepseek_v2"
    own = {
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        "expert_weights_norm": bool(config.norm_topk_prob) and not v2,
        "expert_gating_func": 1 if v2 else 2,
    }
    if "mscale_all_dim" in rope:
        own["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return own


def _deepseek_v4(config: Any, rope: Any, kinds: Any) -> Any:
    ratios = {"sliding": 0, "compressed": 4, "heavily": 128}
    scaling, limits = rope["compress"], [config.swiglu_limit] * len(kinds)
    return {
        "attention.sliding_window_pattern": None,
        "attention.compress_ratios": [ratios[kind.partition("_")[0]] for kind in kinds],
        "attention.compress_rope_freq_base": scaling["rope_theta"],
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "hash_layer_count": config.mlp_layer_types.count("hash_moe"),
        "expert_gating_func": 4,
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": config.rope_theta,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(scaling["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(scaling["beta_slow"]),
    }


def _glm5(config: Any, rope: Any, kinds: Any) -> Any:
    limits = [config.swiglu_limit] * len(kinds)
    return {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in kinds],
        "attention.key_length": config.kv_lora_rank,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.layer_norm_epsilon": 1e-6,
        "rope.dimension_count": 0,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "kda.gate_lower_bound": config.linear_lower_bound,
        "attention.indexer.kpool": config.index_kpool,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }


def _absorbed(found: Any, config: Any) -> Any:
    """DeepSeek's keys where attention is over latents."""
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": found["attention.key_length"],
        "attention.value_length_mla": found["attention.value_length"],
    }


def _delta(config: Any, rope: Any, kinds: Any) -> Any:
    return {
        "full_attention_interval": kinds.index("full_attention") + 1,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


def _connected(config: Any, rope: Any, kinds: Any) -> Any:
    """Streams, indexer and n-grams of Qwen3.8-Flash-Next."""
    spec = NgramSpec(
        orders=config.ngram_size,
        heads=config.heads_per_ngram,
        rows_from=config.ngram_vocab_size_base,
        vocab=config.vocab_size,
        separator=config.eos_token_id,
    )
    hashed, ratio = NgramHash(spec), config.indexer_compress_ratio
    return {
        **_delta(config, rope, kinds),
        "attention.compress_ratios": [ratio * (kind == "full_attention") for kind in kinds],
        "ple.layers": [layer - 1 for layer in config.ple_layer_ids],
        "ple.eos_token_id": config.eos_token_id,
        "ple.layer_multipliers": hashed.multipliers.astype(np.uint64),
        "ple.head_offsets": hashed.offsets.astype(np.uint64),
        "ple.head_vocab_sizes": hashed.sizes.astype(np.uint64),
        "embedding_length_per_layer_input": config.ple_embed_dim // spec.rows_per_token,
    }


def _kimi(config: Any, rope: Any, kinds: Any) -> Any:
    rotary = config.qk_rope_head_dim
    return {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in kinds],
        "attention.key_length": config.kv_lora_rank + rotary,
        "attention.key_length_mla": config.qk_nope_head_dim + rotary,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotary,
        "kda.head_dim": config.linear_head_dim,
        "context_length": config.model_max_length,
        "expert_used_count": config.num_experts_per_token,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
    }


def _lfm2(config: Any, rope: Any, kinds: Any) -> Any:
    width = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        scaled = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-scaled // config.block_multiple_of) * config.block_multiple_of
    return {**_groups(config, kinds), "feed_forward_length": width}


def _groups(config: Any, kinds: Any) -> Any:
    own = config.num_key_value_heads
    return {"attention.head_count_kv": [own * (kind == "full_attention") for kind in kinds]}


def _granite_hybrid(config: Any, rope: Any, kinds: Any) -> Any:
    shared = config.shared_intermediate_size
    own = {
        **_groups(config, kinds),
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }
    if config.num_local_experts:
        return own
    none = dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_feed_forward_length"))
    return {**own, **none, "feed_forward_length": shared}


def _laguna(config: Any, rope: Any, kinds: Any) -> Any:
    sliding = config.rope_parameters["sliding_attention"]
    own = {
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": sliding["rope_theta"],
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "attention.head_count": config.num_attention_heads_per_layer,
        "expert_weights_norm": True,
    }
    whole = "sliding_attention" not in kinds
    none = ("attention.sliding_window", "attention.sliding_window_pattern")
    return {**own, **dict.fromkeys(none if whole else ())}


def _nemotron(config: Any, rope: Any, kinds: Any) -> Any:
    kinds = config.layers_block_type
    width = config.moe_intermediate_size if "moe" in kinds else config.intermediate_size
    own = {
        **_groups(config, kinds),
        "block_count": len(kinds),
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }
    if "moe" in kinds:
        return {**own, "expert_shared_count": config.n_shared_experts}
    return {**own, **dict.fromkeys(key for key in _KEYS if key.startswith("expert_"))}


def _cohere2(config: Any, rope: Any, kinds: Any) -> Any:
    return {
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "logit_scale": config.logit_scale,
        "rope.scaling.type": "none",
    }


def _cohere2_moe(config: Any, rope: Any, kinds: Any) -> Any:
    inner = config.intermediate_size
    return {
        **_cohere2(config, rope, kinds),
        "feed_forward_length": config.prefix_dense_intermediate_size or inner,
        "expert_feed_forward_length": inner,
        "expert_shared_feed_forward_length": inner * config.num_shared_experts,
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[config.expert_selection_fn],
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
    }


def _step(config: Any, rope: Any, kinds: Any) -> Any:
    windowed = [kind == "sliding_attention" for kind in kinds]
    heads = (config.num_attention_heads, config.num_sliding_attention_heads)
    limits = {
        f"swiglu_clamp_{own}": [float(limit or 0) for limit in getattr(config, name)]
        for own, name in (("exp", "swiglu_limits"), ("shexp", "swiglu_limits_shared"))
        if getattr(config, name)
    }
    return {
        **limits,
        "attention.head_count": [heads[here] for here in windowed],
        "attention.sliding_window_pattern": windowed,
        "rope.dimension_count": config.head_dim,  # of which half turns without a window
        "rope.freq_base_swa": config.rope_parameters.get("sliding_attention", rope)["rope_theta"],
        "expert_shared_feed_forward_length": config.share_expert_dim,
        "expert_weights_norm": True,
    }


_CHANGES: Mapping[str, Any] = {
    "cohere2": lambda config, rope, kinds: {
        **_cohere2(config, rope, kinds),
        "attention.sliding_window_pattern": None,  # every fourth layer has none
    },
    "cohere2moe": _cohere2_moe,
    "exaone-moe": lambda config, rope, kinds: {"rope.scaling.type": "none"},
    "hy_v3": lambda config, rope, kinds: {"expert_weights_norm": True},
    "step35": _step,
    "hunyuan-moe": lambda config, rope, kinds: {
        "expert_used_count": config.moe_topk,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": config.intermediate_size,
    },
    "mistral3": lambda config, rope, kinds: {
        "attention.temperature_scale": rope.get("llama_4_scaling_beta")
    },
    "granite_swa": lambda config, rope, kinds: {
        "attention.rope_pattern": [base != 0 for base in config.layer_rope_theta]
    },
    "qwen3vl": lambda config, rope, kinds: {"n_deepstack_layers": 1},
    "qwen3vlmoe": lambda config, rope, kinds: {"n_deepstack_layers": 1},
    "muse-glimmer": lambda config, rope, kinds: {"logit_scale": config.output_multiplier},
    "afmoe": lambda config, rope, kinds: {"expert_weights_norm": True},
    "laguna": _laguna,
    "llama4": lambda config, rope, kinds: {
        "feed_forward_length": config.intermediate_size_mlp,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    },
    "mellum": lambda config, rope, kinds: {
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"]
    },
    "gemma4": _gemma4,
    "gemma4-assistant": lambda config, rope, kinds: {
        **_gemma4(config, rope, kinds),
        "nextn_predict_layers": config.num_hidden_layers,
    },
    "deepseek2": _deepseek,
    "mistral4": lambda config, rope, kinds: {
        **_deepseek(config, rope, kinds),
        "expert_gating_func": 1,
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.temperature_length": rope["original_max_position_embeddings"],
    },
    "glm-dsa": lambda config, rope, kinds: {
        **_deepseek(config, rope, kinds),
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
    },
    "deepseek4": _deepseek_v4,
    "glm5-next": _glm5,
    "qwen3next": _delta,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "qwen4exp": _connected,
    "kimi-linear": _kimi,
    "bailingmoe3": lambda config, rope, kinds: {
        **_kimi(config, rope, kinds),
        "kda.gate_lower_bound": config.kda_lower_bound,
        "kda.safe_gate": True,
        "ssm.conv_kernel": config.short_conv_kernel_size,
        "expert_group_count": config.num_expert_group,
        "expert_weights_norm": config.moe_renormalize,
    },
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": lambda config, rope, kinds: {
        "ssm.inner_size": falcon_inner(config),
        "embedding_scale": None,
    },
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
}
"""What an architecture's file says beyond ``_KEYS``, or otherwise; None: nothing."""
