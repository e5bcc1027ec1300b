"""Qwen3-MoE: Qwen3 with mixtures; no shared expert."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.mixture_config import read_mixture, sparse_layers, with_mixture
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Qwen3's keys and those of the mixture. A window, where it is switched on, is every layer's.

    ``norm_topk_prob`` is set in the published configs; GGUF and Qwen3-VL leave it to us.
    """
    config = llama.read_config(raw)
    inner = raw.integer("moe_intermediate_size")
    normalize = raw.is_gguf or raw.architecture != "Qwen3MoeForCausalLM"
    spec = read_mixture(raw, config, normalize=normalize, inner=inner)
    attention = config.attending
    if not raw.flag("use_sliding_window"):
        attention = tuple(replace(layer, window=None) for layer in attention)
    config = replace(config, architecture="qwen3_moe", attention=attention, qk_norm=True)
    return with_mixture(config, spec, sparse_layers(raw, config.layers))
