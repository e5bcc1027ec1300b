"""A card that is not there: its memory is counted, its time computed, its results real.

Units are copied for real into buffers that stand for its memory, and computed by the CPU's kernels;
the clock charges each copy bytes over the link's rate and each unit's kernels the larger of bytes
over memory rate and operations over arithmetic rate. For choosing and testing schedules without a
card; its times are simulated and say so.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import MemoryBudgetError
from localrt.formatting import format_bytes
from localrt.models.timing import Mark
from localrt.offload.cards.clock import VirtualClock
from localrt.quant.ops.aligned import aligned_buffer
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["VirtualAccelerator"]

Bytes = npt.NDArray[np.uint8]


class VirtualAccelerator:
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
        self.name, self.ops, self.capacity = name, ops, capacity
        self.used = 0
        self.link_bytes = 0
        self._clock = clock
        self._link = link_bytes_s
        self._memory = memory_bytes_s
        self._flops = flops
        self._call_s, self._latency_s = call_s, link_latency_s
        self._lock = threading.Lock()

    def alloc(self, nbytes: int) -> Bytes:
        """See ``Accelerator``."""
        with self._lock:
            if self.used + nbytes > self.capacity:
                raise MemoryBudgetError(
                    f"{self.name}: {format_bytes(nbytes)} more do not fit its "
                    f"{format_bytes(self.capacity)}, of which {format_bytes(self.used)} are used"
                )
            self.used += nbytes
        return aligned_buffer(nbytes)

    def free(self, memory: Bytes) -> None:
        """See ``Accelerator``."""
        with self._lock:
            self.used -= memory.nbytes

    def host_buffer(self, nbytes: int) -> Bytes:
        """See ``Accelerator``."""
        return aligned_buffer(nbytes)

    def free_host(self, memory: Bytes) -> int:
        """See ``Accelerator``."""
        return memory.nbytes

    def copy_in(
        self,
        name: str,
        source: Bytes,
        out: Any,
        after: Mark,
        there: Mark,
        *,
        wait: bool = True,
    ) -> Mark:
        """See ``Accelerator``: it is there at once, whatever the clock says."""
        started = self._clock.begin("link")
        out[:] = source
        with self._lock:
            self.link_bytes += source.nbytes
        cost = source.nbytes / self._link
        both = max(after or 0.0, there or 0.0)
        return self._clock.end("link", name, started, after=both, cost_s=cost)

    def settled(self, mark: Mark) -> None:
        """See ``Accelerator``."""

    def wait(self, mark: Mark) -> None:
        """Marks are times: who computes passes them on."""

    def mark(self, ended: Mark) -> Mark:
        """See ``Accelerator``."""
        return ended

    def cost_s(self, nbytes: int, macs: int, rows: int) -> float:
        """See ``Accelerator``."""
        return max(nbytes / self._memory, 2 * macs * rows / self._flops) + self._call_s

    def to_card(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``: few bytes, which pass between the weights' copies."""
        return x, (after or 0.0) + self._latency_s + x.nbytes / self._link

    def to_host(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``."""
        return self.to_card(x, after)

    def close(self) -> None:
        """Nothing is held beside what callers hold."""
