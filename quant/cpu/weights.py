"""Weights as the CPU kernels take them: rows put into tiles once, or a store's tiles as they are.

Rows are tiled block by block as they are read: a matrix is in memory once, and a block beside it.
A table of experts is an array of C structs that stays where it is: putting an expert writes one of
them. It knows the compiled library, not where blocks and experts come from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, TypeVar
from weakref import ref

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.quant.cpu.abi import (
    SCORINGS,
    ExpertArgs,
    ExpertParts,
    Matrix,
    RouteArgs,
    Stack,
    layout_of,
)
from localrt.quant.formats.catalog import FORMATS
from localrt.quant.formats.codebook import CODEBOOKS
from localrt.quant.formats.packed import Bytes, Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor, padded_rows, tile, tile_span, whole_tiles
from localrt.quant.methods.rotation import widened
from localrt.quant.ops.arrays import Regions
from localrt.quant.ops.experts import ExpertSpec, ExpertWeights, RouterSpec, RouterWeights


@dataclass(slots=True)
class NativeWeight:
    """Tiled matrices stacked by rows. ``tensors`` keep alive what ``stack`` points at."""

    stack: Stack
    parts: ctypes.Array[Matrix]
    tensors: list[TiledTensor]
    call: Any = None  # see ``kept_args``

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles."""
        return sum(tensor.nbytes for tensor in self.tensors)


class NativeVector:
    """A norm weight or bias and its address: asking numpy again costs half a microsecond."""

    __slots__ = ("address", "values")

    def __init__(self, values: npt.NDArray[np.float32]) -> None:
        self.values = values
        self.address: int = values.ctypes.data


def address_of(vector: NativeVector | None) -> int | None:
    """The address of a vector; None if there is none."""
    return None if vector is None else vector.address


def locate(array: npt.NDArray[np.generic]) -> int:
    """An array's address, faster than from numpy if it is writable."""
    buffer: Any = array
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):
        address: int = array.ctypes.data
        return address


_Weights = TypeVar("_Weights")
_Spec = TypeVar("_Spec")
_Args = TypeVar("_Args", bound=ctypes.Structure)


def fill_args(kind: type[_Args], /, *sources: object, **more: Any) -> _Args:
    """Arguments of a kernel: ``more``, and what ``sources`` have by the names of its fields.

    A matrix's stack, a vector's address, or a number; 0 for what is None.
    """
    args = kind(**more)
    for source in sources:
        for name, field, *_ in kind._fields_:
            found = None if name in more else getattr(source, name, None)
            if field is Stack and isinstance(found, NativeWeight):
                setattr(args, name, found.stack)
            elif field is ctypes.c_void_p and isinstance(found, NativeVector):
                setattr(args, name, found.address)
            elif field in (ctypes.c_int32, ctypes.c_float) and isinstance(found, int | float):
                setattr(args, name, found)
    return args


def kept_args(
    weight: NativeWeight, weights: _Weights, spec: _Spec, make: Callable[[_Weights, _Spec], _Args]
) -> _Args:
    """The arguments that ``make`` gives for ``weights`` and ``spec``, made once.

    ``weight``, one of the matrices, keeps them for the next call. It keeps no reference to
    ``weights``: evicted ones are freed at once.
    """
    kept = weight.call
    if kept is None or kept[0]() is not weights or kept[1] is not spec:
        kept = weight.call = ref(weights), spec, make(weights, spec)
    args: _Args = kept[2]
    return args


class Tiler:
    """Puts packed rows into tiles, with the compiled library if it knows the format."""

    def __init__(self, api: ctypes.CDLL, handle: int, sites: Mapping[str, int]) -> None:
        self._api = api
        self._handle = handle
        self.sites = sites  # matrices' numbers, by their tensors' names
        self.memory = Regions()

    def know(self, format_: Format) -> None:
        """Give the library the codebook that products with a format's tiles need, once."""
        if format_.name in CODEBOOKS:
            _set_codebook(self._api, format_.name)

    def tile(self, tensor: PackedTensor, *, hadamard: int = 0) -> TiledTensor:
        """A whole matrix in tiles."""
        rows, cols = tensor.shape
        out = np.empty(padded_rows(rows) * tensor.format.row_bytes(cols), np.uint8)
        self.put(tensor, out)
        return TiledTensor(tensor.name, tensor.format, (rows, cols), out, tensor.scale, hadamard)

    def put(self, tensor: PackedTensor, out: Bytes) -> None:
        """Write the tiles of ``tensor`` to ``out``, with room for its rows rounded up to 16."""
        format_ = tensor.format
        if format_.ggml_type is None:
            out[:] = tile(tensor)
            return
        data, (rows, cols) = np.ascontiguousarray(tensor.data), tensor.shape
        kind, size, nbytes = format_.ggml_type, format_.block, format_.block_bytes
        self._api.lrt_tile(
            self._handle, kind, size, nbytes, data.ctypes.data, rows, cols, out.ctypes.data
        )


@cache
def _set_codebook(api: ctypes.CDLL, name: str) -> None:
    codes = CODEBOOKS[name].codes
    api.lrt_set_codebook(layout_of(FORMATS[name]), *codes.shape, codes.ctypes.data)


