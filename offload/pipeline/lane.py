"""The lanes of a pass, one per processor, and the state that a pass carries between them.

The CPU's ring is filled from the SSD, a GPU's over the link. A lane knows neither the parts that it
runs nor their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint, UnitMemory
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import Part
from localrt.models.layers.parts import Logits, PassState
from localrt.models.weight_store import Resource
from localrt.models.weights import VectorKey, WeightLoader
from localrt.offload.device.gpu import Clock, Gpu
from localrt.offload.pipeline.caches import split_batch
from localrt.offload.reading.queued import QueuedCopies
from localrt.offload.reading.reader import UnitReader
from localrt.offload.ring import Ring
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Hidden, Memory, Pass, Vector, Weight, copy_to_host
from localrt.quant.ops.protocol import Batch, Check, Ops


def host_ring(nbytes: int, chunk: int, gpu: Gpu | None) -> Ring[Bytes]:
    """Make the CPU's ring in RAM; with a GPU it is pinned, since copies over the link read it."""
    if gpu is None:
        return Ring(nbytes, chunk)
    return Ring(nbytes, chunk, gpu.host_buffer(nbytes), free=gpu.free_host)


class LaneStep(Protocol):
    """One computation of a lane: a part on resident weights or on units in the ring."""

    @property
    def name(self) -> str:
        """The task's name for the clock."""

    @property
    def timed(self) -> bool:
        """Whether the lane times it."""

    @property
    def ring_units(self) -> Sequence[StoredUnit]:
        """The units that it needs from the ring, in order; none if its weights are resident."""

    def part_of(self, memories: Sequence[Memory]) -> Part:
        """Build the part on the bytes of ``ring_units``."""


class Lane:
    """A processor with its ring, which ``reader`` fills; ``gpu`` is None on the CPU.

    ``attends``: whether it computes any layer's attention. Used by one thread at a time.
    """

    def __init__(
        self,
        store: StoreCheckpoint,
        ops: Ops,
        clock: Clock,
        *,
        reader: UnitReader | QueuedCopies | None = None,
        gpu: Gpu | None = None,
        attends: bool = True,
    ) -> None:
        self.ops = ops
        self.norm: Vector | None = None  # the final norm's weights, set before any part is made
        self.gpu = gpu
        self.recorder = None if gpu is None else ops.recorder()
        self.attends = attends
        self.resource: Resource = "cpu" if gpu is None else "gpu"
        self.reader = reader
        self._task = partial(clock.task, "cpu") if gpu is None else gpu.task
        self._store = store
        self._vectors: dict[str, dict[str, PackedTensor]] = {}

    # -- a pass ----------------------------------------------------------------------------------

    def run(self, step: LaneStep, state: StreamedState) -> None:
        """Wait for a step's weights, compute it, and release their places in the ring."""
        state.enter(self)
        units = step.ring_units
        if not units:
            self.compute(step.part_of(()), step.name, state, timed=step.timed)
            return
        memories: list[Memory] = []
        try:
            for unit in units:
                memories.append(self.acquire(unit, state.check))
            self.compute(step.part_of(memories), step.name, state, timed=step.timed)
        finally:
            self.release(units[: len(memories)])

    def compute(self, part: Part, name: str, state: StreamedState, *, timed: bool = True) -> None:
        """Run a part, timed as a task."""
        with self.ops.scope(), self._task(name) if timed else nullcontext():
            part(state)

    def begin(self, batch: Batch, logit_rows: npt.NDArray[np.intp]) -> Pass:
        """Begin a pass over the caches of ``batch``, recorded if that is faster."""
        batch = split_batch(batch, self.ops)
        if self.recorder is None:
            return self.ops.begin(batch)
        return self.recorder.begin(batch, logit_rows.tolist())

    @property
    def adapts(self) -> bool:
        """Whether its ``Ops`` must be told the adapters of each pass."""
        table = self.ops.adapters
        return table is not None and table.used

    # -- weights ---------------------------------------------------------------------------------

    def weights(
        self, unit: StoredUnit, data: Memory, vectors: dict[VectorKey, Vector] | None = None
    ) -> WeightLoader:
        """A unit's tensors in ``data``, for this lane's ``Ops``; see ``WeightLoader``."""
        return WeightLoader(self._memory(unit, data), self.ops, vectors=vectors)

    def joined(self, slices: Sequence[tuple[StoredUnit, Memory]]) -> Weight:
        """Consecutive slices of one matrix as one weight, without moving them."""
        tensors = [unit.tensors[0] for unit, _ in slices]
        blocks = (
            block
            for unit, data in slices
            for block in self._memory(unit, data).blocks(unit.tensors[0].name)
        )
        rows = sum(tensor.shape[0] for tensor in tensors)
        return self.ops.weight((rows, tensors[0].shape[1]), blocks)

    def remember_vectors(self, unit: StoredUnit, data: Bytes) -> None:
        """Copy a unit's norms and biases, since the CPU cannot read its bytes later."""
        self._vectors[unit.name] = self._memory(unit, data).vectors()

    def _memory(self, unit: StoredUnit, data: Memory) -> UnitMemory:
        store, vectors = self._store, self._vectors.get(unit.name)
        return UnitMemory(store.path, store.architecture, unit, data, vectors)

    # -- the ring --------------------------------------------------------------------------------

    def acquire(self, unit: StoredUnit, check: Check | None) -> Memory:
        """Wait for a unit of the ring; returns its memory."""
        assert self.reader is not None, "units are resident where nothing is streamed"
        return self.reader.acquire(unit.name, check)

    def release(self, units: Sequence[StoredUnit]) -> None:
        """Free the units' places once the kernels started so far have ended."""
        assert self.reader is not None, "they are in its ring"
        last_use = None if self.gpu is None else self.gpu.record()
        for unit in units:
            self.reader.release(unit.name, last_use)

    def place(self, unit: StoredUnit) -> Memory:
        """A unit's memory in the GPU's ring, valid until the next ``stream``."""
        assert isinstance(self.reader, QueuedCopies), "only a GPU's ring has fixed places"
        return self.reader.place(unit.name)

    def stream(self, units: Sequence[StoredUnit], ring: Ring[Bytes] | None = None) -> None:
        """Stream ``units`` through the ring in each pass; ``ring`` replaces the ring in RAM."""
        if isinstance(self.reader, UnitReader):
            self.reader.schedule(units, ring)
        elif self.reader is not None:
            self.reader.schedule(units)

    def skip(self, names: Iterable[str]) -> None:
        """Skip these units in the pass that begins."""
        if self.reader is not None:
            self.reader.skip(names)

    @property
    def failed(self) -> bool:
        """Whether reading ahead for the next pass has failed."""
        return self.reader is not None and self.reader.failed

    def stop_copies(self) -> None:
        """Stop copies to the GPU until ``stream`` or ``rewind``."""
        if isinstance(self.reader, QueuedCopies):
            self.reader.stop()

    def rewind(self) -> None:
        """Begin again at the first unit, after an abandoned pass."""
        if self.reader is not None:
            self.reader.rewind()


