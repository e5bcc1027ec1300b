"""GLM-5.3-Flash: Kimi Delta Attention, latent attention to blocks of tokens that an indexer
chooses, and DeepSeek-V4's streams, whose mean the head reads.

Latents are not rotated. Experts are DeepSeek-V3's, with limits.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import deepseek, kimi_linear
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.attention import LatentSpec
from localrt.quant.ops.recurrent import RecurrentSpec

_KINDS = {"linear_attention": False, "indexed_attention": True, "full_attention": True}


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read DeepSeek-V3's keys, and those of delta layers, indexers and streams.

    Raises:
        UnsupportedModelError: latents are rotated, or rows do not see the tokens after their last
            whole block.
    """
    if not raw.flag("index_kpool_always_select_tail", True):
        raise UnsupportedModelError("index_kpool_always_select_tail false is not supported")
    raw.choice("hidden_act", "silu", {"silu": None})
    config = deepseek.read_config(raw)
    spec, kinds = config.attending[0], raw.layer_kinds("layer_types", config.layers, _KINDS)
    assert isinstance(spec, LatentSpec), "as DeepSeek's"
    if spec.rope_dim:
        raise UnsupportedModelError(f"qk_rope_head_dim must be 0, is {spec.rope_dim}")
    attending = replace(spec, latent_eps=config.norm_eps, needs="StreamOps")
    linear = _delta(raw, config)
    kinds = kinds or [layer % 4 == 3 for layer in range(config.layers)]
    config = replace(
        config,
        architecture="glm5_next",
        attention=tuple(attending if attends else linear for attends in kinds),
        recurrent=kimi_linear.read_names(raw),
    )
    config = deepseek.with_streams(config, raw, mean=True)
    return deepseek.with_indexers(config, raw, block=raw.integer("index_kpool"))


def _delta(raw: RawConfig, config: DecoderConfig) -> RecurrentSpec:
    """Published configs have an object for delta layers. Without a bound, decays have no floor."""
    own = raw.nested("linear_attn_config") if raw.has("linear_attn_config") else None
    if own is not None and "gate_lower_bound" in raw.mapping("linear_attn_config"):
        raw = raw.changed(linear_lower_bound=raw.mapping("linear_attn_config")["gate_lower_bound"])
    floor = -5.0 if own is not None and own.flag("safe_gate", True) else 0.0
    if raw.has("linear_lower_bound"):
        floor = raw.negative_number("linear_lower_bound")
    return replace(kimi_linear.read_delta(raw, own, config), decay_floor=floor)


def _add_keys(config: Config, file: GgufFacts) -> None:
    config["qk_rope_head_dim"] = 0
    deepseek.add_indexers(config, file)
    config["linear_head_dim"] = file.integer("kda.head_dim")
    config["linear_num_heads"] = config.get("num_attention_heads")
    config["linear_conv_kernel_dim"] = file.integer("ssm.conv_kernel")
    config["linear_lower_bound"] = file.number("kda.gate_lower_bound")
    config["index_kpool"] = file.integer("attention.indexer.kpool")
    config["index_kpool_always_select_tail"] = file.flag("attention.indexer.kpool_select_tail")
    config["swiglu_limit"] = config.pop("swiglu_limits", None)


_POOL = "self_attn.indexer.index_kpool_compress_"
FAMILIES = (
    Family(
        name="glm5_next",
        read=read_config,
        folders="Glm5NextForConditionalGeneration",
        tensors={
            f"{_POOL}gate": "self_attn.indexer.gate.weight",
            f"{_POOL}ape": "self_attn.indexer.ape",
        },
        predicts=False,
        convert=lambda stored, config: {
            rows.info.name: rows for rows in map(deepseek.flat_vector, stored.values())
        },
        gguf="glm5-next",
        gguf_layer={
            **kimi_linear.GGUF_DELTA,
            **deepseek.GGUF_INDEXER,
            **deepseek.GGUF_MIX,
            "indexer_compressor_gate": "self_attn.indexer.gate",
            "indexer_compressor_ape": "self_attn.indexer.ape",
        },
        gguf_config=_add_keys,
    ),
)
