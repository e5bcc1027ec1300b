"""The state of a pass in the CUDA implementation.

Rows are in order of sequences. Lengths and positions are on the device, where kernels and recorded
graphs read them. Of the kernels, this module knows only the norm and the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.kv import blocks_of
from localrt.quant.cuda.products import Records
from localrt.quant.cuda.steps import BestLogits, move_rows, norm, norm_records
from localrt.quant.cuda.tensor import BFLOAT16, INT16, Dtype, Tensor
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.experts import MakeHostWork
from localrt.quant.ops.hybrid_cache import states_of
from localrt.quant.ops.protocol import Span

Logits = npt.NDArray[np.float32]
Between = Callable[[Callable[[], None] | None], object]
"""The host's work between graphs in a replay; it may call the pass's ``check`` while it waits."""
Cut = Callable[[Between], None]
"""Ends a graph and begins the next one: in a replay the host works between them."""
Beside = dict[MakeHostWork, list[Any]]
"""The layers whose work the host does while a graph runs, by what makes that work of them."""


@dataclass(slots=True)
class Stream:
    """The residual stream (R, D), float32. ``pending`` is added by the norm that reads it next."""

    values: Tensor
    pending: Tensor | None = None

    def add(self, y: Tensor, scale: float = 1.0) -> None:
        """Add y (R, D), float32, times ``scale``: now or with the next norm."""
        self.settle()
        if scale == 1.0:
            self.pending = y
        else:
            move_rows(y, self.values, scale=scale, add=True)

    def settle(self) -> Tensor:
        """The sum, with nothing pending."""
        if self.pending is not None:
            move_rows(self.pending, self.values, add=True)
            self.pending = None
        return self.values

    def normed(self, weight: Tensor, eps: float, out: Dtype = BFLOAT16) -> Tensor:
        """RMSNorm of the sum; nothing is pending afterwards."""
        pending, self.pending = self.pending, None
        return norm(self.values, weight, eps, pending=pending, out=out)

    def normed_records(self, weight: Tensor, eps: float, *, fine: bool) -> Records:
        """As ``normed``, in the form that products of packed weights read."""
        pending, self.pending = self.pending, None
        return norm_records(self.values, weight, eps, pending=pending, fine=fine)


PassNumbers: TypeAlias = tuple[
    Tensor, Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]
]
"""The first four fields of a ``CudaPass``."""


class Numbers:
    """The integer inputs of a pass of ``rows``, in one buffer and so one copy to the device:
    tokens, positions, ``logit_rows`` rows for the head, lengths and block addresses of caches, and
    trees.

    ``blocks`` and ``trees`` are each sequence's number of block addresses and of mask columns.
    Tokens and positions are aligned to 16 bytes, which the kernels load at once.
    """

    def __init__(
        self, rows: Sequence[int], blocks: Sequence[int], trees: Sequence[int], logit_rows: int = 0
    ) -> None:
        self._rows, self._shapes = sum(rows), list(zip(rows, trees, strict=True))
        width = self._rows + self._rows % 2
        words = [-(-count * columns // 4) for count, columns in self._shapes]
        self._parts = [width, width, logit_rows, len(blocks), *blocks, *words]
        self.staged = np.zeros(sum(self._parts), np.int64)
        self._host = np.split(self.staged, np.cumsum(self._parts[:-1]))
        self._trees = [
            part.view(np.int16)[: count * columns].reshape(count, columns)
            for part, (count, columns) in zip(self._host[-len(words) :], self._shapes, strict=True)
        ]

    def fill(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        spans: Sequence[Span],
        logit_rows: Sequence[int] = (),
    ) -> None:
        """Fill the host's buffer, for sequences whose caches have room for the pass. Padding rows
        repeat the last one.
        """
        all_tokens, all_positions, rows, cached, *parts = self._host
        count = len(tokens)
        all_tokens[:count], all_tokens[count:] = tokens, tokens[-1]
        all_positions[:count], all_positions[count:] = positions, positions[-1]
        rows[:] = logit_rows
        for at, span in enumerate(spans):
            addresses = blocks_of(span).addresses
            cached[at], parts[at][: len(addresses)] = span.cache.length, addresses
            if span.mask is not None:
                _fill_tree(self._trees[at], span.mask)

    def split(self, device: Tensor) -> tuple[PassNumbers, Tensor]:
        """The parts of a copy of ``staged``: those of a ``CudaPass``, and the head's rows."""
        starts = accumulate(self._parts, initial=0)
        parts = (device[at : at + size] for at, size in zip(starts, self._parts, strict=False))
        tokens, positions, logit_rows, cached, *others = parts
        tokens, positions = tokens[: self._rows], positions[: self._rows]
        blocks, words = others[: len(self._shapes)], others[len(self._shapes) :]
        trees = tuple(
            part.typed(INT16)[: count * columns].view(count, columns) if columns else None
            for part, (count, columns) in zip(words, self._shapes, strict=True)
        )
        return (tokens, positions, cached, tuple(blocks), trees), logit_rows


