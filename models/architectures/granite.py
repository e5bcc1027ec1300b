"""Granite (IBM): Llama with four factors."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.layers.block import ResidualBlock
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys and the factors."""
    return with_factors(raw, replace(llama.read_config(raw), architecture="granite"))


def with_factors(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """``config`` with factors of embedding, attention scores, what a layer adds, and logits.

    Logits are divided by theirs.
    """
    gguf_default = config.attending[0].scale if raw.is_gguf else 1.0
    scale = raw.number("attention_multiplier", gguf_default)
    return replace(
        config,
        attention=tuple(replace(layer, scale=scale) for layer in config.attending),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        block=ResidualBlock(scale=raw.number("residual_multiplier", 1.0)),
        logit_scale=1.0 / raw.number("logits_scaling", 1.0),
    )
