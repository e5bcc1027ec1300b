"""A card that is not there: its memory is counted, its time computed, its results real.

Units are copied for real into buffers that stand for its memory, and computed by the CPU's kernels;
the clock charges each copy bytes over the link's rate and each unit's kernels what ``roofline``
makes of its bytes and operations. For choosing and testing schedules without a card; its times are
simulated and say so.
"""

from __future__ import annotations

from typing import Any

from localrt.models.timing import Mark
from localrt.offload.cards.accelerator import Accelerator, Bytes
from localrt.offload.cards.clock import VirtualClock
from localrt.offload.cards.roofline import kernel_seconds
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["VirtualAccelerator"]


class VirtualAccelerator(Accelerator):
    """See ``Accelerator``. Rates are bytes and operations per second.

    ``call_s`` is what starting a unit's kernels takes, ``link_latency_s`` what a copy of few bytes.
    """

    def __init__(
        self,
        clock: VirtualClock,
        ops: Ops,
        *,
        name: str,
        capacity: int,
        link_bytes_s: float,
        memory_bytes_s: float,
        flops: float,
        call_s: float = 1e-5,
        link_latency_s: float = 1e-5,
    ) -> None:
        super().__init__(clock, ops, name=name, capacity=capacity)
        self._link = link_bytes_s
        self._memory = memory_bytes_s
        self._flops = flops
        self._call_s, self._latency_s = call_s, link_latency_s

    def cost_s(self, nbytes: int, macs: int, rows: int, *, unpacks: bool = True) -> float:
        """See ``Accelerator``."""
        seconds = kernel_seconds(
            nbytes, macs, rows, bytes_s=self._memory, flops=self._flops, unpacks=unpacks
        )
        return seconds + self._call_s

    def to_card(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``: few bytes, which pass between the weights' copies."""
        return x, (after or 0.0) + self._latency_s + x.nbytes / self._link

    def to_host(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``."""
        return self.to_card(x, after)

    def _alloc(self, nbytes: int) -> Bytes:
        return aligned_buffer(nbytes)

    def _copy(self, source: Bytes, out: Any, after: Mark, there: Mark, wait: bool) -> Mark:
        """It is there at once, whatever the clock says."""
        out[:] = source
        return max(after or 0.0, there or 0.0)

    def _link_s(self, nbytes: int) -> float:
        return nbytes / self._link