class StreamedState(PassState):
    """The activations of a pass, and their lane; ``check`` is called while it waits."""

    __slots__ = ("_batch", "_copies", "_steps", "check", "lane", "rows")

    def __init__(
        self, batch: Batch, logit_rows: npt.NDArray[np.intp], lane: Lane, check: Check | None
    ) -> None:
        super().__init__(lane.ops, cast(Pass, None), logit_rows=logit_rows, batch=batch)
        self._batch = batch
        self._steps: dict[int, Pass | None] = {}
        self._copies: dict[int, Hidden] = {}  # copies of the inputs, by lane
        self.check = check
        self.lane = lane
        self.rows = len(batch.tokens)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The token ids, (R,)."""
        return np.asarray(self._batch.tokens, np.int64)

    def enter(self, lane: Lane) -> None:
        """Continue on ``lane``: move the activations there."""
        if lane is not self.lane:
            gpu = lane.gpu or self.lane.gpu
            assert gpu is not None, "there are two lanes where there is a GPU"
            move = gpu.to_host if lane.gpu is None else gpu.to_gpu
            self.x = move(self.x)
            assert self.streams is None, "models that have several compute on the CPU alone"
            if self.inputs is not None:
                self._move_inputs(lane, self.inputs, move)
            self.lane, self.ops = lane, lane.ops
        step = self._steps.get(id(lane.ops))
        if step is None and lane.attends:
            step = self._steps[id(lane.ops)] = lane.begin(self._batch, self.logit_rows)
        elif lane.adapts and id(lane.ops) not in self._steps:
            lane.ops.begin_adapters(self._batch)
            self._steps[id(lane.ops)] = None
        self.step = cast(Pass, step)  # None if nothing on the lane attends

    def _move_inputs(self, lane: Lane, inputs: Hidden, move: Callable[[Hidden], Hidden]) -> None:
        """Move ``inputs``, which every layer reads; each lane is given one copy."""
        if self._copies.get(id(self.lane)) is not inputs:  # the inputs were made on this lane
            self._copies = {id(self.lane): inputs}
        if id(lane) not in self._copies:
            self._copies[id(lane)] = move(inputs)
        self.inputs = self._copies[id(lane)]

    def copy_features(self, out: Logits) -> None:
        """Copy ``x`` to ``out`` (R, D) on the host."""
        gpu = self.lane.gpu
        copy_to_host(self.x if gpu is None else gpu.to_host(self.x), out)
