"""Granite-MoE (IBM Granite 3): Granite with mixtures; GraniteMoeShared adds a shared MLP."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import granite, llama
from localrt.models.config import DecoderConfig
from localrt.models.mixture_config import read_mixture, with_mixture
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Granite's keys; ``intermediate_size`` is an expert's."""
    config = replace(llama.read_config(raw), architecture="granite_moe")
    return with_experts(raw, granite.with_factors(raw, config))


def with_experts(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """``config`` with mixtures. Weights are the softmax of the chosen logits."""
    shared = raw.optional_integer("shared_intermediate_size")
    shared = shared or raw.optional_integer("shared_expert_intermediate_size") or 0
    return with_mixture(
        config, replace(read_mixture(raw, config, scoring="softmax-chosen"), shared=shared)
    )
