"""Stages of a pass: a unit's residency, and the part of the model that computes with its weights.

Calling a stage makes its lane run the part; ``balance.py`` changes where the unit is. If a GPU's
``Ops`` records graphs, consecutive stages are one segment, replayed with one launch (in sparse
layers, the host works between two graphs). A segment ends where another processor continues; a unit
in a ring is a segment of its own. Adjacent slices of the head are computed as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import cast

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import DecoderConfig, Part
from localrt.models.layers.parts import Head, PassState
from localrt.models.weights import VectorKey, WeightLoader
from localrt.offload.device.gpu import Gpu, Slab
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.memory import CpuExperts
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.placement import Where
from localrt.offload.reading.queued import QueuedCopies
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import DeviceMemory, Hidden, Memory, Pass, Vector, aligned_buffer
from localrt.quant.ops.protocol import RECORDED_PARTS

_CACHED_PLACES = 32
_RECORDED_PLACES = 2  # one for short and one for long passes: a GPU's ring has fixed places


class PassingParts:
    """Parts of units in a ring, cached by the address of their bytes; ``lane``, if any, records
    them as graphs.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = None if lane is None or lane.recorder is None else lane
        self._max_places = _CACHED_PLACES if self._lane is None else _RECORDED_PLACES
        self._parts: dict[tuple[int, ...], Part] = {}
        self._segments: dict[tuple[int, ...], Segment] = {}

    def at(self, memories: Sequence[Memory], make: Callable[[], Part]) -> Part:
        """The part on these bytes, cached or new."""
        places = tuple(
            int(
                memory.ctypes.data
                if isinstance(memory, np.ndarray)
                else cast(DeviceMemory, memory).address
            )
            for memory in memories
        )
        if (part := self._parts.get(places)) is not None:
            return part
        while len(self._parts) >= self._max_places:
            self._drop(next(iter(self._parts)))
        part = make()
        if self._lane is not None:
            self._segments[places] = segment = Segment(self._lane, [("", part, None)], (part,))
            part = segment.compute
        self._parts[places] = part
        return part

    def clear(self) -> None:
        """Drop all parts: the ring has been replaced, or the unit has left it."""
        for places in list(self._parts):
            self._drop(places)

    def _drop(self, places: tuple[int, ...]) -> None:
        del self._parts[places]
        if (segment := self._segments.pop(places, None)) is not None:
            segment.forget()


