"""The contract of a checkpoint: named tensors that are read one at a time, and a config.

Names and config keys are Hugging Face's whatever the file format: a GGUF file is translated by one
table (``gguf/names.py``), so that an architecture is written once. A checkpoint does not know
architectures or devices.

Tensors that are read by rows, and checkpoints made of them.

A row is one step along the first axis; a vector or scalar is a single row. ``StoredTensor`` is a
range of bytes in a file, for GGUF and safetensors alike, and so is an expert out of a stacked
tensor; other sources put in order what does not lie so. Knows neither file format.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.ranged_file import RangedFile
from localrt.quant.formats.packed import Bytes, Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor

WeightBlock: TypeAlias = PackedTensor | TiledTensor
"""Rows of a matrix or a whole vector as published, or a matrix as a store holds it."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without reading it. ``shape`` is row-major: (out, in)."""

    name: str
    shape: tuple[int, ...]
    format: Format
    nbytes: int


class TensorSource(Protocol):
    """Named tensors and where they are from: all that building a part of a model takes."""

    @property
    def path(self) -> Path:
        """The folder, or the (first) GGUF file."""

    @property
    def architecture(self) -> str:
        """As the file names it: ``"llama"`` (GGUF) or ``"LlamaForCausalLM"`` (config.json)."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, in file order."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop`` of a tensor, read from disk now and owned by the caller.

        Raises:
            CheckpointError: no such tensor, or the file ends before its data.
        """

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        """The tensor's rows in order, in pieces of at most ``max_bytes`` packed bytes each.

        A store gives a matrix as one ``TiledTensor``, however large.
        """


class Checkpoint(TensorSource, Protocol):
    """A model on disk: a GGUF file (possibly split), a Hugging Face folder, or a store."""

    @property
    def kind(self) -> str:
        """Whose conventions config and text files follow: ``"gguf"`` or ``"safetensors"``.

        A store keeps those of the model that it was packed from.
        """

    @property
    def config(self) -> Mapping[str, Any]:
        """The architecture's parameters under the keys of a Hugging Face ``config.json``."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Sampling defaults under the keys of ``generation_config.json``; may be empty."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the weights are read, a line each; mostly nothing."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF key-value pairs, read lazily; empty for a Hugging Face folder."""

    def close(self) -> None:
        """Close the files. Reading afterwards raises ``CheckpointError``."""


_VECTORS = (
    "conv1d.weight",
    ".conv.conv.weight",
    ".mamba.norm.weight",
    ".mamba.A",
    ".mamba.D",
    ".self_attn.A",
    ".self_attn.A_log",
)
"""Small tensors of recurrent layers that files keep in several dimensions: taps of convolutions
(channels, 1, taps), norms by groups.
"""


@dataclass(frozen=True, slots=True)
class RowSource(ABC):
    """A tensor whose rows can be read, however they lie in a file; ``info`` says what it is then.

    Subclasses read in ``_read``, from rows that are there.
    """

    info: TensorInfo

    @property
    def scale(self) -> float:
        """What every value is times."""
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
        """Rows that are best read in one go, because each takes reading them all."""
        return 1

    def read(self, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop``, read now.

        Raises:
            ValueError: the tensor has no such rows.
            CheckpointError: the file ends before them, or is closed.
        """
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(
                f"{self.info.name!r} has {self.rows} rows: {start} to {stop} cannot be read"
            )
        data = self._read(start, stop) if start < stop else np.empty(0, np.uint8)
        return self._packed(data, stop - start)

    def blocks(self, max_bytes: int) -> Iterator[PackedTensor]:
        """All rows in order, in pieces of at most ``max_bytes`` (and at least one row)."""
        for start, stop in self._row_ranges(max_bytes):
            yield self.read(start, stop)

    @abstractmethod
    def _read(self, start: int, stop: int) -> Bytes:
        """The bytes of at least one row, in any shape."""

    def _row_ranges(self, max_bytes: int) -> Iterator[tuple[int, int]]:
        """Consecutive ``(start, stop)`` covering all rows."""
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
    """A tensor whose bytes begin at ``offset`` of ``file``; its values are times ``factor``."""

    file: RangedFile
    offset: int
    factor: float = 1.0

    @property
    def scale(self) -> float:
        return self.factor

    def _read(self, start: int, stop: int) -> Bytes:
        return self.file.read(self.offset + start * self.row_bytes, (stop - start) * self.row_bytes)


class SourcedCheckpoint:
    """How a ``Checkpoint`` whose tensors are ``RowSource``s by their names is read."""

    path: Path

    def __init__(self, sources: Mapping[str, RowSource]) -> None:
        self._sources = {name: _flat(source) for name, source in sources.items()}
        self.tensors: Mapping[str, TensorInfo] = {
            name: source.info for name, source in self._sources.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop`` of a tensor.

        Raises:
            CheckpointError: no such tensor, or the files are closed.
            ValueError: the tensor has no such rows.
        """
        return self._source(name).read(start, stop)

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[PackedTensor]:
        """A tensor's rows in order, in pieces of at most ``max_bytes`` (and at least one row)."""
        yield from self._source(name).blocks(max_bytes)

    def _source(self, name: str) -> RowSource:
        if name not in self._sources:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._sources[name]


def _flat(source: RowSource) -> RowSource:
    """A small tensor of a recurrent layer as a vector, others as they are."""
    info = source.info
    if not info.name.endswith(_VECTORS) or info.format.block != 1:
        return source
    return replace(source, info=replace(info, shape=(math.prod(info.shape),)))