def _fill_tree(tree: npt.NDArray[np.int16], mask: npt.NDArray[np.bool_]) -> None:
    """Write ``mask`` (rows, columns) over the last tokens as the kernels read it: the indices of
    the tokens that each row sees, in order, then -1. Padding rows see what the last row sees.
    """
    (rows, columns), (count, width) = mask.shape, tree.shape
    end = width - count + rows
    seen = np.ones((rows, width), np.bool_)
    seen[:, end - columns : end], seen[:, end:] = mask, False
    tree[:] = -1
    for path, row in zip(tree, seen, strict=False):
        found = np.flatnonzero(row)
        path[: len(found)] = found
    tree[rows:] = tree[rows - 1]


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a pass on a device, int64: their descriptions, (sequences, layers)
    positions, and the parents of tree rows. ``rows`` bounds the waiting and new rows of each
    sequence, ``prepared`` those of all together.
    """

    records: Tensor
    positions: Tensor
    parents: Tensor
    rows: int
    prepared: int


@dataclass(slots=True)
class CudaPass:
    """A batch on the device. ``longest`` bounds all spans; the head computes ``logit_rows``."""

    tokens: Tensor  # (R,) int64
    positions: Tensor  # (R,) int64
    cached: Tensor  # (spans,) int64
    blocks: tuple[Tensor, ...]  # addresses of each span's cache, int64
    trees: tuple[Tensor | None, ...]  # (rows, columns) int16: see ``Numbers``
    spans: tuple[Span, ...]
    longest: tuple[int, ...]
    axes: npt.NDArray[np.int64] | None = None  # (3, R), on the host
    ahead: tuple[Tensor | None, ...] = ()  # per span, (rows,) int32: see ``Span``
    tables: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sequences: Sequences | None = None  # of recurrent layers
    mixed: set[int] = field(default_factory=set)  # recurrent layers that have been computed

    def ahead_of(self, span: int, *, windowed: bool) -> Tensor | None:
        """How many later rows each row of a span sees, in a layer with or without a window."""
        if not self.ahead or (self.spans[span].windows_only and not windowed):
            return None
        return self.ahead[span]

    def layer_done(self, layer: int) -> None:
        """Note that a recurrent layer has been computed."""
        self.mixed.add(layer)
        for span in self.spans:
            states_of(span.cache).layer_done(layer)


@dataclass(slots=True)
class Recording:
    """A recorded pass: its static inputs, head rows, and logits, with the ``best`` if wanted."""

    step: CudaPass
    logit_rows: Tensor | None  # rows of the head, (n,) int64; None is all
    shared: dict[object, Any]  # objects shared by all recordings of this shape
    cut: Cut
    beside: Beside = field(default_factory=dict)
    logits: Tensor | None = None
    best: BestLogits | None = None
    stale: bool = False  # whether it must be recorded again