class Stage:
    """A unit in a pass. ``load`` builds its part from weights of ``lane``; ``joined`` drops the
    parts that have it when the weights move.

    ``memory`` are the bytes of a resident unit, in RAM or on the GPU; ``part`` computes on them if
    they are used in place. With ``keep``, the unit is copied from the ring to ``copy``, its
    resident memory after the pass, in RAM or in ``restore_slab``. A ``fixed`` unit never moves.
    ``ram_copy`` are the bytes in RAM of a unit that is on the GPU and has been in RAM before.
    ``experts`` runs the experts of a sparse layer, and times the layer on a GPU. ``gpu`` is the
    lane that computes a unit of the CPU in passes in which it crosses.
    """

    fixed = False

    def __init__(
        self,
        unit: StoredUnit,
        where: Where,
        lane: Lane,
        load: Callable[[WeightLoader], Part],
        joined: JoinedParts | None = None,
        *,
        experts: CpuExperts | HybridExperts | None = None,
        gpu: Lane | None = None,
    ) -> None:
        self.unit, self.name, self.experts = unit, unit.name, experts
        self.timed = experts is None or lane.gpu is None
        self.where = where
        self.lane = lane
        self.gpu_lane = lane if gpu is None and lane.gpu is not None else gpu
        self.memory: Memory | None = None
        self.slab: Slab | None = None  # the slab that holds ``memory``, on a GPU
        self.part: Part | None = None
        self.ram_copy: Bytes | None = None
        self.keep = False
        self.copy: Memory | None = None
        self.restore_slab: Slab | None = None
        self._load, self._joined = load, joined
        self._passing = PassingParts(lane if experts is None else None)
        self._vectors: dict[VectorKey, Vector] = {}  # copies on the GPU, shared by all parts

    def _moved(self) -> None:
        if self._joined is not None:
            self._joined.stage_moved()

    @property
    def ram_nbytes(self) -> int:
        """Bytes of RAM that the stage takes between passes."""
        in_ram = self.where in (Where.RAM, Where.LINK) or self.ram_copy is not None
        return self.unit.nbytes if in_ram else 0

    def place(self, *, crossing: bool) -> Where:
        """Where the weights are in a pass; if ``crossing``, the GPU computes crossing units."""
        return self.where.crossed if crossing and self.gpu_lane is not None else self.where

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that computes the unit, if only in passes in which it crosses."""
        return None if self.gpu_lane is None else self.gpu_lane.gpu

    def host_buffer(self) -> Bytes:
        """Allocate RAM for the unit: pinned if copies read from it."""
        gpu = self.gpu
        nbytes = self.unit.nbytes
        return aligned_buffer(nbytes) if gpu is None else gpu.host_buffer(nbytes)

    def remember_vectors(self, data: Bytes) -> None:
        """Copy the unit's norms and biases from ``data`` in RAM before its bytes go to a GPU."""
        if self.gpu_lane is not None:
            self.gpu_lane.remember_vectors(self.unit, data)

    def put(self, memory: Memory, slab: Slab | None = None) -> None:
        """Make the unit resident in ``memory``, which is part of ``slab`` on a GPU."""
        if slab is not None:
            self.ram_copy = cast(Bytes | None, self.memory)
        self.memory, self.slab = memory, slab
        self._passing.clear()
        if not self.where.copied:
            self.part = self._load(self.lane.weights(self.unit, memory))
        self._moved()

    def move(self, where: Where) -> int:
        """Stream the resident unit from now on; returns the bytes freed.

        A GPU's slab is freed as a whole when the last of its units moves.
        """
        source, memory = self.where, self.memory
        self.where, self.memory, self.part = where, None, None
        if where is Where.LINK:
            self.memory, self.ram_copy = self.ram_copy, None
        self._moved()
        if memory is None:
            return 0
        gpu = self.gpu
        if gpu is None:
            return int(memory.nbytes)
        if source is not Where.VRAM:
            return gpu.free_host(cast(Bytes, memory))
        assert self.slab is not None, "resident units on a GPU are in slabs"
        slab, self.slab = self.slab, None
        return slab.release()

    def copy_to_ram(self) -> int:
        """Copy the unit from the GPU to RAM as well; returns its bytes."""
        assert self.gpu is not None, "it is on one"
        data = self.gpu.to_host(cast(Hidden, self.memory))
        self.ram_copy = self.host_buffer()
        self.ram_copy[:] = cast(Bytes, data)
        return self.unit.nbytes

    def copy_back(self, gpu: Gpu, slab: Slab) -> None:
        """Copy the unit from RAM to ``slab``; it stays in RAM as well. The host does not wait."""
        memory = slab.take(self.unit.nbytes)
        gpu.queue_copy(self.name, cast(Bytes, self.memory), memory, None)
        gpu.wait(gpu.end_copy(self.name))
        self.where = Where.VRAM
        with gpu.ops.scope():
            self.put(memory, slab)

    def drop_copy(self) -> int:
        """Free the copy in RAM; returns its bytes."""
        copy, self.ram_copy = self.ram_copy, None
        return 0 if copy is None or self.gpu is None else self.gpu.free_host(copy)

    def clear_ring_parts(self) -> None:
        """Drop the parts on the ring: it has been replaced."""
        self._passing.clear()

    def bind_ring(self) -> None:
        """Build parts on the ring's places, which are fixed while no units cross."""

    def free(self) -> None:
        """Free the memory: the pipeline is closed."""
        self.drop_copy()
        if self.memory is not None:
            self.move(self.where)
        self._moved()
        self.copy = None
        self._passing.clear()
        self._vectors.clear()

    @property
    def ring_units(self) -> Sequence[StoredUnit]:
        return (self.unit,) if self.part is None else ()

    def part_of(self, memories: Sequence[Memory]) -> Part:
        """The resident part, or the one on ``memories`` of the ring, cached by place.

        Only the first part copies norms and biases to a GPU, which waits for all of the GPU's
        kernels.
        """
        if self.part is not None:
            return self.part
        (memory,) = memories
        self.keep_copy(memory)
        lane, unit = self.lane, self.unit
        return self._passing.at(
            memories, lambda: self._load(lane.weights(unit, memory, self._vectors))
        )

    def keep_copy(self, memory: Memory) -> None:
        """With ``keep``, copy the unit's bytes out of the ring."""
        if self.keep:
            slab = self.restore_slab
            self.copy = self.host_buffer() if slab is None else slab.take(self.unit.nbytes)
            cast(Bytes, self.copy)[:] = cast(Bytes, memory)

    def __call__(self, state: StreamedState) -> None:
        """Compute the part once its weights have arrived."""
        self.lane.run(self, state)


