"""A GPU that is not there, for what the pipeline decides: it does everything at once.

It has the CPU's kernels, so that whatever is placed where, results are the resident decoder's to
the bit: on the tests' driver the two sides round differently.
"""

from __future__ import annotations

from typing import Any

from localrt.offload.device.gpu import Clock, Event, Gpu
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array, aligned_buffer
from localrt.quant.ops.protocol import Ops


class FakeGpu(Gpu):
    """Its memory is RAM, which is counted; copies have ended when they are begun."""

    def __init__(self, clock: Clock, ops: Ops, *, capacity: int, name: str = "fake GPU") -> None:
        super().__init__(clock, ops, name=name, capacity=capacity)

    def to_gpu(self, x: Array) -> Array:
        return x

    def to_host(self, x: Array) -> Array:
        return x

    def _alloc(self, nbytes: int) -> Any:
        return aligned_buffer(nbytes)

    def _queue_copy(self, source: Bytes, out: Any, after: Event | None) -> None:
        out[:] = source
