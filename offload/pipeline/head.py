"""The head in a pass: slices of the vocabulary, each a unit with a place of its own.

Slices that lie next to one another in a lane's memory are computed at once; of those that come
through a card's ring, as many as it holds while it goes on being filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import DecoderConfig
from localrt.models.layers.parts import Head, Part
from localrt.models.timing import Mark
from localrt.models.weights import WeightLoader
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.stage import PassingParts, Stage
from localrt.offload.pipeline.stretches import Piece, Stretch
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
            self._parts = []
            run: list[Stage] = []
            for stage in stages:
                if run and not _joins(run, stage):
                    self._parts.append(self._part(run))
                    run = []
                run.append(stage)
            if run:
                self._parts.append(self._part(run))
        return self._parts

    def forget(self) -> None:
        """A slice is somewhere else: what was joined would keep its memory."""
        self._parts = None

    def _part(self, run: Sequence[Stage]) -> Part:
        if run[0].part is None:
            return run[0] if len(run) == 1 else _PassingRun(run, self._joined)
        part = self._joined(run, [stage.memory for stage in run])
        nbytes, macs = _size(run)
        return Stretch(run[0].lane, [Piece("head", part, nbytes, macs)])

    def _joined(self, run: Sequence[Stage], memories: Sequence[Any]) -> Part:
        lane, units = run[0].lane, [stage.unit for stage in run]
        weight = lane.joined(list(zip(units, memories, strict=True)))
        return Head(self._config, lane.norm, weight, units[0].tensors[0].row)


class _PassingRun:
    """Slices that a card's ring holds at once. ``join`` makes one part of them where they lie."""

    def __init__(
        self, run: Sequence[Stage], join: Callable[[Sequence[Stage], Sequence[Any]], Part]
    ) -> None:
        self._run, self._join = run, join
        self._passing = PassingParts()

    def __call__(self, state: StreamedState) -> None:
        """Compute them once all have come."""
        run, lane = self._run, self._run[0].lane
        state.enter(lane)
        taken: list[Any] = []
        ended: Mark = None
        try:
            for stage in run:
                memory, there = lane.acquire(stage.unit, state.check)
                taken.append(memory)
                state.wait(there)
            part = self._passing.at(taken, lambda: self._join(run, taken))
            lane.compute(part, state, "head", *_size(run))
            ended = state.mark
        finally:
            for stage, memory in zip(run, taken, strict=False):
                lane.release(stage.unit, memory, ended)


def _joins(run: Sequence[Stage], stage: Stage) -> bool:
    """Whether a slice is computed with those before it."""
    lane = run[0].lane
    if stage.lane is not lane or (stage.part is None) is not (run[0].part is None):
        return False
    if stage.part is not None:
        return True
    if lane.card is None or lane.reader is None or lane.cost_s(0, 0, 1) is not None:
        return False  # the CPU starts one in no time; a virtual card's are timed one by one
    nbytes = stage.unit.nbytes + sum(each.unit.nbytes for each in run)
    return 2 * nbytes <= lane.reader.room  # the other half is filled meanwhile


def _size(run: Sequence[Stage]) -> tuple[int, int]:
    """Bytes and multiply-accumulates."""
    return sum(stage.unit.nbytes for stage in run), sum(stage.macs for stage in run)
