"""An MLP split by rows into pieces on the GPU and possibly a last one on the host, which compute at
the same time.

GPU and host exchange rows through pinned RAM, which kernels read and write directly: no copy is a
driver call. Each device computes its rows of gate and up, receives the other's values, and computes
its rows of down. A recording is cut where the host computes. The layers of a pass share that RAM.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial

import numpy as np

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.linear import gate_up, linear, normed_for
from localrt.quant.cuda.steps import move_rows
from localrt.quant.cuda.stream import Between, Recording, Stream
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, Tensor, empty
from localrt.quant.cuda.weight import MlpWeights
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import Check, HostRows, MlpSpec

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
