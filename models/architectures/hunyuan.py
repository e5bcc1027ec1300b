"""Hunyuan (Tencent), dense and with mixtures: queries and keys are normed after their rotation.

A rotary scaling called "dynamic" scales the base by a fixed ``alpha``; GGUF files have the scaled
base.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.architectures.family import Family
from localrt.models.config import ROUTER, DecoderConfig, LayerNames
from localrt.models.layers.rope import read_rope, scaling_number
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.mathematics import power

_NAMES = LayerNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys and the rotary scaling's ``alpha``."""
    config = llama.read_config(raw)
    plain = config.attending[0]
    attention = replace(plain, rope=_rope(raw, plain.head_dim), window=None, norms_last=True)
    return replace(
        config,
        attention=(attention,) * config.layers,
        qk_norm=True,
        names=LayerNames() if raw.is_gguf else _NAMES,
    )


def read_hunyuan_moe(raw: RawConfig) -> DecoderConfig:
    """Hunyuan-A13B: a mixture and a shared MLP in every layer.

    Reads Hunyuan's keys, ``num_experts`` and ``moe_topk``, which may be a list; an expert and the
    shared MLP have the width ``intermediate_size``.
    """
    config = read_config(raw)
    key, inner = "num_experts_per_tok" if raw.is_gguf else "moe_topk", config.intermediate_size
    used, *others = set(raw.integers(key, config.layers))
    if others:
        raise UnsupportedModelError(f"{key} must be the same for all layers")
    raw = raw.without("scoring_func").changed(num_experts_per_tok=used, norm_topk_prob=True)
    shared = raw.optional_integer("shared_expert_intermediate_size") or inner
    return with_mixture(config, read_mixture(raw, config, shared=shared))


def read_hy_v3(raw: RawConfig) -> DecoderConfig:
    """Hy3: norms on queries and keys before their rotation, and all but the first layer are
    mixtures. Experts are scored by sigmoids; a bias only affects the choice.
    """
    config = replace(llama.read_config(raw), qk_norm=True)
    layers = range(config.layers)
    sparse = raw.sparse(config.layers)
    if raw.is_gguf:
        sparse = [raw.has_tensor(f"model.layers.{layer}.{ROUTER}.weight") for layer in layers]
    inner = raw.integer("moe_intermediate_size")
    shared = raw.optional_integer("shared_expert_intermediate_size")
    scale = raw.number("routed_scaling_factor" if raw.is_gguf else "router_scaling_factor", 1.0)
    spec = read_mixture(
        raw,
        config,
        scoring="sigmoid",
        inner=inner,
        scale=scale,
        shared=shared or inner * (raw.optional_integer("num_shared_experts") or 0),
        choice_bias=True,
    )
    return with_mixture(config, spec, sparse or [layer > 0 for layer in layers])


def _rope(raw: RawConfig, head_dim: int) -> Rope:
    scaling = raw.mapping("rope_scaling")
    if not scaling.get("alpha"):
        return read_rope(raw, head_dim)
    alpha = scaling_number(scaling, "alpha")
    stretch = float(power(alpha, head_dim / max(1, head_dim - 2)))
    return read_rope(raw, head_dim, parameters={"rope_theta": raw.number("rope_theta") * stretch})


FAMILIES = (
    Family(
        name="hunyuan", read=read_config, folders="HunYuanDenseV1ForCausalLM", gguf="hunyuan-dense"
    ),
    Family(
        name="hunyuan_moe",
        read=read_hunyuan_moe,
        folders="HunYuanMoEV1ForCausalLM",
        gguf="hunyuan-moe",
        tensors={"mlp.gate.wg.weight": f"{ROUTER}.weight"},
    ),
    Family(name="hy_v3", read=read_hy_v3, folders="HYV3ForCausalLM", gguf="hy_v3"),
)
