"""LFM2 and LFM3 (Liquid AI): short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import ROUTER, DecoderConfig, LayerNames, RecurrentNames
from localrt.models.layers.rope import read_kind
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture
from localrt.quant.ops.protocol import LayerSpec
from localrt.quant.ops.recurrent import RecurrentSpec

_PUBLISHED = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
"""Liquid AI's own names of two keys, which count where both are there."""

_LFM2_KINDS = {"conv": False, "full_attention": True}
NAMES = LayerNames(
    attention_norm="operator_norm",
    out="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)


def read_lfm2(raw: RawConfig) -> DecoderConfig:
    """LFM2 and LFM2-MoE (Liquid AI): short convolutions, and attention in some layers.

    ``layer_types``, or ``full_attn_idxs``, say which layers attend.
    """
    raw = raw.renamed(_PUBLISHED)
    config = llama.read_config(raw)
    attending = config.attending[0]
    short = short_convolution(raw, config, taps=3)
    kinds = raw.layer_kinds("layer_types", config.layers, _LFM2_KINDS)
    if kinds is None:
        chosen = raw.sequence("full_attn_idxs")
        kinds = [chosen is None or layer in chosen for layer in range(config.layers)]
    config = replace(
        config,
        intermediate_size=_width(raw, config.intermediate_size),
        attention=tuple(attending if attends else short for attends in kinds),
        qk_norm=True,
        names=LayerNames() if raw.is_gguf else NAMES,
        recurrent=convolution_names(short),
    )
    if not raw.has("num_experts") and not raw.has("num_local_experts"):
        return config
    inner = raw.integer("moe_intermediate_size")
    spec = read_mixture(raw, config, scoring="sigmoid", normalize=True, inner=inner)
    router = replace(spec.router, scale=raw.number("routed_scaling_factor", 1.0))
    spec = replace(spec, router=router, choice_bias=raw.flag("use_expert_bias", default=True))
    dense = raw.optional_integer("num_dense_layers")
    dense = dense or raw.optional_integer("first_k_dense_replace") or 0
    return with_mixture(config, spec, [layer >= dense for layer in range(config.layers)])


def short_convolution(raw: RawConfig, config: DecoderConfig, *, taps: int) -> RecurrentSpec:
    """A short convolution layer; ``taps`` is the default where the config has none."""
    return RecurrentSpec(
        kind="conv",
        taps=raw.integer("conv_L_cache", taps),
        eps=config.norm_eps,
        width=config.hidden_size,
        conv_bias=raw.flag("conv_bias"),
    )


def convolution_names(spec: RecurrentSpec) -> RecurrentNames:
    """The tensor names of a short convolution layer."""
    return RecurrentNames(
        mix=("conv.in_proj",), taps=("conv.conv",), out="conv.out_proj", biased=spec.conv_bias
    )


def _width(raw: RawConfig, width: int) -> int:
    """An MLP's width: configs may give 3/2 of it, to be scaled and rounded."""
    adjusts = raw.flag("block_auto_adjust_ff_dim", default=raw.has("block_multiple_of"))
    if raw.is_gguf or not adjusts:
        return width
    scaled = int(raw.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = raw.integer("block_multiple_of", 256)
    return -(-scaled // multiple) * multiple


_FOUR = ("conv", "conv", "full_attention", "conv")
_ROPE: Mapping[str, Mapping[str, object]] = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_theta": 1e4},
}


def read_lfm3(raw: RawConfig) -> DecoderConfig:
    """LFM3 (Liquid AI): short convolutions, norms on inputs and results, and a gate for each head.

    Some attention layers have a window and rotate the whole head; the others see all tokens and
    rotate a share of its pairs: ``rope_parameters`` has an entry for each kind.
    """
    config = llama.read_config(raw)
    gated = raw.flag("use_attention_gate", default=True)
    plain = replace(config.attending[0], head_gates=gated, window=None)
    full, sliding = (
        replace(plain, rope=read_kind(raw, plain.head_dim, kind, _ROPE)) for kind in _ROPE
    )
    short = short_convolution(raw, config, taps=7)
    specs: dict[str, LayerSpec] = {
        "conv": short,
        "full_attention": full,
        "sliding_attention": replace(sliding, window=raw.integer("sliding_window", 256)),
    }
    usual = [specs[_usual_kind(layer)] for layer in range(config.layers)]
    return replace(
        config,
        attention=tuple(raw.layer_kinds("layer_types", config.layers, specs) or usual),
        qk_norm=True,
        names=_names(gated, normed=raw.flag("use_sandwich_norm", default=True)),
        recurrent=convolution_names(short),
    )


def _usual_kind(layer: int) -> str:
    return "sliding_attention" if layer and layer % 4 == 0 else _FOUR[layer % 4]


def _names(gated: bool, *, normed: bool) -> LayerNames:
    usual = LayerNames()
    return replace(
        NAMES,
        qkv=(*usual.qkv, "self_attn.g_proj") if gated else usual.qkv,
        out=usual.out,
        q_norm=usual.q_norm,
        k_norm=usual.k_norm,
        attention_post_norm="post_operator_norm" if normed else "",
        mlp_post_norm="post_ffn_norm" if normed else "",
    )


def _add_kinds(config: Config, file: GgufFacts) -> None:
    """Layers without KV heads are convolutions."""
    if kinds := config.get("layer_types"):
        config["layer_types"] = ["conv" if kind == "linear_attention" else kind for kind in kinds]


FAMILIES = (
    Family(
        name="lfm2",
        read=read_lfm2,
        folders="Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration",
        gguf="lfm2 lfm2moe",
        tensors={"feed_forward.gate.weight": f"{ROUTER}.weight"},
        gguf_layer={
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
        },
        gguf_config=_add_kinds,
    ),
    Family(
        name="lfm3",
        read=read_lfm3,
        folders="Lfm3ForCausalLM Lfm3VlForConditionalGeneration",
        tensors={"self_attn.gate_proj.weight": "self_attn.g_proj.weight"},
    ),
)
