"""Qwen3: Qwen2 without biases, with a norm on every query and key head."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.qwen2 import windowed_layers
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; ``head_dim`` is the config's own, not hidden size over heads."""
    config = llama.read_config(raw)
    return replace(
        config, architecture="qwen3", attention=windowed_layers(raw, config), qk_norm=True
    )
