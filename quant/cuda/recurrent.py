"""Recurrent layers on a GPU (Mamba-2, Gated DeltaNet): the kernels between products.

Rows are prepared (convolution, gates), folded into the states one after another, normed and gated.
A buffer in device memory tells what a pass does to its sequences' states; graphs read it at each
replay. ``quant/ops/states.py`` has the layout of rows and states.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.launch import arguments, declarations, launch, pointers
from localrt.quant.cuda.linear import linear, normed_for, reads_records
from localrt.quant.cuda.products import Records, empty_records, quantize
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.steps import converted, move_rows, norm, norm_gate
from localrt.quant.cuda.stream import CudaPass, Sequences, Stream
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, Tensor, empty, upload
from localrt.quant.cuda.weight import (
    CudaWeight,
)
from localrt.quant.ops.hybrid_cache import begin_states, states_of
from localrt.quant.ops.protocol import Span
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights
from localrt.quant.ops.states import StatePass

SEQUENCE_NUMBERS = 13
"""Int64 fields that describe a sequence: ``Sequence`` in quant/cuda/src/recurrent.cuh."""
_WARPS = 4
_COLUMNS = declarations("recurrent_scan.cu").constants["COLUMNS"]  # columns of a state per warp

_Recurrent = arguments("recurrent.cuh", "Recurrent")


def mix_rows(
    mixed: Tensor,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    sequences: Sequences,
    layer: int,
    places: tuple[int, int],
    records: Records | None = None,
) -> Tensor:
    """(R, H V), bf16, from projected rows (R, ``wide_rows``), float32; writes states and rows to
    their sets.

    ``places`` are the offsets of the layer's state in a set, and of its ring in elements of one
    row. Few rows may go to ``records`` instead, if ``fits_records``; the returned tensor is then
    empty.
    """
    device, rows = mixed.device, len(mixed)
    recurrent, stride = spec.kind != "conv", _prepared_size(spec)
    count_out = 0 if records or recurrent else rows
    out = empty(count_out, spec.inner, dtype=BFLOAT16, device=device)
    seen = empty(rows if recurrent else 0, spec.inner, device=device)
    scratch = empty(sequences.prepared if recurrent else 0, stride, device=device)
    count, layers = sequences.positions.shape
    args = _Recurrent(
        *pointers(sequences.records, sequences.positions, sequences.parents),
        *pointers(mixed, scratch, seen, records.data if records else out),
        *pointers(weights.taps, weights.taps_bias, weights.decay, weights.decay_bias, weights.skip),
        state_at=places[0],
        row_at=places[1],
        layer=layer,
        layers=layers,
        width=mixed.shape[1],
        stride=stride,
        out_stride=records.stride if records else 0,
        channels=spec.channels,
        factors=spec.factors,
        heads=spec.heads,
        key_heads=spec.key_heads,
        value_size=spec.value_size,
        tiled=spec.tiled,
        strength=spec.strength,
        least_step=spec.time_steps[0],
        most_step=spec.time_steps[1],
        **_columns(spec),
    )
    programs = recurrent_programs(spec, records=_form(records))
    blocks = sequences.rows + spec.taps - 1
    if not recurrent:
        grid = (blocks, -(-spec.width // (32 * _WARPS)), count)
        launch(device, programs[0], grid, 32 * _WARPS, args)
        return out
    units, tasks = spec.key_heads + spec.heads, spec.heads * -(-spec.value_size // _COLUMNS)
    launch(device, programs[0], (blocks, -(-units // _WARPS), count), 32 * _WARPS, args)
    launch(device, programs[1], (-(-tasks // _WARPS), count, 1), 32 * _WARPS, args)
    gates_at = args.gates_at
    return norm_gate(
        seen,
        mixed[:, gates_at : gates_at + spec.inner],
        weights.out_norm if spec.norm_size else None,
        size=spec.norm_size,
        eps=spec.norm_eps or spec.eps,
        gate=spec.gate,
        gate_first=spec.gate_first,
        records=records,
    )


def recurrent_programs(
    spec: RecurrentSpec, *, records: tuple[int, int] = (0, 0)
) -> tuple[Program, ...]:
    """The programs that ``mix_rows`` launches, except ``norm_gate``; ``records``: whether it writes
    records, and whether they are fine.
    """
    return _programs(spec.kind, spec.taps, spec.key_size, spec.channel_decay, records)


@cache
def _programs(
    kind: str, taps: int, key: int, each: bool, records: tuple[int, int]
) -> tuple[Program, ...]:
    forms = {"RECORDS": records[0], "FINE": records[1]}
    if kind == "conv":
        return (Program.of("recurrent_conv", TAPS=taps, **forms),)
    shape = {"KIND": kind.upper(), "KEY": key, "EACH": int(each)}
    return (Program.of("recurrent_rows", TAPS=taps, **shape), Program.of("recurrent_scan", **shape))


def fits_records(spec: RecurrentSpec) -> bool:
    """Whether results fill whole records, written in whole steps."""
    return spec.inner % 64 == 0 and spec.norm_size % 32 == 0


def _form(records: Records | None) -> tuple[int, int]:
    return (0, 0) if records is None else (1, int(records.fine))


def wide_rows(spec: RecurrentSpec) -> int:
    """Elements of a projected row. With a ``low_rank``, gates and decays are projected twice: the
    second projections' results follow at the end.
    """
    second = spec.inner + spec.factors - spec.heads
    return spec.mix_rows + (second if spec.low_rank else 0)


def _columns(spec: RecurrentSpec) -> dict[str, int]:
    """The first column of each part of a projected row: see ``RecurrentWeights``."""
    if spec.kind == "conv":
        return {"channels_at": 0, "gates_at": spec.width, "strengths_at": 0, "decays_at": 0}
    if spec.low_rank:
        return {
            "channels_at": 0,
            "gates_at": spec.mix_rows,
            "strengths_at": spec.channels + spec.low_rank,
            "decays_at": spec.mix_rows + spec.inner,
        }
    steps = spec.channels + spec.inner
    delta = spec.kind == "delta"
    return {
        "channels_at": 0 if delta else spec.inner,
        "gates_at": spec.channels if delta else 0,
        "strengths_at": steps,
        "decays_at": steps + (spec.heads if delta else 0),
    }


def _prepared_size(spec: RecurrentSpec) -> int:
    """Elements of a prepared row: keys are padded to 16, rows to 4."""
    padded = -(-spec.key_size // 16) * 16
    decays = spec.heads * (padded if spec.channel_decay else 1)
    size = 2 * spec.key_heads * padded + decays + spec.heads + spec.inner
    return -(-size // 4) * 4


_FOLD = 7  # index of the field in ``Sequence``


class SequenceTable:
    """The buffer for passes over ``count`` sequences of ``rows`` new rows in all, with up to
    ``each`` new and ``waiting`` waiting rows, and of ``nodes`` parents of tree rows in all.
    """

    def __init__(
        self, count: int, rows: int, each: int, waiting: int, *, layers: int, nodes: int
    ) -> None:
        self._shape = count, layers
        self._records = count * SEQUENCE_NUMBERS
        self._positions = self._records + count * layers
        self._numbers = np.zeros(self._positions + max(1, nodes), np.int64)
        self._waiting = waiting
        self._rows, self._prepared = each + waiting, rows + count * waiting

    @classmethod
    def of(cls, spans: Sequence[Span]) -> SequenceTable:
        """A table for passes like the one over ``spans``."""
        states = [states_of(span.cache) for span in spans]
        rows = [span.rows for span in spans]
        waiting = max(each.waiting for each in states)
        return cls(
            *(len(rows), sum(rows), max(rows), waiting),
            layers=len(states[0].layout.specs),
            nodes=sum(0 if span.mask is None else span.mask.shape[1] for span in spans),
        )

    def fill(self, spans: Sequence[Span], passes: Sequence[StatePass]) -> None:
        """Fill the buffer in RAM."""
        first = scratch = nodes = 0
        records = self._numbers[: self._records].reshape(len(spans), -1)
        positions = self._numbers[self._records : self._positions].reshape(self._shape)
        for index, (span, states) in enumerate(zip(spans, passes, strict=True)):
            source, target, parents = states.source, states.target, states.parents
            held = span.cache.length
            assert held - source.positions.min() <= self._waiting, "there is room for them"
            records[index] = (
                source.states.address,
                source.rows.address,
                target.states.address,
                target.rows.address,
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
            scratch += span.rows + self._waiting

    def upload(self, device: Device, out: Tensor | None = None, *, dry: bool = False) -> Tensor:
        """Copy to the device, to ``out`` if given. A ``dry`` pass changes no state, so it can be
        repeated.
        """
        numbers = self._numbers
        if dry:
            numbers = numbers.copy()
            numbers[_FOLD : self._records : SEQUENCE_NUMBERS] = -1
        return upload(numbers, device) if out is None else out.put(numbers)

    def split(self, buffer: Tensor) -> Sequences:
        """The parts of a copy on the device."""
        return Sequences(
            buffer[: self._records],
            buffer[self._records : self._positions].view(*self._shape),
            buffer[self._positions :],
            self._rows,
            self._prepared,
        )


class RecurrentSteps:
    """A part of ``CudaOps``."""

    def norm_recurrent(
        self, x: Stream, weights: RecurrentWeights, spec: RecurrentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        h = normed_for(x, weights.norm, spec.eps, weights.mix)
        y = mix_and_project(h, weights, spec, step, layer)
        if weights.post_norm is None:
            return y
        return norm(y, weights.post_norm, spec.eps, out=FLOAT32)


def mix_and_project(
    h: Tensor | Records, weights: RecurrentWeights, spec: RecurrentSpec, step: CudaPass, layer: int
) -> Tensor:
    """(R, D), float32, from normed rows; the states are in the caches."""
    rows = h.rows if isinstance(h, Records) else len(h)
    device = h.data.device if isinstance(h, Records) else h.device
    mixed = empty(rows, wide_rows(spec), device=device)
    first = mixed[:, : spec.mix_rows]
    linear(h, weights.mix, weights.mix_bias, out=first)
    if weights.mix_scale is not None:
        move_rows(first, first, scales=weights.mix_scale)
    if spec.low_rank:
        at, gates, stop = spec.channels, spec.mix_rows, spec.mix_rows + spec.inner
        _widen(mixed[:, at : at + spec.low_rank], weights.gate_up, mixed[:, gates:stop])
        at += spec.low_rank + spec.heads
        _widen(mixed[:, at : at + spec.low_rank], weights.decay_up, mixed[:, stop:])
    out = weights.out
    # If the next product reads records, they are written directly.
    direct = fits_records(spec) and reads_records(out, rows)
    records = None
    if direct:
        records = empty_records(1, rows, spec.inner, mixed.device, fine=out.fine)
    layout = states_of(step.spans[0].cache).layout
    places = layout.states[layer], layout.rows[layer]
    seen = mix_rows(mixed, weights, spec, _sequences(step, mixed.device), layer, places, records)
    step.layer_done(layer)
    return linear(records or seen, out, weights.out_bias, dtype=FLOAT32)


def _sequences(step: CudaPass, device: Device) -> Sequences:
    """The sequences of a pass; the first layer begins their states."""
    if step.sequences is None:
        passes = begin_states(step.spans)
        table = SequenceTable.of(step.spans)
        table.fill(step.spans, passes)
        step.sequences = table.split(table.upload(device))
    return step.sequences


def _widen(x: Tensor, weight: CudaWeight | None, out: Tensor) -> None:
    """The second projection of a low-rank pair, from columns of float32 rows."""
    assert weight is not None, "a low rank has two projections"
    direct = reads_records(weight, len(x))
    rows = quantize(x, fine=weight.fine) if direct else converted(x, BFLOAT16)
    linear(rows, weight, out=out)
