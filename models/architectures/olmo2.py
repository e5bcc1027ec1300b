"""OLMo 2 and OLMo 3: norms on results instead of inputs, and over all heads of queries and of keys.

In OLMo 3 three of four layers see a window, and only the others' rotary embedding is scaled.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig

RESULT_NORMS = LayerNames(
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_post_norm="post_feedforward_layernorm",
)


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; OLMo 3 has a ``sliding_window``, for the layers that ``layer_types`` names."""
    config = llama.read_config(raw)
    full = replace(config.attending[0], joint_norms=True, window=None)
    attention = (full,) * config.layers
    if (window := raw.optional_integer("sliding_window")) is not None:
        theta = raw.number("rope_local_base_freq", raw.number("rope_theta", 10_000.0))
        local = read_rope(raw, full.head_dim, parameters={"rope_theta": theta})
        sliding = replace(full, window=window, rope=local)
        windowed = raw.windowed([(layer + 1) % 4 != 0 for layer in range(config.layers)])
        attention = tuple(sliding if here else full for here in windowed)
    return replace(
        config,
        architecture="olmo2",
        attention=attention,
        qk_norm=True,
        names=RESULT_NORMS,
    )
