"""Muse-Glimmer (Meta), text: a gate for every number that attention gives, and norms on inputs and
results.

Three of four layers have a window, the others no positions. Embeddings, queries and keys are normed
without weights; in GGUF files, the norms of queries have their factor as weights.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import SANDWICH_NORMS, Config, Family, GgufFacts
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.layers.block import ResidualBlock
from localrt.models.raw_config import RawConfig

GATED_NAMES = LayerNames(
    qkv=(*LayerNames().qkv, "self_attn.gate_proj"),
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
"""A layer with gates behind attention, and norms on inputs and results."""

GGUF_GATED = {**SANDWICH_NORMS, "attn_gate": "self_attn.gate_proj"}
"""GGUF's names of such a layer."""


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Gemma 2's keys, and ``layer_rope_theta``, where 0 means no positions.

    Published weights of a layer's norms are ``w - 1``, those of the last norm are not.
    """
    raw = raw.renamed({"hidden_activation": "hidden_act"})
    config, gguf = llama.read_config(raw), raw.is_gguf
    usual = [(config.layers - 1 - layer) % 4 != 0 for layer in range(config.layers)]
    bases = raw.layer_list("layer_rope_theta", config.layers) or usual
    post_eps, window = raw.number("post_norm_eps", 1e-8), raw.integer("sliding_window")
    plain = config.attending[0]
    plain = replace(
        plain,
        scale=plain.scale * raw.number("qk_scale_factor", 1.0),
        number_gates=True,
        unit_norms=not gguf,
        post_eps=post_eps,
    )
    return replace(
        config,
        architecture="muse_glimmer",
        attention=tuple(
            replace(plain, window=window if near else None, rope=plain.rope if base else None)
            for near, base in zip(raw.windowed(usual), bases, strict=True)
        ),
        mlp=replace(config.mlp, post_eps=post_eps),
        block=ResidualBlock(norm_embeddings=True),
        qk_norm=gguf,
        norm_offset=0.0 if gguf else 1.0,
        final_norm_offset=0.0,
        logit_scale=raw.number("output_multiplier", 1.0),
        final_softcap=raw.optional_number("final_logit_softcapping"),
        names=GATED_NAMES,
    )


def _add_positions(config: Config, file: GgufFacts) -> None:
    """Add the factor of the logits, and which layers have positions: those with a window."""
    config["output_multiplier"] = config.pop("logits_scaling", None)
    if kinds := config.get("layer_types"):
        config["layer_rope_theta"] = [kind == "sliding_attention" for kind in kinds]


FAMILIES = (
    Family(
        name="muse_glimmer",
        read=read_config,
        folders="MuseGlimmerForConditionalGeneration",
        gguf="muse-glimmer",
        gguf_layer=GGUF_GATED,
        gguf_in_pairs=True,
        gguf_config=_add_positions,
    ),
)
