"""What weights and caches may take of RAM together, and which units to give back for caches.

It counts bytes; freeing and streaming are the decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localrt.errors import MemoryBudgetError
from localrt.offload.budget import format_bytes
from localrt.offload.placement import Where
from localrt.offload.stages import Stage

__all__ = ["RamBudget"]


@dataclass(frozen=True, slots=True)
class RamBudget:
    """``nbytes`` for resident units and caches. ``largest`` is the largest unit the ring takes."""

    nbytes: int
    largest: int

    def missing(self, resident: int, caches: int) -> int:
        """Bytes of weights to give back so that both fit."""
        return max(0, resident + caches - self.nbytes)

    def choose(self, stages: Sequence[Stage], nbytes: int) -> frozenset[str]:
        """Resident units of ``nbytes`` or more, little more, spread over the pass.

        Empty where all that may be given back is not enough.
        """
        able = [
            (index, stage)
            for index, stage in enumerate(stages)
            if stage.where in (Where.RAM, Where.LINK) and stage.unit.nbytes <= self.largest
        ]
        if sum(stage.unit.nbytes for _, stage in able) < nbytes:
            return frozenset()
        streamed = [index for index, stage in enumerate(stages) if stage.where.read]
        chosen: set[str] = set()
        rest = nbytes
        while rest > 0:
            # The smallest that suffices, else the largest; of equals the farthest from the others.
            enough = [item for item in able if item[1].unit.nbytes >= rest]
            size = (min if enough else max)(s.unit.nbytes for _, s in enough or able)
            equals = [item for item in able if item[1].unit.nbytes == size]
            pick = max(equals, key=lambda item: _distance(item[0], streamed, len(stages)))
            able.remove(pick)
            streamed.append(pick[0])
            chosen.add(pick[1].name)
            rest -= size
        return frozenset(chosen)

    def error(self, caches: int) -> MemoryBudgetError:
        """The caches alone are too large."""
        return MemoryBudgetError(
            f"the context has grown to {format_bytes(caches)} of keys and values and "
            f"{format_bytes(self.nbytes)} is left for them beside what cannot be streamed: use a "
            "shorter --ctx, --kv-format int8, or more --ram"
        )


def _distance(index: int, others: Sequence[int], count: int) -> int:
    """Stages to the nearest of ``others``, round the end of the pass."""
    return min((min(abs(index - o), count - abs(index - o)) for o in others), default=count)
