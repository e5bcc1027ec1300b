"""LFM3 (Liquid AI): short convolutions, norms on inputs and results, and a gate for each head.

Of the layers that attend, some see a window and rotate all of a head; the others see all and
rotate a share of its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localrt.models.architectures import lfm2, llama
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.protocol import LayerSpec

_KINDS = {name: name for name in ("conv", "full_attention", "sliding_attention")}
_FOUR = ("conv", "conv", "full_attention", "conv")
_ROPE: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_theta": 1e4},
}


def read_config(raw: RawConfig) -> DecoderConfig:
    """LFM2's keys; ``rope_parameters`` has those of both kinds of attention."""
    config = llama.read_config(raw)
    gated = raw.flag("use_attention_gate", default=True)
    plain = replace(config.attending[0], head_gates=gated, window=None)
    full = replace(plain, rope=_rope(raw, plain.head_dim, "full_attention"))
    sliding = replace(
        plain,
        rope=_rope(raw, plain.head_dim, "sliding_attention"),
        window=raw.integer("sliding_window", 256),
    )
    short = lfm2.short_convolution(raw, config, taps=7)
    specs: dict[str, LayerSpec] = {
        "conv": short,
        "full_attention": full,
        "sliding_attention": sliding,
    }
    kinds = raw.layer_kinds("layer_types", config.layers, _KINDS)
    if kinds is None:
        kinds = [_usual_kind(layer) for layer in range(config.layers)]
    return replace(
        config,
        architecture="lfm3",
        attention=tuple(specs[kind] for kind in kinds),
        qk_norm=True,
        names=_names(gated, normed=raw.flag("use_sandwich_norm", default=True)),
        recurrent=lfm2.convolution_names(short),
    )


def _usual_kind(layer: int) -> str:
    return "sliding_attention" if layer and layer % 4 == 0 else _FOUR[layer % 4]


def _rope(raw: RawConfig, head_dim: int, kind: str) -> Rope:
    given = raw.mapping("rope_parameters").get(kind)
    parameters = given if isinstance(given, Mapping) else _ROPE[kind]
    return read_rope(raw, head_dim, parameters={"partial_rotary_factor": 1.0, **parameters})


def _names(gated: bool, *, normed: bool) -> LayerNames:
    usual = LayerNames()
    return replace(
        lfm2.NAMES,
        qkv=(*usual.qkv, "self_attn.g_proj") if gated else usual.qkv,
        out=usual.out,
        q_norm=usual.q_norm,
        k_norm=usual.k_norm,
        attention_post_norm="post_operator_norm" if normed else "",
        mlp_post_norm="post_ffn_norm" if normed else "",
    )
