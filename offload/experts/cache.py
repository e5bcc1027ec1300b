"""Which experts are held: slots that all layers share, filled and emptied by a policy's word.

The same rules serve VRAM slots over RAM and RAM slots over an SSD. The cache counts slots and knows
names, (layer, expert), not bytes or addresses: its caller moves what it says, and holds on to what
is in use. Layers are counted among those with experts. Not thread-safe.

For each layer and pass: ``touch`` with the router's choice, ``admit`` for each miss that is brought
in, ``release`` once the layer has been computed. What is admitted though ``keeps`` says that it is
not worth it is the next to go, so bringing everything in costs no more than those slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrt.errors import MemoryBudgetError
from localrt.formatting import format_bytes
from localrt.offload.experts.policy import Learned, Policy

__all__ = ["CacheStats", "Demand", "ExpertCache", "Key", "slots_within"]

Key = tuple[int, int]
"""(layer, expert)."""

_NOTHING = np.empty(0, np.intp)


class Demand(NamedTuple):
    """The experts that one layer needs in one pass, each once."""

    experts: NDArray[np.intp]
    rows: NDArray[np.intp]
    resident: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Since the beginning or the last ``reset_stats``; one demand is one expert of one step.

    ``hits`` and ``demands`` are per layer.
    """

    hits: tuple[int, ...]
    demands: tuple[int, ...]
    admitted: int
    evicted: int

    @property
    def hit_rate(self) -> float | None:
        """Of all layers; None before any demand."""
        return sum(self.hits) / sum(self.demands) if sum(self.demands) else None


def slots_within(nbytes: int, expert_nbytes: int, *, least: int = 1) -> int:
    """The slots that a budget of ``nbytes`` has, each for the model's largest expert.

    Raises:
        MemoryBudgetError: not even ``least``.
    """
    slots = nbytes // expert_nbytes
    if slots < least:
        raise MemoryBudgetError(
            f"the expert cache needs at least {format_bytes(least * expert_nbytes)} "
            f"({least} expert{'s' if least > 1 else ''} of {format_bytes(expert_nbytes)}), "
            f"and has {format_bytes(nbytes)}: give it more, or none"
        )
    return slots


