"""Trinity (Arcee's AFMoE) and Laguna (Poolside): mixtures with gates behind attention.

Experts are chosen by the sigmoid of their logits plus a bias, and one or more are shared. Trinity's
layers are those of Muse-Glimmer around its mixtures, and only layers with a window have positions.
Laguna's layers have different numbers of heads, and rotate a share of a head that differs between
layers with a window and others; its gates are softplus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.architectures.family import Config, Family, GgufFacts, head_size
from localrt.models.architectures.muse_glimmer import GATED_NAMES, GGUF_GATED
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.layers.rope import read_kind
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture


def read_config(raw: RawConfig) -> DecoderConfig:
    """Trinity: Llama's keys, and those of its windows and mixtures."""
    config = llama.read_config(raw)
    every, window = raw.integer("global_attn_every_n_layers", 4), raw.integer("sliding_window")
    windowed = raw.windowed([(layer + 1) % every != 0 for layer in range(config.layers)])
    near = replace(config.attending[0], number_gates=True, window=window)
    far = replace(near, rope=None, window=None)
    config = replace(
        config,
        attention=tuple(near if here else far for here in windowed),
        embedding_scale=math.sqrt(config.hidden_size) if raw.flag("mup_enabled") else 1.0,
        names=GATED_NAMES,
    )
    shared = raw.integer("moe_intermediate_size") * raw.index("num_shared_experts")
    dense = raw.index("num_dense_layers")
    sparse = [layer >= dense for layer in range(config.layers)]
    return _with_experts(raw, config, sparse, shared, raw.number("route_scale", 1.0))


def _with_experts(
    raw: RawConfig, config: DecoderConfig, sparse: Sequence[bool], shared: int, scale: float
) -> DecoderConfig:
    """``config`` with norms on queries and keys, and mixtures in the ``sparse`` layers."""
    if raw.flag("attention_bias"):
        raise UnsupportedModelError("attention_bias of layers with gates is not supported")
    inner = raw.integer("moe_intermediate_size")
    spec = read_mixture(
        raw, config, scoring="sigmoid", inner=inner, scale=scale, shared=shared, choice_bias=True
    )
    cap = raw.optional_number("moe_router_logit_softcapping")
    spec = replace(spec, router=replace(spec.router, softcap=cap))
    return with_mixture(replace(config, qk_norm=True), spec, sparse)


_GATES = {"True": True, "per-head": True, "per-element": False}
_LAGUNA_NAMES = LayerNames(qkv=(*LayerNames().qkv, "self_attn.g_proj"))
_ROPE: Mapping[str, Mapping[str, object]] = {
    "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4},
}


def read_laguna(raw: RawConfig) -> DecoderConfig:
    """Laguna: Llama's keys, ``num_attention_heads_per_layer``, and ``rope_parameters`` for each
    kind of layer.
    """
    if raw.flag("moe_apply_router_weight_on_input"):
        raise UnsupportedModelError("moe_apply_router_weight_on_input is not supported")
    config = _with_kinds(raw, llama.read_config(raw))
    dense = raw.index("first_k_dense_replace", 1)
    sparse = raw.sparse(config.layers)
    return _with_experts(
        raw,
        replace(config, names=_LAGUNA_NAMES),
        sparse or [layer >= dense for layer in range(config.layers)],
        raw.integer("shared_expert_intermediate_size"),
        raw.number("moe_routed_scaling_factor", 1.0),
    )


def _with_kinds(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """``config`` with gates, and with heads, window and rotation of each layer; without
    ``layer_types``, no layer has a window.
    """
    layers, plain = config.layers, config.attending[0]
    each = raw.choice("gating", "True", _GATES)
    plain = replace(
        plain, window=None, softplus=True, head_gates=each, number_gates=not each, rope=None
    )
    windowed = raw.windowed([False] * layers)
    near = far = replace(plain, rope=read_kind(raw, plain.head_dim, "full_attention", _ROPE))
    if any(windowed):
        rope = read_kind(raw, plain.head_dim, "sliding_attention", _ROPE)
        near = replace(plain, rope=rope, window=raw.integer("sliding_window"))
    heads = raw.integers("num_attention_heads_per_layer", layers, plain.heads)
    kinds = (near if here else far for here in windowed)
    specs = (replace(kind, heads=count) for kind, count in zip(kinds, heads, strict=True))
    return replace(config, attention=tuple(specs))


_GGUF_KEYS = {
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "routed_scaling_factor": "route_scale",
}


def _add_mixture(config: Config, file: GgufFacts) -> None:
    """Add Trinity's keys of mixtures; all files have scaled embeddings."""
    config["mup_enabled"] = True
    config["global_attn_every_n_layers"] = config.get("sliding_window_pattern")
    for theirs, name in _GGUF_KEYS.items():
        config[name] = config.get(theirs) or None


def _add_kinds(config: Config, file: GgufFacts) -> None:
    """Add heads, and the rotation of each kind of layer. The gates' rows show how many
    there are; YaRN is not for layers with a window.
    """
    heads, size = config.get("num_attention_heads"), config.get("head_dim", head_size(config))
    if isinstance(heads, list):
        config["num_attention_heads_per_layer"] = heads
        config["num_attention_heads"] = heads[0]
    gates = file.tensors.get("model.layers.0.self_attn.g_proj.weight")
    if gates is not None and gates.rows != config.get("num_attention_heads"):
        config["gating"] = "per-element"
    config["moe_routed_scaling_factor"] = config.get("routed_scaling_factor") or None
    config.pop("rope_dim", None)
    share = config.pop("partial_rotary_factor", 1.0)
    full = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": share}
    base = config.get("rope_local_base_freq") or config.get("rope_theta")
    turned = file.integer("rope.dimension_count_swa")
    config["rope_parameters"] = {
        "full_attention": {**full, **config.get("rope_scaling", {})},
        "sliding_attention": {
            "rope_theta": base,
            "partial_rotary_factor": turned / size if turned and size else share,
        },
    }
    if "layer_types" not in config and config.get("sliding_window"):
        period, layers = config.get("sliding_window_pattern") or 4, config.get("num_hidden_layers")
        kinds = ["full_attention", *["sliding_attention"] * (period - 1)]
        config["layer_types"] = [kinds[layer % period] for layer in range(layers or 0)]


FAMILIES = (
    Family(
        name="afmoe",
        read=read_config,
        folders="AfmoeForCausalLM",
        gguf="afmoe",
        tensors={
            "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
            "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
        },
        gguf_layer=GGUF_GATED,
        gguf_config=_add_mixture,
    ),
    Family(
        name="laguna",
        read=read_laguna,
        folders="LagunaForCausalLM",
        gguf="laguna",
        gguf_config=_add_kinds,
    ),
)
