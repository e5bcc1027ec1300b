"""Where a vision tower is: in the model's own folder, or in an ``mmproj`` file beside a GGUF file.

A store holds the decoder only: its tower is that of the model that it was packed from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from localrt.models.checkpoints.safetensors.header import read_json
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.checkpoints.store.manifest import MANIFEST_NAME
from localrt.models.vision.registry import has_tower


def vision_source(path: Path, projectors: Sequence[Path] = ()) -> VisionFolder | None:
    """The open tower of the model at ``path`` (a folder, a store or a GGUF file); None if it has
    none that localrt knows. ``projectors`` are ``mmproj`` files that lie elsewhere.

    Raises:
        CheckpointError: the tower's files are damaged.
    """
    if (path / MANIFEST_NAME).is_file():
        origin = _origin(path)
        return None if origin is None else vision_source(origin, projectors)
    if (path / "config.json").is_file():
        return VisionFolder(path) if has_tower(read_json(path / "config.json")) else None
    return None


def _origin(store: Path) -> Path | None:
    """What a store was packed from, if it is still there."""
    source = read_json(store / MANIFEST_NAME).get("source")
    origin = source.get("path") if isinstance(source, dict) else None
    if not isinstance(origin, str):
        return None
    gone = not os.path.exists(origin)  # noqa: PTH110  False for a name too long for the file system
    return None if gone or (Path(origin) / MANIFEST_NAME).exists() else Path(origin)
