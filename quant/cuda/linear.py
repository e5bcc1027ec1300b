"""Products of any number of rows and a matrix, or one matrix per head (GEMM); an MLP split by rows.

Packed tiles go to kernels that read 8-bit rows. bf16 weights go to a kernel of ours for up to 64
rows, and to cuBLAS, if available, for more. Where bf16 is nearly as fast as int8 (data-center
GPUs), packed weights are unpacked piece by piece for cuBLAS above 64 rows, unless there is one
matrix per head.

Pieces of an MLP are on the GPU and possibly a last one on the host; they compute at the same time.
Both exchange rows through pinned RAM, which kernels read and write directly: no copy is a driver
call. Each device computes its rows of gate and up, receives the other's values, and computes its
rows of down. A recording is cut where the host computes. The layers of a pass share that RAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial

import numpy as np

from localrt.quant.cuda import cublas
from localrt.quant.cuda.adapters import add_low_rank
from localrt.quant.cuda.device import Device
from localrt.quant.cuda.launch import many_grid, prefers_int8
from localrt.quant.cuda.products import (
    MOST_ROWS,
    Records,
    TiledMatrix,
    dense_product,
    product,
    quantize,
    unpack_rows,
)
from localrt.quant.cuda.steps import converted, gate, move_rows, rotate_blocks
from localrt.quant.cuda.stream import Between, Recording, Stream
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, Dtype, Tensor, empty
from localrt.quant.cuda.weight import (
    CudaWeight,
)
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.experts import ExpertSpec
from localrt.quant.ops.protocol import Check, HostRows, MlpSpec, MlpWeights


def reads_records(weight: CudaWeight, rows: int) -> bool:
    """Whether a product of ``rows`` rows with this matrix reads 8-bit records only."""
    packed = all(isinstance(part, TiledMatrix) for part in weight.parts)
    return packed and not weight.hadamard and _by_kernels(rows, weight.parts[0])


def _by_kernels(rows: int, part: TiledMatrix | Tensor) -> bool:
    """Whether our kernels, not cuBLAS, multiply ``rows`` rows: if there are few, if weights are
    packed (on most GPUs), or if cuBLAS is missing.
    """
    if isinstance(part, Tensor):
        return rows <= MOST_ROWS or not cublas.multiplies(part.device)
    device = _device(part)
    return rows <= MOST_ROWS or prefers_int8(device) or not cublas.multiplies(device)


def linear(
    x: Tensor | Records,
    weight: CudaWeight,
    bias: Tensor | None = None,
    *,
    dtype: Dtype = BFLOAT16,
    out: Tensor | None = None,
    ours: bool = False,
) -> Tensor:
    """x (R, columns), bf16 or records, @ weight.T: (R, rows) in ``dtype``, or written to ``out``,
    whose rows may be strided.

    ``ours`` forces our kernels for any number of rows. The pass's adapters are applied.
    """
    given = x
    if isinstance(x, Tensor):
        x = _rotated(x, weight)
        if reads_records(weight, len(x)):
            x = quantize(x, fine=weight.fine)
    if out is None:
        out = empty(_rows(x), weight.shape[0], dtype=dtype, device=_device(x))
    change = None if weight.adapters is None else weight.adapters.of(given, weight.starts)
    joined = change if _applies_changes(weight, _rows(x)) else None
    first = 0
    for part in weight.parts:
        rows = part.shape[0]
        y, own = out[:, first : first + rows], None if bias is None else bias[first : first + rows]
        first += rows
        if isinstance(x, Records):
            assert isinstance(part, TiledMatrix), "records are for packed weights"
            product(x, part, y, bias=own, change=joined)
        elif not ours and not _by_kernels(len(x), part):
            _multiply_unpacked(x, part, y, own)
        elif isinstance(part, Tensor):
            dense_product(x, part, y, bias=own)
        else:
            product(quantize(x, fine=weight.fine), part, y, bias=own, change=joined)
    if change is not None and joined is None:
        add_low_rank(change, out, bias, fine=weight.fine)
    return out


def normed_for(
    x: Stream, weight: Tensor | None, eps: float, reader: CudaWeight
) -> Tensor | Records:
    """The norm of x (x itself without ``weight``) in the form that ``reader``'s product takes."""
    if weight is None:
        return converted(x.settle(), BFLOAT16)
    if reads_records(reader, len(x.values)):
        return x.normed_records(weight, eps, fine=reader.fine)
    return x.normed(weight, eps)


