"""Granite (IBM): Llama with four factors; with windows, with mixtures, and with Mamba-2 layers."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import DOWN, GATE_UP, Config, Family, GgufFacts
from localrt.models.architectures.mamba import mamba_names, read_mamba
from localrt.models.config import ROUTER, SHARED_DOWN, SHARED_GATE_UP, DecoderConfig, LayerNames
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture
from localrt.models.row_order import Stack
from localrt.quant.ops.attention import AttentionSpec


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys, and factors of embedding, attention scores, layer outputs and logits.

    Logits are divided by their factor.
    """
    config = llama.read_config(raw)
    gguf_default = config.attending[0].scale if raw.is_gguf else 1.0
    scale = raw.number("attention_multiplier", gguf_default)
    return replace(
        config,
        attention=tuple(replace(layer, scale=scale) for layer in config.attending),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        block=ResidualBlock(scale=raw.number("residual_multiplier", 1.0)),
        logit_scale=1.0 / raw.number("logits_scaling", 1.0),
    )


def read_granite_moe(raw: RawConfig) -> DecoderConfig:
    """Granite-MoE (IBM Granite 3): Granite with mixtures; GraniteMoeShared adds a shared MLP."""
    return with_experts(raw, read_config(raw))


def with_experts(raw: RawConfig, config: DecoderConfig) -> DecoderConfig:
    """``config`` with mixtures. Weights are the softmax of the chosen logits."""
    shared = raw.optional_integer("shared_intermediate_size")
    shared = shared or raw.optional_integer("shared_expert_intermediate_size") or 0
    return with_mixture(
        config, replace(read_mixture(raw, config, scoring="softmax-chosen"), shared=shared)
    )


def read_granite_swa(raw: RawConfig) -> DecoderConfig:
    """Granite with windows, dense or with mixtures: sinks, and a rotary base for each layer.

    Every fourth layer has no window; a layer with base 0 has no rotary embedding.
    """
    config = read_config(raw)
    config = replace(config, attention=_attention(raw, config))
    return with_experts(raw, config) if raw.has("num_local_experts") else config


def _attention(raw: RawConfig, config: DecoderConfig) -> tuple[AttentionSpec, ...]:
    plain = replace(config.attending[0], sinks=True, window=None)
    window = raw.integer("sliding_window", 128)
    windowed = raw.windowed([layer % 4 != 0 for layer in range(config.layers)])
    bases = raw.layer_list("layer_rope_theta", config.layers)

    def spec(layer: int) -> AttentionSpec:
        own = replace(plain, window=window) if windowed[layer] else plain
        if bases is None:
            return own
        if bases[layer] == 0:
            return replace(own, rope=None)
        scaling = {**raw.mapping("rope_scaling"), "rope_theta": bases[layer]}
        return replace(own, rope=read_rope(raw, own.head_dim, parameters=scaling))

    return tuple(spec(layer) for layer in range(config.layers))


_KINDS = {"linear_attention": False, "mamba": False, "full_attention": True, "attention": True}


def read_granite_hybrid(raw: RawConfig) -> DecoderConfig:
    """Granite 4 (IBM): Mamba-2, and attention without rotary embedding; dense or mixtures."""
    config = read_config(raw)
    rotates = raw.text("position_embedding_type", "rope" if raw.is_gguf else "") == "rope"
    attending = config.attending[0]
    attending = attending if rotates else replace(attending, rope=None)
    heads = raw.integer("mamba_n_heads")
    size = raw.text("mamba_d_head", "auto")
    inner = raw.integer("mamba_expand", 2) * config.hidden_size
    inner = inner if size == "auto" else heads * int(size)
    recurrent = read_mamba(raw, eps=config.norm_eps, inner=inner)
    kinds = raw.layer_kinds("layer_types", config.layers, _KINDS) or [False] * config.layers
    config = replace(
        config,
        attention=tuple(attending if attends else recurrent for attends in kinds),
        recurrent=mamba_names(raw, "mamba", biased=raw.flag("mamba_proj_bias")),
    )
    if raw.has("num_local_experts") and raw.optional_integer("num_local_experts"):
        return with_experts(raw, config)
    if raw.is_gguf:
        return config
    names = LayerNames(gate_up=SHARED_GATE_UP, down=SHARED_DOWN)
    return replace(config, names=names, intermediate_size=raw.integer("shared_intermediate_size"))


def _add_bases(config: Config, file: GgufFacts) -> None:
    """Add which layers have RoPE: in Hugging Face's configs, the others have base 0."""
    if (flags := file.listed("attention.rope_pattern")) is not None:
        base = config.get("rope_theta")
        config["layer_rope_theta"] = [base if flag else 0 for flag in flags]


_TENSORS = {
    "block_sparse_moe.router.layer.weight": f"{ROUTER}.weight",
    "block_sparse_moe.router.weight": f"{ROUTER}.weight",
    "shared_mlp.output_linear.weight": f"{SHARED_DOWN}.weight",
}
_STACKS = {
    "block_sparse_moe.input_linear.weight": Stack(GATE_UP),
    "block_sparse_moe.output_linear.weight": Stack(DOWN),
    "shared_mlp.input_linear.weight": Stack(tuple(f"{name}.weight" for name in SHARED_GATE_UP)),
}

FAMILIES = (
    Family(
        name="granite",
        read=read_config,
        folders="GraniteForCausalLM",
        gguf="granite",
        gguf_in_pairs=True,
    ),
    Family(
        name="granite_swa",
        read=read_granite_swa,
        folders="GraniteSWAForCausalLM GraniteMoeSWAForCausalLM",
        gguf="granite_swa",
        tensors=_TENSORS,
        stacks=_STACKS,
        gguf_in_pairs=True,
        # shared experts: (rows of both, columns)
        gguf_stacks={
            "ffn_up_shexp": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
        },
        gguf_config=_add_bases,
    ),
    Family(
        name="granite_moe",
        read=read_granite_moe,
        folders="GraniteMoeForCausalLM GraniteMoeSharedForCausalLM",
        gguf="granitemoe",
        tensors=_TENSORS,
        stacks=_STACKS,
        gguf_in_pairs=True,
    ),
    Family(
        name="granite_hybrid",
        read=read_granite_hybrid,
        folders="GraniteMoeHybridForCausalLM",
        gguf="granitehybrid",
        tensors=_TENSORS,
        stacks=_STACKS,
        gguf_in_pairs=True,
    ),
)
