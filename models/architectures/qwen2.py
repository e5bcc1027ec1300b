"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window on upper layers only."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.protocol import AttentionSpec


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; q, k and v always have a bias."""
    config = llama.read_config(raw)
    return replace(
        config, architecture="qwen2", attention=windowed_layers(raw, config), qkv_bias=True
    )


def windowed_layers(raw: RawConfig, config: DecoderConfig) -> tuple[AttentionSpec, ...]:
    """The window holds where ``layer_types`` or ``max_window_layers`` says, and if switched on."""
    windowed = [False] * config.layers
    if raw.flag("use_sliding_window"):
        first = int(raw.number("max_window_layers", 28))
        windowed = raw.windowed([layer >= first for layer in range(config.layers)])
    return tuple(
        spec if here else replace(spec, window=None)
        for spec, here in zip(config.attending, windowed, strict=True)
    )
