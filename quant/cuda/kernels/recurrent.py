"""Recurrent layers between their projections: rows are prepared, added to states one after another,
and normed and gated. What changes from pass to pass is read from device memory, so that recorded
CUDA graphs stay valid. Rows and states lie as ``quant/ops/states.py`` says.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from localrt.quant.cuda.kernels.launch import launch
from localrt.quant.cuda.kernels.products import Records
from localrt.quant.cuda.kernels.programs import Program
from localrt.quant.cuda.kernels.steps import norm_gate
from localrt.quant.cuda.stream import Sequences
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights

SEQUENCE_NUMBERS = 13
"""Of a sequence's record: ``Sequence`` in quant/cuda/src/recurrent.cuh."""

_WARPS = 4
_COLUMNS = 8  # of a state, of a warp


class _Recurrent(Structure):
    _fields_ = (
        ("sequences", c_void_p),
        ("positions", c_void_p),
        ("parents", c_void_p),
        ("mixed", c_void_p),
        ("scratch", c_void_p),
        ("seen", c_void_p),
        ("out", c_void_p),
        ("taps", c_void_p),
        ("taps_bias", c_void_p),
        ("decay", c_void_p),
        ("decay_bias", c_void_p),
        ("skip", c_void_p),
        ("state_at", c_int64),
        ("row_at", c_int64),
        ("layer", c_int),
        ("layers", c_int),
        ("width", c_int),
        ("stride", c_int),
        ("out_stride", c_int),
        ("channels", c_int),
        ("factors", c_int),
        ("heads", c_int),
        ("key_heads", c_int),
        ("value_size", c_int),
        ("tiled", c_int),
        ("channels_at", c_int),
        ("gates_at", c_int),
        ("strengths_at", c_int),
        ("decays_at", c_int),
        ("strength", c_float),
        ("least_step", c_float),
        ("most_step", c_float),
    )


def mix_rows(
    mixed: Tensor,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    sequences: Sequences,
    layer: int,
    places: tuple[int, int],
    records: Records | None = None,
) -> Tensor:
    """(R, H V), bf16, of rows as projected (R, ...), float32; states and rows go to their sets.

    ``places`` are where the layer's state lies in a set, and its ring in numbers of one row. Few
    rows may go to ``records`` instead, if ``fits_records``; what is returned then holds nothing.
    """
    device, rows = mixed.device, len(mixed)
    recurrent, stride = spec.kind != "conv", _prepared_size(spec)
    count_out = 0 if records or recurrent else rows
    out = torch.empty(count_out, spec.inner, dtype=torch.bfloat16, device=device)
    seen = torch.empty(rows if recurrent else 0, spec.inner, device=device)
    scratch = torch.empty(sequences.prepared if recurrent else 0, stride, device=device)
    count, layers = sequences.positions.shape
    args = _Recurrent(
        sequences=sequences.records.data_ptr(),
        positions=sequences.positions.data_ptr(),
        parents=sequences.parents.data_ptr(),
        mixed=mixed.data_ptr(),
        scratch=scratch.data_ptr(),
        seen=seen.data_ptr(),
        out=(records.data if records else out).data_ptr(),
        taps=weights.taps.data_ptr(),
        taps_bias=_pointer(weights.taps_bias),
        decay=_pointer(weights.decay),
        decay_bias=_pointer(weights.decay_bias),
        skip=_pointer(weights.skip),
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
    """What ``mix_rows`` launches but for ``norm_gate``; ``records``: whether it leaves some, and
    whether fine ones.
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
    return (
        Program.of("recurrent_rows", TAPS=taps, **shape),
        Program.of("recurrent_scan", **shape),
    )


def fits_records(spec: RecurrentSpec) -> bool:
    """Whether results are whole records, written in whole steps."""
    return spec.inner % 64 == 0 and spec.norm_size % 32 == 0


def _form(records: Records | None) -> tuple[int, int]:
    return (0, 0) if records is None else (1, int(records.fine))


def _columns(spec: RecurrentSpec) -> dict[str, int]:
    """Where the parts of a row as projected begin: see ``RecurrentWeights``."""
    if spec.kind == "conv":
        return {"channels_at": 0, "gates_at": spec.width, "strengths_at": 0, "decays_at": 0}
    steps = spec.channels + spec.inner
    delta = spec.kind == "delta"
    return {
        "channels_at": 0 if delta else spec.inner,
        "gates_at": spec.channels if delta else 0,
        "strengths_at": steps,
        "decays_at": steps + (spec.heads if delta else 0),
    }


def _prepared_size(spec: RecurrentSpec) -> int:
    """Numbers of a prepared row: keys go by sixteens, rows by four."""
    padded = -(-spec.key_size // 16) * 16
    decays = spec.heads * (padded if spec.channel_decay else 1)
    size = 2 * spec.key_heads * padded + decays + spec.heads + spec.inner
    return -(-size // 4) * 4


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
