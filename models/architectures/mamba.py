"""Mamba-2 layers, as the configs of several families describe them; Falcon-H1 and Nemotron-H."""

from __future__ import annotations

import math
from dataclasses import replace

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.architectures.family import DOWN, GATE_UP, Config, Family, GgufFacts
from localrt.models.config import (
    LATENT_DOWN,
    LATENT_UP,
    ROUTER,
    SHARED_DOWN,
    SHARED_GATE_UP,
    DecoderConfig,
    LayerNames,
    MixtureSpec,
    Multipliers,
    RecurrentNames,
)
from localrt.models.layers.block import ResidualBlock
from localrt.models.raw_config import RawConfig, positive_number
from localrt.models.row_order import Stack
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.experts import ExpertSpec, RouterSpec
from localrt.quant.ops.protocol import LayerSpec, MlpSpec
from localrt.quant.ops.recurrent import RecurrentSpec


def read_mamba(raw: RawConfig, *, eps: float, inner: int) -> RecurrentSpec:
    """A layer from ``mamba_*``; ``inner`` is its width. Outputs are normed per group of heads."""
    heads, groups = raw.integer("mamba_n_heads"), raw.integer("mamba_n_groups", 1)
    if inner % heads or inner % groups:
        raise CheckpointError(
            f"config mamba_n_heads ({heads}) and mamba_n_groups ({groups}) must divide {inner}"
        )
    limits = raw.sequence("time_step_limit") or []
    least, most = (*limits, None, None)[:2]
    return RecurrentSpec(
        kind="ssm",
        heads=heads,
        key_heads=groups,
        key_size=raw.integer("mamba_d_state", 128),
        value_size=inner // heads,
        taps=raw.integer("mamba_d_conv", 4),
        eps=eps,
        conv_bias=raw.flag("mamba_conv_bias", default=True),
        norm_size=inner // groups,
        gate_first=True,
        time_steps=(positive_number(least) or 0.0, positive_number(most) or float("inf")),
    )


def mamba_names(raw: RawConfig, prefix: str, *, biased: bool) -> RecurrentNames:
    """The tensor names below ``prefix``."""
    return RecurrentNames(
        mix=(f"{prefix}.in_proj",),
        taps=(f"{prefix}.conv1d",),
        out=f"{prefix}.out_proj",
        decay=f"{prefix}.{'A' if raw.is_gguf else 'A_log'}",
        decay_is_rate=raw.is_gguf,
        decay_bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        out_norm=f"{prefix}.norm",
        biased=biased,
    )


