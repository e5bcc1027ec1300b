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
from localrt.models.config import CHOICE_BIAS, ROUTER, DecoderConfig, LayerNames
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, read_mixture, with_limits, with_mixture
from localrt.models.row_order import Stack

_KEYS = {
    "num_attention_groups": "num_key_value_heads",
    "n_routed_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dim": "shared_expert_intermediate_size",
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
    other = raw.nested("attention_other_setting") if raw.has("attention_other_setting") else raw
    heads = raw.optional_integer("num_sliding_attention_heads")
    sliding = replace(
        plain,
        heads=heads or other.integer("num_attention_heads", plain.heads),
        rope=read_rope(raw, size, parameters=ropes[1]),
        window=raw.integer("sliding_window") if any(windowed) else None,
    )
    names = LayerNames()
    config = replace(
        config,
        attention=tuple(sliding if here else plain for here in windowed),
        qk_norm=True,
        norm_offset=0.0 if raw.flag("norm_weights_include_one") else 1.0,
        names=replace(names, qkv=(*names.qkv, "self_attn.g_proj")),
    )
    return _with_mixtures(raw, config)


def _rope_parameters(raw: RawConfig, windowed: Sequence[bool]) -> list[Mapping[str, object]]:
    """Those of layers without and with a window.

    As in transformers, ``rope_parameters`` that lack a kind of layer do not count.
    """
    layers, given = len(windowed), raw.mapping("rope_parameters")
    kinds = [kind for kind, here in _KINDS.items() if here in windowed]
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


def _with_mixtures(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """Read ``mlp_layer_types`` or ``moe_layers_enum``; without them, the first three layers are
    dense.
    """
    layers = range(config.layers)
    sparse = raw.sparse(config.layers)
    if raw.is_gguf:
        sparse = [raw.has_tensor(f"model.layers.{n}.{ROUTER}.weight") for n in layers]
    if sparse is None:
        listed = raw.has("moe_layers_enum")  # as text, or as a list
        numbers = re.findall(r"\d+", raw.text("moe_layers_enum", ""))
        sparse = [str(n) in numbers if listed else n > 2 for n in layers]
    if not any(sparse):
        return with_limits(config, raw)
    inner, normalize = raw.integer("moe_intermediate_size"), not raw.is_gguf
    spec = read_mixture(
        raw,
        config,
        scoring="sigmoid",
        normalize=normalize,
        inner=inner,
        scale=raw.number("routed_scaling_factor", 1.0),
        shared=raw.integer("shared_expert_intermediate_size"),
        choice_bias=True,
    )
    return with_limits(with_mixture(config, spec, sparse), raw)


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
        "full_attention": {"rope_theta": base, "partial_rotary_factor": 0.5},
        "sliding_attention": {
            "rope_type": "proportional",  # whose frequencies nothing divides
            "rope_theta": config.get("rope_local_base_freq", base),
        },
    }


_PARTS = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
FAMILIES = (
    Family(
        name="step",
        read=read_config,
        folders="Step3p5ForCausalLM Step3p7ForConditionalGeneration",
        gguf="step35",
        tensors={
            "moe.gate.weight": f"{ROUTER}.weight",
            "moe.router_bias": CHOICE_BIAS,
            **{f"share_expert.{part}": f"mlp.shared_experts.{part}" for part in _PARTS},
        },
        stacks={f"moe.{part}": Stack((f"mlp.experts.{{}}.{part}",)) for part in _PARTS},
        gguf_plus_one=True,
        gguf_config=_add_kinds,
    ),
)
