"""What the CUDA implementation carries from step to step of a pass.

Rows lie one sequence after another. Lengths and positions are on the device, where kernels and
recorded CUDA graphs read them. It knows no kernels but the norm and the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.kv import blocks_of
from localrt.quant.cuda.products import Records
from localrt.quant.cuda.steps import move_rows, norm, norm_records
from localrt.quant.cuda.tensor import BFLOAT16, Dtype, Tensor
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.hybrid_cache import states_of
from localrt.quant.ops.protocol import Span

Logits = npt.NDArray[np.float32]
Between = Callable[[Callable[[], None] | None], object]
"""What the host does in a replay; it may call the pass's ``check`` while it waits."""
Cut = Callable[[Between], None]
"""Ends a graph, and begins the next one: in a replay the host does something between them."""


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
        """The same as the products of packed weights read it."""
        pending, self.pending = self.pending, None
        return norm_records(self.values, weight, eps, pending=pending, fine=fine)


class Numbers:
    """Tokens, positions, tokens held and addresses of caches' blocks, of a pass of ``rows``, in one
    buffer, which is one copy to the device. ``blocks`` is how many of each sequence's have room.

    Tokens and positions begin at 16 bytes: the kernels load 16 bytes at once.
    """

    def __init__(self, rows: int, blocks: Sequence[int]) -> None:
        self._rows, width = rows, rows + rows % 2
        self._parts = [width, width, len(blocks), *blocks]
        self.staged = np.zeros(sum(self._parts), np.int64)
        self._host = np.split(self.staged, np.cumsum(self._parts[:-1]))

    def fill(
        self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], spans: Sequence[Span]
    ) -> None:
        """Write the host's side, for sequences whose caches have room for the pass."""
        all_tokens, all_positions, held, *blocks = self._host
        all_tokens[: self._rows], all_positions[: self._rows] = tokens, positions
        held[:] = [span.cache.length for span in spans]
        for room, span in zip(blocks, spans, strict=True):
            addresses = blocks_of(span).addresses
            room[: len(addresses)] = addresses

    def split(self, device: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """The parts of a copy of ``staged``."""
        starts = accumulate(self._parts, initial=0)
        parts = (device[at : at + size] for at, size in zip(starts, self._parts, strict=False))
        tokens, positions, held, *blocks = parts
        return tokens[: self._rows], positions[: self._rows], held, tuple(blocks)


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a pass on a device, int64: their records, (sequences, layers) positions, and
    the parents of trees' rows. ``rows`` bounds those that wait and are new of each, ``prepared`` of
    all together.
    """

    records: Tensor
    positions: Tensor
    parents: Tensor
    rows: int
    prepared: int


@dataclass(slots=True)
class CudaPass:
    """A batch on the device. ``longest`` bounds each span's length; ``wanted`` are head rows."""

    tokens: Tensor  # (R,) int64
    positions: Tensor  # (R,) int64
    held: Tensor  # (spans,) int64
    blocks: tuple[Tensor, ...]  # addresses of each span's cache, int64
    spans: tuple[Span, ...]
    trees: tuple[Tensor | None, ...]  # (rows, rows) int8
    longest: tuple[int, ...]
    tables: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sequences: Sequences | None = None  # of recurrent layers
    mixed: set[int] = field(default_factory=set)  # recurrent layers that have been computed

    def layer_done(self, layer: int) -> None:
        """A recurrent layer's states are made."""
        self.mixed.add(layer)
        for span in self.spans:
            states_of(span.cache).layer_done(layer)


@dataclass(slots=True)
class Recording:
    """What a recorded pass reads and leaves: its static inputs, head rows, and logits."""

    step: CudaPass
    wanted: Tensor | None  # rows of the head, (n,) int64; None is all
    kept: dict[Any, Any]  # what stays in its place for all recordings of passes of this shape
    cut: Cut
    logits: Tensor | None = None
    stale: bool = False  # whether it is to be recorded again
