"""Reads what is asked for, the urgent first: experts are known only once chosen.

Every load has memory of its own. What is asked for ahead of its need waits while anything is
urgent: nothing urgent waits for more of it than the pieces that are being read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.residency import Check
from localrt.offload.reading import reader
from localrt.offload.ring import chunks


@dataclass(slots=True, eq=False, kw_only=True)
class Load(reader.Load):
    """Appended to ``ends`` when it has ended, well or not."""

    ends: deque[Load]


class DemandReader(reader.Reader):
    """See ``Reader``. It fetches pieces of ``block`` bytes."""

    def __init__(
        self, source: reader.Source, *, threads: int, block: int = 2 << 20, stall_s: float = 60.0
    ) -> None:
        self._block = block
        self._urgent: deque[Load] = deque()
        self._ahead: deque[Load] = deque()
        super().__init__(source, threads=threads, stall_s=stall_s, name="experts")

    def ask(self, unit: StoredUnit, memory: Any, *, urgent: bool, ends: deque[Load]) -> Load:
        """Begin to fill ``memory`` with ``unit``. See ``Load``."""
        waiting = deque(chunks(unit.nbytes, self._block, first=0))
        load = Load(unit=unit, memory=memory, waiting=waiting, ends=ends)
        with self._changed:
            (self._urgent if urgent else self._ahead).append(load)
            self._changed.notify_all()
        return load

    def hurry(self, load: Load) -> None:
        """What was asked for ahead is needed now."""
        with self._changed:
            if load in self._ahead:
                self._ahead.remove(load)
                self._urgent.append(load)

    def cancel(self, loads: Collection[Load]) -> list[Load]:
        """Of ``loads`` that were asked for ahead begin none; returns those of which none was read.

        The others come all the same.
        """
        with self._changed:
            dropped = [
                load
                for load in self._ahead
                if load in loads and not load.in_flight and load.missing == load.unit.nbytes
            ]
            self._ahead = deque(load for load in self._ahead if load not in dropped)
            return dropped

    def wait(self, load: Load, check: Check | None = None) -> None:
        """Until ``load`` is there. ``check`` is called while waiting, and may raise.

        Raises:
            CheckpointError: the file is truncated or fails, or the disk does not answer.
        """
        with self._changed:
            self._wait(lambda: load.done or None, load.unit.name, check)
            if load.error is not None:
                raise load.error

    def _next(self) -> reader.Job | None:
        queue = self._urgent or self._ahead
        if not queue:
            return None
        load = queue[0]
        chunk = load.waiting.popleft()
        load.in_flight += 1
        if not load.waiting:
            queue.popleft()
        return load, chunk, None

    def _arrived(self, load: reader.Load) -> None:
        assert isinstance(load, Load), "it was asked for here"
        if load.error is not None:
            for queue in (self._urgent, self._ahead):
                if load in queue:
                    queue.remove(load)
        if load.done:
            load.ends.append(load)
            self._changed.notify_all()
