"""A store's unit in memory: its tensors where they lie, and whether they are what was packed.

Nothing is copied: what is made of the tensors points into the unit's bytes, which must stay as they
are for as long as that is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.base import TensorInfo, WeightBlock
from localrt.models.checkpoints.store.manifest import StoredUnit, UnitTensor
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.packed import Bytes
from localrt.quant.formats.tiled import TiledTensor

Mend: TypeAlias = Callable[[StoredUnit, Bytes], None]


class UnitMemory:
    """A unit's tensors in ``data``, its whole range. See ``TensorSource``.

    ``vectors`` are those of a unit whose ``data`` lies where the CPU cannot read it.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        unit: StoredUnit,
        data: Any,
        vectors: Mapping[str, PackedTensor] | None = None,
    ) -> None:
        self.path, self.architecture = path, architecture
        self._tensors = {tensor.name: tensor for tensor in unit.tensors}
        self._data = data
        self._vectors = vectors or {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The unit's tensors; a slice of a matrix has the slice's rows."""
        return {
            tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.format, tensor.nbytes)
            for tensor in self._tensors.values()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """A whole vector."""
        tensor = self._tensors[name]
        if len(tensor.shape) != 1 or start or stop not in (None, 1):
            raise ValueError(f"{name!r} is no vector: its rows are in tiles")
        if name in self._vectors:
            return self._vectors[name]
        return PackedTensor(name, tensor.format, tensor.shape, self._bytes(tensor).reshape(1, -1))

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        """A matrix as it lies."""
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:
            yield self.read(name)
            return
        shape = (tensor.shape[0], tensor.shape[1])
        data = self._bytes(tensor)
        yield TiledTensor(name, tensor.format, shape, data, tensor.scale, tensor.hadamard)

    def vectors(self) -> dict[str, PackedTensor]:
        """Copies of all vectors."""
        return {
            name: replace(packed, data=packed.data.copy())
            for name, tensor in self._tensors.items()
            if len(tensor.shape) == 1
            for packed in (self.read(name),)
        }

    def _bytes(self, tensor: UnitTensor) -> Any:
        return self._data[tensor.offset : tensor.offset + tensor.nbytes]


class Verifier:
    """Compares each unit of the store at ``path`` with the SHA-256 in its manifest, once.

    ``mend`` makes a damaged unit again, in its memory and its file; it raises CheckpointError where
    that cannot be done.
    """

    def __init__(self, path: Path, *, enabled: bool = True, mend: Mend | None = None) -> None:
        self._path = path
        self._enabled = enabled
        self._mend = mend
        self._seen: set[str] = set()

    def __call__(self, unit: StoredUnit, data: Bytes) -> None:
        """Raises CheckpointError when the unit is damaged, and stays so."""
        if not self._enabled or unit.name in self._seen:
            return
        if not unit.is_whole(data):
            if self._mend is None:
                raise CheckpointError(
                    f"{self._path}: unit {unit.name} in {unit.file} is damaged (its SHA-256 is not "
                    "that of the manifest): copy or quantize the model again"
                )
            self._mend(unit, data)
        self._seen.add(unit.name)
