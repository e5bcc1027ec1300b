"""A CUDA card: torch's memory and streams, our kernels.

Copies go through one stream of their own from pinned RAM, kernels through another; each waits for
the events that it needs, and nothing waits for the whole device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localrt.models.timing import Clock, Mark
from localrt.offload.cards.accelerator import Accelerator, Bytes
from localrt.quant.ops.cuda.cuda_memory import CudaCopies
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["CudaAccelerator"]


class CudaAccelerator(Accelerator):
    """See ``Accelerator``. ``capacity`` bounds what is allocated here, below the card's own."""

    def __init__(self, clock: Clock, ops: Ops, copies: CudaCopies, *, capacity: int) -> None:
        super().__init__(clock, ops, name=copies.name, capacity=capacity)
        self._copies = copies

    def free(self, memory: Any) -> None:
        """See ``Accelerator``."""
        super().free(memory)
        self._copies.free(memory)

    def host_buffer(self, nbytes: int) -> Bytes:
        """See ``Accelerator``."""
        return self._copies.host_buffer(nbytes)

    @property
    def unpinned(self) -> int:
        """See ``Accelerator``."""
        return self._copies.unpinned

    def free_host(self, memory: Bytes) -> int:
        """See ``Accelerator``."""
        self._copies.free_host(memory)
        return memory.nbytes

    def settled(self, mark: Mark) -> None:
        """See ``Accelerator``."""
        self._copies.settled(mark)

    def ended(self, mark: Mark) -> bool:
        """See ``Accelerator``."""
        return self._copies.ended(mark)

    def wait(self, mark: Mark) -> None:
        """See ``Accelerator``."""
        self._copies.wait(mark)

    def mark(self, ended: Mark, *read: Any, last: bool = False) -> Mark:
        """See ``Accelerator``."""
        return self._copies.record()

    def to_card(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``."""
        return self._copies.to_card(x), after

    def to_host(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """See ``Accelerator``."""
        return self._copies.to_host(x), after

    def send(self, x: Array, routing: Routing, after: Mark) -> Callable[[], tuple[Array, Mark]]:
        """See ``Accelerator``."""
        received = self._copies.send(x, routing)
        return lambda: (received(), after)

    def close(self) -> None:
        """Give the cached memory back to the card."""
        self._copies.close()

    def _alloc(self, nbytes: int) -> Any:
        return self._copies.alloc(nbytes)

    def _copy(self, source: Bytes, out: Any, after: Mark, there: Mark, wait: bool) -> Mark:
        return self._copies.copy_in(source, out, after, wait=wait)
