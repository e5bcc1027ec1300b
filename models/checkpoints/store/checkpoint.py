"""A store as a checkpoint: whole matrices as tiles, usable in place.

A unit is read by one request; its SHA-256 is verified at the first read. Tensors are views of that
memory, which must not change while they are in use. Does not know how a store is written
(``offload/store``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.gguf.file import GgufFile
from localrt.models.checkpoints.store.manifest import (
    PREDICTION,
    Manifest,
    StoredUnit,
    UnitTensor,
    read_manifest,
)
from localrt.models.checkpoints.text_model import prediction_config
from localrt.models.raw_config import with_default_values
from localrt.models.tensor_source import RangedFile, TensorInfo, WeightBlock
from localrt.models.weight_files import MANIFEST_NAME, model_stamp
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.packed import Bytes
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor, untile
from localrt.quant.ops.arrays import Memory

Mend: TypeAlias = Callable[[StoredUnit, Bytes], None]


class UnitMemory:
    """A unit's tensors in ``data``, the bytes of the whole unit. See ``TensorSource``.

    ``vectors`` has the unit's vectors if the CPU cannot read ``data``. A piece of a tensor, whose
    name ends in brackets, has the tensor's name and its own rows here.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        unit: StoredUnit,
        data: Memory,
        vectors: Mapping[str, PackedTensor] | None = None,
    ) -> None:
        self.path, self.architecture = path, architecture
        self._tensors = {tensor.name.partition("[")[0]: tensor for tensor in unit.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tensor.shape, tensor.format, tensor.nbytes)
            for name, tensor in self._tensors.items()
        }
        self._data = data
        self._vectors = vectors or {}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """A whole vector."""
        tensor = self._tensors[name]
        if len(tensor.shape) != 1 or start or stop not in (None, 1):
            raise ValueError(f"{name!r:.80} is no vector: its rows are in tiles")
        if name in self._vectors:
            return self._vectors[name]
        return PackedTensor(name, tensor.format, tensor.shape, self._bytes(tensor).reshape(1, -1))

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        """Yield a matrix as a view."""
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:
            yield self.read(name)
            return
        shape = (tensor.shape[0], tensor.shape[1])
        data = self._bytes(tensor)
        yield TiledTensor(tensor.name, tensor.format, shape, data, tensor.scale, tensor.hadamard)

    def vectors(self) -> dict[str, PackedTensor]:
        """Copies of all vectors."""
        return {
            name: replace(packed, data=packed.data.copy())
            for name, tensor in self._tensors.items()
            if len(tensor.shape) == 1
            for packed in (self.read(name),)
        }

    def _bytes(self, tensor: UnitTensor) -> Bytes:
        data = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        return cast(Bytes, data)  # or GPU memory with the same interface


class Verifier:
    """Compares each unit of the store at ``path`` with the SHA-256 in its manifest, once.

    ``mend`` repairs a damaged unit in memory and file by packing it again, or raises
    CheckpointError.
    """

    def __init__(self, path: Path, *, enabled: bool = True, mend: Mend | None = None) -> None:
        self._path = path
        self._enabled = enabled
        self._mend = mend
        self._seen: set[str] = set()

    def __call__(self, unit: StoredUnit, data: Bytes) -> None:
        """Verify a unit; raises CheckpointError if it is damaged and cannot be repaired."""
        if not self._enabled or unit.name in self._seen:
            return
        if not unit.is_whole(data):
            self.repair(unit, data)
        self._seen.add(unit.name)

    def repair(self, unit: StoredUnit, data: Bytes) -> None:
        """Repair a damaged unit; raises CheckpointError if that is not possible."""
        if self._mend is None:
            raise CheckpointError(
                f"{self._path}: unit {unit.name} in {unit.file} is damaged (its sum is not that of "
                "the manifest): copy or quantize the model again"
            )
        self._mend(unit, data)