def gate_up(
    x: Tensor | Records, weight: CudaWeight, spec: MlpSpec | ExpertSpec, bias: Tensor | None = None
) -> Tensor:
    """activation(gate) * up of a stacked gate and up, (R, rows / 2) in bf16: in one kernel if each
    is whole tiles. Without a gate, the activation of all rows.
    """
    activation, limit, scale, curve = spec.activation, spec.limit, 1.0, (0.0,) * 4
    if isinstance(spec, MlpSpec):
        scale, curve = spec.gate_scale, spec.curve
    if bias is not None or scale != 1.0 or activation not in ("silu", "gelu_tanh"):
        both = linear(x, weight, bias, dtype=FLOAT32)
        return gate(both, activation, scale=scale, limit=limit, curve=curve)
    part, inner, rows = weight.parts[0], weight.shape[0] // 2, _rows(x)
    if (
        len(weight.parts) > 1
        or not isinstance(part, TiledMatrix)
        or inner % 16
        or not _by_kernels(rows, part)
    ):
        return gate(linear(x, weight), activation, limit=limit)
    change = None if weight.adapters is None else weight.adapters.of(x, weight.starts)
    if change is not None and not _applies_changes(weight, rows):
        # In float32: rows without adapters keep their bits.
        return gate(linear(x, weight, dtype=FLOAT32), activation, limit=limit)
    if isinstance(x, Tensor):
        x = quantize(_rotated(x, weight), fine=weight.fine)
    out = empty(rows, inner, dtype=BFLOAT16, device=_device(x))
    product(x, part, out, gate=activation, limit=limit, change=change)
    return out


def _applies_changes(weight: CudaWeight, rows: int) -> bool:
    """Whether products of ``rows`` rows apply adapters themselves: the kernel for few rows does."""
    count = rows * (2 if weight.fine else 1)
    return all(
        isinstance(part, TiledMatrix)
        and not many_grid(part.format, count, part.count, _device(part).processors)
        for part in weight.parts
    )


def _rotated(x: Tensor, weight: CudaWeight) -> Tensor:
    return rotate_blocks(x, weight.hadamard) if weight.hadamard else x


def _rows(x: Tensor | Records) -> int:
    return x.rows if isinstance(x, Records) else len(x)


def _device(x: Tensor | Records | TiledMatrix) -> Device:
    return x.device if isinstance(x, Tensor) else x.data.device


