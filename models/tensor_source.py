"""The contract of a checkpoint: named tensors that are read one at a time, and a config.

Names and config keys are Hugging Face's in all file formats: GGUF's are translated by one table
(``gguf/names.py``), so that an architecture is written once. Tensors are read by rows, steps along
the first axis; a vector or scalar is a single row. ``StoredTensor`` is a range of bytes in a GGUF
or safetensors file: a tensor, or one expert of a stacked tensor. Other sources reorder rows while
reading. It knows no file format, architecture or device.

Files are read by ``pread`` into memory that the caller owns, not through a memory map: mapped pages
count as the process's memory and are evicted when they are about to be needed.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt import system
from localrt.common.errors import CheckpointError, reason_of
from localrt.quant.formats.packed import Bytes, Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_MOST_PER_CALL = 1 << 30  # systems refuse or silently shorten reads of 2 GiB and more


class RangedFile:
    """An open file of known size, closed by ``close`` or when it is garbage-collected.

    Threads may read concurrently, but must finish before it is closed.

    Raises:
        CheckpointError: the file cannot be opened, or is a folder or another special file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                kind = "is not a regular file" if path.exists() else "does not exist"
                raise CheckpointError(f"{path} {kind}")
            self._file = path.open("rb", buffering=0)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error

    def read(self, offset: int, count: int) -> npt.NDArray[np.uint8]:
        """``count`` bytes from ``offset``, as a new array.

        Raises:
            CheckpointError: the file is too short, cannot be read, or is closed.
        """
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: bytes {offset} to {offset + count} are wanted, "
                f"the file has {self.size}"
            )
        data = np.empty(count, np.uint8)
        view = data.data
        done = 0
        while done < count:
            try:
                got = self._read_into(view[done : done + _MOST_PER_CALL], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {reason_of(error)}") from error
            if got == 0:
                raise CheckpointError(f"{self.path} was cut short while it was being read")
            done += got
        return data

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # opening may have failed
            self._file.close()

    def _read_into(self, view: memoryview, offset: int) -> int:
        if self._file.closed:
            raise CheckpointError(f"{self.path} is closed")
        return system.read_at(self._file.fileno(), view, offset)


def describe_start(file: RangedFile) -> str:
    """Describe what an unexpected file seems to be, for an error message."""
    if file.size == 0:
        return "it is empty"
    start = file.read(0, min(file.size, 16)).tobytes()
    if start.startswith(b"version https://"):
        return "it is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        return "it is a web page: the download went wrong"
    return f"it begins with {start[:4]!r}"


WeightBlock: TypeAlias = PackedTensor | TiledTensor
"""Rows of a matrix or a whole vector in their published layout, or a matrix in a store's tiles."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's shape and format, known without reading it. ``shape`` is row-major: (out, in)."""

    name: str
    shape: tuple[int, ...]
    format: Format
    nbytes: int


class TensorSource(Protocol):
    """Named tensors and their origin: all that is needed to build a part of a model."""

    @property
    def path(self) -> Path:
        """The folder, or the (first) GGUF file."""

    @property
    def architecture(self) -> str:
        """The architecture's name in the file: ``"llama"`` (GGUF) or ``"LlamaForCausalLM"``."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, in file order."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop`` of a tensor, read from disk now and owned by the caller.

        Raises:
            CheckpointError: no such tensor, or the file is too short.
        """

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        """The tensor's rows in order, in pieces of at most ``max_bytes`` packed bytes each.

        A store returns a matrix of any size as one ``TiledTensor``.
        """


class Checkpoint(TensorSource, Protocol):
    """A model on disk: a GGUF file (possibly split), a Hugging Face folder, or a store."""

    @property
    def kind(self) -> str:
        """The conventions of config and text files: ``"gguf"`` or ``"safetensors"``.

        For a store, those of the model that it was packed from.
        """

    @property
    def stamp(self) -> str:
        """The ``model_stamp`` of its files at opening."""

    @property
    def config(self) -> Mapping[str, object]:
        """The architecture's parameters under the keys of a Hugging Face ``config.json``, with the
        defaults of its class.
        """

    @property
    def generation_config(self) -> Mapping[str, object]:
        """Sampling defaults under the keys of ``generation_config.json``; may be empty."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about how the weights are read; usually empty."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """GGUF key-value pairs, read lazily; empty for a Hugging Face folder."""

    def close(self) -> None:
        """Close the files. Reading afterwards raises ``CheckpointError``."""


_VECTORS = (
    "embeddings.cls_token",
    "conv1d.weight",
    ".conv.conv.weight",
    ".mamba.norm.weight",
    ".mamba.A",
    ".mamba.D",
    ".self_attn.A",
    ".self_attn.A_log",
)
"""Suffixes of small recurrent tensors that files store with several dimensions: convolution taps
(channels, 1, taps), norms by groups.
"""


@dataclass(frozen=True, slots=True)
class RowSource(ABC):
    """A tensor that is read by rows, in any file layout; ``info`` describes the result.

    Subclasses implement ``_read``, which gets valid row numbers.
    """

    info: TensorInfo

    @property
    def scale(self) -> float:
        """The factor of all values."""
        return 1.0

    @property
    def rows(self) -> int:
        """Steps along the first axis; 1 for a vector."""
        return self.info.shape[0] if len(self.info.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        """Packed bytes of one row."""
        return self.info.nbytes // self.rows if self.rows else 0

    @property
    def rows_together(self) -> int:
        """How many rows to read together, because reading one means reading all of them."""
        return 1

    def read(self, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop``, read now.

        Raises:
            ValueError: the tensor has no such rows.
            CheckpointError: the file is too short, or is closed.
        """
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(
                f"{self.info.name!r} has {self.rows} rows: {start} to {stop} cannot be read"
            )
        with np.errstate(all="ignore"):  # scales of a damaged file may be infinite or NaN
            data = self._read(start, stop) if start < stop else np.empty(0, np.uint8)
            return self._packed(data, stop - start)

    def blocks(self, max_bytes: int) -> Iterator[PackedTensor]:
        """All rows in order, in pieces of at most ``max_bytes`` (and at least one row)."""
        for start, stop in self._row_ranges(max_bytes):
            yield self.read(start, stop)

    @abstractmethod
    def _read(self, start: int, stop: int) -> Bytes:
        """Return the bytes of one or more rows, in any shape."""

    def _row_ranges(self, max_bytes: int) -> Iterator[tuple[int, int]]:
        """Consecutive ``(start, stop)`` ranges covering all rows."""
        step = max(1, max_bytes // max(1, self.row_bytes))
        if step > self.rows_together:
            step -= step % self.rows_together
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def _packed(self, data: Bytes, rows: int) -> PackedTensor:
        info = self.info
        shape = (rows, *info.shape[1:]) if len(info.shape) > 1 else info.shape
        data = data.reshape(rows, self.row_bytes)
        return PackedTensor(info.name, info.format, shape, data, self.scale)


@dataclass(frozen=True, slots=True)
class StoredTensor(RowSource):
    """A tensor whose bytes begin at ``offset`` of ``file``; ``factor`` scales its values."""

    file: RangedFile
    offset: int
    factor: float = 1.0

    @property
    def scale(self) -> float:
        return self.factor

    def _read(self, start: int, stop: int) -> Bytes:
        return self.file.read(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)


@dataclass(frozen=True, slots=True)
class DerivedRows(RowSource):
    """Rows derived from those of ``whole``, with the same scale."""

    whole: RowSource

    @property
    def scale(self) -> float:
        return self.whole.scale


class SourcedCheckpoint:
    """Base of a ``Checkpoint`` whose tensors are ``RowSource``s by name."""

    path: Path

    def __init__(self, sources: Mapping[str, RowSource]) -> None:
        self._sources = {name: _flat(source) for name, source in sources.items()}
        self.tensors: Mapping[str, TensorInfo] = {
            name: source.info for name, source in self._sources.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        return self._source(name).read(start, stop)

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[PackedTensor]:
        yield from self._source(name).blocks(max_bytes)

    def _source(self, name: str) -> RowSource:
        if name not in self._sources:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._sources[name]


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The two-dimensional form of a shape: a convolution's kernel becomes a row, several matrices
    become one with all their rows.
    """
    if len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return (shape[0], math.prod(shape[1:])) if len(shape) > 3 else shape


def _flat(source: RowSource) -> RowSource:
    """Small tensors of recurrent layers as vectors, others unchanged."""
    info = source.info
    if not info.name.endswith(_VECTORS) or info.format.block != 1:
        return source
    return replace(source, info=replace(info, shape=(math.prod(info.shape),)))
