"""Cohere's Command R7B and Command A, dense and with mixtures: attention and MLP in parallel.

Layers with a window have rotary embedding, the others none. Published rows of queries and keys have
rotary pairs side by side; checkpoints reorder them (``models/row_order.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.layers.block import ParallelBlock
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture
from localrt.quant.ops.experts import Scoring

_NAMES = LayerNames(attention_norm="", mlp_norm="")
_SCORING: dict[str, Scoring] = {"softmax": "softmax-chosen", "sigmoid": "sigmoid"}


def read_cohere2(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys, ``layer_norm_eps`` and ``logit_scale``; all but every fourth layer have a
    window.
    """
    pattern, layers = raw.integer("sliding_window_pattern", 4), raw.integer("num_hidden_layers")
    windowed = raw.windowed([(layer + 1) % pattern != 0 for layer in range(layers)])
    return _read(raw, windowed, windowed)


def _read(raw: RawConfig, windowed: Sequence[bool], rotated: Sequence[bool]) -> DecoderConfig:
    """The decoder; ``windowed`` and ``rotated`` say of each layer whether it has a window, and
    rotary embedding.
    """
    centered = not raw.has("rms_norm_eps")
    config = llama.read_config(raw.renamed({"layer_norm_eps": "rms_norm_eps"}) if centered else raw)
    plain = replace(config.attending[0], needs="ParallelOps")
    return replace(
        config,
        attention=tuple(
            replace(
                plain,
                window=raw.integer("sliding_window") if windows else None,
                rope=plain.rope if rotates else None,
            )
            for windows, rotates in zip(windowed, rotated, strict=True)
        ),
        block=ParallelBlock(centered=centered),
        logit_scale=raw.number("logit_scale", 1.0),
        names=_NAMES,
    )


def read_cohere2_moe(raw: RawConfig) -> DecoderConfig:
    """Command A+ and North: Cohere 2 with mixtures; the first layers may be dense.

    A dense layer without a window has rotary embedding where dense layers have a pattern of 1.
    """
    layers, dense = raw.integer("num_hidden_layers"), raw.index("first_k_dense_replace")
    sparse = raw.sparse(layers)
    if sparse is None:
        sparse = [layer >= dense for layer in range(layers)]
    prefix = raw.integer("prefix_dense_sliding_window_pattern", 1)
    pattern = raw.integer("sliding_window_pattern", 4)
    windowed = raw.windowed(
        [
            (layer + 1) % prefix != 0 if layer < dense else (layer - dense + 1) % pattern != 0
            for layer in range(layers)
        ]
    )
    rotated = [
        windows or (prefix == 1 and not mixes)
        for windows, mixes in zip(windowed, sparse, strict=True)
    ]
    config = _read(raw, windowed, rotated)
    inner = config.intermediate_size
    scoring = raw.choice("expert_selection_fn", "softmax", _SCORING)
    shared = inner * (raw.optional_integer("num_shared_experts") or 0)
    spec = read_mixture(raw, config, scoring=scoring, shared=shared)
    combined = {"average": True, "sum": False}
    averaged = raw.choice("shared_expert_combination_strategy", "average", combined)
    config = replace(
        config,
        block=ParallelBlock(centered=not raw.has("rms_norm_eps"), averaged=averaged),
        intermediate_size=raw.optional_integer("prefix_dense_intermediate_size") or inner,
    )
    return with_mixture(config, spec, sparse)


def _add_norms(config: Config, file: GgufFacts) -> None:
    """Add the norms' epsilon, and the factor of logits."""
    config["layer_norm_eps"] = file.number("attention.layer_norm_epsilon")
    config["logit_scale"] = config.pop("logits_scaling", None)


def _add_mixture(config: Config, file: GgufFacts) -> None:
    """Add how experts are chosen, and widths: the plain one is that of dense layers."""
    _add_norms(config, file)
    config["expert_selection_fn"] = config.pop("scoring_func", "sigmoid")
    config["num_shared_experts"] = config.pop("n_shared_experts", None)
    config["prefix_dense_intermediate_size"] = config.get("intermediate_size")
    if (inner := config.get("moe_intermediate_size")) is not None:
        config["intermediate_size"] = inner


FAMILIES = (
    Family(
        name="cohere2",
        read=read_cohere2,
        folders="Cohere2ForCausalLM",
        gguf="cohere2",
        in_pairs=True,
        gguf_in_pairs=True,
        gguf_config=_add_norms,
    ),
    Family(
        name="cohere2_moe",
        read=read_cohere2_moe,
        folders="Cohere2MoeForCausalLM",
        gguf="cohere2moe",
        in_pairs=True,
        gguf_in_pairs=True,
        gguf_config=_add_mixture,
    ),
)
