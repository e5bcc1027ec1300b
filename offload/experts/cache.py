"""The expert cache: slots that all layers share, assigned by a policy.

The same rules serve slots in VRAM filled from RAM and slots in RAM filled from an SSD. An expert in
the cache has a slot; once it is loaded, its layer's table has its weights. Its key is (layer,
expert), counting sparse layers only. For each layer and pass: ``touch`` with the router's choice,
``admit`` for each miss, ``release`` once the layer has been computed. The policy, ``Learned``,
values experts by routing alone. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from localrt.common.errors import MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.offload.experts.policy import Ids, Learned, Scores, Values
from localrt.offload.reading.reader import DemandLoad
from localrt.quant.ops.arrays import MemoryT
from localrt.quant.ops.experts import ExpertTable, ExpertWeights

Key = tuple[int, int]
"""(layer, expert)."""
_NOTHING = np.empty(0, np.intp)
# An expert is loaded over an idle link if it is worth this many times its victim: otherwise two
# experts that are used alternately would evict each other over and over.
_MARGIN = 2.0


class Demand(NamedTuple):
    """The distinct experts that one layer needs in one pass."""

    experts: NDArray[np.intp]
    rows: NDArray[np.intp]
    resident: NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Slot(Generic[MemoryT]):
    """Memory for one expert, filled by ``load``, which is None once the expert is loaded.

    On a GPU, ``layer`` is that of its latest expert; ``made`` are the layout and weights last built
    on the memory.
    """

    memory: MemoryT
    load: DemandLoad | None = None
    layer: int | None = None
    made: tuple[object, ExpertWeights] | None = None


def slots_within(nbytes: int, expert_nbytes: int) -> int:
    """The number of slots in ``nbytes``, each for the model's largest expert.

    Raises:
        MemoryBudgetError: not even one.
    """
    slots = nbytes // expert_nbytes
    if slots < 1:
        raise MemoryBudgetError(
            f"the expert cache needs at least {format_bytes(expert_nbytes)} "
            f"(1 expert of {format_bytes(expert_nbytes)}), "
            f"and has {format_bytes(nbytes)}: give it more, or none"
        )
    return slots


class ExpertCache(Generic[MemoryT]):
    """``capacity`` slots for the experts of all layers, ``used`` of ``count`` in each layer.

    ``tables`` are read by the layers' kernels. ``alloc`` allocates a slab of up to ``slab_slots``
    slots of ``slot_nbytes`` each, and ``free`` frees it as a whole. ``demands`` counts the chosen
    experts of all layers, ``hits`` those of them that had slots.
    """

    def __init__(
        self,
        layers: int,
        count: int,
        used: int,
        capacity: int,
        *,
        policy: Learned | None = None,
        tables: Sequence[ExpertTable] = (),
        slot_nbytes: int = 0,
        slab_slots: int = 1,
        alloc: Callable[[int], MemoryT] | None = None,
        free: Callable[[MemoryT], object] = lambda memory: None,
    ) -> None:
        self.layers, self.count, self.used = layers, count, used
        self.policy = policy or Learned(layers, count, used)
        self.tables = tables
        self.capacity = capacity
        self.hits = self.demands = 0
        self.slot_nbytes, self.slab_slots = slot_nbytes, slab_slots
        self._alloc = alloc or cast(Callable[[int], MemoryT], bytes)
        self._free = free
        # Memory, and the slots in it.
        self._slabs: list[tuple[MemoryT, list[Slot[MemoryT]]]] = []
        self._allocated = 0  # slots in all slabs
        self._slots: dict[Key, Slot[MemoryT]] = {}
        self._free_slots: list[Slot[MemoryT]] = []
        self._resident = np.zeros((layers, count), np.bool_)  # the keys of ``_slots``
        # Lock counts (an absent expert has one). The worth of a locked expert is infinite.
        self._locks = np.ones((layers, count), np.int32)
        self._worth = np.full((layers, count), np.inf)
        self._stale = set[int]()  # layers whose worth must be computed again
        self._flat = self._worth.reshape(-1)
        self._in_use = [_NOTHING] * layers
        self._ones = np.ones(used, np.intp)
        self._victims = self._flat  # a view of the experts that may be evicted

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def slot(self, layer: int, expert: int) -> Slot[MemoryT] | None:
        """The slot of an expert that is loaded or loading; None if it has none."""
        return self._slots.get((layer, expert))

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """(count,): which of a layer's experts have slots; a read-only view."""
        row: NDArray[np.bool_] = self._resident[layer]
        row.flags.writeable = False
        return row

    def keys(self) -> list[Key]:
        """All experts with slots, sorted."""
        return sorted(self._slots)

    def loading(self) -> list[Key]:
        """Experts that are being loaded."""
        return [key for key, slot in self._slots.items() if slot.load is not None]

    @property
    def complete(self) -> bool:
        """Whether there is room for all experts: nothing is ever evicted."""
        return self.capacity >= self.layers * self.count

    # -- one layer of one pass -----------------------------------------------------------------

    def touch(
        self, layer: int, experts: Ids, scores: Scores, *, only: Sequence[int] | None = None
    ) -> Demand:
        """Record a router's choice: (rows, ranks) each, best first; the first ``used`` are chosen.

        Chosen experts are not evicted until ``release(layer)``. With ``only``, other experts are
        ignored.
        """
        if self._in_use[layer].size:
            self.release(layer)
        chosen: NDArray[np.intp]
        if len(experts) == 1:
            chosen, rows = experts[0, : self.used].astype(np.intp), self._ones
        else:
            seen = np.bincount(experts[:, : self.used].reshape(-1), minlength=self.count)
            chosen = seen.nonzero()[0]
            rows = seen[chosen]
        if only is not None:
            selected = np.zeros(self.count, np.bool_)
            selected[only] = True
            selected = selected[chosen]
            chosen, rows = chosen[selected], rows[selected]
        resident = self._resident[layer, chosen]
        self.hits += int(np.count_nonzero(resident))
        self.demands += len(chosen)
        if not self.complete:
            self.policy.touch(layer, chosen, rows, experts, scores)
        self._in_use[layer] = chosen
        self._locks[layer][chosen] += 1
        self._stale.add(layer)
        # A pass of many rows will need nearly all experts of later layers, so experts are evicted
        # only from layers up to this one, if these have enough slots.
        so_far = self._resident[: layer + 1]
        many_rows = len(experts) > 1 and np.count_nonzero(so_far) >= self.used
        self._victims = self._flat[: (layer + 1) * self.count] if many_rows else self._flat
        return Demand(chosen, rows, resident)

    def touch_rows(
        self, layers: Ids, experts: Ids, scores: Scores, found: NDArray[np.bool_]
    ) -> None:
        """As ``touch`` and ``release`` for each of the ``layers`` (n,) of a pass of one row; (n,
        ranks) each. The pass ``found`` (n, count) in the cache.
        """
        chosen = experts[:, : self.used]
        self.hits += int(np.count_nonzero(np.take_along_axis(found, chosen, 1)))
        self.demands += chosen.size
        if not self.complete:
            self.policy.touch_rows(layers, experts, scores, self.used)
        self._stale.update(layers.tolist())
        self._victims = self._flat

    def count_hits(self, count: int) -> None:
        """Count ``count`` chosen experts as hits, without a ``touch``."""
        self.hits += count
        self.demands += count

    def release(self, layer: int) -> None:
        """Mark all experts of a layer's latest pass as no longer in use."""
        in_use = self._in_use[layer]
        if in_use.size:
            self._locks[layer][in_use] -= 1
            self._in_use[layer] = _NOTHING
            self._stale.add(layer)

    def finish(self, layer: int, experts: Iterable[int]) -> None:
        """Mark some experts of a layer's latest pass as no longer in use: they can be evicted."""
        done = set(experts)
        in_use = self._in_use[layer].tolist()
        self._in_use[layer] = np.array([e for e in in_use if e not in done], np.intp)
        for expert in done.intersection(in_use):
            self._locks[layer, expert] -= 1
        self._stale.add(layer)

    def admit(self, layer: int, expert: int) -> Slot[MemoryT]:
        """Give an expert a free slot, or that of the expert worth least.

        Raises:
            ValueError: it has one already, or nothing can be evicted (see ``room``).
        """
        key = (layer, expert)
        if key in self._slots:
            raise ValueError(f"expert {expert} of layer {layer} is held already")
        if len(self._slots) >= self.capacity and not self._evict_least():
            raise ValueError(f"all {self.capacity} slots are in use")
        if not self._free_slots:
            self._allocate()
        slot = self._slots[key] = self._free_slots.pop()
        self._resident[key] = True
        self._locks[key] -= 1
        if not self._locks[key]:
            self._worth[key] = self.policy.value[key]
        return slot

    def fill(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """Enter an expert as loaded, with the ``weights`` built from its bytes."""
        self._slots[layer, expert].load = None
        self.tables[layer].put(expert, weights)

    def candidate(self, layer: int, gain: float = 0.0) -> int | None:
        """The most valuable absent expert of a layer, to load while the link is idle.

        None if no slot is free and the expert is not worth at least ``_MARGIN`` times its victim,
        and ``gain`` more. The policy's values must be shares.
        """
        value = np.where(self._resident[layer], -np.inf, self.policy.value[layer])
        best = int(value.argmax())
        return best if self._pays(float(value[best]), gain) else None

    def candidates(self, most: int, gain: float = 0.0) -> Iterator[Key]:
        """Up to ``most`` absent experts of all layers, by value, as ``candidate`` would give them.

        Each is compared with the experts that can be evicted when it is asked for.
        """
        value = np.where(self._resident, -np.inf, self.policy.value).reshape(-1)
        most = min(most, value.size)
        best = np.argpartition(value, value.size - most)[value.size - most :]
        for key in best[np.argsort(-value[best], kind="stable")].tolist():
            if not self._pays(float(value[key]), gain):
                return
            yield divmod(key, self.count)

    def _pays(self, worth: float, gain: float) -> bool:
        """Whether an absent expert is worth a slot; minus infinity is the worth of others."""
        if len(self._slots) < self.capacity:
            return worth > -np.inf
        if worth <= gain:  # checked first, since finding the victim takes longer
            return False
        least = max(0.0, self.least)
        return worth > max(_MARGIN * least, least + gain)

    @property
    def least(self) -> float:
        """The worth of the expert that would be evicted next; infinite if there is none."""
        return float(self._values().min())

    @property
    def room(self) -> int:
        """How many experts can be admitted now."""
        free = max(0, self.capacity - len(self._slots))
        return free + int(np.count_nonzero(self._values() < np.inf))

    def widen(self) -> None:
        """Allow evicting experts of later layers in this pass: earlier ones are all locked."""
        self._victims = self._flat

    # -- locks and memory ----------------------------------------------------------------------

    def lock(self, layer: int, experts: Iterable[int]) -> None:
        """Protect these experts, which are being loaded, until ``unlock``. Locks are counted."""
        for expert in experts:
            self._locks[layer, expert] += 1
            self._worth[layer, expert] = np.inf

    def unlock(self, layer: int, experts: Iterable[int]) -> None:
        """Undo one ``lock``."""
        for expert in experts:
            self._locks[layer, expert] -= 1
        self._stale.add(layer)

    def drop(self, layer: int, expert: int) -> None:
        """Free an expert's slot for the next one admitted."""
        key = (layer, expert)
        slot = self._slots.pop(key)
        slot.load = None
        self._free_slots.append(slot)
        if self.tables:
            self.tables[layer].drop(expert)
        self._resident[key] = False
        self._locks[key] += 1
        self._worth[key] = np.inf

    def reserve(self) -> None:
        """Allocate the memory of all slots now, instead of when experts are admitted."""
        while self._allocated < self.capacity:
            self._allocate()

    def grow(self, capacity: int) -> None:
        """Allocate slots up to ``capacity``, or as many as there is memory for."""
        self.capacity = capacity
        try:
            self.reserve()
        except MemoryBudgetError:  # another program has taken it
            self.capacity = self._allocated

    def resize(self, capacity: int, least: int = 0) -> None:
        """Change the number of slots. Slabs are freed as a whole, least valuable first, but at
        least ``least`` slots stay.

        Slabs with experts in use stay, so the new number of slots may differ from ``capacity``.
        """
        self._victims = self._flat
        self._values()
        self.capacity = capacity
        if self._allocated <= capacity:
            return
        keys = {id(slot): key for key, slot in self._slots.items()}
        residents = [[keys[id(s)] for s in slots if id(s) in keys] for _, slots in self._slabs]
        worth = [sum(self._worth[key] for key in each) if each else -np.inf for each in residents]
        freed, left = set[int](), self._allocated
        for number in np.argsort(worth, kind="stable").tolist():
            count = len(self._slabs[number][1])
            if left > capacity and worth[number] < np.inf and left - count >= least:
                freed.add(number)
                left -= count
                for key in residents[number]:
                    self.drop(*key)
        self._free_slabs(freed)
        self.capacity = left

    def close(self) -> None:
        """Free everything."""
        for layer, expert in list(self._slots):
            self.drop(layer, expert)
        self._free_slabs(set(range(len(self._slabs))))

    def _allocate(self) -> None:
        """Allocate one more slab, up to ``capacity``."""
        count = min(self.slab_slots, self.capacity - self._allocated)
        memory, size = self._alloc(count * self.slot_nbytes), self.slot_nbytes
        slots = [Slot(memory[number * size : (number + 1) * size]) for number in range(count)]
        self._slabs.append((memory, slots))
        self._allocated += count
        self._free_slots += reversed(slots)

    def _free_slabs(self, numbers: set[int]) -> None:
        """Free slabs whose slots are all free."""
        freed = {id(slot) for number in numbers for slot in self._slabs[number][1]}
        self._free_slots = [slot for slot in self._free_slots if id(slot) not in freed]
        for number in numbers:
            self._allocated -= len(self._slabs[number][1])
            self._free(self._slabs[number][0])
        self._slabs = [slab for at, slab in enumerate(self._slabs) if at not in numbers]

    def _values(self) -> Values:
        """The worth of the experts that may be evicted; infinite for locked ones."""
        while self._stale:
            layer = self._stale.pop()
            self._worth[layer] = np.where(self._locks[layer], np.inf, self.policy.value[layer])
        return self._victims

    def _evict_least(self) -> bool:
        """Evict the expert worth least; returns whether there was one."""
        layer, expert = divmod(int(self._values().argmin()), self.count)
        if self._locks[layer, expert]:
            return False
        self.drop(layer, expert)
        return True
