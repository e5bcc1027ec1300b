"""The steps of a mixture of experts on a card: the router's choice, experts of a kind at once.

The card chooses, and its kernels find by themselves which rows an expert sees: they are started
before the host knows. All experts of a kind are two launches (``quant/cuda/kernels/grouped.py``).
Others are products of their own, as a dense MLP has them, and the host has to wait for the choice.

A layer's experts on a card, and where: what a launch over many of them needs to know.

Experts of one kind differ in addresses alone, and are computed together; an expert of no kind
(bf16, parts in several formats) has products of its own. It knows weights, not rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.cuda.kernels.grouped import (
    ADDRESSES,
    Plan,
    Side,
    grouped_down,
    grouped_gate_up,
    plan_slots,
    write_entries,
)
from localrt.quant.cuda.kernels.products import TiledMatrix, quantize
from localrt.quant.cuda.kernels.routing import MOST_EXPERTS, choose, router_logits
from localrt.quant.cuda.kernels.steps import rotate_blocks
from localrt.quant.cuda.linear import linear
from localrt.quant.cuda.routing import CudaRouting, on_card
from localrt.quant.cuda.weight import CudaWeight
from localrt.quant.ops.experts import ExpertSpec, ExpertWeights, RouterSpec, RouterWeights, Routing
from localrt.quant.reference.experts import TorchExpertTable, route, run_each

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


def route_rows(
    normed: Tensor,
    rows: Tensor,
    weights: RouterWeights,
    spec: RouterSpec,
) -> Routing:
    """The experts of normed rows (R, D), float32; ``rows`` are the same in bf16."""
    gate: Any = weights.gate
    if gate.hadamard or not all(isinstance(part, Tensor) for part in gate.parts):
        logits = linear(rows, gate, dtype=torch.float32)
    else:
        shape = (len(normed), gate.shape[0])
        logits = torch.empty(shape, dtype=torch.float32, device=normed.device)
        first = 0
        for part in gate.parts:
            stop = first + len(part)
            router_logits(normed, part, logits[:, first:stop])
            first = stop
    if spec.count > MOST_EXPERTS:
        biased = logits if weights.gate_bias is None else logits + weights.gate_bias
        return route(biased, weights.choice_bias, spec)
    results = choose(logits, weights.gate_bias, weights.choice_bias, spec)
    return CudaRouting(results, len(logits), spec.ranked, spec.used)


def run_kinds(
    normed: Tensor,
    routing: Routing,
    table: CudaExpertTable,
    spec: ExpertSpec,
    slots: Tensor,
    experts: Sequence[int] | npt.NDArray[np.int32] | None,
    apart: Callable[[int, Tensor], Tensor],
) -> None:
    """Fill slots: experts of a kind together, whoever else was asked for.

    ``apart`` computes the rows of an expert of no kind. How a row is computed follows from its
    expert, and there from how many rows the pass has.
    """
    kinds = table.kind_of
    wanted = np.ones(len(kinds), np.bool_)
    if experts is not None:
        asked = np.asarray(experts, np.intp)
        wanted[:] = False
        wanted[asked[asked < len(kinds)]] = True
    if (others := wanted & (kinds < 0)).any():
        run_each(normed, routing, slots, others.nonzero()[0].tolist(), apart)
    chosen: Tensor | None = None
    for number, kind in enumerate(table.kinds):
        if not (same := wanted & (kinds == number)).any():
            continue
        if chosen is None:
            chosen = on_card(routing, normed.device).chosen_there
            entries = table.entries(normed.device)
        run_kind(normed, plan_slots(chosen, same), entries, kind, spec, slots)


def run_kind(
    normed: Tensor, plan: Plan, entries: Tensor, kind: ExpertKind, spec: ExpertSpec, slots: Tensor
) -> None:
    """Two products, and the rotations that the weights ask for."""
    outer, within = kind.rotated
    x = quantize(rotate_blocks(normed, outer) if outer else normed, fine=kind.fine)
    inner = grouped_gate_up(x, plan, entries, kind.gate_up, spec.activation, spec.limit)
    if within:
        inner = rotate_blocks(inner, within)
    grouped_down(quantize(inner, fine=kind.fine), slots, plan, entries, kind.down)