class ExpertCache:
    """``capacity`` slots for the experts of all layers; ``pinned`` ones take slots for good.

    Raises:
        MemoryBudgetError: the pinned experts alone take more slots.
    """

    def __init__(
        self,
        layers: int,
        count: int,
        used: int,
        capacity: int,
        *,
        policy: Policy | None = None,
        pinned: Iterable[Key] = (),
    ) -> None:
        self.layers, self.count, self.used = layers, count, used
        self.policy = policy or Learned(layers, count, used)
        self._resident = np.zeros((layers, count), np.bool_)
        # Reasons not to evict, one of them being absent; what there is none for has its worth.
        self._blocked = np.ones((layers, count), np.int32)
        self._worth = np.full((layers, count), np.inf)
        self._flat = self._worth.reshape(-1)
        self._using = [_NOTHING] * layers
        self._ones = np.ones(used, np.intp)
        self._held = [0] * layers
        self._victims = self._flat  # what may go: a view
        self._size = 0
        self._pinned = frozenset(pinned)
        self.capacity = self._checked(capacity)
        self._hits, self._demands = [0] * layers, [0] * layers
        self._admitted = self._evicted = 0
        for layer, expert in sorted(self._pinned):
            self.admit(layer, expert)
            self._blocked[layer, expert] += 1
            self._worth[layer, expert] = np.inf
        self.reset_stats()

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: Key) -> bool:
        return bool(self._resident[key])

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """(count,): which of a layer's experts are held; a view, not to be written."""
        row: NDArray[np.bool_] = self._resident[layer]
        row.flags.writeable = False
        return row

    def keys(self) -> list[Key]:
        """All that is held, in order."""
        return [(int(layer), int(expert)) for layer, expert in np.argwhere(self._resident)]

    # -- one layer of one pass -----------------------------------------------------------------

    def touch(
        self,
        layer: int,
        experts: NDArray[Any],
        scores: NDArray[Any],
        *,
        only: Sequence[int] | None = None,
    ) -> Demand:
        """A router has chosen: (rows, ranks) each, best first, the first ``used`` being chosen.

        The chosen ones are in use from now on, and so not evicted, until ``release(layer)``. With
        ``only`` the others of them are somewhere else, and not asked for here.
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
            asked = np.isin(chosen, only)
            chosen, rows = chosen[asked], rows[asked]
        resident = self._resident[layer, chosen]
        self._hits[layer] += int(np.count_nonzero(resident))
        self._demands[layer] += len(chosen)
        self.policy.touch(layer, chosen, rows, experts, scores)
        self._using[layer] = chosen
        self._blocked[layer, chosen] += 1
        self._refresh(layer)
        # A pass of many rows will need nearly all that later layers hold: it must not evict that
        # for what it is done with. Its own layers so far make room, if they hold enough to do so.
        behind = len(experts) > 1 and sum(self._held[: layer + 1]) >= self.used
        self._victims = self._flat[: (layer + 1) * self.count] if behind else self._flat
        return Demand(chosen, rows, resident)

    def release(self, layer: int) -> None:
        """What a layer's latest pass asked for is no longer in use."""
        using = self._using[layer]
        if using.size:
            self._blocked[layer, using] -= 1
            self._using[layer] = _NOTHING
            self._refresh(layer)

    def finish(self, layer: int, experts: Iterable[int]) -> None:
        """Some of what a layer's latest pass asked for is no longer in use: they can make room."""
        done = set(experts)
        using = self._using[layer].tolist()
        self._using[layer] = np.array([e for e in using if e not in done], np.intp)
        for expert in done.intersection(using):
            self._blocked[layer, expert] -= 1
        self._refresh(layer)

    def admit(self, layer: int, expert: int) -> Key | None:
        """Give an expert a slot: the one that loses its slot for it, None where one was free.

        Raises:
            ValueError: it has one already, or nothing can be evicted (see ``room``).
        """
        if self._resident[layer, expert]:
            raise ValueError(f"expert {expert} of layer {layer} is held already")
        victim = None
        if self._size >= self.capacity:
            victim = self._evict_least()
            if victim is None:
                raise ValueError(f"all {self.capacity} slots are in use")
        self._resident[layer, expert] = True
        self._blocked[layer, expert] -= 1
        self._held[layer] += 1
        self._size += 1
        self._admitted += 1
        if not self._blocked[layer, expert]:
            self._worth[layer, expert] = self.policy.value[layer, expert]
        return victim

    def keeps(self, layer: int, expert: int) -> bool:
        """Whether bringing an expert in is worth more than what it would replace."""
        if self._size < self.capacity:
            return True
        least = float(self._victims.min())
        return least < np.inf and float(self.policy.value[layer, expert]) >= least

    def candidate(self, layer: int, *, margin: float = 2.0) -> int | None:
        """The absent expert of a layer most worth a slot, to be brought in while nothing waits.

        None where a slot is not free and the expert is not worth ``margin`` times what it would
        replace: experts that take turns would keep the link busy, and memory, for nothing.
        The policy's values must be shares.
        """
        value = np.where(self._resident[layer], -np.inf, self.policy.value[layer])
        best = int(value.argmax())
        if self._resident[layer, best]:
            return None
        if self._size < self.capacity:
            return best
        least = float(self._victims.min())
        return best if least < np.inf and float(value[best]) > margin * max(0.0, least) else None

    @property
    def room(self) -> int:
        """How many experts can be admitted as things are."""
        free = max(0, self.capacity - self._size)
        return free + int(np.count_nonzero(self._victims < np.inf))

    def widen(self) -> None:
        """Let any layer make room in this pass: those behind it have nothing to give."""
        self._victims = self._flat

    # -- beside the passes ---------------------------------------------------------------------

    def hold(self, layer: int, experts: Iterable[int]) -> None:
        """Do not evict these until ``let_go``: they are on their way. Holds add up."""
        for expert in experts:
            self._blocked[layer, expert] += 1
            self._worth[layer, expert] = np.inf

    def let_go(self, layer: int, experts: Iterable[int]) -> None:
        """Undo one ``hold``."""
        for expert in experts:
            self._blocked[layer, expert] -= 1
        self._refresh(layer)

    def drop(self, layer: int, expert: int) -> None:
        """An expert is not held after all: its load failed or was cancelled.

        Raises:
            ValueError: it was not held, or is pinned.
        """
        if not self._resident[layer, expert] or (layer, expert) in self._pinned:
            raise ValueError(f"expert {expert} of layer {layer} is not held, or pinned")
        self._resident[layer, expert] = False
        self._blocked[layer, expert] += 1
        self._worth[layer, expert] = np.inf
        self._held[layer] -= 1
        self._size -= 1

    def resize(self, capacity: int) -> list[Key]:
        """Change the number of slots; what must go, the least worth first.

        What is in use stays: where more is in use than ``capacity``, the cache is above it until
        that is released and ``resize`` is called again.

        Raises:
            MemoryBudgetError: the pinned experts alone take more.
        """
        self.capacity = self._checked(capacity)
        self._victims = self._flat
        gone = []
        while self._size > self.capacity:
            victim = self._evict_least()
            if victim is None:
                break
            gone.append(victim)
        return gone

    def stats(self) -> CacheStats:
        """The counts so far."""
        return CacheStats(
            hits=tuple(self._hits),
            demands=tuple(self._demands),
            admitted=self._admitted,
            evicted=self._evicted,
        )

    def reset_stats(self) -> None:
        """Count from zero."""
        self._hits, self._demands = [0] * self.layers, [0] * self.layers
        self._admitted = self._evicted = 0

    def _refresh(self, layer: int) -> None:
        self._worth[layer] = np.where(self._blocked[layer], np.inf, self.policy.value[layer])

    def _evict_least(self) -> Key | None:
        least = int(self._victims.argmin())
        layer, expert = divmod(least, self.count)
        if self._blocked[layer, expert]:
            return None
        self._resident[layer, expert] = False
        self._blocked[layer, expert] += 1
        self._worth[layer, expert] = np.inf
        self._held[layer] -= 1
        self._size -= 1
        self._evicted += 1
        return layer, expert

    def _checked(self, capacity: int) -> int:
        least = max(1, len(self._pinned))
        if capacity < least:
            raise MemoryBudgetError(
                f"the expert cache needs at least {least} slots, and is given {capacity}: "
                "give it more, or pin fewer experts"
            )
        return capacity
