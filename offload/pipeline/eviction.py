"""Chooses which units leave memory, if some bytes of it are needed."""

from __future__ import annotations

from collections.abc import Sequence

from localrt.offload.pipeline.stage import Stage


def choose_units(stages: Sequence[Stage], nbytes: int, candidates: Sequence[Stage]) -> list[Stage]:
    """Choose ``candidates`` with at least ``nbytes`` in all, in order; none if too few.

    The choice exceeds ``nbytes`` only slightly and is spread over the pass. ``stages`` is the whole
    pass, including stages that are already streamed.
    """
    place = {stage.name: index for index, stage in enumerate(stages)}
    left = list(candidates)
    if sum(stage.unit.nbytes for stage in left) < nbytes:
        return []
    streamed = [index for index, stage in enumerate(stages) if stage.where.read]
    chosen: list[Stage] = []
    while nbytes > 0:
        # The smallest stage that suffices, else the largest; among equals, the farthest from
        # streamed ones.
        enough = [stage for stage in left if stage.unit.nbytes >= nbytes]
        size = (min if enough else max)(stage.unit.nbytes for stage in enough or left)
        equals = [stage for stage in left if stage.unit.nbytes == size]
        unit = max(equals, key=lambda stage: _distance(place[stage.name], streamed, len(stages)))
        left.remove(unit)
        streamed.append(place[unit.name])
        chosen.append(unit)
        nbytes -= size
    return sorted(chosen, key=lambda stage: place[stage.name])


def choose_slabs(slabs: Sequence[Sequence[Stage]], nbytes: int) -> list[Sequence[Stage]]:
    """Choose slabs with ``nbytes`` in all or slightly more; all slabs if they have less."""
    left, chosen = list(slabs), list[Sequence[Stage]]()
    while left and nbytes > 0:
        sizes = [sum(stage.unit.nbytes for stage in slab) for slab in left]
        enough = [size for size in sizes if size >= nbytes]
        size = min(enough) if enough else max(sizes)
        chosen.append(left.pop(sizes.index(size)))
        nbytes -= size
    return chosen


def _distance(index: int, others: Sequence[int], count: int) -> int:
    """Distance in stages to the nearest of ``others``, cyclically."""
    return min((min(abs(index - o), count - abs(index - o)) for o in others), default=count)
