"""Pools of a GPU's memory as caches grow, beside other programs."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import MemoryBudgetError
from localrt.offload.account import SPARE_VRAM_NBYTES, gpu_scratch_nbytes
from localrt.offload.device.gpu import Clock, Gpu, Slab, share_slabs
from localrt.offload.memory import MemoryPressure
from localrt.offload.placement import Where
from localrt.offload.shapes import ModelShape
from localrt.planning.shapes import shape_from_config
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.device import Ram
from localrt.quant.cuda.memory import Block
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from tests.models.tiny import tokens
from tests.offload.gpu.fakes import FakeGpu
from tests.offload.gpu.placed_on_gpu import on_gpu, place_on_gpu
from tests.offload.gpu.test_gpu_memory import beside_weights, gpu_of
from tests.offload.placed import Model, assert_same, extend, needs_kernels, passing

MIB = 1 << 20


class Modelled(Ram):
    """A GPU of ``total`` bytes, which are only counted; other programs have ``others``."""

    def __init__(self, total: int, others: int = 0) -> None:
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

    @property
    def wasted(self) -> int:
        """Bytes of slabs in use that nobody has taken."""
        pools = (self.persistent, self.scratch)
        self.trim()
        return sum(pool.unused_nbytes for pool in pools)


# -- models of real sizes --------------------------------------------------------------------------


class ModelledGpu(Gpu):
    """Its memory has no bytes."""

    def __init__(self, memory: Modelled, capacity: int) -> None:
        super().__init__(Clock(), NativeOps(threads=1), name="modelled", capacity=capacity)
        self.memory = memory
        self._places: dict[int, int] = {}

    def _alloc(self, nbytes: int) -> Any:
        made = np.broadcast_to(np.uint8(0), nbytes)
        self._places[id(made)] = self.memory.alloc(nbytes)
        return made

    def free(self, memory: Any) -> None:
        super().free(memory)
        self.memory.free(self._places.pop(id(memory)))


def shape_of(name: str) -> ModelShape:
    text = files("localrt.hub").joinpath("known_configs.json").read_text(encoding="utf-8")
    return shape_from_config(json.loads(text)[name], name=name, format="int4-g32")


@pytest.fixture
def card() -> Modelled:
    """An 8 GB card, of which a desktop has some and the driver's context some."""
    return Modelled(8188 * MIB, others=900 * MIB)


def pressure(card: Modelled) -> int:
    """Bytes that other programs are taken to need."""
    asked = MemoryPressure(lambda: card.free_nbytes)
    asked._asked = -1e9
    return asked()[1]


@needs_kernels
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b"])
def test_growth_to_8192_tokens(name: str, card: Modelled) -> None:
    """Slabs make room for blocks; little is wasted, and nobody else seems to need memory."""
    shape, memory = shape_of(name), card
    block = sum(shape.kv_nbytes("bf16", BLOCK_TOKENS))
    scratch = gpu_scratch_nbytes(shape.pass_sizes, 512)
    gpu = ModelledGpu(memory, memory.memory()[0] - SPARE_VRAM_NBYTES)
    ring = gpu.alloc(2 * max(unit.nbytes for unit in shape.units if unit.kind != "embedding"))
    room, sizes = gpu.capacity - gpu.used - scratch - 2 * block, dict[str, int]()
    for unit in shape.units:
        if unit.nbytes <= room:
            sizes[unit.name] = unit.nbytes
            room -= unit.nbytes
    slabs = [Slab(gpu, sum(sizes[n] for n in names), len(names)) for names in share_slabs(sizes)]
    assert len(slabs) <= 65
    draw, blocks, evictions = random.Random(1), list[Block](), 0
    for tokens_held in range(BLOCK_TOKENS, 8192 + 1, BLOCK_TOKENS):
        held = scratch + (len(blocks) + 1) * block
        while (missing := gpu.used + held - gpu.capacity) > 0:
            smallest = [slab for slab in slabs if slab.nbytes >= missing] or slabs
            gone = min(smallest, key=lambda slab: slab.nbytes)
            slabs.remove(gone)
            gone.free()
            evictions += 1
        gpu.set_reserved(held)
        blocks.append(memory.persistent.take(block))
        for _ in range(3):  # passes: what they need for a while
            parts, left = list[Block](), scratch
            while left > 0:
                size = min(left, draw.choice([1 << draw.randrange(9, 27), MIB, 4 * tokens_held]))
                parts.append(memory.scratch.take(size))
                left -= size
            assert pressure(memory) <= 0, tokens_held
            del parts
        assert memory.wasted < 64 * MIB
    assert gpu.used + gpu.reserved <= gpu.capacity
    assert (evictions > 0) is (name in ("qwen3-14b", "qwen3-30b-a3b"))
    gpu.free(ring)


# -- a decoder, a thousand times larger ------------------------------------------------------------

SCALE = 1 << 10


class ScaledGpu(FakeGpu):
    """``SCALE`` bytes are taken for each, and those that are held in blocks of 38 MB."""

    def __init__(self, clock: Clock, ops: Any, memory: Modelled, *, capacity: int) -> None:
        super().__init__(clock, ops, capacity=capacity)
        self._memory = memory
        self._places: dict[int, int] = {}
        self._held: list[Block] = []

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


@needs_kernels
def test_weights_leave_and_come_back(model: Model, card: Modelled) -> None:
    where, memory = dict.fromkeys(passing(model.store), Where.VRAM), card
    resident = sum(u.nbytes for u in model.store.manifest.units if u.name in where)
    placement = place_on_gpu(model.store, where)
    capacity = placement.vram_ring + resident + beside_weights(model, 340)  # 512 tokens, as plans
    long = next(
        length
        for length in range(256, 10_000, 256)
        if beside_weights(model, 2 * length // 3) - beside_weights(model, 340) > resident // 3
    )
    memory.total = memory.others + capacity * SCALE + SPARE_VRAM_NBYTES

    def make(clock: Clock) -> Gpu:
        return ScaledGpu(clock, model.ops, memory, capacity=capacity)

    options: dict[str, Any] = {"make": make, "shortage": lambda: (0, pressure(memory) // SCALE)}
    with on_gpu(model, where, placement=placement, **options) as decoder:
        gpu, at_first = gpu_of(decoder), gpu_of(decoder).used

        def sequence(length: int, passes: int) -> None:
            """A sequence grows, and ends."""
            cache, twin = decoder.cache(length), model.resident.cache(length)
            for seed in range(passes):
                text = tokens(length // passes, seed=seed)
                ours, theirs = (
                    extend(d, c, text, [len(text) - 1])
                    for d, c in ((decoder, cache), (model.resident, twin))
                )
                assert_same([ours], [theirs])

        sequence(long, 6)
        assert gpu.capacity == capacity  # what it takes itself is nobody's need
        assert gpu.used < at_first
        sequence(250, 50)
        assert (gpu.capacity, gpu.used) == (capacity, at_first)
        memory.others += 800 * MIB
        sequence(60, 20)
        assert gpu.capacity < capacity
        assert gpu.used < at_first
        assert memory.memory()[0] > 100 * MIB
        memory.others -= 800 * MIB
        sequence(240, 120)
        assert (gpu.capacity, gpu.used) == (capacity, at_first)
        assert memory.refused == 0
