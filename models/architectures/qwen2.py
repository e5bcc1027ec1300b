"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window on upper layers only."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.protocol import AttentionSpec

__all__ = ["read_config", "windowed_layers"]


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; q, k and v always have a bias."""
    config = llama.read_config(raw)
    return replace(
        config, architecture="qwen2", attention=windowed_layers(raw, config), qkv_bias=True
    )


def windowed_layers(raw: RawConfig, config: DecoderConfig) -> tuple[AttentionSpec, ...]:
    """The window holds where ``layer_types`` or ``max_window_layers`` says, and if switched on."""
    full = tuple(replace(spec, window=None) for spec in config.attention)
    if not raw.flag("use_sliding_window"):
        return full
    first = int(raw.number("max_window_layers", 28))
    types = raw.layer_types(config.layers) or [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(config.layers)
    ]
    pairs = zip(types, config.attention, full, strict=False)
    return tuple(
        windowed if kind == "sliding_attention" else plain for kind, windowed, plain in pairs
    )
