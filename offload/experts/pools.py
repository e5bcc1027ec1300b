"""Experts in memory where layers differ in size: a pool of equal slots for each size.

GGUF mixes (Q4_K_M, Q3_K_M) give some layers' down matrices more bits: with one size of slot, every
expert would take the room of the largest. Each pool has the bytes that are its experts' share, a
cache of its own with the same policy, and the one reader of all: what is demanded in one pool goes
before what is proposed in another. It has ``ExpertMemory``'s interface and knows nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.timing import Mark
from localrt.offload.experts.cache import Key
from localrt.offload.experts.memory import Bytes, Demanded, ExpertMemory
from localrt.offload.experts.reader import Check, DemandReader, ReadingTime
from localrt.quant.ops.experts import ExpertTable, Routing

__all__ = ["ExpertPools", "size_classes"]

_NEAR = 1.02  # sizes that are one class
_LEAST_WASTE = 0.03  # of the memory, for which pools are worth it


def size_classes(units: Mapping[Key, StoredUnit]) -> list[list[int]]:
    """The layers whose experts are about equally large, together; one list where it is all alike.

    So too where equal slots for all would waste hardly any memory.
    """
    sizes: dict[int, int] = {}
    for (layer, _), unit in units.items():
        sizes[layer] = max(unit.nbytes, sizes.get(layer, 0))
    layers = sorted(sizes, key=lambda layer: (sizes[layer], layer))
    waste = 1 - sum(sizes.values()) / (len(sizes) * sizes[layers[-1]])
    if waste < _LEAST_WASTE:
        return [sorted(layers)]
    classes = [[layers[0]]]
    for layer in layers[1:]:
        if sizes[layer] <= _NEAR * sizes[classes[-1][0]]:
            classes[-1].append(layer)
        else:
            classes.append([layer])
    return [sorted(members) for members in classes]


class ExpertPools:
    """``pools``, each of the layers of ``classes`` at its place; ``reader`` is that of all."""

    def __init__(
        self,
        pools: Sequence[ExpertMemory],
        classes: Sequence[Sequence[int]],
        reader: DemandReader,
    ) -> None:
        self._pools = pools
        self._reader = reader
        self._at = {
            layer: (pool, number)
            for pool, layers in zip(pools, classes, strict=True)
            for number, layer in enumerate(layers)
        }
        self.slot_nbytes = max(pool.slot_nbytes for pool in pools)
        self._whole = [pool.nbytes for pool in pools]
        self.layers = len(self._at)
        self.count, self.used = pools[0].count, pools[0].used

    @property
    def nbytes(self) -> int:
        """See ``ExpertMemory``."""
        return sum(pool.nbytes for pool in self._pools)

    @property
    def bytes_read(self) -> int:
        """See ``ExpertMemory``."""
        return self._reader.bytes_read

    @property
    def reading(self) -> ReadingTime:
        """See ``ExpertMemory``."""
        return self._reader.time()

    @property
    def proposals(self) -> tuple[int, int]:
        """See ``ExpertMemory``."""
        found = [pool.proposals for pool in self._pools]
        return sum(each[0] for each in found), sum(each[1] for each in found)

    @property
    def reclaimable(self) -> int:
        """See ``ExpertMemory``."""
        return sum(pool.reclaimable for pool in self._pools)

    def resident(self, layer: int) -> npt.NDArray[np.bool_]:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        return pool.resident(number)

    def hold(self, layer: int, expert: int) -> None:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        pool.hold(number, expert)

    def let_go(self, layer: int, expert: int) -> None:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        pool.let_go(number, expert)

    def holds(self, layer: int, expert: int) -> bool:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        return pool.holds(number, expert)

    def data(self, layer: int, expert: int) -> Bytes:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        return pool.data(number, expert)

    def fill(self) -> None:
        """See ``ExpertMemory``."""
        for pool in self._pools:
            pool.fill()

    def table(self, layer: int) -> ExpertTable:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        return pool.table(number)

    def stage(self, size: int) -> bool:
        """See ``ExpertMemory``: each pool has buffers of its own."""
        staged = [pool.stage(size) for pool in self._pools]
        return all(staged)

    def propose(self, layer: int, experts: Sequence[int]) -> None:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        pool.propose(number, experts)

    def demand(
        self, layer: int, routing: Routing, after: Mark, *, only: Sequence[int] | None = None
    ) -> Demanded:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        return pool.demand(number, routing, after, only=only)

    def arrive(self, layer: int, expert: int, after: Mark, check: Check | None) -> Mark:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        return pool.arrive(number, expert, after, check)

    def computed(self, layer: int, experts: Sequence[int], after: Mark) -> None:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        pool.computed(number, experts, after)

    def done(self, layer: int) -> None:
        """See ``ExpertMemory``."""
        pool, number = self._at[layer]
        pool.done(number)

    def resize(self, nbytes: int) -> int:
        """See ``ExpertMemory``: every pool its share."""
        whole = sum(self._whole)
        pairs = zip(self._pools, self._whole, strict=True)
        return sum(pool.resize(nbytes * size // whole) for pool, size in pairs)

    def close(self) -> None:
        """See ``ExpertMemory``."""
        for pool in self._pools:
            pool.close()
