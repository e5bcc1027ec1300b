"""Matrices for the GPU kernels: tiles as in a store, or bf16 rows.

Rows are tiled as they are read, straight into the matrix on the device, without a second copy.
Formats without a kernel (f32, f16, bf16), and columns that are not whole spans, become bf16.

Tiles of E4M3 codes are unpacked to bf16 on the device: no kernel multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.adapters import CudaAdapters
from localrt.quant.cuda.device import Device
from localrt.quant.cuda.formats import is_packed
from localrt.quant.cuda.launch import arguments, launch, pointers
from localrt.quant.cuda.products import TiledMatrix
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import BFLOAT16, UINT8, Tensor, empty, upload
from localrt.quant.formats import BF16, unpack
from localrt.quant.formats.convert import bf16_bits
from localrt.quant.formats.packed import PackedTensor
from localrt.quant.formats.published import E4m3Codec
from localrt.quant.formats.tiled import (
    TILE_ROWS,
    TiledTensor,
    padded_rows,
    tile_tensor,
    untile,
    whole_tiles,
)
from localrt.quant.methods.rotation import widened


def is_e4m3_groups(block: TiledTensor) -> bool:
    """Whether a matrix has E4M3 codes in groups."""
    format_ = block.format
    return format_.name.startswith("e4m3-") and format_ == E4m3Codec(format_.block).format


_UnpackE4m3 = arguments("unpack_e4m3.cu", "UnpackE4m3")


def unpack_e4m3(block: TiledTensor, data: Tensor, out: Tensor) -> None:
    """Unpack ``block``, with tiles ``data`` (uint8), to out (rows, columns), contiguous bf16."""
    rows, columns = block.shape
    args = _UnpackE4m3(*pointers(data, out), rows, columns, block.format.block, block.scale)
    grid = (-(-columns // 64), -(-rows // TILE_ROWS), 1)
    launch(out.device, Program.of("unpack_e4m3"), grid, 16 * TILE_ROWS, args)


Tile = Callable[[PackedTensor], TiledTensor]


@dataclass(frozen=True, slots=True)
class CudaWeight:
    """Row blocks stacked: tiles, or bf16 (rows, columns). With ``hadamard`` n, inputs need the
    Hadamard rotation in blocks of n. Few input rows are read in 8 bits, or in 15 with ``fine``.

    ``adapters`` change products with the matrix; ``starts`` are the first rows of its tensors.
    """

    shape: tuple[int, int]
    parts: tuple[TiledMatrix | Tensor, ...]
    hadamard: int = 0
    fine: bool = False
    starts: Mapping[str, int] = field(default_factory=dict)
    adapters: CudaAdapters | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(p.nbytes if isinstance(p, Tensor) else p.data.nbytes for p in self.parts)


def build_weight(
    shape: tuple[int, int],
    blocks: Iterable[PackedTensor | TiledTensor],
    device: Device,
    tile: Tile = tile_tensor,
    *,
    fine: bool = False,
    adapters: CudaAdapters | None = None,
) -> CudaWeight:
    """A matrix of ``shape`` from consecutive row blocks; tiles on the device are used in place.

    Raises:
        ValueError: blocks that are not the matrix, or inputs rotated in different ways.
    """
    parts: list[TiledMatrix | Tensor] = []
    rotations: set[int] = set()
    starts: dict[str, int] = {}
    building: _TiledPart | _PlacedPart | _DensePart | None = None
    left = shape[0]
    pieces = (
        whole_tiles(named) for _, named in groupby(widened(blocks), key=lambda block: block.name)
    )
    for block in chain.from_iterable(pieces):
        rotations.add(block.hadamard if isinstance(block, TiledTensor) else 0)
        starts.setdefault(block.name, shape[0] - left)
        if building is None or not building.takes(block):
            if building is not None:
                parts.append(building.done())
            if not is_packed(block.format, shape[1]):
                building = _DensePart(block, left, device)
            elif (data := _device_data(block)) is not None:
                building = _PlacedPart(block, data)
            else:
                building = _TiledPart(block, left, device, tile)
        if block.shape[0] > left:
            raise ValueError(f"{block.name}: more rows than the matrix has")
        building.add(block)
        left -= block.shape[0]
    if building is not None:
        parts.append(building.done())
    if left:
        raise ValueError(f"blocks hold {shape[0] - left} rows, the matrix has {shape[0]}")
    if len(rotations) > 1:
        raise ValueError("stacked matrices share their input's rotation")
    rotation = rotations.pop() if rotations else 0
    return CudaWeight(shape, tuple(parts), rotation, fine, starts, adapters)


def _device_data(block: PackedTensor | TiledTensor) -> Tensor | None:
    """The tiles, if they are already on the device, as in a ring of the pipeline."""
    data: object = block.data
    return data if isinstance(block, TiledTensor) and isinstance(data, Tensor) else None


def _factors(scales: Sequence[float], device: Device) -> Tensor | None:
    """The factor of each tile's values; None if all are 1."""
    if all(scale == 1.0 for scale in scales):
        return None
    return upload(np.array(scales, np.float32), device, pool=device.persistent)


