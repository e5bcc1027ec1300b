"""Qwen2-MoE and Qwen1.5-MoE: Qwen2 with mixtures, and a shared expert behind a gate of its own."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import qwen2
from localrt.models.config import DecoderConfig
from localrt.models.mixture_config import read_mixture, sparse_layers, with_mixture
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Qwen2's keys and those of the mixture; chosen weights do not sum to 1 unless it says so."""
    config = qwen2.read_config(raw)
    spec = replace(
        read_mixture(raw, config, normalize=False, inner=raw.integer("moe_intermediate_size")),
        shared=raw.integer("shared_expert_intermediate_size", config.intermediate_size),
        shared_gate=True,
    )
    biased = raw.has_tensor("model.layers.0.self_attn.q_proj.bias")
    config = replace(config, architecture="qwen2_moe", qkv_bias=biased)
    return with_mixture(config, spec, sparse_layers(raw, config.layers))
