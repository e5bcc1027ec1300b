"""Granite-MoE (IBM Granite 3): Mixtral with four factors; GraniteMoeShared adds a shared MLP."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.mixture_config import read_mixture, with_mixture
from localrt.models.raw_config import RawConfig

__all__ = ["read_config"]


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; ``intermediate_size`` is an expert's.

    Weights are the softmax of the chosen logits. The factors are those of embedding, attention
    scores, what a layer adds, and (divided by) logits.
    """
    config = llama.read_config(raw)
    gguf_default = config.attention[0].scale if raw.is_gguf else 1.0
    scale = raw.number("attention_multiplier", gguf_default)
    shared = raw.optional_integer("shared_intermediate_size")
    shared = shared or raw.optional_integer("shared_expert_intermediate_size") or 0
    spec = replace(read_mixture(raw, config, scoring="softmax-chosen"), shared=shared)
    return with_mixture(
        replace(
            config,
            architecture="granite_moe",
            attention=tuple(replace(layer, scale=scale) for layer in config.attention),
            embedding_scale=raw.number("embedding_multiplier", 1.0),
            residual_scale=raw.number("residual_multiplier", 1.0),
            logit_scale=1.0 / raw.number("logits_scaling", 1.0),
        ),
        spec,
    )
