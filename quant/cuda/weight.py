"""Matrices as the GPU kernels take them: the tiles of a store as they are, or bf16 rows.

Rows are tiled as they are read, straight into the matrix on the device: it is never held twice.
Formats without tiles that the kernels read (f32, f16, bf16), and columns that are not whole spans,
become bf16.

Tiles of E4M3 codes as bf16, on the device: there is no kernel that multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from localrt.quant.cuda.adapters import CudaAdapters
from localrt.quant.cuda.formats import is_packed
from localrt.quant.cuda.products import TiledMatrix
from localrt.quant.formats import unpack
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
    """Whether a matrix is E4M3 codes in groups."""
    format_ = block.format
    return format_.name.startswith("e4m3-") and format_ == E4m3Codec(format_.block).format


def unpack_e4m3(block: TiledTensor, data: Tensor) -> Tensor:
    """``block`` (rows, columns) in bf16, from its tiles in ``data``, uint8."""
    rows, columns = block.shape
    group = block.format.block
    spans = data.view(-1, columns // group, TILE_ROWS * block.format.block_bytes)
    head = 4 * TILE_ROWS
    scales = spans[..., :head].contiguous().view(torch.float32)  # (tiles, spans, 16)
    codes = spans[..., head:].contiguous().view(torch.float8_e4m3fn)
    codes = codes.view(*scales.shape[:2], group // 4, TILE_ROWS, 4)
    values = codes.float() * (scales * block.scale)[:, :, None, :, None]
    whole = values.permute(0, 3, 1, 2, 4).reshape(-1, columns)  # tiles, rows of one, columns
    return whole[:rows].to(torch.bfloat16)


Tile = Callable[[PackedTensor], TiledTensor]


@dataclass(frozen=True, slots=True)
class CudaWeight:
    """Row blocks stacked: tiles, or bf16 (rows, columns). With ``hadamard`` n, inputs need the
    block Hadamard rotation of n. Few inputs are read in 8 bits, or in 15 with ``fine``.

    ``adapters`` change products with its tensors, whose rows begin at ``starts``.
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
    device: torch.device,
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
    building: _TiledPart | _DensePart | None = None
    left = shape[0]
    pieces = (
        whole_tiles(named) for _, named in groupby(widened(blocks), key=lambda block: block.name)
    )
    for block in chain.from_iterable(pieces):
        rotations.add(block.hadamard if isinstance(block, TiledTensor) else 0)
        starts.setdefault(block.name, shape[0] - left)
        data: object = block.data
        if isinstance(block, TiledTensor) and isinstance(data, Tensor):
            _join(parts, _on_device(block, data))
            left -= block.shape[0]
            continue
        if building is None or not building.takes(block):
            if building is not None:
                parts.append(building.done())
            if is_packed(block.format, shape[1]):
                building = _TiledPart(block, left, device, tile)
            else:
                building = _DensePart(block, left, device)
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


def _on_device(block: TiledTensor, data: Tensor) -> TiledMatrix | Tensor:
    """Tiles that lie on the device already, as a ring of the pipeline holds them: used in place."""
    if is_e4m3_groups(block):
        return unpack_e4m3(block, data)
    if not is_packed(block.format, block.shape[1]):
        plain = replace(block, data=data.cpu().numpy())
        return torch.from_numpy(unpack(untile(plain))).to(data.device, torch.bfloat16)
    factor = None
    if block.scale != 1.0:
        tiles = padded_rows(block.shape[0]) // TILE_ROWS
        factor = torch.full((tiles,), block.scale, dtype=torch.float32, device=data.device)
    return TiledMatrix(block.format.name, block.shape, data, factor)


def _join(parts: list[TiledMatrix | Tensor], new: TiledMatrix | Tensor) -> None:
    """Add a part; where its tiles follow the last part's in memory the two are one, and one product
    of the kernels: the queries, keys and values of a unit, a gate and what it lets through.
    """
    last = parts[-1] if parts else None
    if (
        not isinstance(last, TiledMatrix)
        or not isinstance(new, TiledMatrix)
        or last.format != new.format
    ):
        parts.append(new)
        return
    follows = last.data.data_ptr() + last.data.nbytes == new.data.data_ptr()
    same = last.data.untyped_storage().data_ptr() == new.data.untyped_storage().data_ptr()
    if not (follows and same) or last.shape[0] % TILE_ROWS:
        parts.append(new)
        return
    data = last.data.as_strided((last.data.numel() + new.data.numel(),), (1,))
    factor = None
    if last.factor is not None or new.factor is not None:
        factor = torch.cat([_factor(last), _factor(new)])
    shape = (last.shape[0] + new.shape[0], last.shape[1])
    parts[-1] = TiledMatrix(last.format, shape, data, factor)


def _factor(tiles: TiledMatrix) -> Tensor:
    if tiles.factor is not None:
        return tiles.factor
    return torch.ones(tiles.count, dtype=torch.float32, device=tiles.data.device)


class _TiledPart:
    """Tiles of one format as far as they have come, in room for all rows that may follow."""

    def __init__(
        self,
        first: PackedTensor | TiledTensor,
        most_rows: int,
        device: torch.device,
        tile: Tile,
    ) -> None:
        self._tile = tile
        self._format = first.format
        self._columns = first.shape[1]
        self._tile_bytes = TILE_ROWS * first.format.row_bytes(self._columns)
        tiles = padded_rows(most_rows) // TILE_ROWS
        self._out = torch.empty(tiles * self._tile_bytes, dtype=torch.uint8, device=device)
        self._scales: list[float] = []  # one per tile
        self._rows = 0

    def takes(self, block: PackedTensor | TiledTensor) -> bool:
        """Whether the block continues this part: its rows must begin a tile."""
        return block.format == self._format and self._rows % TILE_ROWS == 0

    def add(self, block: PackedTensor | TiledTensor) -> None:
        tiled = block if isinstance(block, TiledTensor) else self._tile(block)
        start = len(self._scales) * self._tile_bytes
        data = torch.from_numpy(np.ascontiguousarray(tiled.data))
        self._out[start : start + len(data)] = data
        self._scales += [tiled.scale] * (len(data) // self._tile_bytes)
        self._rows += tiled.shape[0]

    def done(self) -> TiledMatrix:
        used = len(self._scales) * self._tile_bytes
        data = self._out if used == self._out.numel() else self._out[:used].clone()
        factor = None
        if any(scale != 1.0 for scale in self._scales):
            factor = torch.tensor(self._scales, dtype=torch.float32, device=data.device)
        shape = (self._rows, self._columns)
        return TiledMatrix(self._format.name, shape, data, factor)


class _DensePart:
    """bf16 rows as far as they have come."""

    def __init__(
        self, first: PackedTensor | TiledTensor, most_rows: int, device: torch.device
    ) -> None:
        self._out = torch.empty(most_rows, first.shape[1], dtype=torch.bfloat16, device=device)
        self._rows = 0

    def takes(self, block: PackedTensor | TiledTensor) -> bool:
        """Whether the block continues this part."""
        return not is_packed(block.format, block.shape[1])

    def add(self, block: PackedTensor | TiledTensor) -> None:
        plain = untile(block) if isinstance(block, TiledTensor) else block
        rows = plain.shape[0]
        self._out[self._rows : self._rows + rows] = torch.from_numpy(unpack(plain))
        self._rows += rows

    def done(self) -> Tensor:
        return self._out if self._rows == len(self._out) else self._out[: self._rows].clone()
