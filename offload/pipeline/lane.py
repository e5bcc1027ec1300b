"""The processors of a pass, the CPU and a card, and what a pass carries from one to the other.

The CPU's ring is filled from the SSD, a card's over the link. A lane knows neither which parts it
runs nor their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.checkpoints.store.memory import UnitMemory, Verifier
from localrt.models.layers.parts import Logits, Part, PassState
from localrt.models.residency import Check
from localrt.models.timing import Clock, Mark, Resource
from localrt.models.weights import VectorKey, WeightLoader
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.cards.clock import later, marks_of
from localrt.offload.pipeline.caches import split_batch
from localrt.offload.reading.unit_reader import UnitReader
from localrt.offload.ring import Ring
from localrt.quant.formats import PackedTensor
from localrt.quant.ops.arrays import copy_to_host
from localrt.quant.ops.protocol import Array, Batch, Ops, Pass, Vector

__all__ = ["Bytes", "Lane", "StreamedState"]

Bytes = npt.NDArray[np.uint8]


class Lane:
    """``reader`` fills the ring, if there is one; ``verify`` is called for what it brings.

    ``card`` is the accelerator, None on the CPU. ``attends``: some layers' keys and values are
    here. Used by one thread at a time.
    """

    def __init__(
        self,
        store: StoreCheckpoint,
        ops: Ops,
        clock: Clock,
        *,
        reader: UnitReader | None = None,
        verify: Verifier | None = None,
        card: Accelerator | None = None,
        attends: bool = True,
    ) -> None:
        self.ops = ops
        self.norm: Vector = None  # the final norm's weights, set before any part is made
        self.card = card
        self.recorder = None if card is None else ops.recorder()
        self.attends = attends
        self.resource: Resource = "cpu" if card is None else "gpu"
        self.reader = reader
        self._clock = clock
        self._store = store
        self._verify = verify
        self._vectors: dict[str, dict[str, PackedTensor]] = {}

    @property
    def adapts(self) -> bool:
        """Whether it must know the adapters of each pass."""
        table = self.ops.adapters
        return table is not None and table.used

    def begin(self, batch: Batch, wanted: npt.NDArray[np.intp]) -> Pass:
        """A pass of the caches that ``batch`` has, recorded where that is quicker."""
        batch = split_batch(batch, self.ops)
        if self.recorder is None:
            return self.ops.begin(batch)
        return self.recorder.begin(batch, wanted.tolist())

    def weights(
        self, unit: StoredUnit, data: Any, vectors: dict[VectorKey, Vector] | None = None
    ) -> WeightLoader:
        """A unit's tensors in ``data``, for this lane's ``Ops``; see ``WeightLoader``."""
        return WeightLoader(self._memory(unit, data), self.ops, vectors=vectors)

    def joined(self, slices: Sequence[tuple[StoredUnit, Any]]) -> Any:
        """Consecutive slices of one matrix as one weight, where each of them lies."""
        tensors = [unit.tensors[0] for unit, _ in slices]
        blocks = (
            block
            for unit, data in slices
            for block in self._memory(unit, data).blocks(unit.tensors[0].name)
        )
        rows = sum(tensor.shape[0] for tensor in tensors)
        return self.ops.weight((rows, tensors[0].shape[1]), blocks)

    def remember_vectors(self, unit: StoredUnit, data: Bytes) -> None:
        """Keep a unit's norms and biases: its bytes will lie where the CPU cannot read them."""
        self._vectors[unit.name] = self._memory(unit, data).vectors()

    def compute(self, part: Part, state: StreamedState, name: str, nbytes: int, macs: int) -> None:
        """Run a part, timed as a task; on a virtual card by its ``nbytes`` and ``macs``."""
        with self.ops.scope():
            started = self._clock.begin(self.resource)
            part(state)
            cost = self.cost_s(nbytes, macs, state.rows)
            state.mark = self._clock.end(
                self.resource, name, started, after=state.mark, cost_s=cost
            )

    def charge(self, state: StreamedState, name: str, cost_s: float) -> None:
        """Time a task whose work is done elsewhere."""
        started = self._clock.begin(self.resource)
        state.mark = self._clock.end(self.resource, name, started, after=state.mark, cost_s=cost_s)

    def cost_s(self, nbytes: int, macs: int, rows: int) -> float | None:
        """Seconds on a virtual card; None where they are as they pass."""
        return None if self.card is None else self.card.cost_s(nbytes, macs, rows)

    def acquire(self, unit: StoredUnit, check: Check | None) -> tuple[Any, Mark]:
        """A unit's bytes in the ring, once they have come, and the mark by which they are there."""
        assert self.reader is not None, "units are resident where nothing is streamed"
        memory, there = self.reader.acquire(unit.name, check)
        try:
            if self._verify is not None:
                self._verify(unit, memory)
            if self.card is not None:
                for mark in marks_of(there):
                    self.card.wait(mark)
        except BaseException:
            self.reader.release(unit.name)
            raise
        return memory, there

    def release(self, unit: StoredUnit, memory: Any, ended: Mark) -> None:
        """A unit has been computed with, at ``ended``: its place in the ring may be filled."""
        assert self.reader is not None, "see acquire"
        if self.card is not None:
            ended = self.card.mark(ended, memory, last=True)
        self.reader.release(unit.name, ended)

    def stream(self, units: Sequence[StoredUnit], ring: Ring | None = None) -> None:
        """Have these pass through the ring, or a new one, from now on, in each pass."""
        if self.reader is not None:
            self.reader.schedule(units, ring)

    def skip(self, names: Iterable[str]) -> None:
        """The pass that begins does not need these units.

        A card fetches what it has begun to, since the CPU's ring holds it until it is copied.
        """
        if self.reader is not None:
            self.reader.skip(names, finish=self.card is not None)

    @property
    def failed(self) -> bool:
        """Whether what was read ahead of the next pass has failed."""
        return self.reader is not None and self.reader.failed

    def rewind(self) -> None:
        """The pass was abandoned: the next one begins at the first unit."""
        if self.reader is not None:
            self.reader.rewind()

    def _memory(self, unit: StoredUnit, data: Any) -> UnitMemory:
        store, vectors = self._store, self._vectors.get(unit.name)
        return UnitMemory(store.path, store.architecture, unit, data, vectors)