class _PlacedPart:
    """Consecutive tiles of one format on the device, used in place, so that queries, keys and
    values, or gate and up, are one product.
    """

    def __init__(self, first: PackedTensor | TiledTensor, data: Tensor) -> None:
        self._format, self._columns = first.format, first.shape[1]
        self._data = data[:0]
        self._scales: list[float] = []  # one per tile
        self._rows = 0

    def takes(self, block: PackedTensor | TiledTensor) -> bool:
        """Whether the block continues this part: its tiles must follow in the same memory."""
        last, new = self._data, _device_data(block)
        return (
            new is not None
            and block.format == self._format
            and self._rows % TILE_ROWS == 0
            and last.address + last.nbytes == new.address
            and last.block is new.block
        )

    def add(self, block: PackedTensor | TiledTensor) -> None:
        new = _device_data(block)
        assert new is not None, "the block is on the device"
        self._data = self._data.followed_by(new)
        self._scales += [block.scale] * (padded_rows(block.shape[0]) // TILE_ROWS)
        self._rows += block.shape[0]

    def done(self) -> TiledMatrix:
        factor = _factors(self._scales, self._data.device)
        return TiledMatrix(self._format.name, (self._rows, self._columns), self._data, factor)


class _TiledPart:
    """Tiles of one format, in memory allocated for all rows that may follow."""

    def __init__(
        self, first: PackedTensor | TiledTensor, most_rows: int, device: Device, tile: Tile
    ) -> None:
        self._tile = tile
        self._format = first.format
        self._columns = first.shape[1]
        self._tile_bytes = TILE_ROWS * first.format.row_bytes(self._columns)
        tiles = padded_rows(most_rows) // TILE_ROWS
        self._out = empty(
            tiles * self._tile_bytes, dtype=UINT8, device=device, pool=device.persistent
        )
        self._scales: list[float] = []  # one per tile
        self._rows = 0

    def takes(self, block: PackedTensor | TiledTensor) -> bool:
        """Whether the block continues this part: its rows must begin a tile."""
        same = block.format == self._format and _device_data(block) is None
        return same and self._rows % TILE_ROWS == 0

    def add(self, block: PackedTensor | TiledTensor) -> None:
        tiled = block if isinstance(block, TiledTensor) else self._tile(block)
        start = len(self._scales) * self._tile_bytes
        data = np.ascontiguousarray(tiled.data)
        self._out[start : start + len(data)].put(data)
        self._scales += [tiled.scale] * (len(data) // self._tile_bytes)
        self._rows += tiled.shape[0]

    def done(self) -> TiledMatrix:
        used = len(self._scales) * self._tile_bytes
        data = self._out if used == self._out.size else _shortened(self._out, used)
        factor = _factors(self._scales, data.device)
        return TiledMatrix(self._format.name, (self._rows, self._columns), data, factor)


class _DensePart:
    """bf16 rows, in memory allocated for all rows that may follow."""

    def __init__(self, first: PackedTensor | TiledTensor, most_rows: int, device: Device) -> None:
        self._out = empty(
            most_rows, first.shape[1], dtype=BFLOAT16, device=device, pool=device.persistent
        )
        self._rows = 0

    def takes(self, block: PackedTensor | TiledTensor) -> bool:
        """Whether the block continues this part."""
        return not is_packed(block.format, block.shape[1])

    def add(self, block: PackedTensor | TiledTensor) -> None:
        rows, data = block.shape[0], _device_data(block)
        out = self._out[self._rows : self._rows + rows]
        if isinstance(block, TiledTensor) and data is not None and is_e4m3_groups(block):
            unpack_e4m3(block, data, out)
        else:
            out.put(_bf16_rows(block, data))
        self._rows += rows

    def done(self) -> Tensor:
        return self._out if self._rows == len(self._out) else _shortened(self._out, self._rows)


def _shortened(memory: Tensor, count: int) -> Tensor:
    """A copy of the first ``count`` rows."""
    shape = (count, *memory.shape[1:])
    out = empty(*shape, dtype=memory.dtype, device=memory.device, pool=memory.device.persistent)
    return out.put(memory[:count])


def _bf16_rows(block: PackedTensor | TiledTensor, data: Tensor | None) -> npt.NDArray[np.uint16]:
    """A block as bf16 bits on the host; ``data`` has its bytes if they are on the device."""
    if isinstance(block, TiledTensor):
        block = untile(block if data is None else replace(block, data=data.to_host()))
    if block.format == BF16 and block.scale == 1.0:
        return block.data.view("<u2").reshape(block.shape)
    return bf16_bits(unpack(block))


# Weight types of the steps, for CUDA; instances are of the generic classes.
