"""LLaVA around a Llama or a Mistral: Pixtral, Apriel 1.5 and 1.6. The text model runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig

__all__ = ["read_config"]

# What a published text_config leaves out: transformers' defaults, by the text model's type
_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
_MISTRAL: dict[str, Any] = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
_TEXT_MODELS = {"llama": _LLAMA, "mistral": _MISTRAL, "llava": _LLAMA}  # the last is the wrapper's


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; the text model's ``model_type`` says whose defaults hold."""
    defaults = raw.choice("model_type", "llama", _TEXT_MODELS)
    return replace(llama.read_config(raw.with_defaults(defaults)), architecture="llava")
