"""Qwen3-MoE: Qwen3 with mixtures; no shared expert."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig, MixtureSpec
from localrt.models.mixture_config import read_router, sparse_layers, with_mixture
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.experts import ExpertSpec

__all__ = ["read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    """Qwen3's keys and those of the mixture. A window, where it is switched on, is every layer's.

    ``norm_topk_prob`` is set in the published configs; GGUF leaves it to the architecture.
    """
    config = llama.read_config(raw)
    spec = MixtureSpec(
        router=read_router(raw, config.norm_eps, normalize=raw.is_gguf),
        expert=ExpertSpec(activation=config.mlp.activation),
        inner=raw.integer("moe_intermediate_size"),
    )
    attention = config.attention
    if not raw.flag("use_sliding_window"):
        attention = tuple(replace(layer, window=None) for layer in attention)
    return with_mixture(
        replace(config, architecture="qwen3_moe", attention=attention, qk_norm=True),
        spec,
        sparse_layers(raw, config.layers),
    )
