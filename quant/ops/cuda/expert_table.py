"""A layer's experts on a card, and where: what a launch over many of them needs to know.

Experts of one kind differ in addresses alone, and are computed together; an expert of no kind
(bf16, parts in several formats) has products of its own. It knows weights, not rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.ops.cuda.kernels.grouped import ADDRESSES, MOST_EXPERTS, Side, write_entries
from localrt.quant.ops.cuda.kernels.products import TiledMatrix
from localrt.quant.ops.cuda.weight import CudaWeight
from localrt.quant.ops.experts import ExpertWeights
from localrt.quant.ops.torch.experts import TorchExpertTable

_ALIGNED = 16  # bytes: what the kernels' widest loads need


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What experts of one launch share. ``rotated`` are Hadamard blocks, of x and of inner rows;
    ``fine`` as in ``CudaWeight``.
    """

    gate_up: Side
    down: Side
    rotated: tuple[int, int]
    fine: bool


class CudaExpertTable(TorchExpertTable):
    """See ``ExpertTable``. ``kind_of[expert]`` is the number of its kind, or -1."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.kinds: list[ExpertKind] = []  # those that were seen
        self.kind_of = np.full(count, -1, np.int64)
        self._places: npt.NDArray[np.int64] = np.zeros((count, ADDRESSES), np.int64)
        self._moved = np.zeros(count, np.bool_)  # since the card's entries were written
        self._entries: Tensor | None = None

    @property
    def hostless(self) -> bool:  # type: ignore[override]
        return bool((self.kind_of >= 0).all())

    def put(self, expert: int, weights: ExpertWeights) -> None:
        """Hold it."""
        super().put(expert, weights)
        described = _describe(weights) if len(self.kind_of) <= MOST_EXPERTS else None
        if described is None:
            self.kind_of[expert] = -1
            return
        kind, self._places[expert] = described
        self._moved[expert] = True
        if kind not in self.kinds:
            self.kinds.append(kind)
        self.kind_of[expert] = self.kinds.index(kind)

    def drop(self, expert: int) -> None:
        """Forget it."""
        super().drop(expert)
        self.kind_of[expert] = -1

    def entries(self, device: torch.device) -> Tensor:
        """(E, ADDRESSES) int64 on the device: where experts lie, for kernels that start now."""
        if self._entries is None:
            self._entries = torch.zeros(self._places.shape, dtype=torch.int64, device=device)
        if self._moved.any():
            moved = self._moved.nonzero()[0]
            write_entries(self._entries, moved, self._places[moved])
            self._moved[:] = False
        return self._entries


def _describe(weights: ExpertWeights) -> tuple[ExpertKind, list[int]] | None:
    """An expert's kind and addresses; None where the grouped kernels cannot compute it."""
    inner = weights.down.shape[1]
    both = _gate_and_up(weights.gate_up, inner)
    down = weights.down.parts[0]
    if both is None or len(weights.down.parts) != 1 or not isinstance(down, TiledMatrix):
        return None
    (gate, gate_factor), (up, up_factor), format_ = both
    biases = weights.gate_up_bias, weights.down_bias
    kind = ExpertKind(
        Side(format_, inner, weights.gate_up.shape[1]),
        Side(down.format, *weights.down.shape),
        (weights.gate_up.hadamard, weights.down.hadamard),
        weights.gate_up.fine,
    )
    factors = [gate_factor, up_factor, _address(down.factor)]
    places = [gate, up, _address(down.data), *factors, *map(_address, biases)]
    return None if any(place % _ALIGNED for place in places[:3]) else (kind, places)


def _gate_and_up(
    weight: CudaWeight, inner: int
) -> tuple[tuple[int, int], tuple[int, int], str] | None:
    """Addresses of gate's tiles and factors, of up's, and their format; up is in the place of a
    gate that there is not.
    """
    tiles = [part for part in weight.parts if isinstance(part, TiledMatrix)]
    first = tiles[0] if tiles else None
    if first is None or len(tiles) != len(weight.parts):
        return None
    at, factor = first.data.data_ptr(), _address(first.factor)
    if len(tiles) == 1 and weight.shape[0] == inner:
        return (at, factor), (0, 0), first.format
    if len(tiles) == 1 and inner % 16 == 0:
        up = at + inner // 16 * first.tile_bytes
        return (at, factor), (up, factor and factor + inner // 16 * 4), first.format
    if len(tiles) == 2 and tiles[1].shape[0] == inner and tiles[1].format == first.format:
        return (at, factor), (tiles[1].data.data_ptr(), _address(tiles[1].factor)), first.format
    return None


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
