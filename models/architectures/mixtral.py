"""Mixtral: Mistral with a mixture of experts in every layer.

GGUF files of it call themselves ``llama`` (see ``registry.py``).
"""

from __future__ import annotations

from dataclasses import replace

from localrt.models.architectures import llama
from localrt.models.config import DecoderConfig
from localrt.models.mixture_config import read_mixture, with_mixture
from localrt.models.raw_config import RawConfig


def read_config(raw: RawConfig) -> DecoderConfig:
    """Llama's keys; ``intermediate_size`` is an expert's. The chosen weights sum to 1."""
    config = llama.read_config(raw)
    return with_mixture(replace(config, architecture="mixtral"), read_mixture(raw, config))
