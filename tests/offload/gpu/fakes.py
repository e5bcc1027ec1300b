"""A GPU that is not there, for what the pipeline decides: it does everything at once.

It has the CPU's kernels, so that whatever is placed where, results are the resident decoder's to
the bit: on the tests' driver the two sides round differently.
"""

from __future__ import annotations

from typing import Any

from localrt.offload.device.gpu import Clock, Event, Gpu
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array, aligned_buffer
from localrt.quant.ops.protocol import Ops


def same_kernels(ops: NativeOps) -> NativeOps:
    """The kernels of ``ops`` once more: a GPU keeps caches of its own."""
    return NativeOps(threads=1, kv_format=ops.kv_format)


class FakeGpu(Gpu):
    """Its memory is RAM, which is counted; copies have ended when they are begun.

    ``pinned`` are bytes of RAM by their address, of which ``registered`` pieces were pinned so far.
    """

    def __init__(self, clock: Clock, ops: Ops, *, capacity: int, name: str = "fake GPU") -> None:
        super().__init__(clock, ops, name=name, capacity=capacity)
        self.pinned: dict[int, int] = {}
        self.registered = 0

    def host_buffer(self, nbytes: int) -> Bytes:
        data = super().host_buffer(nbytes)
        self.pinned[data.ctypes.data] = nbytes
        self.registered += 1
        return data

    def free_host(self, memory: Bytes) -> int:
        freed = super().free_host(memory)
        assert self.pinned.pop(memory.ctypes.data) == freed
        return freed

    def to_gpu(self, x: Array) -> Array:
        return x

    def to_host(self, x: Array) -> Array:
        return x

    def _alloc(self, nbytes: int) -> Any:
        return aligned_buffer(nbytes)

    def _queue_copy(self, source: Bytes, out: Any, after: Event | None) -> None:
        out[:] = source
