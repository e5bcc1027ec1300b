"""What the CUDA implementation carries from step to step of a pass.

Rows lie one sequence after another. Lengths and positions are on the device, where kernels and
recorded CUDA graphs read them. It knows no kernels but the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.cuda.products import Records
from localrt.quant.cuda.steps import norm, norm_records
from localrt.quant.ops.attention import AttentionTemperature, Rope
from localrt.quant.ops.hybrid_cache import states_of
from localrt.quant.ops.protocol import Span

Logits = npt.NDArray[np.float32]


@dataclass(slots=True)
class Stream:
    """The residual stream (R, D), float32. ``pending`` is added by the norm that reads it next."""

    values: Tensor
    pending: Tensor | None = None

    def add(self, y: Tensor) -> None:
        """Add y (R, D): now or with the next norm."""
        self.settle()
        self.pending = y

    def settle(self) -> Tensor:
        """The sum, with nothing pending."""
        if self.pending is not None:
            self.values += self.pending
            self.pending = None
        return self.values

    def normed(self, weight: Tensor, eps: float, out: torch.dtype = torch.bfloat16) -> Tensor:
        """RMSNorm of the sum; nothing is pending afterwards."""
        pending, self.pending = self.pending, None
        return norm(self.values, weight, eps, pending=pending, out=out)

    def normed_records(self, weight: Tensor, eps: float, *, fine: bool) -> Records:
        """The same as the products of packed weights read it."""
        pending, self.pending = self.pending, None
        return norm_records(self.values, weight, eps, pending=pending, fine=fine)


class Numbers:
    """Tokens, positions and tokens held of a pass in one buffer, which is one copy to the device.

    Each part begins at 16 bytes: the kernels load 16 bytes at once.
    """

    def __init__(self, rows: int, spans: int) -> None:
        self._rows, self._spans = rows, spans
        self._width = rows + rows % 2
        size = 2 * self._width + spans
        self.staged = torch.zeros(size, dtype=torch.int64)

    def fill(
        self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], held: Sequence[int]
    ) -> None:
        """Write the host's side."""
        host = self.staged.numpy()
        host[: self._rows] = tokens
        host[self._width : self._width + self._rows] = positions
        host[2 * self._width :] = held

    def split(self, device: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three parts of a copy of ``staged``."""
        width = self._width
        return device[: self._rows], device[width : width + self._rows], device[2 * width :]


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
    spans: tuple[Span, ...]
    trees: tuple[Tensor | None, ...]  # (rows, rows) int8
    longest: tuple[int, ...]
    tables: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    masks: dict[int, Tensor | None] = field(default_factory=dict)
    temperatures: dict[AttentionTemperature, Tensor] = field(default_factory=dict)
    sequences: Sequences | None = None  # of recurrent layers
    mixed: set[int] = field(default_factory=set)  # recurrent layers that have been computed

    def factors(self, temperature: AttentionTemperature) -> Tensor:
        """What the rows' queries are multiplied by: (R, 1, 1), float32."""
        if temperature not in self.temperatures:
            turns = torch.log1p((self.positions // temperature.length).float())
            self.temperatures[temperature] = (1 + temperature.beta * turns)[:, None, None]
        return self.temperatures[temperature]

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
    logits: Tensor | None = None
