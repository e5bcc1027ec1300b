"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with fused projections, LongRoPE and partial rotation."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig

_NAMES = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys; "su" and "yarn" are old names of LongRoPE here."""
    config = llama.read_config(raw)
    parameters = dict(raw.mapping("rope_scaling"))
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind in ("su", "yarn") or raw.has_tensor("rope_factors_long.weight"):
        parameters["rope_type"] = "longrope"
    rope = read_rope(raw, config.attending[0].head_dim, parameters=parameters)
    return replace(
        config, attention=tuple(replace(spec, rope=rope) for spec in config.attending), names=_NAMES
    )


def _add_original_length(config: Config, file: GgufFacts) -> None:
    length = file.number("rope.scaling.original_context_length")
    if length is not None:
        config["original_max_position_embeddings"] = length


FAMILIES = (
    Family(
        name="phi3",
        read=read_config,
        folders="Phi3ForCausalLM",
        gguf="phi3",
        gguf_layer={"ffn_up": "mlp.gate_up_proj"},
        gguf_config=_add_original_length,
    ),
)
