"""Gemma 3n (text): several residual streams, per-layer embeddings, shared keys and values.

Gemma 4 has the latter two as well (``gemma4.py``). Layers run on one of the streams and correct the
others (``models/layers/altup.py``). In the first layers, MLPs keep only the largest gates.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

from localrt.models.architectures import gemma
from localrt.models.architectures.family import SANDWICH_NORMS, Family
from localrt.models.architectures.gemma4 import add_streams, read_layer_inputs, read_sources
from localrt.models.config import DecoderConfig
from localrt.models.layers.altup import AltUp
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, positive_number
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.streams import StreamSpec

_SHARED = 15
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # defaults


def read_config(raw: RawConfig) -> DecoderConfig:
    """Gemma 3n's ``text_config`` keys."""
    layers = raw.integer("num_hidden_layers")
    windowed = raw.windowed([(layer + 1) % 5 != 0 for layer in range(layers)])
    full = _read_full(raw)
    local = {"rope_theta": raw.number("rope_local_base_freq", 1e4), "partial_rotary_factor": 1.0}
    sliding = replace(
        full,
        rope=read_rope(raw, full.head_dim, parameters=local),
        window=raw.integer("sliding_window", 512),
    )
    config = gemma.sandwich_config(raw, full, sliding, windowed)
    sources = read_sources(raw, windowed, _SHARED)
    streams = StreamSpec(
        count=raw.integer("altup_num_inputs", 4),
        active=raw.index("altup_active_idx", 0),
        eps=config.norm_eps,
    )
    inputs = read_layer_inputs(raw, config.vocab_size)
    if inputs is None:
        raise ValueError("hidden_size_per_layer_input must be at least 1, is 0")
    return replace(
        config,
        attention=tuple(
            replace(spec, reads=source)
            for spec, source in zip(config.attending, sources, strict=True)
        ),
        qk_norm=True,
        norm_offset=0.0,
        inner_sizes=raw.integers("intermediate_size", layers),
        cutoffs=_read_cutoffs(raw, layers),
        block=AltUp(
            streams=streams,
            inputs=inputs,
            scaled=raw.flag("altup_correct_scale", default=True),
            low_rank=raw.integer("laurel_rank", 64),
        ),
    )


def _read_full(raw: RawConfig) -> AttentionSpec:
    size = raw.integer("head_dim")
    scaled = {"rope_theta": raw.number("rope_theta", 1e6), **raw.mapping("rope_scaling")}
    return AttentionSpec(
        heads=raw.integer("num_attention_heads"),
        kv_heads=raw.integer("num_key_value_heads"),
        head_dim=size,
        scale=1.0,
        eps=raw.number("rms_norm_eps", 1e-6),
        rope=read_rope(raw, size, parameters=scaled),
        value_norm=True,
        streams=True,
    )


def _read_cutoffs(raw: RawConfig, layers: int) -> tuple[float | None, ...]:
    """Each layer's gate cutoff, in standard deviations above the mean; None: no cutoff.

    Configs have the share of gates that is cut, GGUF files the deviations.
    """
    deviations = raw.layer_list("activation_sparsity_scale", layers)
    if deviations is not None:
        return tuple(positive_number(value) for value in deviations)
    shares = raw.shares("activation_sparsity_pattern", layers)
    if shares is None:
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        shares = (_SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    if max(shares) >= 1:
        raise ValueError(f"activation_sparsity_pattern must be below 1, has {max(shares)}")
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


FAMILIES = (
    Family(
        name="gemma3n",
        read=read_config,
        folders="Gemma3nForCausalLM Gemma3nForConditionalGeneration",
        gguf="gemma3n",
        gguf_layer={
            **SANDWICH_NORMS,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        gguf_config=add_streams,
    ),
)
