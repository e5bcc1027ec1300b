"""EXAONE 4: norms on results instead of inputs, and on every query and key head.

In models with windows, layers without one have no rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.architectures.family import SANDWICH_NORMS, Family
from localrt.models.architectures.olmo import RESULT_NORMS
from localrt.models.config import DecoderConfig
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
    return replace(
        config,
        architecture="exaone4",
        attention=attention,
        qk_norm=True,
        names=RESULT_NORMS,
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
        folders="Exaone4ForCausalLM",
        gguf="exaone4",
        gguf_layer=SANDWICH_NORMS,
    ),
)
