"""What a lane computes at a stretch: units that stay on a card, one behind the other in a pass.

Where the card's ``Ops`` records, such a stretch is one launch. It ends where another processor goes
on, where a unit's weights come through a ring (they lie elsewhere in each pass), and where the host
has to look at the router's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from localrt.models.layers.parts import Head, Part, PassState
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.pipeline.stage import Stage
from localrt.quant.ops.protocol import Array, Pass

__all__ = ["Piece", "Stretch", "Stretches"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part whose weights stay where they are, and what a virtual card's time follows from."""

    name: str
    part: Part
    nbytes: int
    macs: int


class Stretch:
    """Consecutive pieces as one part."""

    def __init__(self, lane: Lane, pieces: Sequence[Piece]) -> None:
        self._lane = lane
        self._pieces = pieces
        first, last = pieces[0], pieces[-1]
        self._name = first.name if first is last else f"{first.name} to {last.name}"
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._macs = sum(piece.macs for piece in pieces)

    def __call__(self, state: StreamedState) -> None:
        """Compute them: recorded if the pass is, else one after another."""
        state.enter(self._lane)
        recorder = self._lane.recorder
        if recorder is not None and recorder.takes(state.step):
            self._lane.compute(self._replay, state, self._name, self._nbytes, self._macs)
            return
        for number, piece in enumerate(self._pieces):
            if number and state.check is not None:
                state.check()
            self._lane.compute(piece.part, state, piece.name, piece.nbytes, piece.macs)

    def _replay(self, state: StreamedState) -> None:
        recorder = self._lane.recorder
        assert recorder is not None, "it takes the pass"
        logits = recorder.run(state.step, state.x, self, partial(self._run, state.wanted))
        if logits is not None:
            head = self._pieces[-1].part
            assert isinstance(head, Head), "others make no logits"
            head.fill(state, logits)

    def _run(self, wanted: npt.NDArray[np.intp], step: Pass, x: Array) -> Array:
        state = PassState(self._lane.ops, step, x, wanted)
        for piece in self._pieces:
            piece.part(state)
        return state.x


class Stretches:
    """Joins the stages of a pass as far as they can be recorded, and remembers it."""

    def __init__(self) -> None:
        self._parts: list[Part] | None = None

    def parts(self, stages: Sequence[Stage]) -> Sequence[Part]:
        """What a pass computes of all, in order."""
        if self._parts is None:
            self._parts = []
            for lane, group in groupby(stages, _recording_lane):
                run = list(group)
                self._parts += run if lane is None else [_stretch(lane, run)]
        return self._parts

    def forget(self) -> None:
        """A unit is somewhere else."""
        self._parts = None


def _recording_lane(stage: Stage) -> Lane | None:
    """None: it is not to be recorded."""
    stays = stage.part is not None and stage.recordable
    return stage.lane if stays and stage.lane.recorder is not None else None


def _stretch(lane: Lane, stages: Sequence[Stage]) -> Stretch:
    pieces = []
    for stage in stages:
        assert stage.part is not None, "its weights stay where they are"
        pieces.append(Piece(stage.name, stage.part, stage.unit.nbytes, stage.macs))
    return Stretch(lane, pieces)