class StreamedState(PassState):
    """The activations of a pass, the lane that they are on, and the mark by which they are there.

    ``rows`` are those that the part at hand computes; ``check`` may be called while waiting.
    """

    __slots__ = ("_batch", "_copies", "_steps", "check", "lane", "mark", "rows")

    def __init__(
        self,
        batch: Batch,
        wanted: npt.NDArray[np.intp],
        lane: Lane,
        mark: Mark,
        check: Check | None,
    ) -> None:
        super().__init__(lane.ops, None, wanted=wanted, batch=batch)
        self._batch = batch
        self._steps: dict[int, Pass | None] = {}
        self._copies: dict[int, Array] = {}  # of the inputs, by lane
        self.check = check
        self.lane = lane
        self.mark = mark
        self.rows = len(batch.tokens)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """(R,)."""
        return np.asarray(self._batch.tokens, np.int64)

    def enter(self, lane: Lane) -> None:
        """Go on with ``lane``, which the activations move to."""
        if lane is not self.lane:
            card = lane.card or self.lane.card
            assert card is not None, "there are two lanes where there is a card"
            change = card.to_host if lane.card is None else card.to_card
            self.x, self.mark = change(self.x, self.mark)
            if self.streams is not None:
                self.streams, self.mark = change(self.streams, self.mark)
            if self.inputs is not None:
                self._move_inputs(lane, change)
            self.lane, self.ops = lane, lane.ops
            self.step = self._steps.get(id(lane.ops))
        if self.step is None and lane.attends:
            self.step = lane.begin(self._batch, self.wanted)
            self._steps[id(lane.ops)] = self.step
        elif lane.adapts and id(lane.ops) not in self._steps:
            lane.ops.begin_adapters(self._batch)
            self._steps[id(lane.ops)] = None

    def _move_inputs(self, lane: Lane, change: Callable[[Array, Mark], tuple[Array, Mark]]) -> None:
        """Every layer reads them: a lane's copy is made once."""
        if self._copies.get(id(self.lane)) is not self.inputs:  # they were made on this lane
            self._copies = {id(self.lane): self.inputs}
        if id(lane) not in self._copies:
            self._copies[id(lane)], self.mark = change(self.inputs, self.mark)
        self.inputs = self._copies[id(lane)]

    def wait(self, there: Mark) -> None:
        """What comes next begins after ``there`` as well."""
        self.mark = later(self.mark, there)

    def copy_features(self, out: Logits) -> None:
        """See ``PassState``."""
        x, card = self.x, self.lane.card
        if card is not None:
            x, self.mark = card.to_host(x, self.mark)
        copy_to_host(x, out)
