"""EXAONE 4 and 4.5: norms on results instead of inputs, and on every query and key head.
EXAONE MoE: norms on inputs, and mixtures.

In models with windows, layers without one have no rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.architectures.deepseek import add_choice, read_mixtures
from localrt.models.architectures.family import SANDWICH_NORMS, Family
from localrt.models.architectures.olmo import RESULT_NORMS
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Reads Llama's keys; ``layer_types`` or ``sliding_window_pattern`` says which have windows."""
    config = llama.read_config(raw)
    attention = config.attending
    if raw.has("sliding_window"):
        windowed = raw.windowed(_pattern(raw, config.layers))
        attention = tuple(
            spec if here else replace(spec, window=None, rope=None)
            for spec, here in zip(attention, windowed, strict=True)
        )
    return replace(config, attention=attention, qk_norm=True, names=RESULT_NORMS)


def read_exaone_moe(raw: RawConfig) -> DecoderConfig:
    """K-EXAONE: experts are chosen as in DeepSeek-V3, and the first layers are dense."""
    raw = raw.renamed({"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"})
    config = read_config(raw)
    return replace(
        config,
        names=LayerNames(),
        mixtures=read_mixtures(raw, config.norm_eps, config.layers, config.mlp.activation),
    )


def _pattern(raw: RawConfig, layers: int) -> list[bool]:
    """Which layers have a window: "LLLG" is the same as 4, all but every fourth."""
    pattern = raw.text("sliding_window_pattern", "4")
    if pattern.isdecimal() and int(pattern) > 0:
        return [(layer + 1) % int(pattern) != 0 for layer in range(layers)]
    if not pattern or set(pattern) - set("LG"):
        raise UnsupportedModelError(f"sliding_window_pattern {pattern!r:.60} is not supported")
    last = layers - 1  # the last layer never has a window
    return [pattern[layer % len(pattern)] == "L" and layer < last for layer in range(layers)]


FAMILIES = (
    Family(
        name="exaone4",
        read=read_config,
        folders="Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration",
        gguf="exaone4",
        gguf_layer=SANDWICH_NORMS,
    ),
    Family(
        name="exaone_moe",
        read=read_exaone_moe,
        folders="ExaoneMoeForCausalLM ExaoneMoEForCausalLM",
        gguf="exaone-moe",
        gguf_config=add_choice,
    ),
)
