"""The fixed buffers that layers on an SSD are computed from: made once, shared by all caches.

A buffer keeps what it was filled with until another layer needs it. Of several that could go, the
one needed last goes first: layers come round in a circle, where the oldest is the next to be used.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from localrt.common.errors import MemoryBudgetError
from localrt.offload.kv.file import PAGE, Bytes
from localrt.offload.kv.tasks import IoTask
from localrt.quant.cpu.kv import map_zeros


class Slot:
    """One buffer. It holds blocks [``first``, ``stop``) of ``layer`` of the cache ``owner``."""

    __slots__ = ("address", "busy", "data", "first", "layer", "load", "owner", "stop", "task")

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.address: int = data.ctypes.data
        self.task: IoTask | None = None  # the last that reads or writes it, whoever's
        self.free()

    def free(self) -> None:
        """Forget what it holds."""
        self.owner: object = None
        self.layer = -1
        self.first = self.stop = 0
        self.load: IoTask | None = None
        self.busy = False  # a pass computes on it


class SlotPool:
    """``count`` buffers of ``nbytes`` each. One pass at a time; ``forget`` from anywhere."""

    def __init__(self, count: int, nbytes: int) -> None:
        size = -(-nbytes // PAGE) * PAGE
        memory = map_zeros(count * size)
        self.nbytes = count * size
        self._slots = [Slot(memory[i * size : (i + 1) * size]) for i in range(count)]
        self._active: deque[object] = deque(maxlen=count)  # owners that passes began with
        self._lock = threading.RLock()  # a finalizer may come in the middle

    def begin(self, owner: object) -> None:
        """A pass begins that ``owner`` takes part in: nothing is in use before its layers are."""
        with self._lock:
            self._active.append(owner)
            for slot in self._slots:
                slot.busy = False

    def find(self, owner: object, layer: int) -> Slot | None:
        """The buffer that holds ``layer`` of ``owner``, or is being filled with it."""
        with self._lock:
            for slot in self._slots:
                if slot.owner is owner and slot.layer == layer:
                    return slot
        return None

    def take(
        self, owner: object, layer: int, distance: Callable[[int], int], *, ahead: bool
    ) -> Slot | None:
        """An empty buffer for ``layer``. ``distance`` says in how many layers' time one is needed.

        ``ahead``: not now, so that nothing goes that is needed sooner, or by another cache of the
        same pass; None where there is no such buffer.

        Raises:
            MemoryBudgetError: every buffer is computed on.
        """
        with self._lock:
            best, best_rank = None, -1
            for slot in self._slots:
                rank = self._rank(slot, owner, distance)
                if not slot.busy and rank > best_rank:
                    best, best_rank = slot, rank
            if best is None and not ahead:
                raise MemoryBudgetError(
                    f"keys and values on the SSD have buffers for {len(self._slots)} sequences at "
                    "once: run fewer together"
                )
            if best is None or (ahead and best_rank <= distance(layer)):
                return None
            best.free()
            best.owner, best.layer = owner, layer
            return best

    def forget(self, owner: object) -> None:
        """``owner`` is gone."""
        with self._lock:
            for slot in self._slots:
                if slot.owner is owner:
                    slot.free()

    def _rank(self, slot: Slot, owner: object, distance: Callable[[int], int]) -> int:
        """How late it is needed."""
        if slot.owner is None:
            return 1 << 30
        if slot.owner is owner:
            return distance(slot.layer)
        return 0 if any(slot.owner is other for other in self._active) else 1 << 29
