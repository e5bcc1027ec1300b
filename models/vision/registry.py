"""Vision towers by the ``model_type`` of the models that have them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from localrt.common.errors import UnsupportedModelError
from localrt.models.vision.tower import Tower

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
    "gemma3": "gemma3",
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "lfm2_vl": "lfm2_vl",
}
"""The file in this folder of each ``model_type``; its ``read_tower`` takes what ``read_tower``
here does.
"""

_TOWERS = {"llava": "pixtral"}
"""The only ``model_type`` of a tower that is known, where models may have several."""


def has_tower(config: Mapping[str, Any]) -> bool:
    """Whether a model with this published config sees, and localrt knows how."""
    kind, vision = config.get("model_type"), config.get("vision_config")
    if kind not in _FILES or not isinstance(vision, dict):
        return False
    return vision.get("model_type") == _TOWERS.get(kind, vision.get("model_type"))


def read_tower(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Tower:
    """The tower of a model: its published ``config.json`` and its image processor's settings.

    Raises:
        UnsupportedModelError: localrt does not know it, or a value makes no sense.
    """
    kind = config.get("model_type")
    if not has_tower(config):
        known = ", ".join(_FILES)
        raise UnsupportedModelError(f"the pictures of {kind!r} are not known (known: {known})")
    module = import_module(f"localrt.models.vision.{_FILES[str(kind)]}")
    try:
        tower: Tower = module.read_tower(config, processor)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        found = error if isinstance(error, ValueError) else repr(error)
        raise UnsupportedModelError(f"the vision config makes no sense: {found}") from error
    return tower
