"""Llama 4 (Meta), text: mixtures of one expert for each token and a shared one.

Attention of most layers sees a chunk of tokens, and norms queries and keys without weights behind
their rotation. Every fourth layer sees all tokens, has no positions, and scales queries up at late
ones. The weight of an expert, a sigmoid, is a factor of its input. Rows of queries and keys have
rotary pairs side by side.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import DOWN, GATE_UP, Config, Family, GgufFacts
from localrt.models.config import ROUTER, DecoderConfig
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture
from localrt.models.row_order import Stack
from localrt.quant.ops.attention import AttentionSpec, AttentionTemperature

_KINDS = {"chunked_attention": True, "full_attention": False}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys; ``intermediate_size`` is an expert's width."""
    config = llama.read_config(raw.renamed({"intermediate_size_mlp": "intermediate_size"}))
    step, inner = raw.integer("interleave_moe_layer_step", 1), raw.integer("intermediate_size")
    sparse = raw.sequence("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, config.layers, step))
    mixture = replace(
        read_mixture(raw, config, scoring="sigmoid", normalize=False, inner=inner),
        shared=inner,
        weigh_inputs=True,
    )
    config = replace(config, attention=_attention(raw, config))
    return with_mixture(config, mixture, [layer in sparse for layer in range(config.layers)])


def _attention(raw: RawConfig, config: DecoderConfig) -> tuple[AttentionSpec, ...]:
    layers, normed = config.layers, raw.flag("use_qk_norm", default=True)
    interval = raw.integer("no_rope_layer_interval", 4)
    rotates = [(layer + 1) % interval != 0 for layer in range(layers)]
    if raw.sequence("no_rope_layers"):
        rotates = [bool(here) for here in raw.layer_list("no_rope_layers", layers) or ()]
    chunk = raw.optional_integer("attention_chunk_size")
    chunked = raw.layer_kinds("layer_types", layers, _KINDS) or rotates
    plain = replace(config.attending[0], window=None)
    near = replace(plain, unit_norms=normed, norms_last=normed)
    temperature = None
    if raw.flag("attn_temperature_tuning", default=True):
        beta, length = raw.number("attn_scale", 0.1), raw.integer("floor_scale", 8192)
        temperature = AttentionTemperature(beta=beta, length=length, offset=1)
    far = replace(plain, rope=None, temperature=temperature)
    specs = [near if here else far for here in rotates]
    return tuple(
        replace(spec, window=chunk, chunked=True) if here and chunk else spec
        for spec, here in zip(specs, chunked, strict=True)
    )


_LARGER = 128  # experts of a model without norms on queries and keys
_CHUNK = 8192


def _add_chunks(config: Config, file: GgufFacts) -> None:
    """Add what llama.cpp's code says of attention, and the two widths."""
    config["intermediate_size_mlp"] = config.get("intermediate_size")
    config["intermediate_size"] = config.get("moe_intermediate_size")
    config["interleave_moe_layer_step"] = config.get("moe_layer_interval")
    config["use_qk_norm"] = config.get("num_local_experts") != _LARGER
    if file.integer("attention.sliding_window") == 0:  # all layers see all tokens
        config["no_rope_layers"] = [1] * (config.get("num_hidden_layers") or 0)
    else:
        config["attention_chunk_size"] = _CHUNK


FAMILIES = (
    Family(
        name="llama4",
        read=read_config,
        folders="Llama4ForConditionalGeneration Llama4ForCausalLM",
        gguf="llama4",
        tensors={
            "feed_forward.router.weight": f"{ROUTER}.weight",
            **{
                f"feed_forward.{theirs}{kind}_proj.weight": f"mlp.{ours}{kind}_proj.weight"
                for theirs, ours in (
                    ("", ""),
                    ("shared_expert.", "shared_experts."),
                    ("experts.{}.", "experts.{}."),
                )
                for kind in ("gate", "up", "down")
            },
        },
        stacks={
            "feed_forward.experts.gate_up_proj": Stack(GATE_UP, transposed=True),
            "feed_forward.experts.down_proj": Stack(DOWN, transposed=True),
        },
        in_pairs=True,
        gguf_in_pairs=True,
        gguf_config=_add_chunks,
    ),
)
