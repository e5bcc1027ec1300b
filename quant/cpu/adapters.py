"""Adapters as the compiled kernels take them: bytes with scales, by numbers of matrices.

A ``Sites`` gives every matrix that is made its number, by its tensor's name; a pass gives the
kernels a table of each adapter set's changes by number. A and B have a scale for 64 columns of A
and for 16 ranks of a row of B: as exact as the activations that weights meet, and half of
bfloat16's bytes. ``quant/cpu/csrc/adapters.h`` computes ``A x`` of all rows in one go, and adds ``B
(A x)`` where a tile's products are in the cache already, also between gate and up. Where rows have
different adapters, each one's B is read beforehand in long pieces: a tile of each by turns would
wait for memory at every one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.cpu.abi import CONSTANTS, AdapterArgs, LowRankArgs, LowRankPack
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.formats.tiled import TILE_ROWS, padded_rows
from localrt.quant.ops.adapters import Adapter, AdapterTable, LowRank, adapted_rows, joined_factors
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import Batch

_COLUMNS = CONSTANTS["LOW_COLUMNS"]  # of A that share a scale
_LINE = 64  # bytes
_THREADS = 4  # that pack adapters
_RANKS = CONSTANTS["LOW_RANKS"]  # of a row of B that share one
_GROUP = 32 + 16 * _RANKS  # bytes of a tile of theirs


class Sites(dict[str, int]):
    """Numbers from 1 on, by tensors' names."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self) + 1
        return self[name]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLowRank:
    """A ``LowRank`` in about a quarter of its bytes, rounded to as many bits as activations.

    ``a`` (rank, columns), ``a_scales`` (rank, of 64 columns), ``b`` (tiles, bytes), all filled up
    and laid out as ``LowRank`` in ``quant/cpu/csrc/abi.h`` says.
    """

    a: npt.NDArray[np.int8]
    a_scales: Floats
    b: Bytes
    factors: Floats | None

    @classmethod
    def empty(
        cls,
        rank: int,
        columns: int,
        tiles: int,
        factors: Floats | None,
        memory: Bytes | None = None,
    ) -> PackedLowRank:
        """Make an empty one, at the beginning of ``memory`` if given."""
        rank, groups = _filled(rank), -(-columns // _COLUMNS)
        sizes = [rank * groups * 4, rank * groups * _COLUMNS, tiles * _tile_bytes(rank)]
        memory = np.empty(sum(sizes), np.uint8) if memory is None else memory
        scales, a, b = np.split(memory[: sum(sizes)], np.cumsum(sizes)[:-1])
        return cls(
            a.view(np.int8).reshape(rank, -1),
            scales.view(np.float32).reshape(rank, groups),
            b.reshape(tiles, -1),
            factors,
        )

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        factors = 0 if self.factors is None else self.factors.nbytes
        return self.a.nbytes + self.a_scales.nbytes + self.b.nbytes + factors

    @property
    def args(self) -> LowRankArgs:
        """As the kernels take it; valid as long as this is."""
        arrays = (self.a, self.a_scales, self.b, self.factors)
        addresses = [None if array is None else array.ctypes.data for array in arrays]
        return LowRankArgs(*addresses, len(self.a), 0)


class NativeAdapters:
    """The adapters of passes on the CPU: see ``Ops.adapters``."""

    def __init__(self, api: ctypes.CDLL, handle: int) -> None:
        self.sites = Sites()
        self.table: AdapterTable[PackedLowRank] = AdapterTable(self._packed, _joined)
        self._api, self._handle = api, handle
        self.of_rows: list[tuple[slice, Adapter[PackedLowRank]]] = []
        """The adapters of the latest pass's rows, where they have any."""
        self._told: object = None  # keeps alive what the kernels point at
        self._entries: tuple[object, ...] = ()  # tables of the latest adapter sets, for reuse

    def begin(self, batch: Batch) -> None:
        """Tell the kernels of a pass's adapters."""
        self.of_rows = adapted_rows(self.table, batch.mixes)
        if not self.of_rows:
            if self._told is not None:
                self._api.lrt_set_adapters(self._handle, AdapterArgs())
                self._told, self._entries = None, ()
            return
        mixes: dict[Adapter[PackedLowRank], int] = {}
        rows = np.full(len(batch.tokens), -1, np.int32)
        for part, adapter in self.of_rows:
            rows[part] = mixes.setdefault(adapter, len(mixes))
        table = self._table(tuple(mixes))
        args = AdapterArgs(
            rows.ctypes.data, ctypes.addressof(table), len(rows), len(self.sites) + 1
        )
        self._told = rows, table
        self._api.lrt_set_adapters(self._handle, args)

    def _table(self, mixes: tuple[Adapter[PackedLowRank], ...]) -> Any:
        """(mixes, sites)."""
        if self._entries[1:] != (mixes, len(self.sites)):
            sites = [{self.sites[name]: p for name, p in mix.matrices.items()} for mix in mixes]
            count = len(self.sites) + 1
            table = (LowRankArgs * (count * len(mixes)))()
            for index, parts in enumerate(sites):
                for site, part in parts.items():
                    table[index * count + site] = part.args
            self._entries = (table, mixes, len(self.sites))
        return self._entries[0]

    def _packed(self, matrices: Mapping[str, LowRank]) -> dict[str, PackedLowRank]:
        """Pack an adapter in one block with large pages: passes read a little of each part."""
        sizes = [_nbytes(part) for part in matrices.values()]
        memory = np.split(aligned_buffer(sum(sizes)), np.cumsum(sizes)[:-1])
        with ThreadPoolExecutor(_THREADS) as pool:
            packed = pool.map(self._pack, matrices.values(), memory)
            return dict(zip(matrices, packed, strict=True))

    def _pack(self, part: LowRank, memory: Bytes) -> PackedLowRank:
        (rank, columns), rows = part.a.shape, len(part.b)
        factors: Floats | None = None
        if part.factors is not None:
            factors = np.ones(padded_rows(rows), np.float32)
            factors[:rows] = part.factors
        packed = PackedLowRank.empty(rank, columns, _tiles(rows), factors, memory)
        a, b = (np.ascontiguousarray(values, np.float32) for values in (part.a, part.b))
        of = LowRankPack(a.ctypes.data, b.ctypes.data, rank, rows, columns)
        self._api.lrt_pack_low_rank(self._handle, of, packed.args)
        return packed


def _tiles(rows: int) -> int:
    tiles: int = padded_rows(rows) // TILE_ROWS
    return tiles


def _filled(rank: int) -> int:
    return -(-rank // 2) * 2


def _tile_bytes(rank: int) -> int:
    return 32 * -(-rank // _RANKS) + TILE_ROWS * rank


def _nbytes(part: LowRank) -> int:
    """Bytes of packed A and B, rounded up to a cache line."""
    (rank, columns), tiles = part.a.shape, _tiles(len(part.b))
    rank = _filled(rank)
    of_a = rank * -(-columns // _COLUMNS) * (_COLUMNS + 4)
    nbytes: int = -(-(of_a + tiles * _tile_bytes(rank)) // _LINE) * _LINE
    return nbytes


def _joined(parts: Sequence[tuple[PackedLowRank, float]]) -> PackedLowRank:
    """Their ranks one after the other, whole groups of each; weights go to the scales of A."""
    factors = joined_factors([(part.factors, weight) for part, weight in parts])
    first = parts[0][0]
    groups = [-(-len(part.a) // _RANKS) for part, _ in parts]
    columns, tiles = first.a.shape[1], len(first.b)
    whole = PackedLowRank.empty(sum(groups) * _RANKS, columns, tiles, factors)
    for array in (whole.a, whole.a_scales, whole.b):
        array[:] = 0
    at = 0
    for (part, weight), count in zip(parts, groups, strict=True):
        rows = slice(at * _RANKS, at * _RANKS + len(part.a))
        whole.a[rows], whole.a_scales[rows] = part.a, np.float32(weight) * part.a_scales
        whole.b[:, at * _GROUP : at * _GROUP + part.b.shape[1]] = part.b
        at += count
    return whole
