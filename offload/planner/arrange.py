"""Which units of each class go where: what moves is spread evenly over the pass.

Reads and copies that come in lumps need large rings; evenly spread ones keep disk and link busy
with small ones. It takes counts and gives every unit its place; it chooses no counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from localrt.offload.placement import PlacedUnit, Where
from localrt.offload.planner.problem import Counts, UnitClass

Pattern = Literal["spread", "block"]
"""Units of the CPU between those of the GPU, or all of them first."""

_SPECIAL = (
    frozenset(where for where in Where if where.on_gpu),
    frozenset(where for where in Where if where.read),
    frozenset(where for where in Where if where.copied),
)


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


_Choice = Where | tuple[_Flow, float, "_Choice", "_Choice"]
"""A place, or a flow that takes a share for the first of two choices."""


def arrange(
    units: Sequence[PlacedUnit],
    classes: Sequence[UnitClass],
    counts: Counts,
    pattern: Pattern = "spread",
) -> dict[str, Where]:
    """Every unit of a class at a place, in the order of the pass."""
    flows = (_Flow(), _Flow(), _Flow()) if pattern == "spread" else (None, _Flow(), _Flow())
    of: dict[str, _Quota] = {}
    for group, places in zip(classes, counts, strict=True):
        of |= dict.fromkeys(group.names, _Quota(places, flows))
    return {unit.name: of[unit.name].take(unit.nbytes) for unit in units if unit.name in of}


class _Quota:
    """What is left of a class's units for each place, and the questions that settle the next one's:
    on the GPU or not, read or not, copied or not.
    """

    def __init__(self, places: Mapping[Where, int], flows: Sequence[_Flow | None]) -> None:
        self._whole, self._flows = places, flows
        self._left = {where: count for where, count in places.items() if count}
        self._choice = self._choices()

    def take(self, nbytes: int) -> Where:
        """The place of the class's next unit."""
        choice = self._choice
        while not isinstance(choice, Where):
            flow, share, taken, others = choice
            choice = taken if flow.takes(nbytes, share) else others
        self._left[choice] -= 1
        if not self._left[choice]:
            del self._left[choice]
            if self._left:
                self._choice = self._choices()
        return choice

    def _choices(self) -> _Choice:
        """The questions while no place's quota is used up."""
        return self._split(list(self._left), list(zip(self._flows, _SPECIAL, strict=True)))

    def _split(
        self, among: list[Where], questions: list[tuple[_Flow | None, frozenset[Where]]]
    ) -> _Choice:
        if len(among) == 1:
            return among[0]
        (flow, special), *others = questions
        taken = [where for where in among if where in special]
        rest = [where for where in among if where not in special]
        if not taken or not rest:
            return self._split(among, others)
        if flow is None:  # what the CPU computes comes first
            return self._split(rest, others)
        count = sum(self._whole[where] for where in taken)
        share = count / (count + sum(self._whole[where] for where in rest))
        return flow, share, self._split(taken, others), self._split(rest, others)
