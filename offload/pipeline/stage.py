"""One unit in a pass: where its weights are, and the part of the model that they make.

A stage is called like the part that it stands for, and has its lane run it. All that is known of
where a unit is stands here; who changes it is ``balance.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.layers.parts import Part
from localrt.models.weights import VectorKey, WeightLoader
from localrt.offload.device.gpu import Slab
from localrt.offload.pipeline.lane import Lane, StreamedState
from localrt.offload.placement import Where
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import Vector

_KEPT_PLACES = 32


class PassingParts:
    """Parts of what passes through a ring, by where in it the bytes lie that they are made of."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, ...], Part] = {}

    def at(self, memories: Sequence[Any], make: Callable[[], Part]) -> Part:
        """The part of these bytes; made once for each place, as far as they are kept."""
        places = tuple(
            int(memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr())
            for memory in memories
        )
        if places not in self._parts:
            while len(self._parts) >= _KEPT_PLACES:
                del self._parts[next(iter(self._parts))]
            self._parts[places] = make()
        return self._parts[places]

    def clear(self) -> None:
        """The ring is another one from now on."""
        self._parts.clear()


class Stage:
    """``load`` makes the part of ``lane``'s weights; ``moved`` is told when they are elsewhere.

    ``memory`` are the unit's bytes where it is resident, in RAM or on the GPU; ``part`` is what
    was made of them where they are computed with in place. With ``keep`` the unit is copied as it
    passes through the ring: to ``copy``, from which it becomes resident after the pass. The
    experts of a ``sparse`` layer on a GPU time what they compute, as the host sees the choice.
    """

    def __init__(
        self,
        unit: StoredUnit,
        where: Where,
        lane: Lane,
        load: Callable[[WeightLoader], Part],
        moved: Callable[[], None] = lambda: None,
        *,
        sparse: bool = False,
    ) -> None:
        self.unit, self.name = unit, unit.name
        self.sparse, self.timed = sparse, not sparse or lane.gpu is None
        self.where = where
        self.lane = lane
        self.memory: Any | None = None
        self.slab: Slab | None = None  # what the memory is a part of, on a GPU
        self.part: Part | None = None
        self.keep = False
        self.copy: Any | None = None
        self._load, self._moved = load, moved
        self._passing = PassingParts()
        self._vectors: dict[VectorKey, Vector] = {}  # copies that all of these share

    @property
    def ram_nbytes(self) -> int:
        """Bytes of RAM that it takes between passes."""
        return self.unit.nbytes if self.where in (Where.RAM, Where.LINK) else 0

    def place(self, *, crossing: bool) -> Where:
        """Where its weights are in a pass that has the GPU compute what can cross the link."""
        return self.where

    def host_buffer(self, nbytes: int) -> Any:
        """RAM for it."""
        return aligned_buffer(nbytes)

    def put(self, memory: Any, slab: Slab | None = None) -> None:
        """The unit is resident from now on, and its bytes are ``memory``: of ``slab`` on a GPU."""
        self.memory, self.slab = memory, slab
        if not self.where.copied:
            self.part = self._load(self.lane.weights(self.unit, memory))
        self._moved()

    def move(self, where: Where) -> int:
        """Stream what was resident from now on; returns the bytes that are free.

        On a GPU they are those of all units of a slab, when the last of them is moved.
        """
        before, memory = self.where, self.memory
        self.where, self.memory, self.part = where, None, None
        self._moved()
        if memory is None:
            return 0
        nbytes, gpu = int(memory.nbytes), self.lane.gpu
        if gpu is None:
            return nbytes
        if before is Where.LINK:
            return gpu.free_host(memory)
        assert self.slab is not None, "that of resident units is in slabs"
        slab, self.slab = self.slab, None
        return slab.give_back()

    def forget_places(self) -> None:
        """The ring is another one from now on."""
        self._passing.clear()

    def free(self) -> None:
        """The pipeline is closed."""
        if self.memory is not None:
            self.move(self.where)
        self._moved()
        self.copy = None
        self._passing.clear()
        self._vectors.clear()

    @property
    def passing(self) -> Sequence[StoredUnit]:
        return (self.unit,) if self.part is None else ()

    def part_of(self, memories: Sequence[Any]) -> Part:
        """The resident part, or the one on ``memories``.

        That is made once for each place in the ring that the unit comes to lie at: only the first
        copies norms and biases to a GPU, which waits for all of its kernels.
        """
        if self.part is not None:
            return self.part
        (memory,) = memories
        if self.keep:
            self.copy = self.host_buffer(self.unit.nbytes)
            self.copy[:] = memory
        lane, unit = self.lane, self.unit
        return self._passing.at(
            memories, lambda: self._load(lane.weights(unit, memory, self._vectors))
        )

    def __call__(self, state: StreamedState) -> None:
        """Compute the part once its weights are there."""
        self.lane.run(self, state)


class CrossingStage(Stage):
    """A unit that the CPU computes; in passes of ``rows`` rows or more ``gpu`` does, to which it
    is copied then.
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
        super().__init__(unit, where, lane, load)
        assert gpu.gpu is not None, "the CPU's lane is the other one"
        self._gpu, self._rows = gpu.gpu, rows
        self._on_gpu = Stage(unit, where.crossed, gpu, load)  # has no memory but the ring

    def place(self, *, crossing: bool) -> Where:
        return self.where.crossed if crossing else self.where

    def host_buffer(self, nbytes: int) -> Any:
        """See ``Stage``: copies are fast from it."""
        return self._gpu.host_buffer(nbytes)

    def remember_vectors(self, data: Any) -> None:
        """For the GPU: what comes through its ring is not the CPU's to read."""
        self._on_gpu.lane.remember_vectors(self.unit, data)

    def move(self, where: Where) -> int:
        memory = self.memory
        freed = super().move(where)
        return freed if memory is None else self._gpu.free_host(memory)

    def free(self) -> None:
        super().free()
        self._on_gpu.free()

    def __call__(self, state: StreamedState) -> None:
        if state.rows >= self._rows:
            self._on_gpu(state)
        else:
            super().__call__(state)
