"""How a store is read, and whole units of it at once: several requests at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.checkpoints.store.memory import Mend
from localrt.offload.reading.files import ReadMode, StoreFiles

__all__ = ["Reading", "read_units"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a store is read. ``files`` stands in for the store's own.

    With ``verify`` each unit is compared with its SHA-256, once; see ``Verifier`` for ``mend``.
    ``stall_s``: how long a disk may be silent.
    """

    mode: ReadMode
    files: StoreFiles | None = None
    verify: bool = True
    mend: Mend | None = None
    stall_s: float = 60.0


def read_units(
    files: StoreFiles,
    units: Sequence[StoredUnit],
    alloc: Callable[[int], Bytes],
    done: Callable[[StoredUnit, Bytes], None],
    *,
    mode: ReadMode,
    on_bytes: Callable[[int], None] | None = None,
) -> float:
    """Read ``units`` in order, each into memory of its own, and call ``done`` for each.

    ``on_bytes`` gets the bytes as they come, and may raise to stop. Returns the seconds that
    reading took, without ``done``.

    Raises:
        CheckpointError: a file is truncated or fails.
    """
    seconds = 0.0

    def read(unit: StoredUnit, data: Bytes, start: int) -> int:
        part = data[start : start + mode.block]
        files.read_into(unit.file, unit.offset + start, part)
        return part.nbytes

    with ThreadPoolExecutor(mode.threads, thread_name_prefix="localrt-load") as pool:
        for unit in units:
            data = alloc(unit.nbytes)
            began = time.perf_counter()
            starts = range(0, unit.nbytes, mode.block)
            for count in pool.map(lambda start, u=unit, d=data: read(u, d, start), starts):
                if on_bytes is not None:
                    on_bytes(count)
            seconds += time.perf_counter() - began
            done(unit, data)
    return seconds
