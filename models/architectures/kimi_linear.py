"""Kimi-Linear (Moonshot): Kimi Delta Attention, and some layers of unrotated latent attention.

Its delta layers have a decay for each key channel and low-rank projections for decays and gates.
Experts are DeepSeek-V3's. Ling 3.0's latent attention is rotated, and has a gate for each head; its
delta layers project decays and gates in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localrt.models.architectures import deepseek
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import CHOICE_BIAS, DecoderConfig, RecurrentNames
from localrt.models.raw_config import RawConfig, with_limits
from localrt.quant.ops.attention import LatentSpec, Rope
from localrt.quant.ops.recurrent import RecurrentSpec

_KINDS = {"linear_attention": False, "full_attention": True}
_KEYS = {
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_LING_KEYS = {
    "expert_swiglu_limit_list": "swiglu_limits",
    "share_expert_swiglu_limit_list": "swiglu_limits_shared",
}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read DeepSeek-V3's keys, some renamed, and those of the delta layers.

    ``layer_types`` or ``full_attn_layers`` (counted from 1) says which layers attend.
    """
    raw = raw.renamed(_KEYS)
    config = deepseek.read_config(raw)
    nested = raw.nested("linear_attn_config") if raw.has("linear_attn_config") else None
    kinds = raw.layer_kinds("layer_types", config.layers, _KINDS)
    if kinds is None:
        numbers = (nested or raw).sequence("full_attn_layers") or []
        kinds = [layer + 1 in numbers for layer in range(config.layers)]
    attending, linear = _standing_still(config.attending[0]), read_delta(raw, nested, config)
    return replace(
        config,
        architecture="kimi_linear",
        attention=tuple(attending if attends else linear for attends in kinds),
        recurrent=read_names(raw),
    )


def _standing_still(spec: object) -> LatentSpec:
    """Replace the rotary embedding by one with frequency zero."""
    assert isinstance(spec, LatentSpec), "as DeepSeek's"
    return replace(spec, rope=Rope((0.0,) * (spec.rope_dim // 2)), interleaved=False)


def read_delta(raw: RawConfig, nested: RawConfig | None, config: DecoderConfig) -> RecurrentSpec:
    """Read the sizes of delta layers; ``nested`` has Kimi-Linear's published keys."""

    def number(key: str, nested_key: str) -> int:
        return raw.integer(key) if nested is None else nested.integer(nested_key)

    size = number("linear_head_dim", "head_dim")
    heads = number("linear_num_heads", "num_heads")
    return RecurrentSpec(
        kind="delta",
        heads=heads,
        key_heads=heads,
        key_size=size,
        value_size=size,
        taps=number("linear_conv_kernel_dim", "short_conv_kernel_size"),
        eps=config.norm_eps,
        channel_decay=True,
        norm_size=size,
        gate="sigmoid",
        low_rank=size,
    )


def read_names(raw: RawConfig) -> RecurrentNames:
    """The names of delta layers' tensors."""
    prefix = "self_attn."
    return RecurrentNames(
        mix=tuple(f"{prefix}{part}_proj" for part in ("q", "k", "v", "g_a", "b", "f_a")),
        taps=tuple(f"{prefix}{part}_conv1d" for part in "qkv"),
        out=f"{prefix}o_proj",
        gate_up=f"{prefix}g_b_proj",
        decay_up=f"{prefix}f_b_proj",
        decay=f"{prefix}{'A' if raw.is_gguf else 'A_log'}",
        decay_bias=f"{prefix}dt_bias",
        out_norm=f"{prefix}o_norm",
        decay_is_rate=raw.is_gguf,
    )


def read_ling(raw: RawConfig) -> DecoderConfig:
    """Ling 3.0: read Kimi-Linear's keys, or those of its publisher.

    ``layer_types`` or ``layer_group_size`` says which layers attend: the last of each group. With
    ``kda_safe_gate``, decays are not below ``kda_lower_bound``, a logarithm.
    """
    raw = raw.renamed(_LING_KEYS)
    taps = raw.integer("linear_conv_kernel_dim", raw.integer("short_conv_kernel_size", 4))
    raw = raw.changed(
        linear_head_dim=raw.integer("linear_head_dim", raw.integer("head_dim", 128)),
        linear_num_heads=raw.integer("linear_num_heads", raw.integer("num_attention_heads")),
        linear_conv_kernel_dim=taps,
    )
    layers, names = raw.integer("num_hidden_layers"), read_names(raw)
    kinds = raw.layer_kinds("layer_types", layers, _KINDS)
    if kinds is None:
        group = raw.integer("layer_group_size")
        kinds = [(layer + 1) % group == 0 for layer in range(layers)]
    config = deepseek.read_config(raw.renamed(_KEYS))
    floor = raw.negative_number("kda_lower_bound") if raw.flag("kda_safe_gate", True) else 0.0
    linear = replace(read_delta(raw, None, config), low_rank=0, decay_floor=floor)
    attending = replace(config.attending[0], head_gates=True)
    mix = tuple(f"self_attn.{part}_proj" for part in "qkvgbf")
    config = replace(
        config,
        architecture="ling",
        attention=tuple(attending if attends else linear for attends in kinds),
        recurrent=replace(names, mix=mix, gate_up="", decay_up=""),
    )
    return with_limits(config, raw)


GGUF_DELTA: Mapping[str, str] = {
    **deepseek.GGUF_LATENT,
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
"""GGUF's names of latent attention and of delta layers."""


def _add_delta(config: Config, file: GgufFacts) -> None:
    """Add sizes of delta layers (as many heads as others); expert weights sum to 1."""
    config["linear_head_dim"] = file.integer("kda.head_dim")
    config["linear_num_heads"] = config.get("num_attention_heads")
    config["linear_conv_kernel_dim"] = file.integer("ssm.conv_kernel")
    config.setdefault("norm_topk_prob", True)
    deepseek.add_choice(config, file)
    deepseek.add_latents(config, file)


def _add_ling(config: Config, file: GgufFacts) -> None:
    _add_delta(config, file)
    config["kda_lower_bound"] = file.number("kda.gate_lower_bound")


_PUBLISHED = (
    *("q_proj", "k_proj", "v_proj", "f_proj", "g_proj", "b_proj", "q_a_proj", "q_b_proj"),
    *("kv_a_proj_with_mqa", "kv_b_proj", "q_conv1d", "k_conv1d", "v_conv1d"),
    *("o_proj", "o_norm", "q_a_layernorm", "kv_a_layernorm"),
)
FAMILIES = (
    Family(
        name="ling",
        read=read_ling,
        folders="BailingHybridForCausalLM BailingMoeV3ForCausalLM",
        gguf="bailingmoe3",
        tensors={
            **{f"attention.{name}.weight": f"self_attn.{name}.weight" for name in _PUBLISHED},
            **{f"attention.{name}": f"self_attn.{name}" for name in ("A_log", "dt_bias")},
            "attention.dense.weight": "self_attn.o_proj.weight",
            "mlp.gate.expert_bias": CHOICE_BIAS,
        },
        gguf_layer={
            **GGUF_DELTA,
            "ssm_f_a": "self_attn.f_proj",
            "ssm_g_a": "self_attn.g_proj",
            "attn_gate": "self_attn.g_proj",
        },
        gguf_config=_add_ling,
    ),
    Family(
        name="kimi_linear",
        read=read_config,
        folders="KimiLinearForCausalLM",
        gguf="kimi-linear",
        gguf_layer=GGUF_DELTA,
        gguf_config=_add_delta,
    ),
)
