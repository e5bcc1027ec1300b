"""Whatever a GPU holds, copies or leaves to the CPU, and whatever is evicted for its memory budget.

GPUs have the CPU's kernels: answers keep the resident decoder's bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import MemoryBudgetError
from localrt.models.decoder import Decoder
from localrt.offload.account import gpu_scratch_nbytes
from localrt.offload.placement import LEAST_GPU_ROWS, Where
from localrt.offload.shapes import PassSizes
from tests.driver.inside.conftest import (
    COSTS,
    PAGES,
    SHORTAGES,
    all_in_ram,
    few,
    gpu_of,
    on_gpu,
    placements,
    places,
    stages,
)
from tests.models.tiny import tokens
from tests.offload.placed import (
    Model,
    assert_same,
    extend,
    needs_kernels,
    pack_tiny,
    passing,
    place_on_gpu,
)
from tests.waits import wait_for

pytestmark = [needs_kernels, pytest.mark.usefixtures("gpu")]
SLOW = pytest.mark.slow


LONG = 70
SHORT = LEAST_GPU_ROWS - 1


def crossing(
    model: Model, where: Mapping[str, Where], **options: Any
) -> AbstractContextManager[Decoder]:
    """On a GPU, to which every MLP of the CPU crosses in passes of 65 rows or more."""
    slack = options.pop("slack", (0, 0))
    placement = place_on_gpu(model.store, where, slack=slack)
    names = (n for n, place in placement.where.items() if n.endswith("mlp") and not place.on_gpu)
    placement = replace(
        placement, gpu_rows=LEAST_GPU_ROWS, crossing=frozenset(names), prefill_rows=LONG
    )
    return on_gpu(model, where, placement=placement, **options)


def passes(decoder: Decoder, sizes: list[int]) -> list[np.ndarray]:
    """One conversation in passes of these sizes, with and without logits.

    It has its memory from the start: what others take of a GPU meanwhile may leave no room.
    """
    cache = decoder.cache(sum(sizes))
    decoder.weights.reserve(cache, sum(sizes))
    return [
        extend(decoder, cache, tokens(size, seed=seed), [] if seed % 3 == 2 else [size - 1])
        for seed, size in enumerate(sizes)
    ]


# -- who computes ----------------------------------------------------------------------------------


@few(25)
@given(data=st.data(), slack=PAGES)
def test_any_mix_of_long_and_short_passes(
    model: Model, data: st.DataObject, slack: tuple[int, int]
) -> None:
    where = data.draw(placements(passing(model.store)))
    sizes = data.draw(st.lists(st.sampled_from([1, 7, SHORT, LONG]), min_size=2, max_size=6))
    pending = iter([(0, 0), *data.draw(SHORTAGES), *[(0, 0)] * 100])
    with crossing(model, where, slack=slack, shortage=lambda: next(pending)) as decoder:
        assert_same(passes(decoder, sizes), passes(model.resident, sizes))


def test_rows_say_who_computes(model: Model) -> None:
    mlps = [name for name in passing(model.store) if name.endswith("mlp")]
    others = dict.fromkeys(passing(model.store), Where.VRAM)
    with crossing(model, others | dict.fromkeys(mlps, Where.SSD)) as decoder:
        cache = decoder.cache(400)
        seen: list[dict[str, set[str]]] = []
        for size in (SHORT, LEAST_GPU_ROWS, LONG, 1):
            before = len(decoder.weights.tasks())
            extend(decoder, cache, tokens(size), [])
            gpu_of(decoder).record().synchronize()
            gpu_of(decoder).count_times()
            done = decoder.weights.tasks()[before:]
            seen.append(
                {r: {t.name for t in done if t.resource == r} & set(mlps) for r in ("cpu", "gpu")}
            )
    by_cpu, by_gpu = {"cpu": set(mlps), "gpu": set()}, {"cpu": set(), "gpu": set(mlps)}
    assert seen == [by_cpu, by_gpu, by_gpu, by_cpu]


# -- a GPU's memory --------------------------------------------------------------------------------


def units(model: Model) -> dict[str, Any]:
    """Those that may pass through a ring."""
    names = passing(model.store)
    return {unit.name: unit for unit in model.store.manifest.units if unit.name in names}


def beside_weights(model: Model, length: int) -> int:
    """What passes need of the GPU, with keys and values of so many tokens."""
    scratch = gpu_scratch_nbytes(PassSizes.of_config(model.config), 512)
    return scratch + model.ops.kv_nbytes(model.config.attention, 3 * length // 2)


def generate(decoder: Decoder, count: int) -> Iterator[np.ndarray]:
    """A prompt, and tokens after it, one pass each."""
    cache = decoder.cache(20 + count)
    yield extend(decoder, cache, tokens(20), [19])
    for token in tokens(count, seed=3):
        yield extend(decoder, cache, [token])


# -- what may be used ------------------------------------------------------------------------------


@few(30)
@given(data=st.data(), room=st.integers(0, 400_000), slack=st.integers(0, 40))
def test_peak(model: Model, data: st.DataObject, room: int, slack: int) -> None:
    where = data.draw(placements(passing(model.store)))
    placement = place_on_gpu(model.store, where, slack=(slack, slack))
    resident = sum(u.nbytes for u in model.store.manifest.units if where.get(u.name) is Where.VRAM)
    capacity = placement.vram_ring + max(resident, beside_weights(model, 50)) + room
    with on_gpu(model, where, placement=placement, capacity=capacity) as decoder:
        passes = zip(generate(decoder, 30), generate(model.resident, 30), strict=True)
        for ours, theirs in passes:
            assert_same([ours], [theirs])
        gpu = gpu_of(decoder)
        assert gpu.used + gpu.reserved <= gpu.peak <= capacity


def test_cache_evicts_weights(model: Model) -> None:
    where = dict.fromkeys(passing(model.store), Where.VRAM)
    resident = sum(u.nbytes for u in model.store.manifest.units if u.name in where)
    placement = place_on_gpu(model.store, where)
    capacity = placement.vram_ring + resident + beside_weights(model, 1)
    with on_gpu(model, where, placement=placement, capacity=capacity) as decoder:
        cache, twin = decoder.cache(2000), model.resident.cache(2000)
        for seed in range(20):
            if any(stage.where.copied for stage in decoder.weights.stages):
                break
            text = tokens(40, seed=seed)
            ours = extend(decoder, cache, text, [39])
            assert_same([ours], [extend(model.resident, twin, text, [39])])
        assert any(stage.where.copied for stage in decoder.weights.stages)
        assert "keys and values on the GPU have grown" in decoder.weights.counts().memory_note
        assert gpu_of(decoder).peak <= capacity


# -- memory that others need -----------------------------------------------------------------------


@few(30)
@given(data=st.data(), drops=st.lists(st.floats(0.3, 1.0), min_size=1, max_size=4))
def test_shrinking_capacity(model: Model, data: st.DataObject, drops: list[float]) -> None:
    where = dict.fromkeys(passing(model.store), Where.VRAM)
    where |= data.draw(placements(data.draw(st.permutations(passing(model.store)))[:3]))
    with on_gpu(model, where, slack=(9, 9)) as decoder:
        gpu = gpu_of(decoder)
        least = place_on_gpu(model.store, where, slack=(9, 9)).vram_ring
        passes = zip(generate(decoder, 12), generate(model.resident, 12), strict=True)
        for number, (ours, theirs) in enumerate(passes):
            assert_same([ours], [theirs])
            if number:
                assert gpu.used + gpu.reserved <= gpu.capacity
            if number % 3 == 0 and drops:
                weights = round(drops.pop() * (gpu.used - least))
                gpu.capacity = least + weights + beside_weights(model, 32)


def test_slabs_come_back(model: Model) -> None:
    """One in a pass, without a copy besides; so do all that were given back."""
    where, needed = dict.fromkeys(passing(model.store), Where.VRAM), [0]
    options = {"shortage": lambda: (0, needed[0]), "capacity": 1 << 30}
    with on_gpu(model, where, slack=(9, 9), **options) as one:
        gpu, at_first = gpu_of(one), gpu_of(one).used
        needs = [0, 60_000, 0, 60_000, 0, -(1 << 40), *[0] * 30]
        passes = zip(needs[1:], generate(one, 30), generate(model.resident, 30), strict=False)
        used = list[int]()
        for need, ours, theirs in passes:
            assert_same([ours], [theirs])
            used.append(gpu.used)
            needed[0] = need
        assert used[4] < used[2] < at_first
        assert used[4:] == sorted(used[4:])
        assert used[-1] == at_first
        assert gpu.capacity == 1 << 30  # no more than was allowed at first
        assert not one.weights.counts().memory_note


def test_memory_for_something_else(model: Model) -> None:
    """Weights leave the GPU for it and come back behind it; what there is not changes nothing."""
    where = dict.fromkeys(passing(model.store), Where.VRAM)
    resident = sum(u.nbytes for u in model.store.manifest.units if u.name in where)
    placement = place_on_gpu(model.store, where)
    spare = model.ops.kv_nbytes(model.config.attention, 600)  # for the next tokens
    capacity = placement.vram_ring + resident + beside_weights(model, 50) + spare
    with on_gpu(model, where, placement=placement, capacity=capacity) as one:
        gpu, memory = gpu_of(one), one.weights.memory
        at_first, wanted = gpu.used, resident // 3 + spare
        for number, (ours, theirs) in enumerate(
            zip(generate(one, 30), generate(model.resident, 30), strict=True)
        ):
            assert_same([ours], [theirs])
            assert gpu.used + gpu.reserved <= capacity
            if number == 0:
                with pytest.raises(MemoryBudgetError, match=r"GPU: .* wanted"):
                    memory.take_gpu(capacity)
                assert gpu.used == at_first
            if number == 3:
                memory.take_gpu(wanted)
                assert gpu.used <= at_first - resident // 3
                assert "something else in this program" in one.weights.counts().memory_note
            if number == 6:
                memory.take_gpu(-wanted)
        assert gpu.used == at_first
        assert not one.weights.counts().memory_note


@pytest.mark.parametrize("there", [0.4, pytest.param(1.0, marks=SLOW)])
def test_experts_leave_and_return(tmp_path: Path, there: float) -> None:
    """Slots are freed for another model, and filled again at once when the memory returns, with
    the experts that are in RAM. Answers stay the same.
    """
    with (
        closing(Model(pack_tiny("qwen3-moe", tmp_path))) as model,
        on_gpu(model, places(model, there), slack=(9, 9), expert_costs=COSTS) as decoder,
    ):
        gpu, memory, slots = gpu_of(decoder), decoder.weights.memory, stages(decoder).slots
        passes = zip(generate(decoder, 30), generate(model.resident, 30), strict=True)
        wait_for(lambda: all_in_ram(decoder))
        assert_same(*([each] for each in next(passes)))
        at_first, use, capacity = gpu.used, memory.gpu_use, slots.cache.capacity
        spare = model.ops.kv_nbytes(model.config.attention, 600)  # for the next tokens
        memory.set_gpu_budget(use.used + spare, "little more than now")
        assert use.leavable >= slots.reclaimable > 0 == use.missing
        for _ in range(2):
            filled = len(slots.cache)
            memory.set_gpu_budget(use.used - use.leavable, "another model is used")
            assert gpu.used <= at_first - use.leavable
            assert memory.gpu_use.missing == use.leavable - memory.gpu_use.leavable >= use.leavable
            assert_same(*([each] for each in next(passes)))
            memory.set_gpu_budget(use.used + spare, "it is not")
            assert (memory.gpu_use.missing, slots.cache.capacity) == (0, capacity)
            assert len(slots.cache) >= filled
            assert_same(*([each] for each in next(passes)))
        assert gpu.used + gpu.reserved <= gpu.capacity


@pytest.mark.parametrize(
    ("share", "room"), [(1.0, 1.0), (0.3, 0.4), pytest.param(1.0, 0.0, marks=SLOW)]
)
def test_leave_and_return(model: Model, share: float, room: float) -> None:
    """What leaves the GPU for another model goes to RAM, as far as there is ``room`` for it, else
    to the SSD. It returns from RAM at once, and leaves again without a copy; what is on the SSD
    returns with later passes. Answers stay the same.
    """
    where = dict.fromkeys(passing(model.store), Where.VRAM)
    with on_gpu(model, where, slack=(9, 9)) as one:
        memory, gpu, passes = one.weights.memory, gpu_of(one), generate(one, 30)
        theirs = generate(model.resident, 30)
        assert_same([next(passes)], [next(theirs)])
        use = memory.gpu_use
        leaving = round(share * use.leavable)
        memory.set_budget(memory.ram_nbytes + (1 << 20) + round(room * leaving), "so much RAM")
        for turn in range(3):
            before, was_read = gpu.registered, one.weights.counts().ssd_read_bytes
            memory.set_gpu_budget(use.used - leaving, "another model is used")
            assert gpu.used + gpu.reserved <= use.used - leaving
            assert use.leavable - memory.gpu_use.leavable >= leaving
            assert gpu.registered == before or turn == 0 or room < 1
            assert_same([next(passes)], [next(theirs)])
            memory.set_gpu_budget(1 << 40, "")
            if room == 1:
                assert memory.gpu_use.missing == 0
                assert one.weights.counts().ssd_read_bytes == was_read
                assert_same([next(passes)], [next(theirs)])
                continue
            for _ in range(8):
                assert_same([next(passes)], [next(theirs)])
        assert memory.gpu_use.missing == 0
        if room == 1:  # copies in RAM are given up first, for nothing
            assert memory.evict(1) > 0
            assert all(stage.where is Where.VRAM for stage in one.weights.stages)


def test_a_byte_less(model: Model) -> None:
    """The note says who asked for it; a budget that weights alone exceed is refused."""
    with on_gpu(model, dict.fromkeys(passing(model.store), Where.VRAM)) as one:
        memory, passes, theirs = one.weights.memory, generate(one, 5), generate(model.resident, 5)
        assert_same([next(passes)], [next(theirs)])
        memory.set_gpu_budget(memory.gpu_use.used - 1, "1 byte less")
        assert_same(list(passes), list(theirs))
        assert one.weights.counts().memory_note.endswith("copied to the GPU: 1 byte less")
        with pytest.raises(MemoryBudgetError, match="weights that can be streamed"):
            memory.set_gpu_budget(1, "all")
