"""Gemma 3 (text): Gemma 2 with query and key norms, and five sliding-window layers to one full.

Sliding layers rotate with their own base frequency, which is not scaled; scores have no cap.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import gemma2
from localrt.models.config import DecoderConfig
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Gemma 3's ``text_config`` keys."""
    head_dim = raw.integer("head_dim", 256)
    scaled = {"rope_theta": raw.number("rope_theta", 1e6), **raw.mapping("rope_scaling")}
    local = {"rope_theta": raw.number("rope_local_base_freq", 1e4)}
    full = gemma2.read_attention(raw, read_rope(raw, head_dim, parameters=scaled))
    sliding = replace(
        full,
        rope=read_rope(raw, head_dim, parameters=local),
        window=raw.integer("sliding_window", 4096),
    )
    layers, pattern = raw.integer("num_hidden_layers", 26), raw.integer("sliding_window_pattern", 6)
    windowed = raw.windowed([(layer + 1) % pattern != 0 for layer in range(layers)])
    config = gemma2.sandwich_config(
        raw, "gemma3", full, sliding, windowed, vocab_size=262_208, context_length=131_072
    )
    return replace(config, qk_norm=True)
