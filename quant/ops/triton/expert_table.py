"""A layer's experts on a card, and where: what a launch over many of them needs to know.

Experts of one kind differ in addresses alone, and are computed together; an expert of no kind
(bf16, parts in several formats) has products of its own. It knows weights, not rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from localrt.quant.ops.experts import ExpertWeights
from localrt.quant.ops.torch.experts import TorchExpertTable
from localrt.quant.ops.triton.formats import TritonLayout
from localrt.quant.ops.triton.grouped import ADDRESSES, Side
from localrt.quant.ops.triton.linear import Tiles
from localrt.quant.ops.triton.weight import TritonWeight

__all__ = ["ExpertKind", "TritonExpertTable"]

_ALIGNED = 16  # bytes: what the kernels' widest loads need


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What experts of one launch share. ``rotated`` are Hadamard blocks, of x and of inner rows."""

    gate_up: Side
    down: Side
    rotated: tuple[int, int]


class TritonExpertTable(TorchExpertTable):
    """See ``ExpertTable``. ``places[expert]`` are the addresses that a plan's blocks begin with."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.kinds: list[ExpertKind] = []  # those that were seen
        self.kind_of = np.full(count, -1, np.int64)  # -1: none
        self.places: npt.NDArray[np.int64] = np.zeros((count, ADDRESSES), np.int64)

    def put(self, expert: int, weights: ExpertWeights) -> None:
        """Hold it."""
        super().put(expert, weights)
        described = _describe(weights)
        if described is None:
            self.kind_of[expert] = -1
            return
        kind, self.places[expert] = described
        if kind not in self.kinds:
            self.kinds.append(kind)
        self.kind_of[expert] = self.kinds.index(kind)

    def drop(self, expert: int) -> None:
        """Forget it."""
        super().drop(expert)
        self.kind_of[expert] = -1


def _describe(weights: ExpertWeights) -> tuple[ExpertKind, list[int]] | None:
    """An expert's kind and addresses; None where the grouped kernels cannot compute it."""
    both = _gate_and_up(weights.gate_up)
    down = weights.down.parts[0]
    if both is None or len(weights.down.parts) != 1 or not isinstance(down, Tiles):
        return None
    (gate, gate_factor), (up, up_factor), layout = both
    biases = weights.gate_up_bias, weights.down_bias
    kind = ExpertKind(
        _side(weights.gate_up, layout, 2, gate_factor, biases[0]),
        _side(weights.down, down.layout, 1, _address(down.factor), biases[1]),
        (weights.gate_up.hadamard, weights.down.hadamard),
    )
    factors = [gate_factor, up_factor, _address(down.factor)]
    places = [gate, up, _address(down.w8), *factors, *map(_address, biases)]
    return None if any(place % _ALIGNED for place in places[:3]) else (kind, places)


def _gate_and_up(
    weight: TritonWeight,
) -> tuple[tuple[int, int], tuple[int, int], TritonLayout] | None:
    """Addresses of gate's tiles and factors, of up's, and their layout."""
    tiles = [part for part in weight.parts if isinstance(part, Tiles)]
    inner, columns = weight.shape[0] // 2, weight.shape[1]
    first = tiles[0] if tiles else None
    if first is None or len(tiles) != len(weight.parts):
        return None
    if len(tiles) == 1 and inner % 16 == 0:
        at, factor = first.w8.data_ptr(), _address(first.factor)
        up = at + inner // 16 * first.layout.tile_bytes(columns)
        return (at, factor), (up, factor and factor + inner // 16 * 4), first.layout
    if len(tiles) == 2 and tiles[1].shape[0] == inner and tiles[1].layout == first.layout:
        ends = [(part.w8.data_ptr(), _address(part.factor)) for part in tiles]
        if bool(ends[0][1]) == bool(ends[1][1]):
            return ends[0], ends[1], first.layout
    return None


def _side(
    weight: TritonWeight, layout: TritonLayout, stacked: int, factor: int, bias: Tensor | None
) -> Side:
    rows, columns = weight.shape
    return Side(layout, rows // stacked, columns, factor != 0, bias is not None)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
