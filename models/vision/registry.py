"""Vision encoders by ``model_type``, and where a model's encoder is.

It is in the model's folder, or in an ``mmproj`` file next to its GGUF file. A store has a copy in
its folder ``vision``, or uses the encoder of the model it was packed from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from localrt.common.errors import CheckpointError, LocalrtError, UnsupportedModelError
from localrt.models.checkpoints.gguf.file import GgufFile, is_gguf
from localrt.models.checkpoints.gguf.vision import VisionGguf
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.checkpoints.safetensors_header import read_json
from localrt.models.raw_config import with_default_values
from localrt.models.vision.encoder import VisionEncoder
from localrt.models.weight_files import (
    MANIFEST_NAME,
    STORED_ENCODER,
    projectors_beside,
    rivals,
    words_in_common,
)

_FILES = {
    "qwen2_vl": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "qwen3_vl": "qwen_vl",
    "qwen3_vl_moe": "qwen_vl",
    "qwen3_5": "qwen_vl",
    "qwen3_5_moe": "qwen_vl",
    "llava": "pixtral",
    "mistral3": "pixtral",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4",
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


VisionSource = VisionFolder | VisionGguf
"""The open files of an encoder: a ``TensorSource`` with a ``config`` and a ``processor``."""


def vision_source(path: Path, projectors: Sequence[Path] = ()) -> VisionSource | None:
    """Open the encoder of the model at ``path`` (folder, store or GGUF file); None if it has none.
    ``projectors`` are ``mmproj`` files elsewhere.

    Of several ``mmproj`` files next to a GGUF file, the best one with the model's family and hidden
    size is opened.

    Raises:
        CheckpointError: the encoder's files are damaged.
        UnsupportedModelError: localrt does not support the encoder of the model's ``mmproj`` file.
    """
    if (path / MANIFEST_NAME).is_file():
        if (folder := path / STORED_ENCODER).is_dir():
            file = next(folder.glob("*.gguf"), None)
            return VisionFolder(folder) if file is None else VisionGguf(file)
        origin = _origin(path)
        return None if origin is None else vision_source(origin, projectors)
    if (path / "config.json").is_file():
        return VisionFolder(path) if has_encoder(read_json(path / "config.json")) else None
    files = [*projectors, *projectors_beside(path)] if is_gguf(path) else []
    return _fitting(path, files, projectors) if files else None


def _fitting(path: Path, files: Sequence[Path], named: Sequence[Path]) -> VisionGguf | None:
    """The first encoder that fits the model at ``path``; the user chose the files ``named``."""
    with closing(GgufFile(path)) as model:
        architecture = model.metadata.text("general.architecture")
        columns = model.metadata.get(f"{architecture}.embedding_length")
    problem: LocalrtError | None = None
    fitting: list[VisionGguf] = []
    for file in files:
        try:
            encoder = VisionGguf(file)
        except LocalrtError as error:
            # It may belong to another model, unless its name matches this one.
            if problem is None and (file in named or words_in_common(file.name, path.name) >= 0):
                problem = error
            continue
        if architecture in encoder.decoders and encoder.columns == columns:
            fitting.append(encoder)
        else:
            encoder.close()
    if fitting:
        first, *others = fitting
        names = [] if first.path in named else [each.path.name for each in others]
        equal = rivals(first.path.name, names, path.name)
        for each in fitting if equal else others:
            each.close()
        if equal:
            raise CheckpointError(
                f"{first.path.name} and {equal[0]} may both be the vision tower of {path.name}: "
                "leave one of them beside it, or give it the model's name"
            )
        return first
    if problem is not None:
        raise problem
    return None


def _origin(store: Path) -> Path | None:
    """The model that a store was packed from, if it still exists."""
    source = read_json(store / MANIFEST_NAME).get("source")
    origin = source.get("path") if isinstance(source, dict) else None
    if not isinstance(origin, str):
        return None
    missing = not os.path.exists(origin)  # noqa: PTH110  no error for a name that is too long
    return None if missing or (Path(origin) / MANIFEST_NAME).exists() else Path(origin)
