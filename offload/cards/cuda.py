"""A CUDA card: torch's memory and streams, our kernels.

Copies go through one stream of their own from pinned RAM, kernels through another; each waits for
the events that it needs, and nothing waits for the whole device.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import MemoryBudgetError
from localrt.formatting import format_bytes
from localrt.models.timing import Clock, Mark
from localrt.quant.ops.protocol import Array, Ops
from localrt.quant.ops.triton.cuda_memory import CudaCopies

__all__ = ["CudaAccelerator"]

Bytes = npt.NDArray[np.uint8]


class CudaAccelerator:
    """See ``Accelerator``. ``capacity`` bounds what is allocated here, below the card's own."""

    def __init__(self, clock: Clock, ops: Ops, copies: CudaCopies, *, capacity: int) -> None:
        self.name, self.ops, self.capacity = copies.name, ops, capacity
        self.used = 0
        self.link_bytes = 0
        self._clock = clock
        self._copies = copies
        self._lock = threading.Lock()

    def alloc(self, nbytes: int) -> Any:
        """See ``Accelerator``."""
        with self._lock:
            if self.used + nbytes > self.capacity:
                raise MemoryBudgetError(
                    f"{self.name}: {format_bytes(nbytes)} more do not fit the "
                    f"{format_bytes(self.capacity)} that may be used, of which "
                    f"{format_bytes(self.used)} are taken"
                )
            self.used += nbytes
        return self._copies.alloc(nbytes)

    def free(self, memory: Any) -> None:
        """See ``Accelerator``."""
        with self._lock:
            self.used -= memory.numel()
        self._copies.free(memory)

    def host_buffer(self, nbytes: int) -> Bytes:
        """See ``Accelerator``."""
        return self._copies.host_buffer(nbytes)

    def free_host(self, memory: Bytes) -> int:
        """See ``Accelerator``."""
        self._copies.free_host(memory)
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
        """See ``Accelerator``."""
        started = self._clock.begin("link")
        event = self._copies.copy_in(source, out, after, wait=wait)
        with self._lock:
            self.link_bytes += source.nbytes
        self._clock.end("link", name, started)
        return event

    def settled(self, mark: Mark) -> None:
        """See ``Accelerator``."""
        self._copies.settled(mark)

    def wait(self, mark: Mark) -> None:
        """See ``Accelerator``."""
        self._copies.wait(mark)

    def mark(self, ended: Mark) -> Mark:
        """See ``Accelerator``."""
        return self._copies.record()

    def cost_s(self, nbytes: int, macs: int, rows: int) -> None:
        """Its kernels are real."""

    def to_card(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``."""
        return self._copies.to_card(x), after

    def to_host(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``."""
        return self._copies.to_host(x), after

    def close(self) -> None:
        """Give the cached memory back to the card."""
        self._copies.close()