_FALCON_H1_NAMES = LayerNames(
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def read_falcon_h1(raw: RawConfig) -> DecoderConfig:
    """Falcon-H1 (TII): attention and Mamba-2 in parallel in every layer, and many factors, which
    GGUF files have folded into the weights.
    """
    config = llama.read_config(raw)
    (plain,) = set(config.attending)
    attending = replace(plain, window=None, scale=plain.scale * raw.number("key_multiplier", 1.0))
    inner = raw.integer("mamba_expand", 2) * config.hidden_size
    mamba = read_mamba(raw, eps=config.norm_eps, inner=raw.optional_integer("mamba_d_ssm") or inner)
    normed = raw.flag("mamba_rms_norm")
    if raw.is_gguf:
        normed = raw.has_tensor("model.layers.0.mamba.norm.weight")
    mamba = replace(
        mamba,
        norm_size=mamba.norm_size if normed else 0,
        gate_first=raw.is_gguf or not raw.flag("mamba_norm_before_gate", default=True),
    )
    biased = raw.flag("mamba_proj_bias")
    if raw.flag("mlp_bias") or biased is not raw.flag("projectors_bias"):
        raise UnsupportedModelError(
            "mlp_bias of Falcon-H1, and one of mamba_proj_bias and projectors_bias without the "
            "other, are not supported"
        )
    gate, mlp_out = raw.numbers("mlp_multipliers", 2)
    gates, values, keys, queries, steps = raw.numbers("ssm_multipliers", 5)
    return replace(
        config,
        attention=(attending,) * config.layers,
        block=ResidualBlock(beside=mamba),
        mlp=replace(config.mlp, gate_scale=gate),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        logit_scale=raw.number("lm_head_multiplier", 1.0),
        multipliers=Multipliers(
            attention_in=raw.number("attention_in_multiplier", 1.0),
            attention_out=raw.number("attention_out_multiplier", 1.0),
            recurrent_in=raw.number("ssm_in_multiplier", 1.0),
            recurrent_out=raw.number("ssm_out_multiplier", 1.0),
            mlp_out=mlp_out,
            projected=(gates, values, keys, queries, steps),
        ),
        names=LayerNames() if raw.is_gguf else _FALCON_H1_NAMES,
        recurrent=mamba_names(raw, "mamba", biased=biased),
    )


_KEYS = {
    "conv_kernel": "mamba_d_conv",
    "layer_norm_epsilon": "rms_norm_eps",
    "mamba_head_dim": "mamba_d_head",
    "mamba_num_heads": "mamba_n_heads",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "n_groups": "mamba_n_groups",
    "num_local_experts": "n_routed_experts",
    "ssm_state_size": "mamba_d_state",
    "use_conv_bias": "mamba_conv_bias",
}
_LISTS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_KINDS = {
    **{"linear_attention": "mamba", "full_attention": "attention"},
    **{kind: kind for kind in ("mamba", "attention", "mlp", "moe")},
    # in a pattern
    **{"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"},
}


def read_nemotron_h(raw: RawConfig) -> DecoderConfig:
    """Nemotron-H and Nemotron 3 (NVIDIA): layers of one kind each, Mamba-2, attention without
    rotary embedding, an MLP with a squared ReLU and no gate, or a mixture of such.

    A list gives each layer's kind; the first models have a pattern of letters.
    """
    raw = raw.renamed(_KEYS)
    kinds = _kinds(raw)
    eps, heads = raw.number("rms_norm_eps", 1e-5), raw.integer("num_attention_heads")
    hidden = raw.integer("hidden_size")
    head_dim = raw.integer("head_dim", hidden // heads)
    attending = AttentionSpec(
        heads=heads,
        kv_heads=raw.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=1 / math.sqrt(head_dim),
        eps=eps,
        rope=None,
    )
    inner = raw.integer("mamba_n_heads") * raw.integer("mamba_d_head")
    mamba = read_mamba(raw, eps=eps, inner=inner)
    mixers: dict[str, LayerSpec] = {"mamba": mamba, "attention": attending}
    mixture = _read_mixture(raw, eps) if "moe" in kinds else None
    dense = raw.integer("intermediate_size") if "mlp" in kinds else 0
    if raw.flag("mlp_bias"):
        raise UnsupportedModelError("mlp_bias of Nemotron-H is not supported")
    return DecoderConfig(
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=max(dense, 0 if mixture is None else mixture.shared),
        context_length=raw.integer("max_position_embeddings"),
        norm_eps=eps,
        attention=tuple(mixers.get(kind) for kind in kinds),
        mlp=MlpSpec(activation="relu2", eps=eps),
        block=ResidualBlock(),
        tied_head=raw.flag("tie_word_embeddings"),
        inner_sizes=tuple(dense if kind == "mlp" else 0 for kind in kinds),
        mixtures=tuple(mixture if kind == "moe" else None for kind in kinds) if mixture else (),
        names=_GGUF_NAMES if raw.is_gguf else _NEMOTRON_H_NAMES,
        recurrent=mamba_names(
            raw, "mamba" if raw.is_gguf else "mixer", biased=raw.flag("use_bias")
        ),
    )


_NEMOTRON_H_NAMES = LayerNames(
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    mlp_norm="norm",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
)
_GGUF_NAMES = LayerNames(mlp_norm="input_layernorm", gate_up=("mlp.up_proj",))


def _kinds(raw: RawConfig) -> list[str]:
    key = next((key for key in _LISTS if raw.has(key)), _LISTS[0])
    layers = raw.integer("num_hidden_layers", raw.count(key))
    return raw.layer_kinds(key, layers, _KINDS) or []


def _read_mixture(raw: RawConfig, eps: float) -> MixtureSpec:
    """Read a mixture with DeepSeek-V3's routing and experts without a gate."""
    groups = raw.integer("n_group", 1)
    router = RouterSpec(
        count=raw.integer("n_routed_experts"),
        used=raw.integer("num_experts_per_tok"),
        eps=eps,
        scoring="sigmoid",
        normalize=raw.flag("norm_topk_prob", default=True),
        scale=raw.number("routed_scaling_factor", 1.0),
        groups=groups,
        used_groups=raw.integer("topk_group", 1),
        group_top=2,
    )
    return MixtureSpec(
        router=router,
        expert=ExpertSpec(activation="relu2"),
        inner=raw.integer("moe_intermediate_size"),
        shared=raw.integer("shared_expert_intermediate_size"),
        choice_bias=True,
        latent=raw.optional_integer("moe_latent_size") or 0,
    )


_MOST_LAYERS = 1 << 16


def _add_kinds(config: Config, file: GgufFacts) -> None:
    """Add the kind of each layer of Nemotron-H: attention if it has KV heads, an MLP or mixture if
    it has a width.
    """
    layers = config.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:
        return
    heads, widths = (
        file.listed(key) or [config.get(name) or 0] * layers
        for key, name in (
            ("attention.head_count_kv", "num_key_value_heads"),
            ("feed_forward_length", "intermediate_size"),
        )
    )
    wide = "moe" if config.get("num_local_experts") else "mlp"
    config["layer_types"] = [
        "full_attention" if count else wide if width else "linear_attention"
        for count, width in zip(heads[:layers], widths[:layers], strict=False)
    ]
    config["num_key_value_heads"], config["intermediate_size"] = max(heads), max(widths)
    config["moe_latent_size"] = file.integer("moe_latent_size")


_NEMOTRON = {
    "mixer.gate.weight": f"{ROUTER}.weight",
    "mixer.experts.{}.up_proj.weight": GATE_UP[1],
    "mixer.experts.{}.down_proj.weight": DOWN[0],
    "mixer.fc1_latent_proj.weight": f"{LATENT_DOWN}.weight",
    "mixer.fc2_latent_proj.weight": f"{LATENT_UP}.weight",
    "mixer.shared_experts.up_proj.weight": f"{SHARED_GATE_UP[1]}.weight",
    "mixer.shared_experts.down_proj.weight": f"{SHARED_DOWN}.weight",
}

FAMILIES = (
    Family(
        name="falcon_h1",
        read=read_falcon_h1,
        folders="FalconH1ForCausalLM",
        gguf="falcon-h1",
    ),
    Family(
        name="nemotron_h",
        read=read_nemotron_h,
        folders="NemotronHForCausalLM NemotronH_Omni_Reasoning_V3 NemotronH_Nano_Omni_Reasoning_V3 "
        "NemotronH_Nano_VL_V2",
        gguf="nemotron_h nemotron_h_moe",
        tensors=_NEMOTRON,
        stacks={
            "mixer.experts.up_proj": Stack(GATE_UP[1:]),
            "mixer.experts.down_proj": Stack(DOWN),
        },
        gguf_config=_add_kinds,
    ),
)
