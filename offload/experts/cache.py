"""Decides which experts are in memory: slots shared by all layers, assigned by a policy.

The same rules serve VRAM slots over RAM and RAM slots over an SSD. An expert's state is its slot,
and its weights in its layer's table once loaded. Experts are named (layer, expert), layers counted
among those with experts. For each layer and pass: ``touch`` with the router's choice, ``admit`` for
each miss, ``release`` once the layer has been computed. The policy, ``Learned``, values experts by
routing alone; docs/mixtures.md compares it with LRU and the optimum. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from localrt.common.errors import MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.offload.reading.reader import DemandLoad
from localrt.quant.ops.arrays import MemoryT
from localrt.quant.ops.experts import ExpertTable, ExpertWeights

Values = NDArray[np.float64]
Ids = NDArray[np.integer]
Scores = NDArray[np.floating]


class Learned:
    """Estimates each expert's chance of being used next from its recent use, fitted online.

    Features are a constant and four moving averages for each expert: of being chosen and of its
    share of the scores, over about 3 and about 30 rows. Least squares over all layers' past
    routing, with slow forgetting, weighs them. A workload with long phases thus relies on slow
    averages and a changeable one on fast averages, without settings.

    The chances are ``value`` (layers, count).
    """

    RATES = (0.3, 0.03)
    FORGET = 0.999  # decay of the evidence per pass
    PRIOR = 10.0  # layers' worth of evidence, which is never forgotten

    def __init__(self, layers: int, count: int, used: int) -> None:
        self.value: Values = np.zeros((layers, count))
        self._top = min(2 * used, count)
        self._used = float(used)
        # (layers, features, count): chosen fast, slow, scores fast, slow, one
        self._features = np.zeros((layers, 5, count))
        self._features[:, 4] = 1.0
        self._rates = np.array(self.RATES)[:, None]
        self._new = np.zeros((2, 1, count))  # of one row: chosen, shares of the scores
        self._keeps = 1.0 - np.array([*self.RATES, *self.RATES, 0.0])[:, None]
        self._weights = np.array([0.2, 0.3, 0.2, 0.3, 0.0])
        self._prior = self.PRIOR * np.eye(5) * used / count
        self._prior_target = self._prior @ self._weights
        self._moments, self._target = self._prior.copy(), self._prior_target.copy()
        self._last = layers

    def touch(
        self, layer: int, chosen: Ids, rows: Ids, experts: Ids,
        scores: Scores,
    ) -> None:  # fmt: skip
        """Learn from the routing of one layer in one pass.

        ``chosen`` are the experts that the pass uses, each once, with the ``rows`` that each sees;
        ``experts`` and ``scores`` are (rows of the pass, ranks), best first, possibly with more
        ranks than the chosen ones. Only this layer's values change.
        """
        features, steps = self._features[layer], len(experts)
        if layer <= self._last:  # a new pass
            self._weights = np.linalg.solve(self._moments, self._target)
            self._moments += (1.0 - self.FORGET) * (self._prior - self._moments)
            self._target += (1.0 - self.FORGET) * (self._prior_target - self._target)
        self._last = layer
        self._moments += features @ features.T
        if steps == 1:
            new, top = self._new, self._top
            new.fill(0.0)
            new[0, 0, chosen] = 1.0
            self._target += features @ new[0, 0]
            new[1, 0, experts[0, :top]] = self._used * _shares_of(scores[0, :top])
            features *= self._keeps
            averages = features[:4].reshape(2, 2, -1)
            averages += self._rates * new
        else:
            happened = np.zeros(features.shape[1])
            happened[chosen] = rows / steps
            shares = self._used * _mean_shares(experts, scores, self._top, len(happened))
            self._target += features @ happened
            keeps = self._keeps**steps
            features *= keeps
            features[:2] += (1.0 - keeps[:2]) * happened
            features[2:4] += (1.0 - keeps[2:4]) * shares
        np.dot(self._weights, features, out=self.value[layer])


def _shares_of(scores: Scores) -> Values:
    """One row's scores as shares of their sum; where they sum to nothing, equal ones."""
    shares: Values = scores.astype(np.float64)
    total = float(shares.sum())
    return shares / total if total > 0 else np.full(len(shares), 1.0 / len(shares))


def _mean_shares(experts: Ids, scores: Scores, top: int, count: int) -> Values:
    """(count,): each expert's share of the top scores, mean over the rows."""
    best = scores[:, :top].astype(np.float64)
    total = best.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = np.where(total > 0, best / total, 1.0 / best.shape[1])
    flat = experts[:, :top].ravel()
    summed = np.bincount(flat, weights=shares.ravel(), minlength=count)
    return np.asarray(summed / len(experts), np.float64)


Key = tuple[int, int]
"""(layer, expert)."""
_NOTHING = np.empty(0, np.intp)
# How much more than its victim an expert must be worth to be loaded while the link idles:
# experts that take turns would keep the link busy, and memory, for nothing.
_MARGIN = 2.0
STAYS = round(1 / min(Learned.RATES))
"""Passes for which an expert that is worth a slot is taken to keep it: what slow averages span."""


