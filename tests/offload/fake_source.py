"""Units that are made up, and a source of them that is slow, fails, hangs, or counts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from localrt.common.files import PAGE
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Event
from localrt.quant.formats.packed import Bytes

Fault = Callable[[StoredUnit, int], None]


def make_units(pages: Sequence[int]) -> list[StoredUnit]:
    """Units u0, u1, ... of so many pages, one after another in one file."""
    units, offset = [], 0
    for number, count in enumerate(pages):
        units.append(StoredUnit(f"u{number}", "file.safetensors", offset, count * PAGE, "", ()))
        offset += count * PAGE
    return units


def content(unit: StoredUnit, start: int = 0, stop: int | None = None) -> Bytes:
    """The bytes of a unit: other ones in every unit and place."""
    stop = unit.nbytes if stop is None else stop
    return (np.arange(unit.offset + start, unit.offset + stop, dtype=np.uint64) // 8 % 251).astype(
        np.uint8
    )


class FakeSource:
    """``fault`` is called before each fetch, and may raise, wait or sleep."""

    def __init__(self, *, delay_s: float = 0.0, seed: int = 0, fault: Fault | None = None) -> None:
        self.fetched: list[tuple[str, int, int]] = []
        self.fault = fault
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Event | None) -> None:
        with self._lock:
            self.fetched.append((unit.name, start, len(out)))
            pause = self._delay_s * self._random.random()
        if after is not None:
            after.synchronize()
        if self.fault is not None:
            self.fault(unit, start)
        if pause:
            time.sleep(pause)
        out[:] = content(unit, start, start + len(out))

    @property
    def nbytes(self) -> int:
        """Bytes asked for so far."""
        return sum(count for _, _, count in self.fetched)
