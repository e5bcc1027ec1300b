"""Llama 2 and 3.x, Mistral, SmolLM2: the plain decoder, which most architectures start from."""

from __future__ import annotations

from localrt.models.config import DecoderConfig
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.protocol import Activation, AttentionSpec, MlpSpec

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's ``config.json`` keys, and Mistral's sliding window over every layer."""
    heads = raw.integer("num_attention_heads")
    hidden = raw.integer("hidden_size")
    head_dim = raw.integer("head_dim", hidden // heads)
    eps = raw.number("rms_norm_eps", raw.optional_number("norm_eps"))
    attention = AttentionSpec(
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        eps=eps,
        rope=read_rope(raw, head_dim),
        window=raw.optional_integer("sliding_window"),
    )
    return DecoderConfig(
        architecture="llama",
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        context_length=raw.integer("max_position_embeddings"),
        norm_eps=eps,
        attention=(attention,) * raw.integer("num_hidden_layers"),
        mlp=MlpSpec(activation=raw.choice("hidden_act", "silu", ACTIVATIONS), eps=eps),
        block=ResidualBlock(),
        qkv_bias=raw.has_tensor("model.layers.0.self_attn.q_proj.bias"),
        out_bias=raw.has_tensor("model.layers.0.self_attn.o_proj.bias"),
        tied_head=raw.flag("tie_word_embeddings"),
    )