class Demand(NamedTuple):
    """The experts that one layer needs in one pass, each once."""

    experts: NDArray[np.intp]
    rows: NDArray[np.intp]
    resident: NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Slot(Generic[MemoryT]):
    """An expert's place: ``memory``, filled by ``load``, which is None once the expert is loaded.

    ``layer`` is that of the expert it had last on a GPU; ``made`` is the key and the weights last
    made on the memory.
    """

    memory: MemoryT
    load: DemandLoad | None = None
    layer: int | None = None
    made: tuple[object, ExpertWeights] | None = None


def slots_within(nbytes: int, expert_nbytes: int) -> int:
    """The slots that a budget of ``nbytes`` has, each for the model's largest expert.

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

    ``tables`` are what the layers' kernels compute with. ``alloc`` gives the memory of up to
    ``together`` slots of ``slot_nbytes`` each, and ``free`` takes it back as a whole.
    ``hits`` and ``demands`` count the experts that layers found and asked for.
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
        together: int = 1,
        alloc: Callable[[int], MemoryT] | None = None,
        free: Callable[[MemoryT], object] = lambda memory: None,
    ) -> None:
        self.layers, self.count, self.used = layers, count, used
        self.policy = policy or Learned(layers, count, used)
        self.tables = tables
        self.capacity = capacity
        self.hits = self.demands = 0
        self.slot_nbytes, self.together = slot_nbytes, together
        self._alloc = alloc or cast(Callable[[int], MemoryT], bytes)
        self._free = free
        # Each one's memory and the slots in it.
        self._slabs: list[tuple[MemoryT, list[Slot[MemoryT]]]] = []
        self._allocated = 0  # these slots
        self._slots: dict[Key, Slot[MemoryT]] = {}
        self._spare: list[Slot[MemoryT]] = []
        self._resident = np.zeros((layers, count), np.bool_)  # the keys of ``_slots``
        # Counts of reasons not to evict (absence is one); an expert without any has its worth.
        self._blocked = np.ones((layers, count), np.int32)
        self._worth = np.full((layers, count), np.inf)
        self._stale = set[int]()  # layers whose worth is to be computed again
        self._flat = self._worth.reshape(-1)
        self._using = [_NOTHING] * layers
        self._ones = np.ones(used, np.intp)
        self._victims = self._flat  # a view of what may be evicted

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def slot(self, layer: int, expert: int) -> Slot[MemoryT] | None:
        """The slot of an expert, loaded or loading; None if it has none."""
        return self._slots.get((layer, expert))

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """(count,): which of a layer's experts have slots; a view, not to be written."""
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
        self,
        layer: int,
        experts: Ids,
        scores: Scores,
        *,
        only: Sequence[int] | None = None,
    ) -> Demand:
        """Note a router's choice: (rows, ranks) each, best first; the first ``used`` are chosen.

        Chosen experts are in use, and so not evicted, until ``release(layer)``. With ``only``,
        other experts are elsewhere and are ignored.
        """
        if self._using[layer].size:
            self.release(layer)
        chosen: NDArray[np.intp]
        if len(experts) == 1:
            chosen, rows = experts[0, : self.used].astype(np.intp), self._ones
        else:
            seen = np.bincount(experts[:, : self.used].reshape(-1), minlength=self.count)
            chosen = seen.nonzero()[0]
            rows = seen[chosen]
        if only is not None:
            asked = np.zeros(self.count, np.bool_)
            asked[only] = True
            asked = asked[chosen]
            chosen, rows = chosen[asked], rows[asked]
        resident = self._resident[layer, chosen]
        self.hits += int(np.count_nonzero(resident))
        self.demands += len(chosen)
        if not self.complete:
            self.policy.touch(layer, chosen, rows, experts, scores)
        self._using[layer] = chosen
        self._blocked[layer][chosen] += 1
        self._stale.add(layer)
        # A pass of many rows will need nearly all that later layers hold: it must not evict that
        # for what it is done with. Its own layers so far make room, if they hold enough to do so.
        held = self._resident[: layer + 1]
        behind = len(experts) > 1 and np.count_nonzero(held) >= self.used
        self._victims = self._flat[: (layer + 1) * self.count] if behind else self._flat
        return Demand(chosen, rows, resident)

    def found(self, count: int) -> None:
        """Count experts that a layer asked for and found, whichever they were."""
        self.hits += count
        self.demands += count

    def release(self, layer: int) -> None:
        """Mark all experts of a layer's latest pass as no longer in use."""
        using = self._using[layer]
        if using.size:
            self._blocked[layer][using] -= 1
            self._using[layer] = _NOTHING
            self._stale.add(layer)

    def finish(self, layer: int, experts: Iterable[int]) -> None:
        """Mark some experts of a layer's latest pass as no longer in use: they can be evicted."""
        done = set(experts)
        using = self._using[layer].tolist()
        self._using[layer] = np.array([e for e in using if e not in done], np.intp)
        for expert in done.intersection(using):
            self._blocked[layer, expert] -= 1
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
        if not self._spare:
            self._allocate()
        slot = self._slots[key] = self._spare.pop()
        self._resident[key] = True
        self._blocked[key] -= 1
        if not self._blocked[key]:
            self._worth[key] = self.policy.value[key]
        return slot

    def fill(self, layer: int, expert: int, weights: ExpertWeights) -> None:
        """Enter an expert as loaded, with the ``weights`` made of its bytes."""
        self._slots[layer, expert].load = None
        self.tables[layer].put(expert, weights)

    def candidate(self, layer: int, gain: float = 0.0) -> int | None:
        """The absent expert of a layer most worth a slot, to be loaded while the link idles.

        None if no slot is free and the expert is not worth well more than its victim, and at least
        ``gain`` more. The policy's values must be shares.
        """
        value = np.where(self._resident[layer], -np.inf, self.policy.value[layer])
        best = int(value.argmax())
        worth = float(value[best])
        if worth == -np.inf:
            return None
        if len(self._slots) < self.capacity:
            return best
        if worth <= gain:  # finding the victim takes longer
            return None
        least = max(0.0, self.least)
        return best if worth > max(_MARGIN * least, least + gain) else None

    @property
    def least(self) -> float:
        """The worth of the expert to be evicted next; infinite if none can be."""
        return float(self._worths().min())

    @property
    def room(self) -> int:
        """How many experts can be admitted now."""
        free = max(0, self.capacity - len(self._slots))
        return free + int(np.count_nonzero(self._worths() < np.inf))

    def widen(self) -> None:
        """Let later layers make room too in this pass: earlier ones have nothing to evict."""
        self._victims = self._flat

    # -- beside the passes ---------------------------------------------------------------------

    def hold(self, layer: int, experts: Iterable[int]) -> None:
        """Do not evict these experts, which are being loaded, until ``let_go``. Holds add up."""
        for expert in experts:
            self._blocked[layer, expert] += 1
            self._worth[layer, expert] = np.inf

    def let_go(self, layer: int, experts: Iterable[int]) -> None:
        """Undo one ``hold``."""
        for expert in experts:
            self._blocked[layer, expert] -= 1
        self._stale.add(layer)

    def drop(self, layer: int, expert: int) -> None:
        """Free an expert's slot for the next one admitted."""
        key = (layer, expert)
        slot = self._slots.pop(key)
        slot.load = None
        self._spare.append(slot)
        if self.tables:
            self.tables[layer].drop(expert)
        self._resident[key] = False
        self._blocked[key] += 1
        self._worth[key] = np.inf

    def reserve(self) -> None:
        """Allocate the memory of all slots now, not as experts are admitted."""
        while self._allocated < self.capacity:
            self._allocate()

    def resize(self, capacity: int, least: int = 0) -> None:
        """Change the number of slots. What was allocated together is freed together: first what
        holds the experts worth least in all, as long as ``least`` slots stay.

        Memory with experts in use stays: then, and where slots are freed together, the capacity
        differs from ``capacity``.
        """
        self._victims = self._flat
        self._worths()
        self.capacity = capacity
        if self._allocated <= capacity:
            return
        keys = {id(slot): key for key, slot in self._slots.items()}
        found = [[keys[id(s)] for s in slots if id(s) in keys] for _, slots in self._slabs]
        worth = [sum(self._worth[key] for key in each) if each else -np.inf for each in found]
        gone, left = set[int](), self._allocated
        for number in np.argsort(worth, kind="stable").tolist():
            count = len(self._slabs[number][1])
            if left > capacity and worth[number] < np.inf and left - count >= least:
                gone.add(number)
                left -= count
                for key in found[number]:
                    self.drop(*key)
        self._free_slabs(gone)
        self.capacity = left

    def close(self) -> None:
        """Free everything."""
        for layer, expert in list(self._slots):
            self.drop(layer, expert)
        self._free_slabs(set(range(len(self._slabs))))

    def _allocate(self) -> None:
        """Have more slots, up to ``capacity``."""
        count = min(self.together, self.capacity - self._allocated)
        memory, size = self._alloc(count * self.slot_nbytes), self.slot_nbytes
        slots = [Slot(memory[number * size : (number + 1) * size]) for number in range(count)]
        self._slabs.append((memory, slots))
        self._allocated += count
        self._spare += reversed(slots)

    def _free_slabs(self, numbers: set[int]) -> None:
        """Free memory whose slots are all spare."""
        gone = {id(slot) for number in numbers for slot in self._slabs[number][1]}
        self._spare = [slot for slot in self._spare if id(slot) not in gone]
        for number in numbers:
            self._allocated -= len(self._slabs[number][1])
            self._free(self._slabs[number][0])
        self._slabs = [slab for at, slab in enumerate(self._slabs) if at not in numbers]

    def _worths(self) -> Values:
        """What may be evicted is worth, by layers and experts."""
        while self._stale:
            layer = self._stale.pop()
            self._worth[layer] = np.where(self._blocked[layer], np.inf, self.policy.value[layer])
        return self._victims

    def _evict_least(self) -> bool:
        """Evict the expert worth least; returns whether there was one."""
        layer, expert = divmod(int(self._worths().argmin()), self.count)
        if self._blocked[layer, expert]:
            return False
        self.drop(layer, expert)
        return True
