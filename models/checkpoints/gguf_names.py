"""GGUF's names for tensors and parameters, and Hugging Face's for the same things.

Two tables and their look-ups. How the values behind the names differ (row order, norm weights,
rotary scaling) is the business of ``gguf_checkpoint.py`` and ``gguf_config.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = [
    "CONFIG_KEYS",
    "GEMMA",
    "INTERLEAVED_ROTARY",
    "ROPE_SCALING_KEYS",
    "SAMPLING_KEYS",
    "TOKEN_KEYS",
    "hf_tensor_name",
]

INTERLEAVED_ROTARY = frozenset({"llama", "mistral3", "smollm3"})
"""Architectures whose files hold query and key rows in pairs (x0, y0, x1, y1, ...)."""

GEMMA = frozenset({"gemma", "gemma2", "gemma3"})
"""Architectures whose files hold norm weights with the 1 added that Hugging Face adds later."""

_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
}

_SANDWICH_NORMS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_LAYER_TENSORS_OF: Mapping[str, Mapping[str, str]] = {
    "gemma2": _SANDWICH_NORMS,
    "gemma3": _SANDWICH_NORMS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}

CONFIG_KEYS: Mapping[str, str] = {
    # after the architecture's name and a dot
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.dimension_count": "rope_dim",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "vocab_size": "vocab_size",
}

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
    # after "tokenizer.ggml."; any of three may end a text
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

_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<stem>[a-z0-9_]+)\.(?P<kind>weight|bias)")


def hf_tensor_name(architecture: str, name: str) -> str:
    """Hugging Face's name of a GGUF tensor; the name itself where Hugging Face has none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match["layer"], match["stem"], match["kind"]
    if layer is None:
        return f"{_TENSORS[stem]}.{kind}" if stem in _TENSORS else name
    own = _LAYER_TENSORS_OF.get(architecture, {})
    hf_stem = own.get(stem) or _LAYER_TENSORS.get(stem)
    return f"model.layers.{int(layer)}.{hf_stem}.{kind}" if hf_stem else name
