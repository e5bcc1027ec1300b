"""Experts in a card's memory: equal slots of one allocation, filled over the link.

It knows bytes and marks, not who computes what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.timing import Mark
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.experts.cache import ExpertCache, Key
from localrt.quant.ops.experts import ExpertWeights

__all__ = ["CardSlots"]


class CardSlots:
    """``cache`` says which of ``units`` are in its slots, which are cut from ``memory``.

    ``build`` makes weights of a unit's bytes on the card and of the same in RAM. ``expert_size`` is
    the largest expert's bytes, and its multiply-accumulates with one row.
    """

    def __init__(
        self,
        card: Accelerator,
        units: Mapping[Key, StoredUnit],
        cache: ExpertCache,
        memory: Any,
        *,
        build: Callable[[Key, StoredUnit, Any, Any], ExpertWeights],
    ) -> None:
        self.card, self.cache = card, cache
        self._units = units
        self._memory = memory
        self._build = build
        largest = max(units.values(), key=lambda unit: unit.nbytes)
        matrices = (tensor.shape for tensor in largest.tensors if len(tensor.shape) == 2)
        self.expert_size = largest.nbytes, sum(rows * cols for rows, cols in matrices)

    def bring(self, key: Key, data: Any, after: Mark) -> Mark:
        """Copy an expert, whose bytes are in RAM by ``after``, to a slot; the mark of its arrival.

        Its table holds it from now on, for kernels that wait for the mark. ``data`` must stay as it
        is until the card says that the mark is settled.
        """
        unit, slot = self._units[key], self.cache.admit(*key)
        memory = slot.memory[: unit.nbytes]
        mark = self.card.copy_in(unit.name, data, memory, slot.used, after, wait=False)
        with self.card.ops.scope():
            self.cache.fill(*key, self._build(key, unit, memory, data))
        return mark

    def used(self, layer: int, experts: Sequence[int], ended: Mark) -> None:
        """These have been computed with; ``ended`` is the clock's mark of the last."""
        slots = []
        for expert in experts:
            slot = self.cache.slot(layer, expert)
            assert slot is not None, "what a pass uses stays"
            slots.append(slot)
        mark = self.card.mark(ended, *(slot.memory for slot in slots))
        for slot in slots:
            slot.used = mark

    def close(self) -> None:
        """Free the memory."""
        self.cache.close()
        self.card.free(self._memory)