def build_weight(
    tiler: Tiler, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
) -> NativeWeight:
    """A matrix of ``shape`` from consecutive row blocks; blocks of one name become one part.

    Raises:
        OptionError: a format, or columns, that the kernels do not know.
        ValueError: blocks that are not the matrix, or inputs rotated in different ways.
    """
    tensors: list[TiledTensor] = []
    for _, named in groupby(widened(blocks), key=lambda block: block.name):
        building: _Building | None = None
        for piece in whole_tiles(named):
            _require_known(piece.name, piece.format, shape[1])
            if isinstance(piece, TiledTensor):
                tensors.append(piece)
                continue
            if building is None:
                building = _Building(tiler, piece, shape[0] - sum(t.shape[0] for t in tensors))
            building.add(piece)
        if building is not None:
            tensors.append(building.done())
    total = sum(tensor.shape[0] for tensor in tensors)
    if total != shape[0]:
        raise ValueError(f"blocks hold {total} rows, the matrix has {shape[0]}")
    rotations = {tensor.hadamard for tensor in tensors}
    if len(rotations) > 1:
        raise ValueError(f"{tensors[0].name}: stacked matrices share their input's rotation")
    for tensor in tensors:
        tiler.know(tensor.format)
    parts = (Matrix * len(tensors))(*(_matrix(t, tiler.sites[t.name]) for t in tensors))
    hadamard = rotations.pop() if rotations else 0
    stack = Stack(ctypes.addressof(parts), len(tensors), shape[0], shape[1], hadamard)
    return NativeWeight(stack, parts, tensors)


class _Building:
    """One tensor's tiles as far as its rows have come."""

    def __init__(self, tiler: Tiler, first: PackedTensor, most_rows: int) -> None:
        self._tiler = tiler
        self._first = first
        self._row_bytes = first.format.row_bytes(first.shape[1])
        # Room for all rows that may follow; ``done`` frees what was not needed.
        self._out = tiler.memory.take(padded_rows(max(most_rows, 0)) * self._row_bytes)
        self._rows = 0

    def add(self, piece: PackedTensor) -> None:
        start = self._rows * self._row_bytes
        stop = start + padded_rows(piece.shape[0]) * self._row_bytes
        if stop > self._out.size:
            raise ValueError(f"{piece.name}: more rows than the matrix has")
        self._tiler.put(piece, self._out[start:stop])
        self._rows += piece.shape[0]

    def done(self) -> TiledTensor:
        first = self._first
        out = self._tiler.memory.cut(self._out, padded_rows(self._rows) * self._row_bytes)
        shape = (self._rows, first.shape[1])
        return TiledTensor(first.name, first.format, shape, out, first.scale)


def _require_known(name: str, format_: Format, cols: int) -> None:
    if layout_of(format_) is None:
        raise OptionError(f"{name}: the CPU kernels do not know {format_.name} yet")
    if cols % tile_span(format_):
        raise OptionError(
            f"{name}: {format_.name} needs columns that are a multiple of {tile_span(format_)} on "
            f"the CPU kernels, not {cols}: use format 'f32', or quantize to another format"
        )


def _matrix(tensor: TiledTensor, site: int) -> Matrix:
    layout = layout_of(tensor.format)
    rows, cols = tensor.shape
    span = tile_span(tensor.format)
    return Matrix(tensor.data.ctypes.data, layout, rows, cols, span, tensor.scale, site)


class NativeExpertTable:
    """See ``ExpertTable``. All experts of a table have one shape, but any formats."""

    sharable = False

    def __init__(self, count: int) -> None:
        self._parts = (ExpertParts * count)()
        self._weights: list[ExpertWeights | None] = [None] * count
        self._shape: tuple[int, int, int] | None = None
        self.args = ExpertArgs(table=ctypes.addressof(self._parts), count=count)

    @property
    def capturable(self) -> bool:
        return None not in self._weights

    def takes(self, spec: ExpertSpec) -> bool:
        """Whether the experts have the matrices that ``spec`` computes with."""
        if self._shape is None:
            return True
        _, inner, rows = self._shape
        return rows == (2 if spec.gated else 1) * inner

    def put(self, expert: int, weights: ExpertWeights) -> None:
        """Point at an expert's weights, which stay where they are.

        Raises:
            ValueError: there is no such number, or shapes that do not fit.
        """
        if not 0 <= expert < len(self._weights):
            raise ValueError(f"expert {expert} of {len(self._weights)} does not exist")
        gate_up, down = weights.gate_up.stack, weights.down.stack
        self._require_fit(expert, weights)
        parts = self._parts[expert]
        parts.down = down
        parts.gate_up_bias = address_of(weights.gate_up_bias)
        parts.down_bias = address_of(weights.down_bias)
        parts.gate_up = gate_up
        self._weights[expert] = weights

    def drop(self, expert: int) -> None:
        self._parts[expert].gate_up.count = 0
        self._weights[expert] = None

    def _require_fit(self, expert: int, weights: ExpertWeights) -> None:
        gate_up, down = weights.gate_up.stack, weights.down.stack
        hidden, inner = down.rows, down.cols
        if gate_up.rows not in (inner, 2 * inner) or gate_up.cols != hidden:
            raise ValueError(
                f"expert {expert}: gate and up are {gate_up.rows} x {gate_up.cols}, "
                f"down is {hidden} x {inner}"
            )
        for bias, size in ((weights.gate_up_bias, gate_up.rows), (weights.down_bias, hidden)):
            if bias is not None and bias.values.size != size:
                raise ValueError(f"expert {expert}: a bias has {bias.values.size} of {size} values")
        shape = (hidden, inner, gate_up.rows)
        if self._shape is None:
            self._shape = shape
        elif self._shape != shape:
            raise ValueError(f"expert {expert} is {hidden} x {inner}, others are {self._shape[:2]}")


def route_args(weights: RouterWeights, spec: RouterSpec) -> RouteArgs:
    """A router's constant arguments."""
    return fill_args(RouteArgs, weights, spec, scoring=SCORINGS[spec.scoring])
