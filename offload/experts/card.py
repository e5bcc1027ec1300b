"""Experts in a card's memory: equal slots of one allocation, filled over the link as a cache says.

Some slots may be set aside for proposals, which evict nothing: one that is right is kept by the
cache's rules, or used once. It knows bytes and marks, not who computes what.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.timing import Mark
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.experts.cache import ExpertCache, Key
from localrt.quant.ops.experts import ExpertTable, ExpertWeights

__all__ = ["CardSlots"]


@dataclass(slots=True, eq=False)
class _Slot:
    memory: Any
    used: Mark = None  # when what it holds has been computed with


@dataclass(frozen=True, slots=True)
class _Proposal:
    slot: _Slot
    weights: ExpertWeights
    arrival: Mark


_LEAST_BESIDE = 4  # slots of the cache for each that is set aside, and for each expert of a row


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
        self.begun = self.useful = 0  # proposals, and those that were asked for
        self._aside = 0
        self._proposed: dict[Key, _Proposal] = {}
        self._once: list[Key] = []  # in use, and not worth keeping

    def table(self, layer: int) -> ExpertTable:
        """A layer's experts that can be computed on the card."""
        return self._tables[layer]

    def stage(self, size: int) -> bool:
        """Set ``size`` slots aside for proposals, 0: none; whether there are so many now.

        Called between passes.
        """
        if size == self._aside:
            return True
        capacity = self.cache.capacity + self._aside - size
        if size and capacity < _LEAST_BESIDE * (size + self.cache.used):
            return False
        for key in list(self._proposed):
            self._spare.append(self._proposed.pop(key).slot)
        self._aside = size
        for victim in self.cache.resize(capacity):
            self._evict(victim)
        return True

    def propose(self, key: Key, data: Any, after: Mark) -> Mark | None:
        """Copy an expert aside, if there is room: the mark of its arrival, None if there is none.

        ``data`` as for ``bring``.
        """
        for old in [old for old in self._proposed if old[0] != key[0]]:  # of a pass given up
            self._spare.append(self._proposed.pop(old).slot)
        taken = len(self._proposed) + len(self._once)
        if key in self._slots or key in self._proposed or taken >= self._aside:
            return None
        slot = self._spare.pop()
        mark, weights = self._copy(key, data, slot, after, " ahead")
        self._proposed[key] = _Proposal(slot, weights, mark)
        self.begun += 1
        return mark

    def chosen(self, layer: int, experts: Collection[int]) -> dict[int, Mark]:
        """``layer`` asks for ``experts``: those that were proposed can be used now.

        Each with the mark of its arrival. The cache keeps what it would keep of what is brought;
        the others can be used until ``done``.
        """
        found = {}
        for key in [key for key in self._proposed if key[0] == layer]:
            proposal = self._proposed.pop(key)
            if key[1] not in experts:
                self._spare.append(proposal.slot)
                continue
            if self.cache.room and self.cache.keeps(*key):
                victim = self.cache.admit(*key)
                if victim is not None:
                    self._evict(victim)
            else:
                self._once.append(key)
            self._slots[key] = proposal.slot
            self._tables[layer].put(key[1], proposal.weights)
            found[key[1]] = proposal.arrival
            self.useful += 1
        return found

    def done(self) -> None:
        """The layer's turn is over."""
        for key in self._once:
            self._evict(key)
        self._once.clear()

    def bring(self, key: Key, data: Any, after: Mark) -> Mark:
        """Copy an expert, whose bytes are in RAM by ``after``, to a slot; the mark of its arrival.

        Its table holds it from now on, for kernels that wait for the mark. ``data`` must stay as it
        is until the card says that the mark is settled.
        """
        victim = self.cache.admit(*key)
        if victim is not None:
            self._evict(victim)
        slot = self._slots[key] = self._spare.pop()
        mark, weights = self._copy(key, data, slot, after)
        self._tables[key[0]].put(key[1], weights)
        return mark

    def _copy(
        self, key: Key, data: Any, slot: _Slot, after: Mark, why: str = ""
    ) -> tuple[Mark, ExpertWeights]:
        unit = self._units[key]
        memory = slot.memory[: unit.nbytes]
        name = f"{unit.name}{why}"
        mark = self.card.copy_in(name, data, memory, slot.used, after, wait=False)
        with self.card.ops.scope():
            return mark, self._build(key, unit, memory, data)

    def _evict(self, key: Key) -> None:
        """An expert that lost its slot."""
        self._tables[key[0]].drop(key[1])
        self._spare.append(self._slots.pop(key))

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
        self._proposed.clear()
        self._spare.clear()
        self.card.free(self._memory)
