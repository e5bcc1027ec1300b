"""Llama 2 and 3.x, Mistral and SmolLM2: the plain decoder that most architectures build on, and
models that differ little from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from localrt.models.architectures.family import MLP_NORM, Config, Family, GgufFacts
from localrt.models.config import DecoderConfig
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.rope import read_rope, scaling_number
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture
from localrt.quant.ops.attention import AttentionSpec, AttentionTemperature
from localrt.quant.ops.protocol import Activation, MlpSpec

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


def read_config(
    raw: RawConfig, activations: Mapping[str, Activation] = ACTIVATIONS
) -> DecoderConfig:
    """Read Llama's ``config.json`` keys, and Mistral's sliding window of all layers.

    The tensors show which biases there are: Seed-OSS has some.
    """
    heads = raw.integer("num_attention_heads")
    hidden = raw.integer("hidden_size")
    head_dim = raw.integer("head_dim", hidden // heads)
    eps = raw.number("rms_norm_eps", raw.optional_number("norm_eps"))
    attention = AttentionSpec(
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=1 / math.sqrt(head_dim),
        eps=eps,
        rope=read_rope(raw, head_dim),
        window=raw.optional_integer("sliding_window"),
    )
    return DecoderConfig(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=raw.integer("intermediate_size"),
        context_length=raw.integer("max_position_embeddings"),
        norm_eps=eps,
        attention=(attention,) * raw.integer("num_hidden_layers"),
        mlp=MlpSpec(activation=raw.choice("hidden_act", "silu", activations), eps=eps),
        block=ResidualBlock(),
        qkv_bias=raw.has_tensor("model.layers.0.self_attn.q_proj.bias"),
        out_bias=raw.has_tensor("model.layers.0.self_attn.o_proj.bias"),
        tied_head=raw.flag("tie_word_embeddings"),
    )


_TEXT_MODELS = {  # the others: no type given
    name: name for name in ("llama", "mistral", "llava", "idefics3", "smolvlm")
}


def read_llava(raw: RawConfig) -> DecoderConfig:
    """LLaVA around a Llama or a Mistral: Pixtral, Apriel 1.5 and 1.6; Idefics3 and SmolVLM, whose
    text model is a Llama.
    """
    raw.choice("model_type", "llama", _TEXT_MODELS)
    return read_config(raw)


def read_mixtral(raw: RawConfig) -> DecoderConfig:
    """Mixtral: Mistral with mixtures, whose GGUF files have the architecture ``llama``."""
    config = read_config(raw)
    return with_mixture(config, read_mixture(raw, config))


def read_ministral3(raw: RawConfig) -> DecoderConfig:
    """Ministral 3 and Mistral 3: Mistral with YaRN, and queries scaled up at late positions."""
    config, temperature = read_config(raw), read_temperature(raw)
    attention = tuple(replace(spec, temperature=temperature) for spec in config.attending)
    return replace(config, attention=attention)


def read_temperature(raw: RawConfig) -> AttentionTemperature | None:
    """Read ``llama_4_scaling_beta`` and its length, if a config has them."""
    scaling = raw.mapping("rope_scaling")
    if not scaling.get("llama_4_scaling_beta"):
        return None
    trained = raw.integer("max_position_embeddings")
    length = scaling_number(scaling, "original_max_position_embeddings", trained)
    beta = scaling_number(scaling, "llama_4_scaling_beta")
    return AttentionTemperature(beta=beta, length=int(length))


def add_temperature(config: Config, file: GgufFacts) -> None:
    """Add Mistral 3's RoPE scaling, which does not change the magnitude of queries and keys."""
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        scaling["llama_4_scaling_beta"] = config.pop("llama_4_scaling_beta", None)
        if "mscale_all_dim" in scaling:
            scaling["mscale"] = scaling["mscale_all_dim"]


FAMILIES = (
    Family(
        name="llama",
        read=read_config,
        folders="LlamaForCausalLM MistralForCausalLM",
        gguf="llama mistral",
        gguf_in_pairs=True,
    ),
    Family(
        name="llava",
        read=read_llava,
        folders="LlavaForConditionalGeneration Idefics3ForConditionalGeneration "
        "SmolVLMForConditionalGeneration",
    ),
    Family(
        name="ministral3",
        read=read_ministral3,
        folders="Ministral3ForCausalLM Mistral3ForConditionalGeneration",
        gguf="mistral3",
        gguf_in_pairs=True,
        gguf_config=add_temperature,
    ),
    Family(name="mixtral", read=read_mixtral, folders="MixtralForCausalLM"),
    Family(
        name="seed_oss",
        read=read_config,
        folders="SeedOssForCausalLM",
        gguf="seed_oss",
        gguf_layer=MLP_NORM,
    ),
)
