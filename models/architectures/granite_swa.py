"""Granite with windows, dense or with mixtures: sinks, and a rotary base for each layer.

Every fourth layer sees all; where a layer's base is 0 it has no rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import granite, granite_moe, llama
from localrt.models.config import DecoderConfig
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.protocol import AttentionSpec


def read_config(raw: RawConfig) -> DecoderConfig:
    """Granite's keys, ``layer_types`` and ``layer_rope_theta``."""
    config = replace(llama.read_config(raw), architecture="granite_swa")
    config = granite.with_factors(raw, config)
    config = replace(config, attention=_attention(raw, config))
    return granite_moe.with_experts(raw, config) if raw.has("num_local_experts") else config


def _attention(raw: RawConfig, config: DecoderConfig) -> tuple[AttentionSpec, ...]:
    plain = replace(config.attending[0], sinks=True, window=None)
    window = raw.integer("sliding_window", 128)
    windowed = raw.windowed([layer % 4 != 0 for layer in range(config.layers)])
    bases = raw.layer_list("layer_rope_theta", config.layers)

    def spec(layer: int) -> AttentionSpec:
        own = replace(plain, window=window) if windowed[layer] else plain
        if bases is None:
            return own
        if bases[layer] == 0:
            return replace(own, rope=None)
        scaling = {**raw.mapping("rope_scaling"), "rope_theta": bases[layer]}
        return replace(own, rope=read_rope(raw, own.head_dim, parameters=scaling))

    return tuple(spec(layer) for layer in range(config.layers))
