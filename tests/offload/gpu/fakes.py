"""A GPU that is not there, for what the pipeline decides: it does everything at once, or copies as
late as it may.

It has the CPU's kernels, so that whatever is placed where, results are the resident decoder's to
the bit: on the tests' driver the two sides round differently.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from localrt.offload.device.gpu import Clock, Event, Gpu
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array, aligned_buffer
from localrt.quant.ops.protocol import Ops

__all__ = ["FakeGpu", "LateGpu"]


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


class Mark:
    """An event; ``run`` has its GPU do what comes before it."""

    def __init__(self, run: Callable[[Mark], None]) -> None:
        self._run = run
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self._run(self)


class LateGpu(FakeGpu):
    """It copies when somebody waits for it, and knows what it has not copied yet."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._work: deque[Mark | tuple[Bytes, Any]] = deque()
        self._running = threading.RLock()
        self.faults: list[str] = []

    def run(self, until: Mark | None) -> None:
        """Copy up to an event, or all."""
        with self._running:
            while self._work and not (until is not None and until.happened):
                work = self._work.popleft()
                if isinstance(work, Mark):
                    work.happened = True
                else:
                    work[1][:] = work[0]

    def end_copy(self, name: str) -> Event | None:
        with self._running:
            mark = Mark(self.run)
            self._work.append(mark)
            return mark

    def settle_copies(self) -> None:
        self.run(None)

    def wait(self, event: Event | None) -> None:
        if event is not None:
            event.synchronize()

    def free_host(self, memory: Bytes) -> int:
        self._note(memory)
        return super().free_host(memory)

    def free(self, memory: Any, unpacked: int = 0) -> None:
        self._note(memory)
        super().free(memory, unpacked)

    def _note(self, memory: Any) -> None:
        with self._running:
            copies = [work for work in self._work if isinstance(work, tuple)]
            if any(np.shares_memory(memory, one) for work in copies for one in work):
                self.faults.append("a copy needs what is freed")

    def _queue_copy(self, source: Bytes, out: Any, after: Event | None) -> None:
        with self._running:
            self._work.append((source, out))
