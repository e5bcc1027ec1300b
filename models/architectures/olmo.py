"""OLMo 2 and 3, OLMoE and OLMo Hybrid (Ai2): norms on results instead of inputs, and over all heads
of queries and of keys.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.architectures.family import SANDWICH_NORMS, Family
from localrt.models.config import DecoderConfig, LayerNames, RecurrentNames
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture
from localrt.quant.ops.recurrent import RecurrentSpec

RESULT_NORMS = LayerNames(
    attention_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_post_norm="post_feedforward_layernorm",
)


def read_olmo2(raw: RawConfig) -> DecoderConfig:
    """OLMo 3 has a window in three of four layers; only the others scale their rotary embedding."""
    config = llama.read_config(raw)
    full = replace(config.attending[0], joint_norms=True, window=None)
    attention = (full,) * config.layers
    if (window := raw.optional_integer("sliding_window")) is not None:
        theta = raw.number("rope_local_base_freq", raw.number("rope_theta", 10_000.0))
        local = read_rope(raw, full.head_dim, parameters={"rope_theta": theta})
        sliding = replace(full, window=window, rope=local)
        windowed = raw.windowed([(layer + 1) % 4 != 0 for layer in range(config.layers)])
        attention = tuple(sliding if here else full for here in windowed)
    return replace(config, attention=attention, qk_norm=True, names=RESULT_NORMS)


def read_olmoe(raw: RawConfig) -> DecoderConfig:
    """OLMoE: Llama with many small experts, and norms over all heads of queries and of keys."""
    if raw.optional_number("clip_qkv") is not None:
        raise UnsupportedModelError("clip_qkv (clipped queries, keys and values) is not supported")
    config = llama.read_config(raw)
    attention = tuple(replace(layer, joint_norms=True) for layer in config.attending)
    config = replace(config, attention=attention, qk_norm=True)
    return with_mixture(config, read_mixture(raw, config, normalize=False))


_KINDS = {"linear_attention": False, "full_attention": True}
_RESULT_EPS = 1e-5  # fixed epsilon of the norm after the state
_PREFIX = "linear_attn."
_NAMES = RecurrentNames(
    mix=tuple(f"{_PREFIX}{part}_proj" for part in "qkvgba"),
    taps=tuple(f"{_PREFIX}{part}_conv1d" for part in "qkv"),
    out=f"{_PREFIX}o_proj",
    decay=f"{_PREFIX}A_log",
    decay_bias=f"{_PREFIX}dt_bias",
    out_norm=f"{_PREFIX}o_norm",
    block=LayerNames(),
)


def read_olmo_hybrid(raw: RawConfig) -> DecoderConfig:
    """OLMo Hybrid: Gated DeltaNet, and some layers of OLMo 3's attention, mostly without rotary
    embedding.

    Attention's outputs are normed, as in OLMo 2; DeltaNet's inputs are normed. With
    ``linear_allow_neg_eigval`` the delta rule's write strength goes up to 2.

    Reads Llama's keys, and Qwen3.5's for DeltaNet; without ``layer_types`` every fourth layer
    attends.
    """
    config = llama.read_config(raw)
    layers, attending = config.layers, replace(config.attending[0], joint_norms=True)
    if not raw.has("rope_theta"):
        attending = replace(attending, rope=None)
    kinds = raw.layer_kinds("layer_types", layers, _KINDS)
    kinds = kinds or [n % 4 == 3 or (layers < 4 and n == layers - 1) for n in range(layers)]
    linear = _delta(raw, config)
    return replace(
        config,
        attention=tuple(attending if attends else linear for attends in kinds),
        qk_norm=True,
        names=RESULT_NORMS,
        recurrent=_NAMES,
    )


def _delta(raw: RawConfig, config: DecoderConfig) -> RecurrentSpec:
    heads = raw.integer("num_attention_heads")
    key_heads = raw.integer("linear_num_key_heads", heads)
    key = raw.integer("linear_key_head_dim", 3 * config.hidden_size // (4 * key_heads))
    value = raw.integer("linear_value_head_dim", 2 * key)
    return RecurrentSpec(
        kind="delta",
        heads=raw.integer("linear_num_value_heads", heads),
        key_heads=key_heads,
        key_size=key,
        value_size=value,
        taps=raw.integer("linear_conv_kernel_dim", 4),
        eps=config.norm_eps,
        norm_size=value,
        norm_eps=_RESULT_EPS,
        strength=2.0 if raw.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )


FAMILIES = (
    Family(name="olmoe", read=read_olmoe, folders="OlmoeForCausalLM", gguf="olmoe"),
    Family(
        name="olmo2",
        read=read_olmo2,
        folders="Olmo2ForCausalLM Olmo3ForCausalLM",
        gguf="olmo2",
        gguf_layer=SANDWICH_NORMS,
    ),
    Family(
        name="olmo_hybrid",
        read=read_olmo_hybrid,
        folders="OlmoHybridForCausalLM",
        tensors={
            "attention_layer_norm.weight": "input_layernorm.weight",
            "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
        },
    ),
)
