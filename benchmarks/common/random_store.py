"""Stores of random weights: units that are made when they are read, and such a store as a folder.

No two units are the same, so that a product with the wrong one shows; but all are cut from the same
32 MB of random tiles, so that many gigabytes are made about as fast as memory copies.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.random_weights import RandomPackedCheckpoint, random_packed
from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.store.manifest import (
    MANIFEST_NAME,
    UNIT_ALIGNMENT,
    Manifest,
    Source,
    StoredUnit,
    UnitTensor,
)
from localrt.models.config import DecoderConfig
from localrt.models.registry import read_config
from localrt.models.units import list_units
from localrt.offload.reading.files import StoreFiles
from localrt.quant.formats import FORMATS
from localrt.quant.formats.tiled import TILE_ROWS, tile

_ON_DISK = "units.bin"
_WEIGHTS = "weights.safetensors"
_POOL_NBYTES = 32 << 20
_FEWEST_TILES = 61
_KEPT = 8  # units that were read last: several threads read one in pieces


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
        self._pools: dict[int, np.ndarray] = {}
        self._read = lru_cache(_KEPT)(self._content)
        self._lock = threading.Lock()
        self._disk: StoreFiles | None = None
        units = []
        for unit in list_units(checkpoint.tensors, self.decoder):
            inside, at = [], 0
            for name in unit.tensors:
                info = checkpoint.tensors[name]
                rows = unit.rows or (0, info.shape[0])
                shape = (rows[1] - rows[0], *info.shape[1:])
                tensor = UnitTensor(name, info.format, shape, at, row=rows[0])
                inside.append(tensor)
                at += -(-tensor.nbytes // 64) * 64
            size = -(-at // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
            units.append(StoredUnit(unit.name, unit.name, 0, size, "", tuple(inside)))
        self.manifest = _Manifest(tuple(units))
        self._units = {unit.name: unit for unit in units}
        tensors = [tensor for unit in units for tensor in unit.tensors]
        # Each begins with another tile.
        self._numbers = {(tensor.name, tensor.row): at for at, tensor in enumerate(tensors)}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """None are asked for."""
        return {}

    @property
    def nbytes(self) -> int:
        """Of all units."""
        return sum(unit.nbytes for unit in self.manifest.units)

    def put_on_disk(self, names: Iterable[str]) -> None:
        """These units are read from a file from now on."""
        wanted, at, units = set(names), 0, []
        with (self.path / _ON_DISK).open("wb") as file:
            for unit in self.manifest.units:
                if unit.name in wanted:
                    file.write(self._content(unit))
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
        with self._lock:  # else each of several threads would make the unit
            data = self._read(self._units[name])
        np.copyto(out, data[offset : offset + len(out)])

    def check_unchanged(self) -> None:
        """Nothing changes."""

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    def _content(self, unit: StoredUnit) -> np.ndarray:
        data = np.zeros(unit.nbytes, np.uint8)
        for tensor in unit.tensors:
            part = data[tensor.offset : tensor.offset + tensor.nbytes]
            if len(tensor.shape) == 1:
                part.view(np.float32)[:] = 1.0
                continue
            pool = self._pool(tensor.shape[1])
            tiles = part.reshape(-1, pool.shape[1])
            first, done = self._numbers[tensor.name, tensor.row] % len(pool), 0
            while done < len(tiles):
                some = pool[first : first + len(tiles) - done]
                tiles[done : done + len(some)] = some
                first, done = 0, done + len(some)
        return data

    def _pool(self, columns: int) -> np.ndarray:
        """(tiles, bytes of a tile) of matrices that are so wide."""
        if columns not in self._pools:
            tile_nbytes = TILE_ROWS * FORMATS[self.format].row_bytes(columns)
            most = max(_FEWEST_TILES, _POOL_NBYTES // tile_nbytes)
            count = min(most, max(_FEWEST_TILES, 2 * self._most_tiles(columns)))
            packed = random_packed(self.format, count * TILE_ROWS, columns)
            if self.format.startswith("int4-g") and not self.format.endswith("m"):
                # Codes 1 to 15, whose mean is zero: else each layer's rows become more alike.
                blocks = packed.data.reshape(-1, packed.format.block_bytes)
                codes = np.arange(256, dtype=np.uint8)
                codes[codes & 15 == 0] += 8
                codes[codes < 16] += 128
                blocks[:, 2:] = codes[blocks[:, 2:]]
            self._pools[columns] = tile(packed).reshape(count, tile_nbytes)
        return self._pools[columns]

    def _most_tiles(self, columns: int) -> int:
        matrices = (t for unit in self._units.values() for t in unit.tensors if len(t.shape) == 2)
        return max(-(-t.shape[0] // TILE_ROWS) for t in matrices if t.shape[1] == columns)


def write_store(
    folder: Path, architecture: str, config: Mapping[str, Any], format: str
) -> RandomStore:
    """A random store as a folder that ``localrt.load`` takes; it has no tokenizer."""
    store = RandomStore(architecture, config, format, folder)
    placed, at = [], 0
    for unit in store.manifest.units:
        placed.append(replace(unit, file=_WEIGHTS, offset=at))
        at += unit.nbytes
    for columns in {t.shape[1] for unit in placed for t in unit.tensors if len(t.shape) == 2}:
        store._pool(columns)  # before threads ask for it
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _WEIGHTS).open("wb") as file:
        file.truncate(at)
        descriptor = file.fileno()

        def write(unit: StoredUnit) -> StoredUnit:
            data = store._content(unit)
            done = 0
            while done < len(data):  # a call writes 2 GB at the most
                done += os.pwrite(descriptor, data[done:], unit.offset + done)
            return replace(unit, sha256=hashlib.sha256(data.data).hexdigest())

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            units = tuple(threads.map(write, placed))
    manifest = Manifest(
        kind="safetensors",
        architecture=architecture,
        config=dict(config),
        generation_config={},
        format=format,
        exactness="approximate",
        source=Source(folder.name, "random"),
        units=units,
    )
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return store
