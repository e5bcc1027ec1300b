"""What all threads that read for a pass have in common: one fetch, a silent disk, their end.

It knows neither orders nor rings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from localrt.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.timing import Mark

__all__ = ["POLL_S", "Source", "end_threads", "fetch", "require_answer"]

POLL_S = 0.05
"""Seconds until a waiting pass notices that it was cancelled."""

_CLOSE_S = 2.0  # how long closing waits for reads on their way


class Source(Protocol):
    """Where units come from. Used by several threads at once."""

    def fetch(self, unit: StoredUnit, start: int, out: Any, after: Mark) -> Mark:
        """Fill ``out`` with the unit's bytes from ``start`` on, not before ``after`` has happened.

        Returns the mark by which they are there.

        Raises:
            LocalrtError: they cannot be had.
        """

    def skip(self, unit: StoredUnit) -> None:
        """The unit is left out once: in the order of ``fetch``, after all of what came before."""


def fetch(
    source: Source, unit: StoredUnit, start: int, out: Any, after: Mark
) -> tuple[Mark, LocalrtError | None]:
    """``source.fetch``, its error returned: it is the pass's that waits, not the thread's."""
    try:
        return source.fetch(unit, start, out, after), None
    except LocalrtError as failure:
        return None, failure
    except Exception as failure:  # noqa: BLE001 - a thread must not die in silence
        return None, CheckpointError(f"{unit.file} cannot be read: {failure}")


def require_answer(since: float, stall_s: float, what: str) -> None:
    """Raises CheckpointError when nothing has come for ``stall_s`` seconds ``since`` then."""
    silent = time.perf_counter() - since
    if silent > stall_s:
        raise CheckpointError(
            f"the disk has not answered for {silent:.0f} seconds (reading {what}): check the drive "
            "that the model is on"
        )


def end_threads(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that were told to end. One whose read hangs is left behind."""
    end = time.perf_counter() + _CLOSE_S
    for thread in threads:
        thread.join(timeout=max(0.0, end - time.perf_counter()))
