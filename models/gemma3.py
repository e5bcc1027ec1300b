"""Gemma 3 (text): sandwich norms, query and key norms, five sliding-window layers to one full.

Sliding layers rotate with their own base frequency. Published norm weights are ``w - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localrt.models.decoder import DecoderConfig, LayerNames
from localrt.models.llama import ACTIVATIONS
from localrt.models.raw_config import RawConfig
from localrt.models.rope import read_rope
from localrt.quant.ops.protocol import AttentionSpec, MlpSpec, Rope

__all__ = ["NAMES", "read_config"]

NAMES = LayerNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

_LAYERS_27B = 62


def read_config(raw: RawConfig) -> DecoderConfig:
    """Gemma 3's ``text_config`` keys; a GGUF leaves several to constants of the architecture."""
    heads = raw.integer("num_attention_heads", 8)
    hidden = raw.integer("hidden_size", 2304)
    layers = raw.integer("num_hidden_layers", 26)
    head_dim = raw.integer("head_dim", 256)
    eps = raw.number("rms_norm_eps", 1e-6)
    full = AttentionSpec(
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        scale=_query_scale(raw, layers, hidden // heads, head_dim),
        eps=eps,
        rope=_rope(raw, head_dim, "full_attention"),
    )
    sliding = replace(
        full,
        rope=_rope(raw, head_dim, "sliding_attention"),
        window=raw.integer("sliding_window", 4096),
    )
    pattern = raw.integer("sliding_window_pattern", 6)
    types = raw.layer_types(layers) or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(layers)
    ]
    return DecoderConfig(
        architecture="gemma3",
        vocab_size=raw.integer("vocab_size", 262_208),
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size", 9216),
        context_length=raw.integer("max_position_embeddings", 131_072),
        norm_eps=eps,
        attention=tuple(
            sliding if kind == "sliding_attention" else full for kind in types[:layers]
        ),
        mlp=MlpSpec(
            activation=raw.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS), eps=eps
        ),
        qk_norm=True,
        post_norms=True,
        norm_offset=0.0 if raw.flag("norm_weights_include_one") else 1.0,
        embedding_scale=math.sqrt(hidden),
        final_softcap=raw.optional_number("final_logit_softcapping"),
        tied_head=raw.flag("tie_word_embeddings", default=True),
    )


def _query_scale(raw: RawConfig, layers: int, share: int, head_dim: int) -> float:
    # GGUF has no key for it: the 27B scales by hidden size over heads, the others by head size.
    default = share if raw.is_gguf and layers == _LAYERS_27B else head_dim
    return 1 / math.sqrt(raw.number("query_pre_attn_scalar", float(default)))


def _rope(raw: RawConfig, head_dim: int, layer_type: str) -> Rope:
    """Newer configs hold parameters per layer type; older ones scale the full layers only."""
    per_type = raw.mapping("rope_parameters")
    local = layer_type == "sliding_attention"
    theta = (
        raw.number("rope_local_base_freq", 10_000.0)
        if local
        else raw.number("rope_theta", 1_000_000.0)
    )
    parameters: Mapping[str, Any] = per_type.get(layer_type) or (
        {} if local else raw.mapping("rope_scaling")
    )
    return read_rope(raw, head_dim, parameters={"rope_theta": theta, **parameters})
