"""Gemma 2: sandwich norms, soft-capped scores and logits, every other layer behind a window.

Published norm weights are ``w - 1``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from localrt.models.decoder import DecoderConfig, LayerNames
from localrt.models.llama import ACTIVATIONS
from localrt.models.raw_config import RawConfig
from localrt.models.rope import read_rope
from localrt.quant.ops.protocol import AttentionSpec, MlpSpec

__all__ = ["NAMES", "read_config"]

NAMES = LayerNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

_LAYERS_27B = 46


def read_config(raw: RawConfig) -> DecoderConfig:
    """Gemma 2's keys; a GGUF leaves the query scale to the architecture's constants."""
    heads = raw.integer("num_attention_heads")
    hidden = raw.integer("hidden_size")
    layers = raw.integer("num_hidden_layers")
    head_dim = raw.integer("head_dim", 256)
    eps = raw.number("rms_norm_eps", 1e-6)
    # The 27B scales queries by hidden size over heads, the others by head size.
    share = hidden // heads if raw.is_gguf and layers == _LAYERS_27B else head_dim
    full = AttentionSpec(
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads"),
        head_dim=head_dim,
        scale=1 / math.sqrt(raw.number("query_pre_attn_scalar", float(share))),
        eps=eps,
        rope=read_rope(raw, head_dim),
        softcap=raw.optional_number("attn_logit_softcapping"),
    )
    sliding = replace(full, window=raw.integer("sliding_window", 4096))
    types = raw.layer_types(layers) or ["sliding_attention", "full_attention"] * layers
    return DecoderConfig(
        architecture="gemma2",
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        context_length=raw.integer("max_position_embeddings"),
        norm_eps=eps,
        attention=tuple(
            sliding if kind == "sliding_attention" else full for kind in types[:layers]
        ),
        mlp=MlpSpec(
            activation=raw.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS), eps=eps
        ),
        post_norms=True,
        norm_offset=0.0 if raw.flag("norm_weights_include_one") else 1.0,
        embedding_scale=math.sqrt(hidden),
        final_softcap=raw.optional_number("final_logit_softcapping"),
        tied_head=raw.flag("tie_word_embeddings", default=True),
    )
