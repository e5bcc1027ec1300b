"""OLMo Hybrid: Gated DeltaNet, and OLMo 3's attention at times, mostly without rotary embedding.

What is around attention norms results, as in OLMo 2; around DeltaNet are norms on inputs. Of a
value up to twice as much is written as the state lacks (``linear_allow_neg_eigval``).
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.olmo2 import RESULT_NORMS
from localrt.models.config import DecoderConfig, LayerNames, RecurrentNames
from localrt.models.raw_config import RawConfig
from localrt.quant.ops.protocol import RecurrentSpec

_KINDS = {"linear_attention": False, "full_attention": True}
_RESULT_EPS = 1e-5  # of the norm behind the state, whatever the config says of others
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


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys, and Qwen3.5's for DeltaNet; without ``layer_types`` every fourth attends."""
    config = llama.read_config(raw)
    layers, attending = config.layers, replace(config.attending[0], joint_norms=True)
    if not raw.has("rope_theta"):
        attending = replace(attending, rope=None)
    kinds = raw.layer_kinds("layer_types", layers, _KINDS)
    if kinds is None:
        kinds = [layer % 4 == 3 or (layers < 4 and layer == layers - 1) for layer in range(layers)]
    linear = _delta(raw, config)
    return replace(
        config,
        architecture="olmo_hybrid",
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