class CrossingStage(Stage):
    """A unit that the CPU computes, except in passes of at least ``rows`` rows, which copy it to
    ``gpu`` and compute it there.
    """

    def __init__(
        self,
        unit: StoredUnit,
        where: Where,
        lane: Lane,
        load: Callable[[WeightLoader], Part],
        *,
        gpu: Lane,
        rows: int,
    ) -> None:
        super().__init__(unit, where, lane, load, gpu=gpu)
        self._rows = rows
        self._gpu_stage = Stage(unit, where.crossed, gpu, load)  # never resident

    def free(self) -> None:
        super().free()
        self._gpu_stage.free()

    def __call__(self, state: StreamedState) -> None:
        if state.rows >= self._rows:
            self._gpu_stage(state)
        else:
            super().__call__(state)


NamedPart = tuple[str, Part, HybridExperts | None]


class Segment:
    """Consecutive resident ``parts`` on ``lane``, recorded as one graph; sparse layers come with
    the runner of their experts. ``stage_parts`` are the parts of its stages.
    """

    timed = True
    ring_units: Sequence[StoredUnit] = ()

    def __init__(
        self, lane: Lane, parts: Sequence[NamedPart], stage_parts: tuple[Part | None, ...] = ()
    ) -> None:
        self._lane, self.stage_parts = lane, stage_parts
        self._parts = parts
        self._experts = {experts for *_, experts in parts if experts is not None}
        first, last = parts[0][0], parts[-1][0]
        self.name = first if len(parts) == 1 else f"{first} to {last}"

    def __call__(self, state: StreamedState) -> None:
        """Compute the parts: as one recording if the pass is recorded, else one by one."""
        lane = self._lane
        state.enter(lane)
        records = [experts.records(state.rows) for experts in self._experts]
        if None in records or (all(records) and not self._is_recorded(state)):
            self._one_by_one(state)
        elif all(records):
            lane.run(self, state)
        else:
            for segment in self._pieces:
                if segment._experts or not segment._is_recorded(state):
                    segment._one_by_one(state)
                else:
                    lane.run(segment, state)

    def _is_recorded(self, state: StreamedState) -> bool:
        """Whether this pass records or replays the parts."""
        recorder = self._lane.recorder
        if recorder is None or state.inputs is not None:
            return False  # layers' own inputs have no fixed place
        if state.features is not None and state.features.within:
            return False  # features are taken between parts, where a graph does not stop
        return recorder.takes(state.step, self, len(self._parts))

    @cached_property
    def _pieces(self) -> list[Segment]:
        """The sparse layers, and the segments between them."""
        groups = groupby(self._parts, lambda part: part[2])
        return [Segment(self._lane, list(group)) for _, group in groups]

    def _one_by_one(self, state: StreamedState) -> None:
        for number, (name, part, experts) in enumerate(self._parts):
            if number and state.check is not None:
                state.check()
            self._lane.compute(part, name, state, timed=experts is None)

    def compute(self, state: StreamedState) -> None:
        """Compute the parts within a lane's step, after their units have arrived."""
        if self._is_recorded(state):
            self._replay(state)
            return
        for _, part, _ in self._parts:
            part(state)

    def part_of(self, memories: Sequence[Memory]) -> Part:
        """One part that replays the recording of all parts."""
        return self._replay

    def forget(self) -> None:
        """Drop its recordings."""
        recorder = self._lane.recorder
        if recorder is not None:
            for segment in (self, *self.__dict__.get("_pieces", ())):  # if already computed
                recorder.forget(segment)

    def _replay(self, state: StreamedState) -> None:
        recorder = self._lane.recorder
        assert recorder is not None, "the pass is recorded"
        body = partial(self._run, state.logit_rows)
        logits = recorder.run(state.step, state.x, self, body, state.check)
        if logits is not None:
            head = self._parts[-1][1]
            assert isinstance(head, Head), "others make no logits"
            head.fill(state, logits)

    def _run(self, logit_rows: npt.NDArray[np.intp], step: Pass, x: Hidden) -> Hidden:
        state = PassState(self._lane.ops, step, x, logit_rows)
        for _, part, _ in self._parts:
            part(state)
        return state.x


class Stages(dict[str, Stage]):
    """The stages of a pass by name, in its order."""

    def in_ram(self, name: str) -> Bytes | None:
        """The bytes of a unit that is in RAM between passes, else None."""
        stage = self.get(name)
        return cast(Bytes, stage.memory) if stage is not None and stage.ram_nbytes else None


