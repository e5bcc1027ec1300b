"""Which units to stream when memory must be freed: enough, little more, spread over the pass."""

from __future__ import annotations

from collections.abc import Sequence

from localrt.offload.pipeline.stages import Stage

__all__ = ["choose_units"]


def choose_units(stages: Sequence[Stage], nbytes: int, able: Sequence[Stage]) -> frozenset[str]:
    """Units among ``able`` of ``nbytes`` or more in all; none where all are not enough.

    ``stages`` is the pass, with what it streams already.
    """
    place = {stage.name: index for index, stage in enumerate(stages)}
    left = [(place[stage.name], stage) for stage in able]
    if sum(stage.unit.nbytes for _, stage in left) < nbytes:
        return frozenset()
    streamed = [index for index, stage in enumerate(stages) if stage.where.read]
    chosen: set[str] = set()
    rest = nbytes
    while rest > 0:
        # The smallest that suffices, else the largest; of equals the farthest from the others.
        enough = [item for item in left if item[1].unit.nbytes >= rest]
        size = (min if enough else max)(s.unit.nbytes for _, s in enough or left)
        equals = [item for item in left if item[1].unit.nbytes == size]
        pick = max(equals, key=lambda item: _distance(item[0], streamed, len(stages)))
        left.remove(pick)
        streamed.append(pick[0])
        chosen.add(pick[1].name)
        rest -= size
    return frozenset(chosen)


def _distance(index: int, others: Sequence[int], count: int) -> int:
    """Stages to the nearest of ``others``, round the end of the pass."""
    return min((min(abs(index - o), count - abs(index - o)) for o in others), default=count)
