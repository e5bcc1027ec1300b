"""Stages that a lane computes at once: parts that stay on a GPU, and slices of the head.

Where a GPU's ``Ops`` records, consecutive parts are one launch: a segment of a graph. It ends where
another processor goes on, where a unit's weights come through a ring (they lie elsewhere in each
pass), and where the host has to look at the router's choice. The head's slices, each a unit with a
place of its own, are one matrix where they are neighbours in a lane's memory; of those that come
through a GPU's ring, as many are joined as it holds while it goes on being filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import DecoderConfig
from localrt.models.layers.parts import Head, Part, PassState
from localrt.models.weights import WeightLoader
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.stage import PassingParts, Stage
from localrt.offload.placement import Where
from localrt.quant.ops.protocol import Array, Pass


class Segment:
    """Consecutive parts on ``lane``, by name, whose weights stay where they are."""

    timed = True
    passing: Sequence[StoredUnit] = ()

    def __init__(self, lane: Lane, parts: Sequence[tuple[str, Part]]) -> None:
        self._lane = lane
        self._parts = parts
        (first, _), (last, _) = parts[0], parts[-1]
        self.name = first if len(parts) == 1 else f"{first} to {last}"

    def __call__(self, state: StreamedState) -> None:
        """Compute them: recorded if the pass is, else one after another."""
        lane, recorder = self._lane, self._lane.recorder
        state.enter(lane)
        if recorder is not None and recorder.takes(state.step):
            lane.run(self, state)
            return
        for number, (name, part) in enumerate(self._parts):
            if number and state.check is not None:
                state.check()
            lane.compute(part, name, state)

    def part_of(self, memories: Sequence[Any]) -> Part:
        """All of them, recorded."""
        return self._replay

    def _replay(self, state: StreamedState) -> None:
        recorder = self._lane.recorder
        assert recorder is not None, "it takes the pass"
        logits = recorder.run(state.step, state.x, self, partial(self._run, state.wanted))
        if logits is not None:
            _, head = self._parts[-1]
            assert isinstance(head, Head), "others make no logits"
            head.fill(state, logits)

    def _run(self, wanted: npt.NDArray[np.intp], step: Pass, x: Array) -> Array:
        state = PassState(self._lane.ops, step, x, wanted)
        for _, part in self._parts:
            part(state)
        return state.x


class Segments:
    """Joins the stages of a pass as far as they can be recorded, and remembers it."""

    def __init__(self) -> None:
        self._parts: list[Part] | None = None

    def parts(self, stages: Sequence[Stage]) -> Sequence[Part]:
        """What a pass computes of all, in order."""
        if self._parts is None:
            self._parts = []
            for lane, group in groupby(stages, _recording_lane):
                run = list(group)
                self._parts += run if lane is None else [Segment(lane, list(map(_named, run)))]
        return self._parts

    def forget(self) -> None:
        """A unit is somewhere else."""
        self._parts = None


def _recording_lane(stage: Stage) -> Lane | None:
    """None: it is not to be recorded."""
    stays = stage.part is not None and not stage.sparse
    return stage.lane if stays and stage.lane.recorder is not None else None


def _named(stage: Stage) -> tuple[str, Part]:
    assert stage.part is not None, "its weights stay where they are"
    return stage.name, stage.part


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
        return Segment(run[0].lane, [("head", part)])

    def _joined(self, run: Sequence[Stage], memories: Sequence[Any]) -> Part:
        lane, units = run[0].lane, [stage.unit for stage in run]
        weight = lane.joined(list(zip(units, memories, strict=True)))
        return Head(self._config, lane.norm, weight, units[0].tensors[0].row)


class _PassingRun:
    """Slices that a GPU's ring holds at once. ``join`` makes one part of them where they lie."""

    name = "head"
    timed = True

    def __init__(
        self, run: Sequence[Stage], join: Callable[[Sequence[Stage], Sequence[Any]], Part]
    ) -> None:
        self._run, self._join = run, join
        self._parts = PassingParts()
        self.passing = [stage.unit for stage in run]

    def part_of(self, memories: Sequence[Any]) -> Part:
        """All of them as one."""
        return self._parts.at(memories, lambda: self._join(self._run, memories))

    def __call__(self, state: StreamedState) -> None:
        """Compute them once all have come."""
        self._run[0].lane.run(self, state)


def _joins(run: Sequence[Stage], stage: Stage) -> bool:
    """Whether a slice is computed with those before it."""
    lane = run[0].lane
    if stage.lane is not lane or (stage.part is None) is not (run[0].part is None):
        return False
    if stage.part is not None:
        return True
    if lane.gpu is None or lane.reader is None:
        return False  # the CPU starts one in no time
    nbytes = stage.unit.nbytes + sum(each.unit.nbytes for each in run)
    return 2 * nbytes <= lane.reader.room  # the other half is filled meanwhile