class JoinedParts:
    """The parts that ``join`` builds from stages, cached until a stage moves."""

    def __init__(self, join: Callable[[Sequence[Stage]], list[Part]]) -> None:
        self._join = join
        self._parts: list[Part] = []
        self._stale = True

    def parts(self, stages: Sequence[Stage]) -> Sequence[Part]:
        """The parts that a pass computes, in order.

        After a unit has moved, segments without it keep their recordings.
        """
        if self._stale:
            unused = {part.stage_parts: part for part in self._parts if isinstance(part, Segment)}
            self._parts = [
                unused.pop(part.stage_parts, part) if isinstance(part, Segment) else part
                for part in self._join(stages)
            ]
            for segment in unused.values():
                segment.forget()
            self._stale = False
        return self._parts

    def stage_moved(self) -> None:
        """Drop parts with the moved unit: they would use its old memory."""
        # Stages refer to this object; if it referred to them, a closed model would stay in memory.
        self._parts = [part for part in self._parts if isinstance(part, Segment)]
        self._stale = True


def join_segments(stages: Sequence[Stage]) -> list[Part]:
    """The stages of layers, with consecutive recordable ones joined into segments."""
    parts: list[Part] = []
    for (lane, _), group in groupby(enumerate(stages), _recording_lane):
        run = [stage for _, stage in group]
        if lane is None:
            parts += run
        else:
            parts.append(Segment(lane, list(map(_named, run)), tuple(s.part for s in run)))
    return parts


def _recording_lane(numbered: tuple[int, Stage]) -> tuple[Lane | None, int]:
    """The lane that records a stage (None: it cannot be recorded), and the number of its group of
    ``RECORDED_PARTS``. Segments do not cross groups, so that few change when a unit moves.
    """
    index, stage = numbered
    fixed = stage.part is not None and not isinstance(stage.experts, CpuExperts)
    lane = stage.lane if fixed and stage.lane.recorder is not None else None
    return lane, index // RECORDED_PARTS


def _named(stage: Stage) -> NamedPart:
    assert stage.part is not None, "it is resident"
    assert not isinstance(stage.experts, CpuExperts), "it is on a GPU"
    return stage.name, stage.part, stage.experts


def head_stage(
    config: DecoderConfig, unit: StoredUnit, where: Where, lane: Lane, joined: JoinedParts
) -> Stage:
    """One slice of the head: rows of the vocabulary."""
    (tensor,) = unit.tensors

    def load(weights: WeightLoader) -> Part:
        matrix = weights.matrix((tensor.shape[0], tensor.shape[1]), tensor.name)
        return Head(config, lane.norm, matrix, tensor.row)

    return Stage(unit, where, lane, load, joined)


def join_head(config: DecoderConfig, stages: Sequence[Stage]) -> list[Part]:
    """The head's slices, with slices that are adjacent in memory joined into one matrix."""
    runs: list[list[Stage]] = []
    for stage in stages:
        if runs and _same_matrix(runs[-1], stage):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    parts: list[Part] = []
    for run in runs:
        if run[0].part is not None:
            part = _joined(config, run, [cast(Memory, stage.memory) for stage in run])
            parts.append(Segment(run[0].lane, [("head", part, None)], tuple(s.part for s in run)))
        else:
            parts.append(run[0] if len(run) == 1 else _PassingRun(run, partial(_joined, config)))
    return parts


def _joined(config: DecoderConfig, run: Sequence[Stage], memories: Sequence[Memory]) -> Part:
    lane, units = run[0].lane, [stage.unit for stage in run]
    weight = lane.joined(list(zip(units, memories, strict=True)))
    return Head(config, lane.norm, weight, units[0].tensors[0].row)


class _PassingRun:
    """Adjacent head slices that are in a ring at the same time. ``join`` builds one part from them
    in place.
    """

    name = "head"
    timed = True

    def __init__(
        self, run: Sequence[Stage], join: Callable[[Sequence[Stage], Sequence[Memory]], Part]
    ) -> None:
        self._run, self._join = run, join
        self._parts = PassingParts()
        self.ring_units = [stage.unit for stage in run]

    def part_of(self, memories: Sequence[Memory]) -> Part:
        """The part of all slices."""
        for stage, memory in zip(self._run, memories, strict=True):
            stage.keep_copy(memory)
        return self._parts.at(memories, lambda: self._join(self._run, memories))

    def __call__(self, state: StreamedState) -> None:
        """Compute the slices once all have arrived."""
        self._run[0].lane.run(self, state)


def _same_matrix(run: Sequence[Stage], stage: Stage) -> bool:
    """Whether a head slice is computed in one product with those before it."""
    lane = run[0].lane
    if stage.lane is not lane or (stage.part is None) is not (run[0].part is None):
        return False
    if stage.part is not None:
        return True
    if not isinstance(lane.reader, QueuedCopies):
        return False  # larger products are no faster on a CPU
    nbytes = stage.unit.nbytes + sum(each.unit.nbytes for each in run)
    return 2 * nbytes <= lane.reader.room  # the ring's other half is filled meanwhile
