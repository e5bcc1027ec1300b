"""The step of recurrent layers on a card: our kernels between our products.

What a pass does to the states of its sequences, as the kernels of recurrent layers read it.

All that changes from pass to pass is one buffer, which is one copy to the device: recorded CUDA
graphs read it anew. It knows ``quant/ops/states.py``, not the layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from localrt.quant.cuda.device import upload
from localrt.quant.cuda.kernels.products import Records, empty_records
from localrt.quant.cuda.kernels.recurrent import SEQUENCE_NUMBERS, fits_records, mix_rows
from localrt.quant.cuda.kernels.steps import norm
from localrt.quant.cuda.linear import linear, normed_for, reads_records
from localrt.quant.cuda.stream import CudaPass, Sequences, Stream
from localrt.quant.cuda.weight import CudaWeight
from localrt.quant.ops.hybrid_cache import begin_states, states_of
from localrt.quant.ops.protocol import Span
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights
from localrt.quant.ops.states import StatePass
from localrt.quant.reference.recurrent import widen

_FOLD = 7  # its place in a record


class SequenceTable:
    """The buffer of passes over sequences of ``rows`` rows each, of which up to ``waiting`` more
    wait, with ``nodes`` parents of trees' rows.
    """

    def __init__(
        self, rows: Sequence[int], waiting: Sequence[int], *, layers: int, nodes: int
    ) -> None:
        self._shape = len(rows), layers
        self._records = len(rows) * SEQUENCE_NUMBERS
        self._positions = self._records + len(rows) * layers
        self._numbers = np.zeros(self._positions + max(1, nodes), np.int64)
        self._waiting = tuple(waiting)
        together = [new + old for new, old in zip(rows, waiting, strict=True)]
        self._rows, self._prepared = max(together), sum(together)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> SequenceTable:
        """For passes like the one over ``spans``."""
        states = [states_of(span.cache) for span in spans]
        return cls(
            [span.rows for span in spans],
            [each.waiting for each in states],
            layers=len(states[0].layout.specs),
            nodes=sum(0 if span.mask is None else span.mask.shape[1] for span in spans),
        )

    def fill(self, spans: Sequence[Span], passes: Sequence[StatePass]) -> None:
        """Write the host's side."""
        first = scratch = nodes = 0
        records = self._numbers[: self._records].reshape(len(spans), -1)
        positions = self._numbers[self._records : self._positions].reshape(self._shape)
        for index, (span, states) in enumerate(zip(spans, passes, strict=True)):
            source, target, parents = states.source, states.target, states.parents
            held = span.cache.length
            assert held - source.positions.min() <= self._waiting[index], "there is room for them"
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

    def upload(
        self, device: torch.device, out: torch.Tensor | None = None, *, dry: bool = False
    ) -> torch.Tensor:
        """A copy on the device, in ``out`` if given; of a ``dry`` pass, which changes no state and
        can be run again.
        """
        numbers = self._numbers
        if dry:
            numbers = numbers.copy()
            numbers[_FOLD : self._records : SEQUENCE_NUMBERS] = -1
        return upload(numbers, device, out=out)

    def split(self, buffer: torch.Tensor) -> Sequences:
        """The parts of a copy."""
        return Sequences(
            buffer[: self._records],
            buffer[self._records : self._positions].view(self._shape),
            buffer[self._positions :],
            self._rows,
            self._prepared,
        )


class RecurrentSteps:
    """A part of ``CudaOps``."""

    def norm_recurrent(
        self,
        x: Stream,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        step: CudaPass,
        layer: int,
    ) -> Tensor:
        """(R, D), float32."""
        h = normed_for(x, weights.norm, spec.eps, weights.mix)
        y = mix_and_project(h, weights, spec, step, layer)
        if weights.post_norm is None:
            return y
        return norm(y, weights.post_norm, spec.eps, out=torch.float32)


def mix_and_project(
    h: Tensor | Records,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    step: CudaPass,
    layer: int,
) -> Tensor:
    """(R, D), float32, of normed rows; the caches have the states."""
    mixed = linear(h, weights.mix, weights.mix_bias, dtype=torch.float32)
    if weights.mix_scale is not None:
        mixed *= weights.mix_scale
    mixed = widen(mixed, weights, spec, _wide_linear)
    out, rows = weights.out, len(mixed)
    # Where the product that follows reads records, they are written at once.
    direct = fits_records(spec) and reads_records(out, rows)
    records = None
    if direct:
        records = empty_records(1, rows, spec.inner, mixed.device, fine=out.fine)
    layout = states_of(step.spans[0].cache).layout
    places = layout.states[layer], layout.rows[layer]
    seen = mix_rows(mixed, weights, spec, _sequences(step, mixed.device), layer, places, records)
    step.layer_done(layer)
    return linear(records or seen, out, weights.out_bias, dtype=torch.float32)


def _sequences(step: CudaPass, device: torch.device) -> Sequences:
    """Those of a pass, whose states begin with the first layer."""
    if step.sequences is None:
        passes = begin_states(step.spans)
        table = SequenceTable.of(step.spans)
        table.fill(step.spans, passes)
        step.sequences = table.split(table.upload(device))
    return step.sequences


def _wide_linear(x: Tensor, weight: CudaWeight) -> Tensor:
    """(R, rows), float32, of some columns of float32 rows."""
    return linear(x.bfloat16().contiguous(), weight, dtype=torch.float32)
