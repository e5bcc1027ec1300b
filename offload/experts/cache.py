"""The expert cache: slots that all layers share, and the policy that assigns them.

The same rules serve slots in VRAM filled from RAM and slots in RAM filled from an SSD. An expert in
the cache has a slot; once it is loaded, its layer's table has its weights. Its key is (layer,
expert), counting sparse layers only. For each layer and pass: ``touch`` with the router's choice,
``admit`` for each miss, ``release`` once the layer has been computed. Not thread-safe.

The policy, ``Learned``, says how likely each expert is to be used next, by routing alone, and from
which likelihood on a copy to a GPU pays. docs/mixtures.md compares it with LRU and the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Estimates each expert's probability of being used next from its recent use, fitted online.

    Features are a constant and four moving averages for each expert: of being chosen and of its
    share of the scores, each over about 3 and about 30 rows. Their weights are fitted by least
    squares over all layers' past routing, with slow forgetting. So slow averages dominate for
    workloads with long phases and fast ones for changing workloads, without settings.

    The probabilities are ``value`` (layers, count).
    """

    RATES = (0.3, 0.03)
    FORGET = 0.999  # decay of the evidence per pass
    PRIOR = 10.0  # weight of the prior, in layers' worth of evidence; never forgotten

    def __init__(self, layers: int, count: int, used: int) -> None:
        self.value: Values = np.zeros((layers, count))
        self._top = min(2 * used, count)
        self._used = float(used)
        # (layers, features, count): chosen fast, slow, scores fast, slow, one
        self._features = np.zeros((layers, 5, count))
        self._features[:, 4] = 1.0
        self._rates = np.array(self.RATES)[:, None]
        self._row = np.zeros((2, 1, count))  # one row's features: chosen, shares of the scores
        self._decay = 1.0 - np.array([*self.RATES, *self.RATES, 0.0])[:, None]
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

        ``chosen`` are the distinct experts that the pass uses, with the number of ``rows`` of each;
        ``experts`` and ``scores`` are (rows of the pass, ranks), best first, possibly with more
        ranks than are chosen. Only this layer's values change.
        """
        features, steps = self._features[layer], len(experts)
        self._begin(layer)
        self._last = layer
        self._moments += features @ features.T
        if steps == 1:
            new, top = self._row, self._top
            new.fill(0.0)
            new[0, 0, chosen] = 1.0
            self._target += features @ new[0, 0]
            new[1, 0, experts[0, :top]] = self._used * _shares_of(scores[0, :top])
            features *= self._decay
            averages = features[:4].reshape(2, 2, -1)
            averages += self._rates * new
        else:
            chosen_shares = np.zeros(features.shape[1])
            chosen_shares[chosen] = rows / steps
            shares = self._used * _mean_shares(experts, scores, self._top, len(chosen_shares))
            self._target += features @ chosen_shares
            decay = self._decay**steps
            features *= decay
            features[:2] += (1.0 - decay[:2]) * chosen_shares
            features[2:4] += (1.0 - decay[2:4]) * shares
        np.dot(self._weights, features, out=self.value[layer])

    def touch_rows(self, layers: Ids, experts: Ids, scores: Scores, used: int) -> None:
        """As ``touch`` for each of the ``layers`` (n,), ascending, of a pass of one row: (n, ranks)
        of experts and scores each, of which the first ``used`` are chosen.
        """
        self._begin(int(layers[0]))
        self._last = int(layers[-1])
        features = self._features[layers]  # (n, 5, count)
        each = np.arange(len(layers))[:, None]
        new = np.zeros((len(layers), 2, features.shape[2]))  # chosen, shares of the scores
        new[each, 0, experts[:, :used]] = 1.0
        top = self._top
        new[each, 1, experts[:, :top]] = self._used * _shares_of(scores[:, :top])
        flat = features.transpose(1, 0, 2).reshape(5, -1)
        self._moments += flat @ flat.T
        self._target += flat @ new[:, 0].reshape(-1)
        features *= self._decay
        averages = features[:, :4].reshape(len(layers), 2, 2, -1)
        averages += self._rates * new[:, :, None]
        self._features[layers] = features
        self.value[layers] = self._weights @ features

    def _begin(self, layer: int) -> None:
        """If a pass begins with this layer, fit the weights."""
        if layer > self._last:
            return
        self._weights = np.linalg.solve(self._moments, self._target)
        self._moments += (1.0 - self.FORGET) * (self._prior - self._moments)
        self._target += (1.0 - self.FORGET) * (self._prior_target - self._target)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCosts:
    """Seconds for one expert: computing it for one row on the ``cpu`` or the ``gpu``, and copying
    it over the link (``fetch``). A copy costs the CPU ``slowdown``: the host starts it, and it
    takes bandwidth of the RAM.
    """

    cpu: float
    gpu: float
    fetch: float
    slowdown: float = 0.0

    @property
    def min_gain(self) -> float:
        """The value from which on a copy saves more of the CPU's time than it costs."""
        stay = round(1 / min(Learned.RATES))  # passes in a slot: the span of slow averages
        return self.slowdown / (max(self.cpu - self.gpu, 1e-9) * stay)


def _shares_of(scores: Scores) -> Values:
    """Scores (..., n) as shares of a row's sum; equal shares if the sum is 0."""
    values: Values = scores.astype(np.float64)
    total = values.sum(axis=-1, keepdims=True)
    equal = np.full_like(values, 1.0 / values.shape[-1])
    shares: Values = np.divide(values, total, out=equal, where=total > 0)
    return shares


def _mean_shares(experts: Ids, scores: Scores, top: int, count: int) -> Values:
    """(count,): each expert's share of the top scores, averaged over the rows."""
    shares, flat = _shares_of(scores[:, :top]), experts[:, :top].ravel()
    summed = np.bincount(flat, weights=shares.ravel(), minlength=count)
    return np.asarray(summed / len(experts), np.float64)


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
class ExpertSlot(Generic[MemoryT]):
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
        self._slabs: list[tuple[MemoryT, list[ExpertSlot[MemoryT]]]] = []
        self._allocated = 0  # slots in all slabs
        self._slots: dict[Key, ExpertSlot[MemoryT]] = {}
        self._free_slots: list[ExpertSlot[MemoryT]] = []
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

    def slot(self, layer: int, expert: int) -> ExpertSlot[MemoryT] | None:
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

    def admit(self, layer: int, expert: int) -> ExpertSlot[MemoryT]:
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
        slots = [ExpertSlot(memory[number * size : (number + 1) * size]) for number in range(count)]
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
