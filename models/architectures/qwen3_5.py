"""Qwen3.5 to 3.8 and Qwen3-Next, dense or mixtures: Gated DeltaNet, and some full attention.

Attention has an elementwise gate and rotates a quarter of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import MLP_NORM, Family
from localrt.models.config import DecoderConfig, RecurrentNames
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, read_mixture, sparse_layers, with_mixture
from localrt.quant.ops.recurrent import RecurrentSpec

_IN_GROUPS = "qwen3next"  # its files keep the value heads of a key head together
_KINDS = {"linear_attention": False, "full_attention": True, "indexed_attention": True}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read the config; ``layer_types`` says which layers attend, by default every fourth."""
    if not raw.has("intermediate_size"):  # all layers are mixtures
        raw = raw.renamed({"moe_intermediate_size": "intermediate_size"})
    config = llama.read_config(raw)
    (plain,) = set(config.attending)
    rope = read_rope(raw, plain.head_dim)
    attending = replace(plain, rope=rope, gated=True)
    linear = RecurrentSpec(
        kind="delta",
        heads=raw.integer("linear_num_value_heads"),
        key_heads=raw.integer("linear_num_key_heads"),
        key_size=raw.integer("linear_key_head_dim"),
        value_size=raw.integer("linear_value_head_dim"),
        taps=raw.integer("linear_conv_kernel_dim", 4),
        eps=config.norm_eps,
        norm_size=raw.integer("linear_value_head_dim"),
        tiled=raw.is_gguf and raw.architecture != _IN_GROUPS,
    )
    every = raw.integer("full_attention_interval", 4)
    kinds = raw.layer_kinds("layer_types", config.layers, _KINDS)
    kinds = kinds or [(n + 1) % every == 0 for n in range(config.layers)]
    config = replace(
        config,
        attention=tuple(attending if attends else linear for attends in kinds),
        qk_norm=True,
        norm_offset=0.0 if raw.flag("norm_weights_include_one") else 1.0,
        recurrent=_names(raw),
    )
    if not raw.has("num_experts") and not raw.has("num_local_experts"):
        return config
    inner = raw.integer("moe_intermediate_size")
    spec = replace(
        read_mixture(raw, config, normalize=True, inner=inner),
        shared=raw.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return with_mixture(config, spec, sparse_layers(raw, config.layers))


def _names(raw: RawConfig) -> RecurrentNames:
    prefix = "linear_attn."
    return RecurrentNames(
        mix=tuple(f"{prefix}in_proj_{part}" for part in ("qkv", "z", "b", "a")),
        taps=(f"{prefix}conv1d",),
        out=f"{prefix}out_proj",
        decay=f"{prefix}{'A' if raw.is_gguf else 'A_log'}",
        decay_bias=f"{prefix}dt_bias",
        out_norm=f"{prefix}norm",
        decay_is_rate=raw.is_gguf,
    )


GGUF_DELTA: Mapping[str, str] = {
    **MLP_NORM,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""GGUF's names of Gated DeltaNet."""

FAMILIES = (
    Family(
        name="qwen3_5",
        read=read_config,
        folders="Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM "
        "Qwen3_5MoeForConditionalGeneration MiniCPMV4_6ForConditionalGeneration",
        gguf="qwen35 qwen35moe",
        gguf_layer=GGUF_DELTA,
        gguf_plus_one=True,
        gguf_by_turns=True,
    ),
    Family(
        name="qwen3_5",
        read=read_config,
        folders="Qwen3NextForCausalLM",
        gguf="qwen3next",
        gguf_layer={
            **GGUF_DELTA,
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_in": "linear_attn.in_proj_qkvz",  # early files; others have four tensors
        },
        gguf_plus_one=True,
    ),
)
