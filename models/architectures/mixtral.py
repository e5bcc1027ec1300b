"""Mixtral: Mistral with a mixture of experts in every layer.

GGUF files of it call themselves ``llama`` (see ``registry.py``).
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig, MixtureSpec
from localrt.models.mixture_config import read_router, with_mixture
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.experts import ExpertSpec

__all__ = ["read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; ``intermediate_size`` is an expert's. The chosen weights sum to 1."""
    config = llama.read_config(raw)
    spec = MixtureSpec(
        router=read_router(raw, config.norm_eps),
        expert=ExpertSpec(activation=config.mlp.activation),
        inner=config.intermediate_size,
    )
    return with_mixture(replace(config, architecture="mixtral"), spec)
