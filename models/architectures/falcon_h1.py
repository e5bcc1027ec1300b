"""Falcon-H1 (TII): in every layer attention and Mamba-2 side by side, and many factors.

GGUF files have these in the weights.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.architectures.mamba import mamba_names, read_mamba
from localrt.models.config import DecoderConfig, LayerNames, Multipliers
from localrt.models.layers.block import ResidualBlock
from localrt.models.raw_config import RawConfig

_NAMES = LayerNames(
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys, Mamba's, and ``*_multiplier``."""
    config = llama.read_config(raw)
    (plain,) = set(config.attending)
    attending = replace(plain, window=None, scale=plain.scale * raw.number("key_multiplier", 1.0))
    inner = raw.integer("mamba_expand", 2) * config.hidden_size
    mamba = read_mamba(raw, eps=config.norm_eps, inner=raw.optional_integer("mamba_d_ssm") or inner)
    normed = raw.flag("mamba_rms_norm")
    if raw.is_gguf:
        normed = raw.has_tensor("model.layers.0.mamba.norm.weight")
    mamba = replace(
        mamba,
        norm_size=mamba.norm_size if normed else 0,
        gate_first=raw.is_gguf or not raw.flag("mamba_norm_before_gate", default=True),
    )
    biased = raw.flag("mamba_proj_bias")
    if raw.flag("mlp_bias") or biased is not raw.flag("projectors_bias"):
        raise UnsupportedModelError(
            "mlp_bias of Falcon-H1, and one of mamba_proj_bias and projectors_bias without the "
            "other, are not supported"
        )
    gate, mlp_out = raw.numbers("mlp_multipliers", 2)
    gates, values, keys, queries, steps = raw.numbers("ssm_multipliers", 5)
    return replace(
        config,
        architecture="falcon_h1",
        attention=(attending,) * config.layers,
        block=ResidualBlock(beside=mamba),
        mlp=replace(config.mlp, gate_scale=gate),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        logit_scale=raw.number("lm_head_multiplier", 1.0),
        multipliers=Multipliers(
            attention_in=raw.number("attention_in_multiplier", 1.0),
            attention_out=raw.number("attention_out_multiplier", 1.0),
            recurrent_in=raw.number("ssm_in_multiplier", 1.0),
            recurrent_out=raw.number("ssm_out_multiplier", 1.0),
            mlp_out=mlp_out,
            projected=(gates, values, keys, queries, steps),
        ),
        names=LayerNames() if raw.is_gguf else _NAMES,
        recurrent=mamba_names(raw, "mamba", biased=biased),
    )
