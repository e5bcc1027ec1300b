"""A store of random weights that is not there: any number of layers, made when they are read.

Every unit of a kind has the same bytes, so that many gigabytes are filled as fast as memory copies.
Some units can lie in a real file, to be read from a real disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.random_weights import RandomPackedCheckpoint, random_packed
from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.store_manifest import UNIT_ALIGNMENT, StoredUnit, UnitTensor
from localrt.models.config import DecoderConfig
from localrt.models.registry import read_config
from localrt.models.units import list_units
from localrt.offload.reading.files import StoreFiles
from localrt.quant.formats.tiled import TILE_ROWS, tile_tensor

__all__ = ["RandomStore"]

_ON_DISK = "units.bin"


@dataclass(frozen=True)
class _Manifest:
    units: tuple[StoredUnit, ...]


@dataclass
class RandomStore:
    """What ``open_pipeline`` needs of a ``StoreCheckpoint``, and of its files.

    ``folder`` takes the file of what ``put_on_disk`` names.
    """

    architecture: str
    config: Mapping[str, Any]
    format: str
    path: Path
    manifest: _Manifest = field(init=False)
    decoder: DecoderConfig = field(init=False)

    def __post_init__(self) -> None:
        checkpoint = RandomPackedCheckpoint(self.architecture, self.config, self.format)
        self.decoder = read_config(checkpoint)
        self._bytes: dict[tuple[Any, ...], np.ndarray] = {}
        self._tiles: dict[int, np.ndarray] = {}
        self._of_unit: dict[str, np.ndarray] = {}
        self._disk: StoreFiles | None = None
        units = []
        for unit in list_units(checkpoint.tensors, self.decoder):
            tensors, at = [], 0
            for name in unit.tensors:
                info = checkpoint.tensors[name]
                rows = unit.rows or (0, info.shape[0])
                shape = (rows[1] - rows[0], *info.shape[1:])
                tensor = UnitTensor(name, info.format, shape, at, row=rows[0])
                tensors.append(tensor)
                at += -(-tensor.nbytes // 64) * 64
            size = -(-at // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
            stored = StoredUnit(unit.name, unit.name, 0, size, "", tuple(tensors))
            units.append(stored)
            self._of_unit[unit.name] = self._content(stored)
        self.manifest = _Manifest(tuple(units))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """None are asked for."""
        return {}

    def put_on_disk(self, names: Iterable[str]) -> None:
        """These units are read from a file from now on."""
        wanted, at, units = set(names), 0, []
        with (self.path / _ON_DISK).open("wb") as file:
            for unit in self.manifest.units:
                if unit.name in wanted:
                    file.write(self._of_unit[unit.name])
                    unit = replace(unit, file=_ON_DISK, offset=at)
                    at += unit.nbytes
                units.append(unit)
        self.manifest = _Manifest(tuple(units))
        self._disk = StoreFiles(self.path, [_ON_DISK], direct=True)

    # -- see ``StoreFiles`` ------------------------------------------------------------------------

    def read_into(self, name: str, offset: int, out: np.ndarray) -> None:
        if name == _ON_DISK and self._disk is not None:
            self._disk.read_into(name, offset, out)
            return
        np.copyto(out, self._of_unit[name][offset : offset + len(out)])

    def check_unchanged(self) -> None:
        """Nothing changes."""

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    def _content(self, unit: StoredUnit) -> np.ndarray:
        kind = tuple((t.shape, t.offset) for t in unit.tensors)
        if kind not in self._bytes:
            data = np.zeros(unit.nbytes, np.uint8)
            for tensor in unit.tensors:
                part = data[tensor.offset : tensor.offset + tensor.nbytes]
                if len(tensor.shape) == 1:
                    part.view(np.float32)[:] = 1.0
                else:
                    tile = self._tile(tensor.shape[1])
                    part.reshape(-1, len(tile))[:] = tile
            self._bytes[kind] = data
        return self._bytes[kind]

    def _tile(self, columns: int) -> np.ndarray:
        if columns not in self._tiles:
            self._tiles[columns] = tile_tensor(random_packed(self.format, TILE_ROWS, columns)).data
        return self._tiles[columns].reshape(-1)
