"""Ministral 3 and Mistral 3: Mistral with YaRN, and queries that grow far into a text."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.layers.rope import scaling_number
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.attention import AttentionTemperature


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; Llama 4's ``llama_4_scaling_beta`` among those of the rotary embedding.

    Mistral Small 3.1 has none.
    """
    config = replace(llama.read_config(raw), architecture="ministral3")
    scaling = raw.mapping("rope_scaling")
    if not scaling.get("llama_4_scaling_beta"):
        return config
    temperature = AttentionTemperature(
        beta=scaling_number(scaling, "llama_4_scaling_beta"),
        length=int(
            scaling_number(
                scaling,
                "original_max_position_embeddings",
                raw.integer("max_position_embeddings"),
            )
        ),
    )
    attention = tuple(replace(spec, temperature=temperature) for spec in config.attending)
    return replace(config, attention=attention)
