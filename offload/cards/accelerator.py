"""A card as the pipeline sees it: memory of a fixed size, copies, kernels, and marks to wait for.

Two kinds: a CUDA card (``cuda.py``) and a virtual one (``virtual.py``), which computes on the CPU
and takes its time from what a card would need. The pipeline does not know which it drives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import MemoryBudgetError
from localrt.formatting import format_bytes
from localrt.models.timing import Clock, Mark
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Array, Ops

__all__ = ["Accelerator", "Bytes"]

Bytes = npt.NDArray[np.uint8]


class Accelerator:
    """One card; ``ops`` computes on its memory. ``copy_in`` may be called by several threads, the
    rest by one at a time.

    ``capacity`` is the bytes that may be taken in all, ``used`` those that are allocated here;
    ``held`` are those that others take: keys, values, and what kernels need for themselves. Most
    of both together was ``peak``. ``link_bytes`` were copied to it so far.
    """

    def __init__(self, clock: Clock, ops: Ops, *, name: str, capacity: int) -> None:
        self.name, self.ops, self.capacity = name, ops, capacity
        self.used = self.held = self.peak = 0
        self.link_bytes = 0
        self._clock = clock
        self._lock = threading.Lock()

    def alloc(self, nbytes: int) -> Any:
        """Uninitialized memory of the card, to be sliced by bytes.

        Raises:
            MemoryBudgetError: it would exceed the capacity.
        """
        with self._lock:
            if self.used + nbytes > self.capacity:
                raise MemoryBudgetError(
                    f"{self.name}: {format_bytes(nbytes)} more do not fit the "
                    f"{format_bytes(self.capacity)} that may be used, of which "
                    f"{format_bytes(self.used)} are taken"
                )
            self.used += nbytes
        try:
            memory = self._alloc(nbytes)
        except BaseException:
            with self._lock:
                self.used -= nbytes
            raise
        self.hold(self.held)
        return memory

    def hold(self, nbytes: int) -> None:
        """Others take ``nbytes`` from now on."""
        with self._lock:
            self.held = nbytes
            self.peak = max(self.peak, self.used + nbytes)

    def free(self, memory: Any) -> None:
        """Give memory back."""
        with self._lock:
            self.used -= memory.nbytes

    def _alloc(self, nbytes: int) -> Any:
        raise NotImplementedError

    def host_buffer(self, nbytes: int) -> Bytes:
        """RAM that copies are fast from: pinned, page-aligned."""
        return aligned_buffer(nbytes)

    @property
    def unpinned(self) -> int:
        """Bytes of such RAM that the system would not pin: copies from it are slower."""
        return 0

    def free_host(self, memory: Bytes) -> int:
        """Such RAM is no longer needed; returns its bytes."""
        return memory.nbytes

    def copy_in(
        self, name: str, source: Bytes, out: Any, after: Mark, there: Mark, *, wait: bool = True
    ) -> Mark:
        """Copy to the card, not before ``after`` (memory is free) and ``there`` (data is there).

        Returns once the source may be changed, with the mark of the copy's end; at once without
        ``wait``, and then the source must stay as it is until that mark is ``settled``.
        """
        started = self._clock.begin("link")
        mark = self._copy(source, out, after, there, wait)
        with self._lock:
            self.link_bytes += source.nbytes
        cost = self._link_s(source.nbytes)
        end = self._clock.end("link", name, started, after=mark, cost_s=cost)
        return mark if cost is None else end

    def _copy(self, source: Bytes, out: Any, after: Mark, there: Mark, wait: bool) -> Mark:
        """The mark of the copy's end; on a virtual card of when it could begin."""
        raise NotImplementedError

    def _link_s(self, nbytes: int) -> float | None:
        """Seconds that a copy takes on a virtual card; None where they are real."""
        return None

    def cost_s(self, nbytes: int, macs: int, rows: int, *, unpacks: bool = True) -> float | None:
        """Seconds that a unit's kernels take on a virtual card; None where they are real.

        ``unpacks``: many rows have its matrices unpacked first.
        """
        return None

    def settled(self, mark: Mark) -> None:
        """Return when a copy that was not waited for has ended."""

    def ended(self, mark: Mark) -> bool:
        """Whether it has ended, without waiting."""
        return True

    def wait(self, mark: Mark) -> None:
        """Kernels started from now on wait for ``mark``."""

    def mark(self, ended: Mark, *read: Any, last: bool = False) -> Mark:
        """The mark of all kernels started so far; ``ended`` is the clock's of the last.

        They have ``read`` these parts of the card's memory, which copies may overwrite after the
        mark; for the ``last`` time, if nobody reads them again before that.
        """
        return ended

    def to_card(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """Activations of the CPU's ``Ops`` as the card's."""
        raise NotImplementedError

    def to_host(self, x: Array, after: Mark) -> tuple[Array, Mark]:
        """The card's activations as the CPU's."""
        raise NotImplementedError

    def send(self, x: Array, routing: Routing, after: Mark) -> Callable[[], tuple[Array, Mark]]:
        """Begin to bring a layer's rows to the host, and who was chosen for them.

        What is returned waits for both, and gives the rows as the CPU's activations. Kernels that
        are started later do not hold them up.
        """
        return lambda: self.to_host(x, after)

    def close(self) -> None:
        """Free everything that callers do not hold."""
