"""Gemma 2 and 3 (text): sandwich norms, and sliding-window layers; EmbeddingGemma.

Published norm weights are ``w - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from localrt.models.architectures.family import SANDWICH_NORMS, Config, Family, GgufFacts, head_size
from localrt.models.architectures.llama import ACTIVATIONS
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.encoders import BlockConfig, BlockNames, EncoderConfig
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.attention import AttentionSpec, Rope
from localrt.quant.ops.protocol import MlpSpec

_NAMES = LayerNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_BLOCK_NAMES = BlockNames(
    norm2="pre_feedforward_layernorm",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    post_norm1="post_attention_layernorm",
    post_norm2="post_feedforward_layernorm",
)

_LAYERS_27B = 46


def read_gemma2(raw: RawConfig) -> DecoderConfig:
    """Gemma 2: sandwich norms, soft-capped scores and logits, a window in every other layer."""
    full = replace(
        read_attention(raw, read_rope(raw, raw.integer("head_dim"))),
        softcap=raw.optional_number("attn_logit_softcapping"),
    )
    sliding = replace(full, window=raw.integer("sliding_window", 4096))
    layers = raw.integer("num_hidden_layers")
    windowed = raw.windowed([layer % 2 == 0 for layer in range(layers)])
    return sandwich_config(raw, full, sliding, windowed)


def read_attention(raw: RawConfig, rope: Rope) -> AttentionSpec:
    """Read a full-attention layer. GGUF files of Gemma 2 do not have the query scale."""
    heads, head_dim = raw.integer("num_attention_heads"), raw.integer("head_dim")
    # The 27B scales queries by hidden size divided by heads, the others by head size.
    largest = raw.is_gguf and raw.integer("num_hidden_layers") == _LAYERS_27B
    share = raw.integer("hidden_size") // heads if largest else head_dim
    return AttentionSpec(
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads"),
        head_dim=head_dim,
        scale=1 / math.sqrt(raw.number("query_pre_attn_scalar", float(share))),
        eps=raw.number("rms_norm_eps", 1e-6),
        rope=rope,
    )


def sandwich_config(
    raw: RawConfig, full: AttentionSpec, sliding: AttentionSpec, windowed: Sequence[bool]
) -> DecoderConfig:
    """The decoder around Gemma's layers; ``windowed`` says which are ``sliding``."""
    hidden = raw.integer("hidden_size")
    activation = raw.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)
    return DecoderConfig(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=max(raw.integers("intermediate_size", len(windowed))),
        context_length=raw.integer("max_position_embeddings"),
        norm_eps=full.eps,
        attention=tuple(sliding if here else full for here in windowed),
        mlp=MlpSpec(activation=activation, eps=full.eps),
        block=ResidualBlock(),
        norm_offset=0.0 if raw.flag("norm_weights_include_one") else 1.0,
        embedding_scale=math.sqrt(hidden),
        final_softcap=raw.optional_number("final_logit_softcapping"),
        tied_head=raw.flag("tie_word_embeddings", default=True),
        names=_NAMES,
    )


def read_gemma3(raw: RawConfig) -> DecoderConfig:
    """Gemma 3 (text): Gemma 2 with query and key norms, and five sliding-window layers to one full.

    Sliding layers rotate with their own base frequency, which is not scaled; scores have no cap.
    """
    head_dim = raw.integer("head_dim")
    scaled = {"rope_theta": raw.number("rope_theta", 1e6), **raw.mapping("rope_scaling")}
    local = {"rope_theta": raw.number("rope_local_base_freq", 1e4)}
    full = read_attention(raw, read_rope(raw, head_dim, parameters=scaled))
    sliding = replace(
        full,
        rope=read_rope(raw, head_dim, parameters=local),
        window=raw.integer("sliding_window", 4096),
    )
    layers, pattern = raw.integer("num_hidden_layers"), raw.integer("sliding_window_pattern", 6)
    windowed = raw.windowed([(layer + 1) % pattern != 0 for layer in range(layers)])
    return replace(sandwich_config(raw, full, sliding, windowed), qk_norm=True)


def read_embedding(raw: RawConfig) -> EncoderConfig:
    """EmbeddingGemma: Gemma 3 whose tokens see those after them, and half of a window each way."""
    if not raw.flag("use_bidirectional_attention", default=raw.is_gguf):
        raise ValueError("it is Gemma 3 without a head, which neither writes nor embeds")
    each_way = raw.integer("sliding_window", 4096) // 2
    return encoder_config(raw, read_gemma3(raw.changed(sliding_window=each_way)))


def encoder_config(raw: RawConfig, config: DecoderConfig) -> EncoderConfig:
    """The encoder with a decoder's layers, whose windows reach as far back as ahead."""
    return EncoderConfig(
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        layers=tuple(
            BlockConfig(
                hidden=config.hidden_size,
                inner=config.intermediate_size,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                scale=spec.scale,
                eps=config.norm_eps,
                activation=raw.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
                names=_BLOCK_NAMES,
                rms=True,
                norm_offset=config.norm_offset,
                bias=False,
                mlp_bias=False,
                rope=spec.rope,
                window=spec.window or 0,
                value_norm=spec.value_norm,
            )
            for spec in config.attention
            if isinstance(spec, AttentionSpec)
        ),
        scale=config.embedding_scale,
        dense=raw.dense(),
    )


def _add_query_scale(config: Config, file: GgufFacts) -> None:
    """Add Gemma 3's query scale: from the head size, or for the 27B model from hidden size /
    heads.
    """
    scale = config.get("head_dim")
    if config.get("num_hidden_layers") == 62:
        scale = head_size(config) or scale
    config["query_pre_attn_scalar"] = scale


FAMILIES = (
    Family(
        name="gemma2",
        read=read_gemma2,
        folders="Gemma2ForCausalLM",
        gguf="gemma2",
        gguf_layer=SANDWICH_NORMS,
        gguf_plus_one=True,
    ),
    Family(
        name="gemma3",
        read=read_gemma3,
        folders="Gemma3ForCausalLM Gemma3ForConditionalGeneration",
        gguf="gemma3",
        gguf_layer=SANDWICH_NORMS,
        gguf_plus_one=True,
        gguf_config=_add_query_scale,
    ),
    Family(
        name="gemma_embedding",
        encoder=read_embedding,
        folders="Gemma3TextModel",
        gguf="gemma-embedding",
        gguf_layer=SANDWICH_NORMS,
        gguf_plus_one=True,
        gguf_config=_add_query_scale,
    ),
)
