"""Step 3.5 and 3.7 (StepFun, text): gates and MLPs that are limited, and a gate for each head.

Layers with a window may have more query heads than others, and rotary parameters of their own.
Experts are scored by sigmoids; a bias only affects the choice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import CHOICE_BIAS, ROUTER, DecoderConfig, LayerNames, MixtureSpec
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, read_mixture
from localrt.models.row_order import Stack

_KEYS = {
    "num_attention_groups": "num_key_value_heads",
    "n_routed_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dim": "shared_expert_intermediate_size",
    "share_expert_dims": "shared_expert_intermediate_size",
    "moe_router_scaling_factor": "routed_scaling_factor",
}
_KINDS = {"full_attention": False, "sliding_attention": True}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's and mixture keys, StepFun's own names among them.

    ``rope_theta`` and ``partial_rotary_factors`` may be lists of one number for each layer;
    ``rope_scaling`` is that of layers without a window.
    """
    raw = raw.renamed(_KEYS)
    layers = raw.integer("num_hidden_layers")
    windowed = raw.windowed([False] * layers)
    ropes = _rope_parameters(raw, windowed)
    raw = raw.changed(rope_theta=None, partial_rotary_factor=None, rope_scaling=ropes[0])
    config = llama.read_config(raw)
    size = config.attending[0].head_dim
    scale = 1 / math.sqrt(raw.number("query_pre_attn_scalar", size))
    plain = replace(config.attending[0], scale=scale, head_gates=True, window=None)
    sliding = replace(
        plain,
        heads=_sliding_heads(raw) or plain.heads,
        rope=read_rope(raw, size, parameters=ropes[1]),
        window=raw.integer("sliding_window") if any(windowed) else None,
    )
    names = LayerNames()
    return replace(
        config,
        architecture="step",
        attention=tuple(sliding if here else plain for here in windowed),
        qk_norm=True,
        norm_offset=0.0 if raw.flag("norm_weights_include_one") else 1.0,
        names=replace(names, qkv=(*names.qkv, "self_attn.g_proj")),
        limits=raw.limits("swiglu_limits_shared", layers),
        mixtures=_mixtures(raw, config),
    )


def _sliding_heads(raw: RawConfig) -> int | None:
    heads = raw.optional_integer("num_sliding_attention_heads")
    if heads is None and raw.mapping("attention_other_setting"):
        return raw.nested("attention_other_setting").optional_integer("num_attention_heads")
    return heads


def _rope_parameters(raw: RawConfig, windowed: Sequence[bool]) -> list[Mapping[str, object]]:
    """Those of layers without and with a window.

    As in transformers, ``rope_parameters`` that lack a kind of layer do not count.
    """
    layers, given = len(windowed), raw.mapping("rope_parameters")
    kinds = {kind for kind, here in _KINDS.items() if here in windowed}
    whole = all(isinstance(given.get(kind), Mapping) for kind in kinds)
    if given:
        raw = raw.changed(rope_theta=None, rope_scaling=None)
    bases = raw.shares("rope_theta", layers) or (1e4,) * layers
    turning = raw.shares("partial_rotary_factors", layers) or (1.0,) * layers
    found = []
    for kind, sliding in _KINDS.items():
        layer = windowed.index(sliding) if sliding in windowed else 0
        plain = {"rope_theta": bases[layer], "partial_rotary_factor": turning[layer]}
        own = given.get(kind) if whole else None
        scaling = {} if sliding else raw.mapping("rope_scaling")
        found.append(own if isinstance(own, Mapping) else {**plain, **scaling})
    return found


def _mixtures(raw: RawConfig, config: DecoderConfig) -> tuple[MixtureSpec | None, ...]:
    """Read ``mlp_layer_types`` or ``moe_layers_enum``; without them, the first three layers are
    dense.
    """
    layers = config.layers
    sparse = raw.layer_kinds("mlp_layer_types", layers, {"dense": False, "sparse": True})
    if raw.is_gguf:
        sparse = [
            raw.has_tensor(f"model.layers.{layer}.{ROUTER}.weight") for layer in range(layers)
        ]
    if sparse is None:
        listed = raw.has("moe_layers_enum")  # as text, or as a list
        numbers = re.findall(r"\d+", raw.text("moe_layers_enum", ""))
        sparse = [str(n) in numbers if listed else n > 2 for n in range(layers)]
    if not any(sparse):
        return ()
    spec = read_mixture(
        raw,
        config,
        scoring="sigmoid",
        normalize=not raw.is_gguf,
        inner=raw.integer("moe_intermediate_size"),
    )
    spec = replace(
        spec,
        router=replace(spec.router, scale=raw.number("routed_scaling_factor", 1.0)),
        shared=raw.integer("shared_expert_intermediate_size"),
        choice_bias=not raw.is_gguf
        or any(raw.has_tensor(f"model.layers.{layer}.{CHOICE_BIAS}") for layer in range(layers)),
    )
    limits = raw.limits("swiglu_limits", layers)
    return tuple(
        replace(spec, expert=replace(spec.expert, limit=limit)) if here else None
        for here, limit in zip(sparse, limits, strict=True)
    )


def _add_kinds(config: Config, file: GgufFacts) -> None:
    """Add what layers with a window have of their own. Half of each head turns in the others, whose
    frequencies ``rope_freqs`` divides.
    """
    heads, kinds = config.get("num_attention_heads"), config.get("layer_types") or ()
    if isinstance(heads, list) and len(heads) == len(kinds):
        own = dict(zip(reversed(kinds), reversed(heads), strict=True))
        config["num_attention_heads"] = own.get("full_attention", heads[0])
        config["num_sliding_attention_heads"] = own.get("sliding_attention")
    base = config.pop("rope_theta", 1e4)
    config.pop("rope_dim", None)
    config["rope_parameters"] = {
        "full_attention": {
            "rope_theta": base,
            "partial_rotary_factor": 0.5,
            **config.get("rope_scaling", {}),
        },
        "sliding_attention": {
            "rope_type": "proportional",  # whose frequencies nothing divides
            "rope_theta": config.get("rope_local_base_freq", base),
        },
    }
    for kind, name in (("exp", "swiglu_limits"), ("shexp", "swiglu_limits_shared")):
        limits = file.listed(f"swiglu_clamp_{kind}")
        config[name] = limits and limits[: config.get("num_hidden_layers")]


_EXPERTS = {
    f"moe.{part}_proj.weight": Stack((f"mlp.experts.{{}}.{part}_proj.weight",))
    for part in ("gate", "up", "down")
}
FAMILIES = (
    Family(
        name="step",
        read=read_config,
        folders="Step3p5ForCausalLM Step3p7ForConditionalGeneration",
        gguf="step35",
        tensors={
            "moe.gate.weight": f"{ROUTER}.weight",
            "moe.router_bias": CHOICE_BIAS,
            **{
                f"share_expert.{part}_proj.weight": f"mlp.shared_experts.{part}_proj.weight"
                for part in ("gate", "up", "down")
            },
        },
        stacks=_EXPERTS,
        gguf_layer={"attn_gate": "self_attn.g_proj"},
        gguf_plus_one=True,
        gguf_config=_add_kinds,
    ),
)
