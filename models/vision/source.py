"""Where a vision tower is: in the model's own folder, or in an ``mmproj`` file beside a GGUF file.

A store has its own in the folder ``vision``, or that of the model that it was packed from.
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
from localrt.models.vision.registry import has_tower
from localrt.models.weight_files import (
    MANIFEST_NAME,
    STORED_TOWER,
    projectors_beside,
    rivals,
    words_in_common,
)

VisionSource = VisionFolder | VisionGguf
"""An open tower: a ``TensorSource`` with a ``config`` and a ``processor``."""


def vision_source(path: Path, projectors: Sequence[Path] = ()) -> VisionSource | None:
    """The open tower of the model at ``path`` (a folder, a store or a GGUF file); None if it has
    none. ``projectors`` are ``mmproj`` files that lie elsewhere.

    Of those beside a GGUF file, the best one is taken whose rows and family are the model's.

    Raises:
        CheckpointError: the tower's files are damaged.
        UnsupportedModelError: localrt does not know the tower of the model's ``mmproj`` file.
    """
    if (path / MANIFEST_NAME).is_file():
        if (own := path / STORED_TOWER).is_dir():
            file = next(own.glob("*.gguf"), None)
            return VisionFolder(own) if file is None else VisionGguf(file)
        origin = _origin(path)
        return None if origin is None else vision_source(origin, projectors)
    if (path / "config.json").is_file():
        return VisionFolder(path) if has_tower(read_json(path / "config.json")) else None
    files = [*projectors, *projectors_beside(path)] if is_gguf(path) else []
    return _fitting(path, files, projectors) if files else None


def _fitting(path: Path, files: Sequence[Path], own: Sequence[Path]) -> VisionGguf | None:
    """The first tower that is for the model at ``path``; ``own`` are known to be."""
    with closing(GgufFile(path)) as model:
        architecture = model.metadata.text("general.architecture")
        columns = model.metadata.get(f"{architecture}.embedding_length")
    problem: LocalrtError | None = None
    found: list[VisionGguf] = []
    for file in files:
        try:
            tower = VisionGguf(file)
        except LocalrtError as error:
            # It may be another model's, unless its name says that it is this one's.
            if problem is None and (file in own or words_in_common(file.name, path.name) >= 0):
                problem = error
            continue
        if architecture in tower.decoders and tower.columns == columns:
            found.append(tower)
        else:
            tower.close()
    if found:
        first, *others = found
        names = [] if first.path in own else [each.path.name for each in others]
        equal = rivals(first.path.name, names, path.name)
        for each in found if equal else others:
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
    """What a store was packed from, if it is still there."""
    source = read_json(store / MANIFEST_NAME).get("source")
    origin = source.get("path") if isinstance(source, dict) else None
    if not isinstance(origin, str):
        return None
    gone = not os.path.exists(origin)  # noqa: PTH110  False for a name too long for the file system
    return None if gone or (Path(origin) / MANIFEST_NAME).exists() else Path(origin)
