"""LLaVA around a Llama or a Mistral: Pixtral, Apriel 1.5 and 1.6. The text model runs."""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.raw_config import RawConfig

_TEXT_MODELS = {name: name for name in ("llama", "mistral", "llava")}  # the last: not said


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; the text model's ``model_type`` says whose defaults hold."""
    raw.choice("model_type", "llama", _TEXT_MODELS)
    return replace(llama.read_config(raw), architecture="llava")
