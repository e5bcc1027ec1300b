"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; the weights tell which biases there are."""
    return replace(llama.read_config(raw), architecture="seed_oss")
