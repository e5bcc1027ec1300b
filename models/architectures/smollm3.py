"""SmolLM3: Llama, with no rotary embedding on every fourth layer (NoPE)."""

from __future__ import annotations

from dataclasses import replace

from localrt.common.errors import CheckpointError
from localrt.models.architectures import llama
from localrt.models.architectures.family import Family
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys, and ``no_rope_layers`` (0: no RoPE) or ``no_rope_layer_interval``."""
    config = llama.read_config(raw)
    interval = raw.integer("no_rope_layer_interval", 4)
    rotary = raw.sequence("no_rope_layers") or [
        (layer + 1) % interval != 0 for layer in range(config.layers)
    ]
    if len(rotary) < config.layers:
        raise CheckpointError(
            f"config no_rope_layers has {len(rotary)} entries for {config.layers} layers"
        )
    windowed = raw.flag("use_sliding_window")
    return replace(
        config,
        attention=tuple(
            replace(spec, window=None)
            if rotary[layer]
            else replace(spec, rope=None, window=spec.window if windowed else None)
            for layer, spec in enumerate(config.attending)
        ),
    )


FAMILIES = (
    Family(
        name="smollm3",
        read=read_config,
        folders="SmolLM3ForCausalLM",
        gguf="smollm3",
        gguf_in_pairs=True,
    ),
)
