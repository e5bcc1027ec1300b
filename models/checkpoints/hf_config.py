"""A Hugging Face ``config.json`` as architectures want it: one text model, one way to say a thing.

Multimodal configs hold the text model's parameters in an object of their own; transformers 5 moved
rotary parameters into ``rope_parameters``. Both are brought to the flat, older form. Defaults that
a config leaves out are the architecture's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localrt.errors import CheckpointError
from localrt.models.checkpoints.text_model import TEXT_KEYS

__all__ = ["flatten_config"]

_KIMIS_LENGTH = "model_max_length"


def flatten_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config of the text model.

    Raises:
        CheckpointError: a part is of a wrong type.
    """
    flat = dict(config)
    for key in TEXT_KEYS:
        text = flat.pop(key, None) or {}
        if not isinstance(text, dict):
            raise CheckpointError(f"{path}: {key} is not an object")
        flat.update({name: value for name, value in text.items() if name != "architectures"})
    if flat.get(_KIMIS_LENGTH) is not None:
        flat.setdefault("max_position_embeddings", flat[_KIMIS_LENGTH])
    _add_older_rope(flat, path)
    return flat


def _add_older_rope(config: dict[str, Any], path: Path) -> None:
    """``rope_theta`` and ``rope_scaling`` from ``rope_parameters``, which count where both are.

    Gemma 3 has parameters for each kind of layer: those of full attention are the model's, the
    sliding window's base is ``rope_local_base_freq``.
    """
    rope = config.get("rope_parameters")
    if rope is None:
        return
    if not isinstance(rope, dict):
        raise CheckpointError(f"{path}: rope_parameters is not an object")
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    if isinstance(sliding, dict) and "rope_theta" in sliding:
        config["rope_local_base_freq"] = sliding["rope_theta"]
    scaling = dict(full if isinstance(full, dict) else rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            config[key] = scaling.pop(key)
    if scaling.get("rope_type", "default") != "default":
        config["rope_scaling"] = scaling
