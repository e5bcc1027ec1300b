"""Keeps the sight of a model that is quantized: its vision tower, as published, in the store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from localrt.common.errors import LocalrtError
from localrt.models.checkpoints.base import RangedFile
from localrt.models.checkpoints.gguf.vision import VisionGguf
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision.source import STORED_TOWER, vision_source
from localrt.models.weight_files import WEIGHTS_NAME
from localrt.offload.store.writer import StoreWriter

_PIECE = 16 << 20


def write_tower(writer: StoreWriter, path: Path, projectors: Sequence[Path] = ()) -> int:
    """Write the tower of the model at ``path``, if it has one that can be used; returns its bytes.

    Raises:
        CheckpointError: its files are damaged.
        StorageError: the disk is full, or fails.
        CancelledError: the writer was cancelled.
    """
    try:
        source = vision_source(path, projectors)
    except LocalrtError:  # such a model answers to text alone
        return 0
    if source is None:
        return 0
    with closing(source):
        if isinstance(source, VisionGguf):
            name = f"{STORED_TOWER}/{source.path.name}"
            writer.write_pieces(name, _reported(_contents(source.path), writer, name))
            return source.path.stat().st_size
        settings = {"config": source.config, "preprocessor_config": source.processor}
        for name, values in settings.items():
            writer.write_bytes(f"{STORED_TOWER}/{name}.json", json.dumps(values).encode())
        name = f"{STORED_TOWER}/{WEIGHTS_NAME}"
        writer.write_pieces(name, _reported(_safetensors(source), writer, name))
        return sum(info.nbytes for info in source.tensors.values())


def _reported(pieces: Iterator[bytes], writer: StoreWriter, name: str) -> Iterator[bytes]:
    for piece in pieces:
        writer.report(name)  # which raises if the writer was cancelled
        yield piece


def _contents(path: Path) -> Iterator[bytes]:
    with closing(RangedFile(path)) as file:
        for first in range(0, file.size, _PIECE):
            yield file.read(first, min(_PIECE, file.size - first)).tobytes()


def _safetensors(source: VisionFolder) -> Iterator[bytes]:
    """All tensors as a file of that format."""
    entries, position = {}, 0
    for name, info in source.tensors.items():
        end = position + info.nbytes
        entries[name] = {
            "dtype": info.format.name.upper(),
            "shape": info.shape,
            "data_offsets": (position, end),
        }
        position = end
    header = json.dumps(entries).encode()
    yield len(header).to_bytes(8, "little") + header
    for name in source.tensors:
        yield source.read(name).data.tobytes()
