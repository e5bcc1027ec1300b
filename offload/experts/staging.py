"""Experts that were proposed, in buffers beside the cache: read while nobody waits.

A proposal evicts nothing. When its layer has chosen, what was right takes a slot by the cache's
rules like any expert that is asked for, only sooner there; what was wrong is called off or
overwritten. So the cache holds the same as without proposals, but for the few slots whose memory
the buffers are. It knows neither who proposes nor whether it pays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.offload.experts.cache import Key
from localrt.offload.experts.reader import DemandReader, Load

__all__ = ["Staging"]


class Staging:
    """Up to ``size`` proposals, none at first; ``take_buffer`` and ``give_buffer`` are a pool's.

    Loads that have ended are appended to ``ends``, and told of by ``ended``.

    ``begun`` counts those of which anything was read, ``useful`` those that were asked for.
    """

    def __init__(
        self,
        reader: DemandReader,
        units: Mapping[Key, StoredUnit],
        take_buffer: Callable[[], Any],
        give_buffer: Callable[[Any], None],
        ends: deque[Load],
    ) -> None:
        self.size = 0
        self.begun = self.useful = 0
        self._reader = reader
        self._units = units
        self._ends = ends
        self._take_buffer, self._give_buffer = take_buffer, give_buffer
        self._held: dict[Key, tuple[Any, Load]] = {}
        self._leaving: dict[Load, Any] = {}  # called off while they were being read

    def propose(self, layer: int, experts: Sequence[int]) -> None:
        """Read these for ``layer`` while nothing is demanded, as many as there are buffers for."""
        for key in [key for key in self._held if key[0] != layer]:  # of a pass that was given up
            self._drop(key)
        wanted = [key for expert in experts if (key := (layer, expert)) not in self._held]
        for key in wanted[: max(0, self.size - len(self._held) - len(self._leaving))]:
            unit, memory = self._units[key], self._take_buffer()
            out = memory[: unit.nbytes]
            load = self._reader.ask(unit, out, urgent=False, ends=self._ends)
            self._held[key] = memory, load

    def chosen(self, layer: int, experts: Collection[int]) -> list[int]:
        """``layer`` asks for ``experts``: those that were proposed. The other proposals end."""
        for key in [key for key in self._held if key[0] == layer]:
            if key[1] not in experts or self._held[key][1].error is not None:
                self._drop(key)
        return [expert for expert in experts if (layer, expert) in self._held]

    def take(self, key: Key) -> tuple[Any, Load] | None:
        """A proposal's memory and load, which are the caller's from now on."""
        taken = self._held.pop(key, None)
        if taken is not None and _is_begun(taken[1]):
            self.begun += 1
            self.useful += 1
        return taken

    def ended(self, load: Load) -> None:
        """A load has ended: the memory of one that was called off is free."""
        memory = self._leaving.pop(load, None)
        if memory is not None:
            self._give_buffer(memory)

    def resize(self, size: int) -> None:
        """Have ``size`` buffers from now on; what was proposed is called off."""
        for key in list(self._held):
            self._drop(key)
        self.size = size

    def forget(self) -> None:
        """The reader is closed: let go of all memory."""
        self._held.clear()
        self._leaving.clear()

    def _drop(self, key: Key) -> None:
        memory, load = self._held.pop(key)
        self.begun += _is_begun(load)
        if load.done or self._reader.cancel(load):
            self._give_buffer(memory)
        else:
            self._leaving[load] = memory


def _is_begun(load: Load) -> bool:
    return load.in_flight > 0 or load.missing < load.unit.nbytes