def _multiply_unpacked(
    x: Tensor, part: TiledMatrix | Tensor, out: Tensor, bias: Tensor | None
) -> None:
    rows, columns = part.shape
    at_once = max(16, cublas.UNPACKED // columns // 16 * 16)
    for first in range(0, rows, at_once):
        stop = min(rows, first + at_once)
        own = None if bias is None else bias[first:stop]
        cublas.multiply(x, _unpacked(part, first, stop), out[:, first:stop], own)


def multiply_heads(x: Tensor, weight: CudaWeight, out: Tensor) -> None:
    """out (H, R, rows) = x (H, R, columns), bf16, times H matrices that ``weight`` stacks.

    Rows of x and out may be strided.
    """
    heads, count, columns = x.shape
    x = _rotated(x, weight)
    part, rows = weight.parts[0], weight.shape[0] // heads
    if len(weight.parts) == 1 and isinstance(part, TiledMatrix) and rows % 16 == 0:
        product(quantize(x, fine=weight.fine), part, out)
        return
    dense = part if len(weight.parts) == 1 and isinstance(part, Tensor) else _whole(weight)
    if _by_kernels(count, dense):
        dense_product(x, dense, out)
    else:
        cublas.multiply(x, dense.view(heads, rows, columns), out)


def _unpacked(part: TiledMatrix | Tensor, first: int, stop: int) -> Tensor:
    """Rows of a matrix in bf16."""
    if isinstance(part, Tensor):
        return part[first:stop]
    dense = empty(stop - first, part.shape[1], dtype=BFLOAT16, device=part.data.device)
    unpack_rows(part, dense, first=first)
    return dense


def _whole(weight: CudaWeight) -> Tensor:
    """All rows of all parts in bf16."""
    dense = empty(*weight.shape, dtype=BFLOAT16, device=_device(weight.parts[0]))
    first = 0
    for part in weight.parts:
        out = dense[first : first + part.shape[0]]
        first += part.shape[0]
        if isinstance(part, Tensor):
            out.put(part)
        else:
            unpack_rows(part, out)
    return dense


_Key = tuple[int, int, int]  # rows, D, F


class Handover:
    """The host's work for a layer, between the GPU's launches, in pinned RAM: rows of the residual
    stream (R, D), of down's inputs (R, F), and of the result (R, D). They are arrays for ``host``,
    tensors for kernels.
    """

    host: HostRows

    def __init__(self, device: Device, rows: int, hidden: int, inner: int) -> None:
        self._device = device
        shapes = (rows, hidden), (rows, inner), (rows, hidden)
        self.x, self.inner, self.y = (device.pinned(shape, np.float32) for shape in shapes)
        self._events = device.event(), device.event()

    def first(self, rows: int, host: HostRows) -> Handover:
        """A view of the first rows, for ``host``."""
        other = copy(self)
        other.host = host
        other.x, other.inner, other.y = (each[:rows] for each in (self.x, self.inner, self.y))
        return other

    def tensor(self, values: Floats) -> Tensor:
        """The tensor of one of the arrays."""
        strides = values.shape[1], 1
        return Tensor(self._device, None, values.ctypes.data, values.shape, strides, FLOAT32)

    def begin(self, check: Check | None) -> None:
        """Note that the GPU's kernels that write the rows have been launched."""
        self._sent(0)
        self.host.begin(check)

    def gate(self, first: int, check: Check | None) -> None:
        """Compute the host's rows of gate and up, from row ``first`` on, while the GPU computes its
        own.
        """
        self._sent(1)
        if check is not None:
            check()
        self._receive(0)
        self.inner[:, first:] = self.host.gate(self.x)
        self._receive(1)

    def down(self, first: int, check: Check | None) -> None:
        """Compute the host's rows of down."""
        self.y[:, first:] = self.host.down(self.inner)

    def _sent(self, number: int) -> None:
        """Note that the kernels that write the rows (0), or the GPU's values (1), are launched."""
        event = self._events[number]
        if event is not None:
            event.record()

    def _receive(self, number: int) -> None:
        """Wait until the rows (0) or the GPU's values (1) have been written."""
        event = self._events[number]
        if event is not None:
            event.synchronize()


def split_mlp(
    x: Stream,
    pieces: Sequence[MlpWeights],
    spec: MlpSpec,
    host: HostRows | None,
    recording: Recording | None,
    handovers: dict[_Key, Handover],
) -> Tensor:
    """See ``SplitOps``: (R, D) float32. ``handovers`` is a cache, filled on demand."""
    first = pieces[0]
    h = normed_for(x, first.norm, spec.eps, first.gate_up)
    device, (rows, hidden) = x.values.device, x.values.shape
    inner = first.down.shape[1]
    values = empty(rows, inner, dtype=BFLOAT16, device=device)
    y = empty(rows, hidden, dtype=FLOAT32, device=device)

    def cut(between: Between) -> None:
        if recording is None:
            between(None)
        else:
            recording.cut(between)

    turn = None
    if host is not None:
        # Of few sizes; the GPU may still be reading an earlier pass's.
        key = 1 << (rows - 1).bit_length(), hidden, inner
        if key not in handovers:
            handovers[key] = Handover(device, *key)
        turn = handovers[key].first(rows, host)
        given, seen, made = map(turn.tensor, (turn.x, turn.inner, turn.y))
        move_rows(x.values, given)
        cut(turn.begin)
    at = 0
    for piece in pieces:
        own = gate_up(h, piece.gate_up, spec)
        stop = at + own.shape[1]
        move_rows(own, values[:, at:stop])
        at = stop
    if turn is not None:
        move_rows(values[:, :at], seen[:, :at])
        cut(partial(turn.gate, at))
        move_rows(seen[:, at:], values[:, at:])
    at = 0
    for piece in pieces:
        stop = at + piece.down.shape[0]
        linear(values, piece.down, out=y[:, at:stop])
        at = stop
    if turn is not None:
        cut(partial(turn.down, at))
        move_rows(made[:, at:], y[:, at:])
    return y
