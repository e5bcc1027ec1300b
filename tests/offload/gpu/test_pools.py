"""A GPU's memory as caches grow, beside other programs: a decoder, a thousand times larger."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from localrt.common.errors import MemoryBudgetError
from localrt.offload.account import SPARE_VRAM_NBYTES
from localrt.offload.device.gpu import Clock, Gpu
from localrt.offload.memory import MemoryPressure
from localrt.offload.placement import Where
from localrt.quant.cuda.device import Ram
from localrt.quant.cuda.memory import PoolBlock
from tests.models.tiny import tokens
from tests.offload.gpu.fakes import FakeGpu, same_kernels
from tests.offload.gpu.placed_on_gpu import gpu_of, on_gpu, place_on_gpu
from tests.offload.gpu.test_gpu_memory import beside_weights
from tests.offload.placed import Model, assert_same, extend, needs_kernels, passing

MIB = 1 << 20
SCALE = 1 << 10


class Modelled(Ram):
    """A GPU of ``total`` bytes, which are only counted; other programs have ``others``."""

    def __init__(self, total: int, others: int) -> None:
        super().__init__()
        self.total, self.others, self.refused = total, others, 0
        self._taken, self._next = dict[int, int](), 1 << 40

    def memory(self) -> tuple[int, int]:
        return max(0, self.total - self.others - sum(self._taken.values())), self.total

    def alloc(self, nbytes: int) -> int:
        if nbytes > self.memory()[0]:
            self.refused += 1
            self.trim()
        if nbytes > self.memory()[0]:
            raise MemoryBudgetError("full")
        at, self._next = self._next, self._next + nbytes
        self._taken[at] = nbytes
        return at

    def free(self, address: int) -> None:
        del self._taken[address]


class ScaledGpu(FakeGpu):
    """``SCALE`` bytes are taken for each, and those that are held in blocks of 38 MB."""

    def __init__(self, clock: Clock, ops: Any, memory: Modelled, *, capacity: int) -> None:
        super().__init__(clock, ops, capacity=capacity)
        self._memory = memory
        self._places: dict[int, int] = {}
        self._held: list[PoolBlock] = []

    def _alloc(self, nbytes: int) -> Any:
        made = super()._alloc(nbytes)
        self._places[made.ctypes.data] = self._memory.alloc(nbytes * SCALE)
        return made

    def free(self, memory: Any) -> None:
        super().free(memory)
        self._memory.free(self._places.pop(memory.ctypes.data))

    def set_reserved(self, nbytes: int) -> None:
        super().set_reserved(nbytes)
        step = 38 * MIB
        while len(self._held) * step < nbytes * SCALE:
            self._held.append(self._memory.persistent.take(step))
        while (len(self._held) - 1) * step > nbytes * SCALE:
            self._held.pop()  # a session ends: the memory is kept


OTHERS = 900 * MIB
"""A desktop's, and the driver's context."""


class Shared:
    """A decoder whose weights are all on a modelled GPU, and one in memory to compare with."""

    def __init__(self, model: Model, stack: ExitStack) -> None:
        stack.enter_context(mock.patch("localrt.offload.memory._INTERVAL_S", 0.0))
        where = dict.fromkeys(passing(model.store), Where.VRAM)
        self.resident = sum(u.nbytes for u in model.store.manifest.units if u.name in where)
        placement = place_on_gpu(model.store, where)
        # For 512 tokens, as plans have it.
        self.capacity = placement.vram_ring + self.resident + beside_weights(model, 340)
        self.memory = Modelled(OTHERS + self.capacity * SCALE + SPARE_VRAM_NBYTES, OTHERS)
        pressure = MemoryPressure(lambda: self.memory.free_nbytes)

        def make(clock: Clock) -> Gpu:
            return ScaledGpu(clock, same_kernels(model.ops), self.memory, capacity=self.capacity)

        options: dict[str, Any] = {"make": make, "shortage": lambda: (0, pressure()[1] // SCALE)}
        self.decoder = stack.enter_context(on_gpu(model, where, placement=placement, **options))
        self.model, self.gpu, self.relieved = model, gpu_of(self.decoder), 0

    def sequence(self, length: int, passes: int) -> None:
        """A sequence grows, and ends; its logits are those of the model in memory."""
        decoders = self.decoder, self.model.resident
        caches = [decoder.cache(length) for decoder in decoders]
        for seed in range(passes):
            text = tokens(length // passes, seed=seed)
            work = [(*each, text, [len(text) - 1]) for each in zip(decoders, caches, strict=True)]
            try:
                ours = extend(*work[0])
            except MemoryBudgetError:  # blocks are taken before a pass here: it does not see that
                self.relieved += 1
                self.decoder.weights.relieve()
                ours = extend(*work[0])
            assert_same([ours], [extend(*work[1])])


@needs_kernels
def test_weights_leave_and_come_back(model: Model) -> None:
    with ExitStack() as stack:
        one = Shared(model, stack)
        gpu, memory, capacity, at_first = one.gpu, one.memory, one.capacity, one.gpu.used
        long = next(
            length
            for length in range(256, 10_000, 256)
            if beside_weights(model, 2 * length // 3) - beside_weights(model, 340)
            > one.resident // 3
        )
        one.sequence(long, 6)
        assert gpu.capacity == capacity  # what it takes itself is nobody's need
        assert gpu.used < at_first
        one.sequence(250, 50)
        assert (gpu.capacity, gpu.used) == (capacity, at_first)
        memory.others += 800 * MIB
        one.sequence(60, 20)
        assert gpu.capacity < capacity
        assert gpu.used < at_first
        assert memory.memory()[0] > 100 * MIB
        memory.others -= 800 * MIB
        one.sequence(240, 120)
        assert (gpu.capacity, gpu.used) == (capacity, at_first)
        assert memory.refused == one.relieved == 0
