"""Hunyuan (Tencent), dense: norms on every query and key head, after their rotation.

A rotary scaling called "dynamic" scales the base by a fixed ``alpha``; GGUF files have the scaled
base.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Family
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.layers.rope import read_rope, scaling_number
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.mathematics import power

_NAMES = LayerNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys and the rotary scaling's ``alpha``."""
    config = llama.read_config(raw)
    plain = config.attending[0]
    attention = replace(plain, rope=_rope(raw, plain.head_dim), window=None, norms_last=True)
    return replace(
        config,
        architecture="hunyuan",
        attention=(attention,) * config.layers,
        qk_norm=True,
        names=LayerNames() if raw.is_gguf else _NAMES,
    )


def _rope(raw: RawConfig, head_dim: int) -> Rope:
    scaling = raw.mapping("rope_scaling")
    if not scaling.get("alpha"):
        return read_rope(raw, head_dim)
    alpha = scaling_number(scaling, "alpha")
    stretch = float(power(alpha, head_dim / max(1, head_dim - 2)))
    return read_rope(raw, head_dim, parameters={"rope_theta": raw.number("rope_theta") * stretch})


FAMILIES = (
    Family(
        name="hunyuan", read=read_config, folders="HunYuanDenseV1ForCausalLM", gguf="hunyuan-dense"
    ),
)
