"""What a pass does to the states of its sequences, as the kernels of recurrent layers read it.

All that changes from pass to pass is one buffer, which is one copy to the device: recorded CUDA
graphs read it anew. It knows ``quant/ops/states.py``, not the layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from localrt.quant.ops.cuda.device import upload
from localrt.quant.ops.cuda.kernels.recurrent import SEQUENCE_NUMBERS, Sequences
from localrt.quant.ops.protocol import Span
from localrt.quant.ops.states import StatePass

__all__ = ["SequenceTable", "waiting_rows"]


def waiting_rows(states: StatePass, held: int) -> int:
    """Rows that wait, of ``held`` tokens: the most of any layer."""
    return held - int(states.source.positions.min(initial=held))


class SequenceTable:
    """The buffer of passes over ``spans``, in which up to ``waiting`` rows of each wait."""

    def __init__(
        self, spans: Sequence[Span], passes: Sequence[StatePass], waiting: Sequence[int]
    ) -> None:
        layers = len(passes[0].source.positions)
        nodes = sum(0 if states.parents is None else len(states.parents) for states in passes)
        self._records = len(spans) * SEQUENCE_NUMBERS
        self._positions = self._records + len(spans) * layers
        self._numbers = np.zeros(self._positions + max(1, nodes), np.int64)
        self._waiting = tuple(waiting)
        self._shape = len(spans), layers
        together = [span.rows + rows for span, rows in zip(spans, waiting, strict=True)]
        self._rows, self._prepared = max(together), sum(together)

    def fill(self, spans: Sequence[Span], passes: Sequence[StatePass]) -> None:
        """Write the host's side."""
        first = scratch = nodes = 0
        records = self._numbers[: self._records].reshape(len(spans), -1)
        positions = self._numbers[self._records : self._positions].reshape(self._shape)
        for index, (span, states) in enumerate(zip(spans, passes, strict=True)):
            source, target, parents = states.source, states.target, states.parents
            held = span.cache.length
            assert waiting_rows(states, held) <= self._waiting[index], "there is room for them"
            records[index] = (
                source.states.data_ptr(),
                source.rows.data_ptr(),
                target.states.data_ptr(),
                target.rows.data_ptr(),
                source.ring,
                target.ring,
                held,
                states.fold,
                span.rows,
                first,
                scratch,
                -1 if parents is None else nodes,
                states.extra,
            )
            positions[index] = source.positions
            if parents is not None:
                place = self._positions + nodes
                self._numbers[place : place + len(parents)] = parents
                nodes += len(parents)
            first += span.rows
            scratch += span.rows + self._waiting[index]

    def upload(self, device: torch.device, out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy on the device, in ``out`` if given."""
        return upload(self._numbers, device, out=out)

    def split(self, buffer: torch.Tensor) -> Sequences:
        """The parts of a copy."""
        return Sequences(
            buffer[: self._records],
            buffer[self._records : self._positions].view(self._shape),
            buffer[self._positions :],
            self._rows,
            self._prepared,
        )