GGUF_TEXT_NAME = "metadata.gguf"
"""Key-value pairs of the GGUF file that was packed, with its tokenizer and chat template."""
_Slice = tuple[StoredUnit, UnitTensor]


class StoreCheckpoint:
    """A folder written by ``offload/store``. See ``Checkpoint``.

    ``verify=False`` skips SHA-256 checks, which take half a second per gigabyte. ``manifest``
    replaces the folder's own.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
        UnsupportedModelError: written by a newer version of localrt.
    """

    def __init__(
        self,
        path: Path,
        *,
        manifest: Manifest | None = None,
        verify: bool = True,
        predicts: bool = False,
    ) -> None:
        self.path, self.stamp = path, model_stamp(path)
        if predicts and not (path / f"{PREDICTION}.safetensors").is_file():
            raise CheckpointError(f"{path} has no MTP block")
        manifest = manifest or read_manifest(path / MANIFEST_NAME)
        units = [unit for unit in manifest.units if (unit.name == PREDICTION) is predicts]
        self.config: Mapping[str, object] = manifest.config
        if manifest.kind != "gguf":
            self.config = with_default_values(manifest.config, manifest.architecture)
        if predicts:
            self.config, units = prediction_config(self.config), list(map(_plain, units))
        self.manifest = replace(manifest, units=tuple(units))
        self.kind: str = self.manifest.kind
        self.architecture = self.manifest.architecture
        self.generation_config: Mapping[str, object] = self.manifest.generation_config
        self._verify = Verifier(path, enabled=verify)
        for name, digest in self.manifest.texts.items() if verify else ():
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise CheckpointError(
                        f"{path / name} is damaged: copy or quantize the model again"
                    )
        self._held: tuple[StoredUnit, UnitMemory] | None = None
        self._files: dict[str, RangedFile] = {}
        self._text: GgufFile | None = None
        try:
            if self.kind == "gguf":
                self._text = GgufFile(path / GGUF_TEXT_NAME)
            self._open_files()
            self._slices = self._locate()
        except BaseException:
            self.close()
            raise
        self.notes: tuple[str, ...] = ()
        self.metadata: Mapping[str, object] = self._text.metadata if self._text else {}
        self.tensors: Mapping[str, TensorInfo] = {
            name: _info(name, slices) for name, slices in self._slices.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Read rows ``start`` to ``stop`` of a tensor from its tiles.

        Rows of a matrix are read without verifying a SHA-256.

        Raises:
            CheckpointError: no such tensor, the files are closed, or the bytes are damaged.
            ValueError: the tensor has no such rows, or they are stored rotated.
        """
        slices = self._find(name)
        info, (unit, tensor) = self.tensors[name], slices[0]
        rows = info.shape[0] if len(info.shape) == 2 else 1
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"{name!r:.80} has {rows} rows: {start} to {stop} cannot be read")
        if len(info.shape) == 1:
            return self._unit(unit).read(name)
        if tensor.hadamard:
            raise ValueError(
                f"{name!r:.80} is stored rotated: its blocks can be had, its rows cannot"
            )
        row_bytes = info.format.row_bytes(info.shape[1])
        first = start // TILE_ROWS * TILE_ROWS
        last = min(-(-stop // TILE_ROWS) * TILE_ROWS, rows)
        # The slices of a matrix are consecutive in their file.
        at = unit.offset + tensor.offset + first * row_bytes
        count = -(-(last - first) // TILE_ROWS) * TILE_ROWS * row_bytes
        tiles = self._files[unit.file].read(at, count)
        shape = (last - first, info.shape[1])
        rows_read = untile(TiledTensor(name, info.format, shape, tiles, tensor.scale))
        return rows_read.take_rows(np.arange(start - first, stop - first))

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        """The whole tensor: a matrix as tiles, read by one request; ``max_bytes`` is ignored.

        Raises:
            CheckpointError: as for ``read``.
        """
        slices = self._find(name)
        info, (unit, tensor) = self.tensors[name], slices[0]
        if len(slices) == 1:
            yield from self._unit(unit).blocks(name)
            return
        data = self._read_slices([unit for unit, _ in slices])[: info.nbytes]
        shape = (info.shape[0], info.shape[1])
        yield TiledTensor(name, info.format, shape, data, tensor.scale, tensor.hadamard)

    def _unit(self, unit: StoredUnit) -> UnitMemory:
        """Read a unit's whole range. The last unit is kept, so that it is read once."""
        if self._held is None or self._held[0] is not unit:
            data = self._files[unit.file].read(unit.offset, unit.nbytes)
            self._verify(unit, data)
            self._held = (unit, UnitMemory(self.path, self.architecture, unit, data))
        return self._held[1]

    def close(self) -> None:
        self._held = None
        for file in self._files.values():
            file.close()
        if self._text is not None:
            self._text.close()

    def _find(self, name: str) -> tuple[_Slice, ...]:
        if name not in self._slices:
            raise CheckpointError(f"{self.path} has no tensor {name!r:.80}")
        return self._slices[name]

    def _read_slices(self, units: list[StoredUnit]) -> Bytes:
        """Read the ranges of consecutive units as one."""
        first, last = units[0], units[-1]
        count = last.offset + last.nbytes - first.offset
        data = self._files[first.file].read(first.offset, count)
        for unit in units:
            at = unit.offset - first.offset
            self._verify(unit, data[at : at + unit.nbytes])
        return data

    def _open_files(self) -> None:
        """Open every file, and check that it is long enough for its units."""
        for unit in self.manifest.units:
            if unit.file not in self._files:
                self._files[unit.file] = RangedFile(self.path / unit.file)
            size = self._files[unit.file].size
            if unit.offset + unit.nbytes > size:
                raise CheckpointError(
                    f"{self.path / unit.file} is truncated: unit {unit.name} ends at byte "
                    f"{unit.offset + unit.nbytes}, the file has {size}; copy or quantize the model "
                    "again"
                )

    def _locate(self) -> dict[str, tuple[_Slice, ...]]:
        """The slices of each tensor, in order."""
        found: dict[str, list[_Slice]] = {}
        for unit in self.manifest.units:
            for tensor in unit.tensors:
                found.setdefault(tensor.name, []).append((unit, tensor))
        for name, slices in found.items():
            if slices[0][1].row or not all(_follows(a, b) for a, b in pairwise(slices)):
                raise CheckpointError(f"{self.path}: the parts of tensor {name!r:.80} do not fit")
        return {name: tuple(slices) for name, slices in found.items()}


def _plain(unit: StoredUnit) -> StoredUnit:
    """The unit of an MTP block with its tensors' own names."""
    tensors = (
        replace(tensor, name=tensor.name.removeprefix(f"{PREDICTION}.")) for tensor in unit.tensors
    )
    return replace(unit, tensors=tuple(tensors))


def _follows(before: _Slice, after: _Slice) -> bool:
    (unit, tensor), (next_unit, next_tensor) = before, after
    return (
        len(tensor.shape) == len(next_tensor.shape) == 2
        and tensor.shape[0] % TILE_ROWS == 0
        and tensor.shape[1:] == next_tensor.shape[1:]
        and (tensor.format, tensor.scale, tensor.hadamard)
        == (next_tensor.format, next_tensor.scale, next_tensor.hadamard)
        and next_tensor.row == tensor.row + tensor.shape[0]
        and next_unit.file == unit.file
        and tensor.nbytes == unit.nbytes
        and next_unit.offset == unit.offset + unit.nbytes
        and tensor.offset == next_tensor.offset == 0
    )


def _info(name: str, slices: tuple[_Slice, ...]) -> TensorInfo:
    last = slices[-1][1]
    shape = (last.row + last.shape[0], *last.shape[1:])
    nbytes = sum(tensor.nbytes for _, tensor in slices)
    return TensorInfo(name, shape, last.format, nbytes)
