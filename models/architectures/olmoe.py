"""OLMoE: Llama with many small experts, and norms over all heads of queries and of keys."""

from __future__ import annotations

from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.mixture_config import read_mixture, with_mixture
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; ``intermediate_size`` is an expert's."""
    if raw.optional_number("clip_qkv") is not None:
        raise UnsupportedModelError("clip_qkv (clipped queries, keys and values) is not supported")
    config = llama.read_config(raw)
    attention = tuple(replace(layer, joint_norms=True) for layer in config.attending)
    config = replace(config, architecture="olmoe", attention=attention, qk_norm=True)
    return with_mixture(config, read_mixture(raw, config, normalize=False))
