"""The state of a pass in the CUDA implementation.

Rows are in order of sequences. Lengths and positions are on the device, where kernels and recorded
graphs read them. Of the kernels, this module knows only the norm and the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.kv import BlockedCache, LayerPlace, SpanNumbers, SpanTable
from localrt.quant.cuda.products import Records
from localrt.quant.cuda.steps import BestLogits, move_rows, norm, norm_records
from localrt.quant.cuda.tensor import BFLOAT16, Dtype, Tensor
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.experts import MakeHostWork
from localrt.quant.ops.hybrid_cache import kv_of, states_of
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

    def add(self, y: Tensor, scale: float = 1.0, total: float = 1.0) -> None:
        """Add y (R, D), float32, times ``scale``, and multiply the sum by ``total``: now, or with
        the next norm if both are 1.
        """
        self.settle()
        if scale == total == 1.0:
            self.pending = y
        else:
            move_rows(y, self.values, scale=scale, add=True, total=total)

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


class Numbers:
    """The integer inputs of a pass, in one buffer and so one copy to the device: tokens, positions,
    ``logit_rows`` rows for the head, and ``spans``.

    Tokens and positions are aligned to 16 bytes, which the kernels load at once.
    """

    def __init__(self, spans: SpanNumbers, logit_rows: int = 0) -> None:
        width = spans.rows + spans.rows % 2
        self.spans, self._starts = spans, (width, 2 * width, 2 * width + logit_rows)
        self.staged = np.zeros(self._starts[-1] + len(spans.numbers), np.int64)

    def fill(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        spans: Sequence[Span],
        logit_rows: Sequence[int] = (),
    ) -> None:
        """Fill the host's buffer, for sequences whose caches have room for the pass. Rows that are
        left repeat the last one.
        """
        all_tokens, all_positions, rows, numbers = np.split(self.staged, self._starts)
        count = len(tokens)
        all_tokens[:count], all_tokens[count:] = tokens, tokens[-1]
        all_positions[:count], all_positions[count:] = positions, positions[-1]
        rows[:] = logit_rows
        self.spans.fill(spans)
        numbers[:] = self.spans.numbers

    def split(
        self, device: Tensor, longest: int
    ) -> tuple[tuple[Tensor, Tensor, SpanTable], Tensor]:
        """The parts of a copy of ``staged``: the first fields of a ``CudaPass``, and the head's
        rows. See ``SpanNumbers.table``.
        """
        rows, (second, third, last) = self.spans.rows, self._starts
        table = self.spans.table(device[last:], longest)
        return (device[:rows], device[second : second + rows], table), device[third:last]


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
    """A batch on the device."""

    tokens: Tensor  # (R,) int64
    positions: Tensor  # (R,) int64
    table: SpanTable
    spans: tuple[Span, ...]
    axes: npt.NDArray[np.int64] | None = None  # (3, R), on the host
    tables: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sequences: Sequences | None = None  # of recurrent layers
    mixed: set[int] = field(default_factory=set)  # recurrent layers that have been computed

    def place(self, layer: int) -> LayerPlace:
        """A layer's place in the blocks of the caches."""
        return kv_of(self.spans[0], BlockedCache).layers[layer]

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
