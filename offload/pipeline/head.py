"""The head in a pass: slices of the vocabulary, each a unit with a place of its own.

Slices that lie next to one another in a lane's memory are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.config import DecoderConfig
from localrt.models.parts import Head, Part
from localrt.models.weights import WeightLoader
from localrt.offload.pipeline.lane import Lane
from localrt.offload.pipeline.spans import Piece, Span
from localrt.offload.pipeline.stage import Stage
from localrt.offload.placement import Where

__all__ = ["JoinedHead"]


class JoinedHead:
    """Joins the slices that are in memory as far as they are neighbours, and remembers it."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self._parts: list[Part] | None = None

    def stage(self, unit: StoredUnit, where: Where, lane: Lane, moved: Callable[[], None]) -> Stage:
        """One slice: rows of the vocabulary."""
        (tensor,) = unit.tensors

        def load(weights: WeightLoader) -> Part:
            matrix = weights.matrix((tensor.shape[0], tensor.shape[1]), tensor.name)
            return Head(self._config, lane.norm, matrix, tensor.row)

        return Stage(unit, where, lane, load, moved)

    def parts(self, stages: Sequence[Stage]) -> Sequence[Part]:
        """What a pass computes of all slices, in order."""
        if self._parts is None:
            parts: list[Part] = []
            run: list[Stage] = []
            for stage in stages:
                if run and (stage.part is None or stage.lane is not run[0].lane):
                    parts.append(self._joined(run))
                    run = []
                if stage.part is None:
                    parts.append(stage)
                else:
                    run.append(stage)
            self._parts = [*parts, self._joined(run)] if run else parts
        return self._parts

    def forget(self) -> None:
        """A slice is somewhere else: what was joined would keep its memory."""
        self._parts = None

    def _joined(self, run: Sequence[Stage]) -> Part:
        lane = run[0].lane
        weight = lane.joined([(stage.unit, stage.memory) for stage in run])
        part = Head(self._config, lane.norm, weight, run[0].unit.tensors[0].row)
        nbytes, macs = sum(s.unit.nbytes for s in run), sum(s.macs for s in run)
        return Span(lane, [Piece("head", part, nbytes, macs)])
