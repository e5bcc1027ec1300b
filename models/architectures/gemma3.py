"""Gemma 3 (text): Gemma 2 with query and key norms, and five sliding-window layers to one full.

Sliding layers rotate with their own base frequency; scores have no cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localrt.models.architectures import gemma2
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig
from localrt.models.rope import read_rope
from localrt.quant.ops.protocol import Rope

__all__ = ["read_config"]

_LAYERS_27B = 62


def read_config(raw: RawConfig) -> DecoderConfig:
    """Gemma 3's ``text_config`` keys."""
    head_dim = raw.integer("head_dim", 256)
    full = gemma2.read_attention(raw, _rope(raw, head_dim, "full_attention"), _LAYERS_27B)
    sliding = replace(
        full,
        rope=_rope(raw, head_dim, "sliding_attention"),
        window=raw.integer("sliding_window", 4096),
    )
    layers, pattern = raw.integer("num_hidden_layers", 26), raw.integer("sliding_window_pattern", 6)
    types = raw.layer_types(layers) or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(layers)
    ]
    config = gemma2.sandwich_config(
        raw, "gemma3", full, sliding, types[:layers], vocab_size=262_208, context_length=131_072
    )
    return replace(config, qk_norm=True)


def _rope(raw: RawConfig, head_dim: int, layer_type: str) -> Rope:
    """Newer configs hold parameters per layer type; older ones scale the full layers only."""
    per_type = raw.mapping("rope_parameters")
    local = layer_type == "sliding_attention"
    theta = (
        raw.number("rope_local_base_freq", 10_000.0)
        if local
        else raw.number("rope_theta", 1_000_000.0)
    )
    parameters: Mapping[str, Any] = per_type.get(layer_type) or (
        {} if local else raw.mapping("rope_scaling")
    )
    return read_rope(raw, head_dim, parameters={"rope_theta": theta, **parameters})
