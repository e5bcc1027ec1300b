"""GLM-4.5, GLM-4.5-Air and GLM-4.6: half of each head is rotated, experts are chosen as in
DeepSeek-V3, and the first layers are dense.

GLM-4.7-Flash has latent attention too: its config is ``deepseek.py``'s.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.deepseek import read_mixtures
from localrt.models.config import DecoderConfig
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys and those of DeepSeek's mixtures; ``use_qk_norm`` in the largest."""
    config = llama.read_config(raw)
    spec = config.attending[0]
    share = {"partial_rotary_factor": raw.number("partial_rotary_factor", 0.5)}
    rope = read_rope(raw, spec.head_dim, parameters={**share, **raw.mapping("rope_scaling")})
    normed = raw.flag("use_qk_norm") or raw.has_tensor("model.layers.0.self_attn.q_norm.weight")
    return replace(
        config,
        architecture="glm4_moe",
        attention=(replace(spec, rope=rope, window=None),) * config.layers,
        qk_norm=normed,
        mixtures=read_mixtures(raw, config.norm_eps, config.layers, config.mlp.activation),
    )
