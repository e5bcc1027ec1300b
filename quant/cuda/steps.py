"""Norms and elementwise steps around the products, a kernel each.

No card has run the search for the best logits yet.

A row's bits depend on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from localrt.quant.cuda.launch import arguments, declarations, launch, pointers
from localrt.quant.cuda.products import GATES, OUT, Records, empty_records
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, INT64, Dtype, Tensor, empty
from localrt.quant.ops.protocol import BEST, BEST_COUNT, UNGATED

_THREADS = 256
# Largest Hadamard rotation: one thread block does it.
_MOST_HADAMARD = 256

_Norm = arguments("rms_norm.cu", "Norm")
_NormGate = arguments("norm_gate.cu", "NormGate")
_Rotate = arguments("rotate.cu", "Rotate")
_Gate = arguments("gate.cu", "Gate")
_MoveRows = arguments("move_rows.cu", "MoveRows")
_Rotary = arguments("rotary.cu", "Rotary")
_TokenRows = arguments("token_rows.cu", "TokenRows")
_Best = arguments("best_logits.cu", "BestLogits")
BEST_LOGITS = Program.of("best_logits")


def move_rows(
    x: Tensor,
    y: Tensor,
    *,
    index: Tensor | None = None,
    scale: float = 1.0,
    gates: Tensor | None = None,
    factors: Tensor | None = None,
    scales: Tensor | None = None,
    softcap: float | None = None,
    add: bool = False,
    total: float = 1.0,
) -> Tensor:
    """Write x (R, D) times ``scale`` to y (R, D), or add it; returns y, which may be x. Each is
    bf16 or float32; columns are contiguous, rows may be strided. ``index`` (R,), int64 on the
    device, selects rows of x. Columns are multiplied by ``scales`` (D,), float32, and
    rows by their ``factors`` (R, 1) and the sigmoid of their ``gates`` (R, 1), float32; ``softcap``
    bounds the result by softcap * tanh(x / softcap). ``total`` multiplies sums.
    """
    rows, width = y.shape
    if not y.size:  # a launch needs at least one block
        return y
    args = _MoveRows(
        *pointers(x, y, index, gates, factors, scales),
        x.strides[0],
        y.strides[0],
        width,
        add,
        scale,
        softcap or 0.0,
        total,
    )
    program = Program.of("move_rows", IN=OUT[x.dtype], OUT=OUT[y.dtype])
    launch(y.device, program, (-(-width // _THREADS), rows, 1), _THREADS, args)
    return y


def converted(x: Tensor, dtype: Dtype) -> Tensor:
    """x (R, D), bf16 or float32, in ``dtype`` and contiguous: x itself if it is."""
    if x.dtype == dtype and x.is_contiguous:
        return x
    return move_rows(x, empty(*x.shape, dtype=dtype, device=x.device))


def rotary(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin of positions (R,), int64, times frequencies (F,), times ``scale``: (R, F), all
    float32.
    """
    n, half = len(positions), len(frequencies)
    tables = empty(2, n, half, dtype=FLOAT32, device=positions.device)
    cos, sin = tables[0], tables[1]
    args = _Rotary(*pointers(positions, frequencies, cos, sin), n, half, scale)
    grid = (-(-n * half // _THREADS), 1, 1)
    launch(positions.device, Program.of("rotary"), grid, _THREADS, args)
    return cos, sin


def norm(
    x: Tensor, weight: Tensor, eps: float, *, pending: Tensor | None = None, out: Dtype
) -> Tensor:
    """RMSNorm of x (R, D), float32, times weight (D,); ``pending`` (R, D) is added to x first.

    x keeps the sum; its rows may be strided. The result is of type ``out``, bf16 or float32.
    """
    y = empty(*x.shape, dtype=out, device=x.device)
    _norm(x, weight, eps, pending, y, y.shape[1], OUT=OUT[out], RECORDS=0)
    return y


def norm_in_place(x: Tensor, weight: Tensor, eps: float, pending: Tensor | None = None) -> Tensor:
    """As ``norm``, written to x (R, D), float32."""
    _norm(x, weight, eps, pending, x, x.strides[0], OUT=OUT[FLOAT32], RECORDS=0)
    return x


def norm_records(
    x: Tensor, weight: Tensor, eps: float, *, pending: Tensor | None = None, fine: bool = False
) -> Records:
    """As ``norm``, in the form that products of packed weights read."""
    records = empty_records(1, x.shape[0], x.shape[1], x.device, fine=fine)
    macros = {"OUT": "float", "RECORDS": 1, "FINE": int(fine)}
    _norm(x, weight, eps, pending, records.data, records.stride, **macros)
    return records


def _norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    pending: Tensor | None,
    y: Tensor,
    stride: int,
    **macros: object,
) -> None:
    assert pending is None or pending.is_contiguous, "rows of a sum follow one another"
    args = _Norm(*pointers(x, pending, weight, y), x.shape[1], x.strides[0], stride, eps)
    launch(x.device, Program.of("rms_norm", **macros), (x.shape[0], 1, 1), _THREADS, args)


def norm_gate(
    seen: Tensor,
    gates: Tensor,
    weight: Tensor | None = None,
    *,
    size: int = 0,
    eps: float = 0.0,
    gate: str = "sigmoid",
    gate_first: bool = False,
    records: Records | None = None,
) -> Tensor:
    """Rows ``seen`` (R, W) times gate(gates), bf16.

    With ``weight``, rows are first normed over each ``size`` elements (fewer than W weights
    repeat). ``gates`` (R, W) have the same type and any stride. The result may go to ``records``
    instead, if ``size`` and W are whole steps of 32.
    """
    rows, width = seen.shape
    size = size or width
    out = empty(0 if records else rows, width, dtype=BFLOAT16, device=seen.device)
    args = _NormGate(
        *pointers(seen, gates, weight, records.data if records else out),
        width=width,
        size=size,
        norm_width=0 if weight is None else len(weight),
        gate_stride=gates.strides[0],
        out_stride=records.stride if records else 0,
        gate_first=gate_first,
        kind=("silu", "sigmoid", "softplus").index(gate),
        eps=eps,
    )
    fine = int(records is not None and records.fine)
    program = Program.of(
        "norm_gate", IN=OUT[seen.dtype], RECORDS=int(records is not None), FINE=fine
    )
    grid = (rows, width // size, 1)
    launch(seen.device, program, grid, min(_THREADS, -(-size // 32) * 32), args)
    return out


def gate(
    gate_up: Tensor,
    activation: str,
    *,
    scale: float = 1.0,
    limit: float = math.inf,
    curve: Sequence[float] = (0.0,) * 4,
    up: Tensor | None = None,
) -> Tensor:
    """activation(scale * gate) * up of gate_up (R, 2F), bf16 or float32, gate first: (R, F) in
    bf16. For ``relu2`` and ``xielu``, which have no gate, the activation of (R, F). With ``up``
    (R, F) of the same type, whose rows may be strided, gate_up has the gates alone.

    ``limit`` is that of ``ExpertSpec``, ``curve`` that of ``MlpSpec``.
    """
    count, columns = gate_up.shape
    width = columns if activation in UNGATED or up is not None else columns // 2
    ups = gate_up[:, columns - width :] if up is None else up
    out = empty(count, width, dtype=BFLOAT16, device=gate_up.device)
    args = _Gate(*pointers(gate_up, ups, out), columns, ups.strides[0], width, scale, limit, *curve)
    program = Program.of("gate", GATE=GATES[activation], IN=OUT[gate_up.dtype])
    launch(out.device, program, (-(-width // _THREADS), count, 1), _THREADS, args)
    return out


def token_rows(tokens: Tensor, each: int, rows: int) -> Tensor:
    """See ``quant.ops.streams.rows_of_tokens``: (R * ``each``,) for tokens (R,), both int64."""
    out = empty(len(tokens) * each, dtype=INT64, device=tokens.device)
    args = _TokenRows(*pointers(tokens, out), len(out), each, rows // each)
    grid = (-(-len(out) // _THREADS), 1, 1)
    launch(out.device, Program.of("token_rows"), grid, _THREADS, args)
    return out


def rotate_blocks(x: Tensor, size: int, *, out: Tensor | None = None) -> Tensor:
    """Multiply each block of ``size`` columns of x (R, D) or (H, R, D), bf16, by the Hadamard
    matrix / sqrt(size). The result is contiguous, in ``out`` if given, which may be x.

    Rows of x may be strided. Natural order, as in ``quant/methods/rotation.py``; rounded to bf16.

    Raises:
        ValueError: ``size`` is not a power of two up to 256 that divides D.
    """
    rows, width = x.shape[-2:]
    heads = x.shape[0] if len(x.shape) == 3 else 1
    if size & (size - 1) or not 2 <= size <= _MOST_HADAMARD or width % size:
        raise ValueError(f"no Hadamard rotation in blocks of {size} for {width} columns")
    if out is None:
        out = empty(*x.shape, dtype=BFLOAT16, device=x.device)
    x_head = x.strides[0] if heads > 1 else 0
    args = _Rotate(*pointers(x, out), x_head, x.strides[-2], width, size, size**-0.5)
    grid = (-(-width // _MOST_HADAMARD), rows, heads)
    launch(x.device, Program.of("rotate"), grid, _MOST_HADAMARD, args)
    return out


class BestLogits:
    """The best logits of passes whose logits are like ``logits`` (n, V), float32, in pinned RAM."""

    def __init__(self, logits: Tensor) -> None:
        device, (rows, vocab) = logits.device, logits.shape
        constants = declarations("best_logits.cu").constants
        self._threads, self._vocab = constants["THREADS"], vocab
        self._blocks = -(-vocab // (self._threads * constants["EACH"]))
        shape = rows, self._blocks * BEST_COUNT
        self._keys = empty(*shape, dtype=INT64, device=device, pool=device.persistent)
        self._best = device.pinned((rows, BEST_COUNT), BEST)

    def find(self, logits: Tensor) -> None:
        """Start to find the best of ``logits`` (n, V), contiguous."""
        device, (rows, vocab), place = logits.device, logits.shape, self._best.ctypes.data
        args = _Best(*pointers(logits, None), place, vocab, vocab)
        if self._blocks > 1:
            args.out = self._keys.address
            launch(device, BEST_LOGITS, (self._blocks, rows, 1), self._threads, args)
            args = _Best(*pointers(logits, self._keys), place, vocab, self._keys.shape[1])
        launch(device, BEST_LOGITS, (1, rows, 1), self._threads, args)

    def rows(self, count: int | None = None) -> npt.NDArray[Any]:
        """Wait for the GPU; return a copy of the best of the first ``count`` rows, ``BEST``."""
        self._keys.device.synchronize()
        return self._best[:count, : self._vocab].copy()
