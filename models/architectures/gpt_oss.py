"""gpt-oss: mixtures in MXFP4, attention sinks, every other layer with a window, biases throughout.

Experts use a clamped gate (``swiglu_oai``); YaRN's ramp is not rounded to whole dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.architectures.family import DOWN, GATE_UP, MLP_NORM, Family
from localrt.models.config import EXPERT_DOWN, EXPERT_GATE_UP, ROUTER, DecoderConfig
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture
from localrt.models.row_order import Stack
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.experts import ExpertSpec

_ALPHA = 1.702  # the factor within the gate's sigmoid in ``swiglu_oai``


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys; ``intermediate_size`` is an expert's width."""
    if raw.number("swiglu_alpha", _ALPHA) != _ALPHA:
        raise UnsupportedModelError(f"swiglu_alpha must be {_ALPHA}")
    config = llama.read_config(raw)
    spec = replace(
        read_mixture(raw, config, scoring="softmax-chosen"),
        expert=ExpertSpec(activation="swiglu_oai", limit=raw.number("swiglu_limit", 7.0)),
        gate_bias=True,
        expert_bias=True,
    )
    config = replace(config, attention=_attention(raw, config))
    return with_mixture(config, spec)


def _attention(raw: RawConfig, config: DecoderConfig) -> tuple[AttentionSpec, ...]:
    """Sinks in all layers, a window where ``layer_types`` says, by default in every second.

    GGUF has no key for YaRN's ramp.
    """
    plain = config.attending[0]
    parameters = dict(raw.mapping("rope_scaling"))
    parameters.setdefault("truncate", False)
    rope = read_rope(raw, plain.head_dim, parameters=parameters, default_theta=150_000.0)
    full = replace(plain, rope=rope, sinks=True, window=None)
    sliding = replace(full, window=raw.integer("sliding_window", 128))
    windowed = raw.windowed([layer % 2 == 0 for layer in range(config.layers)])
    return tuple(sliding if here else full for here in windowed)


_STACKS: Mapping[str, Stack] = {
    "mlp.experts.gate_up_proj": Stack(GATE_UP, turns=True, transposed=True),
    "mlp.experts.gate_up_proj_bias": Stack(
        tuple(f"{name}.bias" for name in EXPERT_GATE_UP), turns=True
    ),
    "mlp.experts.down_proj": Stack(DOWN, transposed=True),
    "mlp.experts.down_proj_bias": Stack((f"{EXPERT_DOWN}.bias",)),
}

FAMILIES = (
    Family(
        name="gpt_oss",
        read=read_config,
        folders="GptOssForCausalLM",
        gguf="gpt-oss",
        tensors={"mlp.router.weight": f"{ROUTER}.weight", "mlp.router.bias": f"{ROUTER}.bias"},
        stacks=_STACKS,
        gguf_layer=MLP_NORM,
    ),
)
