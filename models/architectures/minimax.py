"""MiniMax M2: small experts in every layer, norms over all heads of queries and of keys, and a part
of each head rotated.

Experts are scored by sigmoids; a bias only affects the choice.
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.architectures.family import Family
from localrt.models.config import DecoderConfig
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig, read_mixture, with_mixture


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's and mixture keys, and ``rotary_dim``; ``intermediate_size`` is an expert's
    width.
    """
    config = llama.read_config(raw)
    plain = config.attending[0]
    parameters = dict(raw.mapping("rope_scaling"))
    if (size := raw.optional_integer("rotary_dim")) is not None:
        parameters["partial_rotary_factor"] = size / plain.head_dim
    rope = read_rope(raw, plain.head_dim, parameters=parameters)
    attention = replace(plain, rope=rope, joint_norms=True, window=None)
    spec = read_mixture(raw, config, scoring="sigmoid", choice_bias=True)
    config = replace(config, attention=(attention,) * config.layers, qk_norm=True)
    return with_mixture(config, spec)


FAMILIES = (
    Family(name="minimax_m2", read=read_config, folders="MiniMaxM2ForCausalLM", gguf="minimax-m2"),
)
