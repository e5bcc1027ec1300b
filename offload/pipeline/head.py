"""The head in a pass: slices of the vocabulary, each a unit with a place of its own.

Slices that lie next to one another in a lane's memory are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.config import DecoderConfig
from localrt.models.parts import Head, Part
from localrt.models.weights import WeightLoader
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.stage import Stage
from localrt.offload.placement import Where

__all__ = ["HeadStage", "SlicedHead"]


class SlicedHead:
    """The slices in order; ``parts`` are what a pass computes."""

    def __init__(self, config: DecoderConfig) -> None:
        self.stages: list[HeadStage] = []
        self._config = config
        self._parts: list[Part] | None = None

    def add(self, unit: StoredUnit, where: Where, lane: Lane) -> None:
        """The next slice."""
        self.stages.append(HeadStage(self, unit, where, lane))

    def make(self, lane: Lane, weight: Any, first_row: int) -> Head:
        """The part for the rows of ``weight``."""
        return Head(self._config, lane.norm, weight, first_row)

    def changed(self) -> None:
        """A slice is somewhere else: what was joined would keep its memory."""
        self._parts = None

    @property
    def parts(self) -> Sequence[Part]:
        """Streamed slices, and those in memory joined as far as they are neighbours."""
        if self._parts is None:
            parts: list[Part] = []
            run: list[HeadStage] = []
            for stage in self.stages:
                if run and (stage.part is None or stage.lane is not run[0].lane):
                    parts.append(self._joined(run))
                    run = []
                if stage.part is None:
                    parts.append(stage)
                else:
                    run.append(stage)
            self._parts = [*parts, self._joined(run)] if run else parts
        return self._parts

    def _joined(self, run: Sequence[HeadStage]) -> Part:
        lane = run[0].lane
        weight = lane.joined([(stage.unit, stage.memory) for stage in run])
        part = self.make(lane, weight, run[0].first_row)
        nbytes, macs = sum(s.unit.nbytes for s in run), sum(s.macs for s in run)
        return partial(_compute, lane, part, nbytes, macs)


def _compute(lane: Lane, part: Part, nbytes: int, macs: int, state: StreamedState) -> None:
    state.enter(lane)
    lane.compute(part, state, "head", nbytes, macs)


class HeadStage(Stage):
    """One slice: the rows of the vocabulary from ``first_row`` on."""

    def __init__(self, head: SlicedHead, unit: StoredUnit, where: Where, lane: Lane) -> None:
        (tensor,) = unit.tensors
        self.first_row = tensor.row
        self._head = head

        def load(weights: WeightLoader) -> Part:
            matrix = weights.matrix((tensor.shape[0], tensor.shape[1]), tensor.name)
            return head.make(lane, matrix, tensor.row)

        super().__init__(unit, where, lane, load)

    def put(self, memory: Any) -> None:
        """See ``Stage``."""
        super().put(memory)
        self._head.changed()

    def move(self, where: Where) -> int:
        """See ``Stage``."""
        self._head.changed()
        return super().move(where)
