"""Experts in a card's memory: equal slots of one allocation, filled over the link as a cache says.

It knows bytes and marks, not who computes what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.offload.accelerator import Accelerator
from localrt.offload.experts.cache import ExpertCache, Key
from localrt.offload.ring import Mark
from localrt.quant.ops.experts import ExpertTable, ExpertWeights

__all__ = ["CardSlots"]


@dataclass(slots=True, eq=False)
class _Slot:
    memory: Any
    used: Mark = None  # when what it holds has been computed with


class CardSlots:
    """``cache.capacity`` slots, each for the largest of ``units``; a ``table`` for each layer.

    ``build`` makes weights of a unit's bytes on the card and of the same in RAM. ``expert_size`` is
    the largest expert's bytes, and its multiply-accumulates with one row.
    """

    def __init__(
        self,
        card: Accelerator,
        units: Mapping[Key, StoredUnit],
        tables: Sequence[ExpertTable],
        cache: ExpertCache,
        *,
        build: Callable[[Key, StoredUnit, Any, Any], ExpertWeights],
    ) -> None:
        self.card, self.cache = card, cache
        self._units = units
        self._tables = tables
        self._build = build
        largest = max(units.values(), key=lambda unit: unit.nbytes)
        size = largest.nbytes
        matrices = (tensor.shape for tensor in largest.tensors if len(tensor.shape) == 2)
        self.expert_size = size, sum(rows * cols for rows, cols in matrices)
        self._memory = card.alloc(cache.capacity * size)
        cuts = range(0, cache.capacity * size, size)
        self._spare = [_Slot(self._memory[at : at + size]) for at in reversed(cuts)]
        self._slots: dict[Key, _Slot] = {}

    def bring(self, key: Key, data: Any, after: Mark) -> Mark:
        """Copy an expert, whose bytes are in RAM by ``after``, to a slot; the mark of its arrival.

        Its table holds it from now on, for kernels that wait for the mark. ``data`` must stay as it
        is until the card says that the mark is settled.
        """
        victim = self.cache.admit(*key)
        if victim is not None:
            self._tables[victim[0]].drop(victim[1])
            self._spare.append(self._slots.pop(victim))
        slot = self._slots[key] = self._spare.pop()
        unit = self._units[key]
        memory = slot.memory[: unit.nbytes]
        mark = self.card.copy_in(unit.name, data, memory, slot.used, after, wait=False)
        with self.card.ops.scope():
            self._tables[key[0]].put(key[1], self._build(key, unit, memory, data))
        return mark

    def used(self, layer: int, experts: Sequence[int], ended: Mark) -> None:
        """These have been computed with; ``ended`` is the clock's mark of the last."""
        if experts:
            mark = self.card.mark(ended)
            for expert in experts:
                self._slots[layer, expert].used = mark

    def close(self) -> None:
        """Free the memory."""
        for layer, expert in self._slots:
            self._tables[layer].drop(expert)
        self._slots.clear()
        self._spare.clear()
        self.card.free(self._memory)
