"""Which units of each class go where: what moves is spread evenly over the pass.

Reads and copies that come in lumps need large rings; evenly spread ones keep disk and link busy
with small ones. It takes counts and gives every unit its place; it chooses no counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from localrt.offload.placement import PlacedUnit, Where
from localrt.offload.planner.problem import Counts, UnitClass

__all__ = ["Pattern", "arrange"]

Pattern = Literal["spread", "block"]
"""Units of the CPU between those of the GPU, or all of them first."""

_ON_GPU = frozenset(where for where in Where if where.on_gpu)
_ON_CPU = frozenset(Where) - _ON_GPU
_READ = frozenset(where for where in Where if where.read)
_COPIED = frozenset(where for where in Where if where.copied)


class _Flow:
    """Takes its share of a stream of units, by bytes, as evenly as it goes."""

    def __init__(self) -> None:
        self.lag = 0.0

    def takes(self, nbytes: int, share: float) -> bool:
        """Whether the next unit is one of the ``share`` that is to be taken."""
        self.lag += nbytes * share
        if self.lag < nbytes / 2:
            return False
        self.lag -= nbytes
        return True


def arrange(
    units: Sequence[PlacedUnit],
    classes: Sequence[UnitClass],
    counts: Counts,
    pattern: Pattern = "spread",
) -> dict[str, Where]:
    """Every unit of a class at a place, in the order of the pass."""
    wholes = [dict(places) for places in counts]
    quotas = [{where: count for where, count in places.items() if count} for places in counts]
    of = {
        name: (quotas[number], wholes[number])
        for number, group in enumerate(classes)
        for name in group.names
    }
    devices, reads, copies = _Flow(), _Flow(), _Flow()
    placed: dict[str, Where] = {}
    for unit in units:
        if unit.name not in of:
            continue
        quota, whole = of[unit.name]
        left: Iterable[Where] = quota
        if len(quota) > 1:
            if pattern == "block":
                left = _ON_CPU & quota.keys() or quota.keys()
            else:
                left = _split(devices, unit.nbytes, whole, quota, _ON_GPU)
            left = _split(reads, unit.nbytes, whole, left, _READ)
            left = _split(copies, unit.nbytes, whole, left, _COPIED)
        where = next(iter(left))
        placed[unit.name] = where
        quota[where] -= 1
        if not quota[where]:
            del quota[where]
    return placed


def _split(
    flow: _Flow,
    nbytes: int,
    whole: Mapping[Where, int],
    among: Iterable[Where],
    special: frozenset[Where],
) -> list[Where]:
    """The places of ``among`` that are ``special``, or those that are not."""
    taken = [where for where in among if where in special]
    others = [where for where in among if where not in special]
    if not taken or not others:
        return taken or others
    count = sum(whole[where] for where in taken)
    share = count / (count + sum(whole[where] for where in others))
    return taken if flow.takes(nbytes, share) else others
