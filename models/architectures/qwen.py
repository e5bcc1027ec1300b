"""Qwen2, Qwen2.5 and Qwen3, dense and with mixtures; Mellum 2; the text of InternVL."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Family
from localrt.models.config import DecoderConfig
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, read_mixture, sparse_layers, with_mixture
from localrt.quant.ops.attention import AttentionSpec


def read_qwen2(raw: RawConfig) -> DecoderConfig:
    """Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window on upper layers only."""
    config = llama.read_config(raw)
    return replace(config, attention=windowed_layers(raw, config), qkv_bias=True)


def windowed_layers(raw: RawConfig, config: DecoderConfig) -> tuple[AttentionSpec, ...]:
    """Which layers have a window, if on, by ``layer_types`` or ``max_window_layers``."""
    windowed = [False] * config.layers
    if raw.flag("use_sliding_window"):
        first = int(raw.number("max_window_layers", 28))
        windowed = raw.windowed([layer >= first for layer in range(config.layers)])
    return tuple(
        spec if here else replace(spec, window=None)
        for spec, here in zip(config.attending, windowed, strict=True)
    )


def read_qwen3(raw: RawConfig) -> DecoderConfig:
    """Qwen3: Qwen2 without biases, with a norm on every query and key head."""
    config = llama.read_config(raw)
    return replace(config, attention=windowed_layers(raw, config), qk_norm=True)


def read_qwen2_moe(raw: RawConfig) -> DecoderConfig:
    """Qwen2-MoE and Qwen1.5-MoE: Qwen2 with mixtures, and a shared expert with its own gate."""
    config = read_qwen2(raw)
    spec = replace(
        read_mixture(raw, config, normalize=False, inner=raw.integer("moe_intermediate_size")),
        shared=raw.integer("shared_expert_intermediate_size", config.intermediate_size),
        shared_gate=True,
    )
    biased = raw.has_tensor("model.layers.0.self_attn.q_proj.bias")
    config = replace(config, qkv_bias=biased)
    return with_mixture(config, spec, sparse_layers(raw, config.layers))


def read_qwen3_moe(raw: RawConfig) -> DecoderConfig:
    """Qwen3-MoE: Qwen3 with mixtures. A window, if switched on, holds in every layer.

    ``norm_topk_prob`` defaults to true: GGUF and Qwen3-VL leave it out.
    """
    config = llama.read_config(raw)
    inner = raw.integer("moe_intermediate_size")
    normalize = raw.is_gguf or raw.architecture != "Qwen3MoeForCausalLM"
    spec = read_mixture(raw, config, normalize=normalize, inner=inner)
    attention = config.attending
    if not raw.flag("use_sliding_window"):
        attention = tuple(replace(layer, window=None) for layer in attention)
    config = replace(config, attention=attention, qk_norm=True)
    return with_mixture(config, spec, sparse_layers(raw, config.layers))


def read_mellum(raw: RawConfig) -> DecoderConfig:
    """Mellum 2 (JetBrains): Qwen3-MoE in which some layers have a window; these rotate with their
    own base, which is not scaled.
    """
    config = llama.read_config(raw)
    full = replace(config.attending[0], window=None)
    base = raw.number("rope_local_base_freq", raw.number("rope_theta"))
    local = read_rope(raw, full.head_dim, parameters={"rope_theta": base})
    sliding = replace(full, window=raw.optional_integer("sliding_window"), rope=local)
    windowed = raw.windowed([False] * config.layers)
    spec = read_mixture(raw, config, inner=raw.integer("moe_intermediate_size"))
    config = replace(
        config, attention=tuple(sliding if here else full for here in windowed), qk_norm=True
    )
    return with_mixture(config, spec, raw.sparse(config.layers))


def read_internvl(raw: RawConfig) -> DecoderConfig:
    """InternVL around Qwen2, Qwen3 or Llama, which the text model's ``model_type`` says."""
    known = {"internvl": read_qwen2, "qwen2": read_qwen2, "qwen3": read_qwen3}
    known |= {"qwen3_moe": read_qwen3_moe, "llama": llama.read_config}
    config: DecoderConfig = raw.choice("model_type", "internvl", known)(raw)
    return config


FAMILIES = (
    Family(
        name="qwen2",
        read=read_qwen2,
        folders="Qwen2ForCausalLM Qwen2VLForConditionalGeneration "
        "Qwen2_5_VLForConditionalGeneration",
        gguf="qwen2 qwen2vl",
    ),
    Family(
        name="qwen3",
        read=read_qwen3,
        folders="Qwen3ForCausalLM Qwen3VLForConditionalGeneration",
        gguf="qwen3 qwen3vl",
    ),
    Family(name="qwen2_moe", read=read_qwen2_moe, folders="Qwen2MoeForCausalLM", gguf="qwen2moe"),
    Family(
        name="qwen3_moe",
        read=read_qwen3_moe,
        folders="Qwen3MoeForCausalLM Qwen3VLMoeForConditionalGeneration",
        gguf="qwen3moe qwen3vlmoe",
    ),
    Family(name="mellum", read=read_mellum, folders="MellumForCausalLM", gguf="mellum"),
    Family(name="internvl", read=read_internvl, folders="InternVLForConditionalGeneration"),
)
