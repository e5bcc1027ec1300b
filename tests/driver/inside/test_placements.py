"""Whatever a GPU holds, copies or leaves to the CPU: bit for bit the resident decoder's output.

GPUs have the CPU's kernels, so that it does not matter who computes what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.models.decoder import Decoder
from localrt.offload.device.gpu import SLABS
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.placement import LEAST_GPU_ROWS, Where
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
from tests.offload.placed import (
    PLENTY,
    Model,
    assert_same,
    conversation,
    extend,
    needs_kernels,
    passing,
    place_on_gpu,
    tokens,
    wide_mixture,
)
from tests.waits import wait_for

pytestmark = [needs_kernels, pytest.mark.usefixtures("gpu")]

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


# -- dense models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", list(Where))
def test_everything_in_one_place(model: Model, where: Where) -> None:
    with on_gpu(model, dict.fromkeys(passing(model.store), where)) as decoder:
        assert_same(conversation(decoder), model.expected)
        counts = decoder.weights.counts()
        assert (counts.ssd_read_bytes > 0) is where.read
        assert ("link" in counts.busy_s) is (where.copied or where is Where.VRAM)
        assert ("gpu" in counts.busy_s) is where.on_gpu


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


# -- mixtures --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """32 experts in each layer, of which a token sees 4."""
    with closing(wide_mixture(tmp_path_factory.mktemp("moe"), 4)) as model:
        yield model


def test_absent_experts_are_one_launch(mixture: Model) -> None:
    where = places(mixture, 0.5)
    placement = replace(place_on_gpu(mixture.store, where), gpu_rows=LEAST_GPU_ROWS)
    with on_gpu(mixture, where, placement=placement, expert_costs=COSTS) as decoder:
        wait_for(lambda: all_in_ram(decoder))
        stage: Any = stages(decoder)
        launches: list[int] = []
        run = stage._on_gpu
        stage._on_gpu = lambda turn, experts: launches.append(len(experts)) or run(turn, experts)
        cache = decoder.cache(400)
        extend(decoder, cache, tokens(LONG), [])
        launches.clear()
        before = len(decoder.weights.tasks())
        extend(decoder, cache, tokens(LONG, seed=1), [])
        tasks = decoder.weights.tasks()[before:]
    layers = len(decoder.config.sparse_layers)
    assert len(launches) == 2 * layers, "what is there, then what comes"
    assert not any(t.resource == "cpu" and "expert" in t.name for t in tasks)
    copied = [t.name for t in tasks if t.resource == "link"]
    order = [int(name.split(".")[1]) for name in copied]
    assert len(order) > 16
    assert order == sorted(order), "layer by layer"


def test_no_copies_for_the_layer_at_hand(mixture: Model) -> None:
    """Who computes depends on what was in the slots before, not on how fast a copy would be."""
    costs = ExpertCosts(cpu=1.0, gpu=1e-9, fetch=1e-9)
    with on_gpu(mixture, places(mixture, 0.5), expert_costs=costs) as placed:
        hybrid, cache, twin = stages(placed), placed.cache(64), mixture.resident.cache(64)
        hybrid.fills = False
        before = placed.weights.counts().link_bytes
        for count in (1, 20, 1):
            got, wanted = extend(placed, cache, tokens(count)), tokens(count)
            assert_same([got], [extend(mixture.resident, twin, wanted)])
        assert len(hybrid.slots.cache) == 0
        assert placed.weights.counts().link_bytes == before


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A mixture of 160 experts or more."""
    with closing(wide_mixture(tmp_path_factory.mktemp("moe"), 2, count=80)) as model:
        yield model


def test_few_registrations(many: Model) -> None:
    """What is given back is no longer pinned, it returns, and closing frees each buffer once."""
    want = conversation(many.resident)
    with on_gpu(many, places(many, 0.2), expert_costs=COSTS) as placed:
        gpu, balance, memory = gpu_of(placed), placed.weights.memory, stages(placed).memory
        whole, others = memory.nbytes, sum(gpu.pinned.values()) - memory.nbytes
        assert len(memory.pools) == 1
        assert whole >= 160 * memory.slot_nbytes
        assert gpu.registered <= SLABS + 10  # and a few dense units and rings
        assert_same(conversation(placed), want)

        wait_for(lambda: memory.complete)  # what is being loaded cannot be given
        reclaimable = balance.reclaimable
        for nbytes in (memory.slot_nbytes, whole // 3):
            before = memory.nbytes
            freed = balance.evict(nbytes)
            assert nbytes <= freed < nbytes + memory.step_nbytes
            assert memory.nbytes == before - freed
            assert sum(gpu.pinned.values()) == memory.nbytes + others
        assert balance.reclaimable < reclaimable
        assert_same(conversation(placed), want)  # with room for all of them again
        assert memory.nbytes == whole
        balance.evict(PLENTY)
        assert 0 < memory.nbytes < whole // 10
        assert_same(conversation(placed), want)
    assert not gpu.pinned
