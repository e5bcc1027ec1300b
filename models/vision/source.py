"""Finds a model's vision encoder: in its folder, or in an ``mmproj`` file next to its GGUF file.

A store has a copy in its folder ``vision``, or uses the encoder of the model it was packed from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from localrt.common.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints.gguf.file import GgufFile, is_gguf
from localrt.models.checkpoints.gguf.vision import VisionGguf
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.checkpoints.safetensors_header import read_json
from localrt.models.vision.registry import has_encoder
from localrt.models.weight_files import (
    MANIFEST_NAME,
    STORED_ENCODER,
    projectors_beside,
    rivals,
    words_in_common,
)

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
