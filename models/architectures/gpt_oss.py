"""gpt-oss: mixtures in MXFP4, attention sinks, every other layer with a window, biases throughout.

Experts clamp what they gate (``swiglu_oai``); YaRN's ramp is not rounded to whole frequencies.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig, MixtureSpec
from localrt.models.mixture_config import read_router, with_mixture
from localrt.models.raw_config import RawConfig
from localrt.models.rope import read_rope
from localrt.quant.ops.experts import ExpertSpec
from localrt.quant.ops.protocol import AttentionSpec

__all__ = ["read_config"]

_ALPHA = 1.702  # of the gate's sigmoid: what ``swiglu_oai`` computes


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; ``intermediate_size`` is an expert's."""
    if raw.number("swiglu_alpha", _ALPHA) != _ALPHA:
        raise UnsupportedModelError(f"swiglu_alpha must be {_ALPHA}")
    config = llama.read_config(raw)
    spec = MixtureSpec(
        router=read_router(raw, config.norm_eps, scoring="softmax-chosen"),
        expert=ExpertSpec(activation="swiglu_oai", limit=raw.number("swiglu_limit", 7.0)),
        inner=config.intermediate_size,
        gate_bias=True,
        expert_bias=True,
    )
    return with_mixture(
        replace(config, architecture="gpt_oss", attention=_attention(raw, config)), spec
    )


def _attention(raw: RawConfig, config: DecoderConfig) -> tuple[AttentionSpec, ...]:
    """Sinks everywhere; the window in the layers that ``layer_types`` names, else in every second.

    GGUF has no word for YaRN's ramp.
    """
    plain = config.attention[0]
    parameters = dict(raw.mapping("rope_scaling"))
    parameters.setdefault("truncate", False)
    rope = read_rope(raw, plain.head_dim, parameters=parameters, default_theta=150_000.0)
    full = replace(plain, rope=rope, sinks=True, window=None)
    sliding = replace(full, window=raw.integer("sliding_window", 128))
    types = raw.layer_types(config.layers) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config.layers)
    ]
    return tuple(
        sliding if kind == "sliding_attention" else full for kind in types[: config.layers]
    )
