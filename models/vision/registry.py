"""Vision encoders by the ``model_type`` of their models."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from localrt.common.errors import UnsupportedModelError
from localrt.models.raw_config import with_default_values
from localrt.models.vision.encoder import VisionEncoder

_FILES = {
    "qwen2_vl": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "qwen3_vl_moe": "qwen_vl",
    "qwen3_5": "qwen_vl",
    "qwen3_5_moe": "qwen_vl",
    "llava": "pixtral",
    "mistral3": "pixtral",
    "gemma4": "gemma4_vision",
    "gemma4_unified": "gemma4_unified",
    "gemma3": "gemma3",
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "lfm2_vl": "lfm2_vl",
    "internvl": "internvl",
    "minicpmv4_6": "minicpmv",
    "paddleocr_vl": "paddleocr_vl",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "glm46v": "glm4v",
    "glm_ocr": "glm4v",
}
"""The module for each ``model_type``. Each has a ``read_encoder`` function like the one below."""

_ENCODERS = {"llava": "pixtral"}
"""The supported ``model_type`` of the encoder, for models that are published with several."""


def has_encoder(config: Mapping[str, object]) -> bool:
    """Whether a model with this published config has a vision encoder that localrt supports."""
    kind, vision = str(config.get("model_type")), config.get("vision_config")
    if kind not in _FILES or not isinstance(vision, dict):
        return False
    return vision.get("model_type") == _ENCODERS.get(kind, vision.get("model_type"))


def read_encoder(config: Mapping[str, object], processor: Mapping[str, object]) -> VisionEncoder:
    """Build a model's encoder from its published ``config.json`` and image processor settings.

    Raises:
        UnsupportedModelError: localrt does not support the encoder, or a value is invalid.
    """
    kind = config.get("model_type")
    if not has_encoder(config):
        known = ", ".join(_FILES)
        raise UnsupportedModelError(f"the pictures of {kind!r} are not known (known: {known})")
    module = import_module(f"localrt.models.vision.{_FILES[str(kind)]}")
    own: Any = config.get("text_config") or config
    try:
        text = with_default_values(own, str(kind))
        encoder: VisionEncoder = module.read_encoder({**config, "text_config": text}, processor)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise UnsupportedModelError(f"the vision config makes no sense: {reason}") from error
    return encoder
