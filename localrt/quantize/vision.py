"""Copies the vision encoder of a model that is quantized into the store, as published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from localrt.common.errors import LocalrtError
from localrt.models.checkpoints.gguf.vision import VisionGguf
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.tensor_source import RangedFile
from localrt.models.vision.registry import VisionSource, vision_source
from localrt.models.weight_files import STORED_ENCODER, WEIGHTS_NAME
from localrt.offload.store.writer import StoreWriter

_PIECE = 16 << 20


class StoredEncoder:
    """The encoder of the model at ``path``, if it has one; ``problem`` says why it cannot be used:
    the model then answers text alone. ``projectors`` are those of ``vision_source``.
    """

    def __init__(self, path: Path, projectors: Sequence[Path] = ()) -> None:
        self.problem = ""
        self._source: VisionSource | None = None
        self._header = b""
        try:
            self._source = vision_source(path, projectors)
        except LocalrtError as error:
            self.problem = f"pictures are refused: {error}"
        if isinstance(self._source, VisionFolder):
            self._header = _header(self._source)

    @property
    def nbytes(self) -> int:
        """Size of the encoder's file of weights in bytes; 0 without an encoder."""
        if self._source is None:
            return 0
        if isinstance(self._source, VisionGguf):
            return self._source.path.stat().st_size
        weights = sum(info.nbytes for info in self._source.tensors.values())
        return len(self._header) + weights

    def write(self, writer: StoreWriter) -> None:
        """Write the encoder, unless an earlier run of the same packing has.

        Raises:
            CheckpointError: the encoder's files are damaged.
            StorageError: the disk is full, or fails.
            CancelledError: the writer was cancelled.
        """
        source = self._source
        if source is None:
            shutil.rmtree(writer.folder / STORED_ENCODER, ignore_errors=True)
            return
        if isinstance(source, VisionGguf):
            name, pieces = "mmproj.gguf", _contents(source.path)
        else:
            name, pieces = WEIGHTS_NAME, self._safetensors(source)
            # The settings are merged already: the nested copy would say them twice.
            processor = {key: v for key, v in source.processor.items() if key != "image_processor"}
            settings = {"config": source.config, "preprocessor_config": processor}
            for file, values in settings.items():
                writer.write_bytes(f"{STORED_ENCODER}/{file}.json", json.dumps(values).encode())
        path = writer.folder / STORED_ENCODER / name
        if not path.is_file() or path.stat().st_size != self.nbytes:
            writer.write_pieces(f"{STORED_ENCODER}/{name}", _reported(pieces, writer, name))

    def close(self) -> None:
        """Close the encoder's files."""
        if self._source is not None:
            self._source.close()

    def _safetensors(self, source: VisionFolder) -> Iterator[bytes]:
        yield self._header
        for name in source.tensors:
            for block in source.blocks(name):
                yield block.data.tobytes()


def _contents(path: Path) -> Iterator[bytes]:
    with closing(RangedFile(path)) as file:
        for first in range(0, file.size, _PIECE):
            yield file.read(first, min(_PIECE, file.size - first)).tobytes()


def _header(source: VisionFolder) -> bytes:
    """Build the safetensors header of all tensors."""
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
    return len(header).to_bytes(8, "little") + header


def _reported(pieces: Iterator[bytes], writer: StoreWriter, name: str) -> Iterator[bytes]:
    for piece in pieces:
        writer.report(name)  # which raises if the writer was cancelled
        yield piece
