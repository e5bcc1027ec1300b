"""Granite 4 (IBM): Mamba-2, attention without rotary embedding at times; dense, or mixtures."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import granite, llama
from localrt.models.architectures.granite_moe import with_experts
from localrt.models.architectures.mamba import mamba_names, read_mamba
from localrt.models.config import SHARED_DOWN, SHARED_GATE_UP, DecoderConfig, LayerNames
from localrt.models.raw_config import RawConfig

_KINDS = {"linear_attention": False, "mamba": False, "full_attention": True, "attention": True}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Granite's keys, Mamba's, and ``layer_types``."""
    config = replace(llama.read_config(raw), architecture="granite_hybrid")
    config = granite.with_factors(raw, config)
    rotates = raw.text("position_embedding_type", "rope" if raw.is_gguf else "") == "rope"
    attending = config.attending[0]
    attending = attending if rotates else replace(attending, rope=None)
    heads = raw.integer("mamba_n_heads")
    size = raw.text("mamba_d_head", "auto")
    inner = raw.integer("mamba_expand", 2) * config.hidden_size
    inner = inner if size == "auto" else heads * int(size)
    recurrent = read_mamba(raw, eps=config.norm_eps, inner=inner)
    kinds = raw.layer_kinds("layer_types", config.layers, _KINDS) or [False] * config.layers
    config = replace(
        config,
        attention=tuple(attending if attends else recurrent for attends in kinds),
        recurrent=mamba_names(raw, "mamba", biased=raw.flag("mamba_proj_bias")),
    )
    if raw.has("num_local_experts") and raw.optional_integer("num_local_experts"):
        return with_experts(raw, config)
    if raw.is_gguf:
        return config
    names = LayerNames(gate_up=SHARED_GATE_UP, down=SHARED_DOWN)
    return replace(config, names=names, intermediate_size=raw.integer("shared_intermediate_size"))
