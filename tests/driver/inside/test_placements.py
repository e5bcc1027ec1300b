"""Whatever a GPU holds, copies or leaves to the CPU: bit for bit the resident decoder's output.

GPUs have the CPU's kernels, so that it does not matter who computes what.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CancelledError
from localrt.models.decoder import Decoder
from localrt.offload.device.gpu import SLABS
from localrt.offload.experts import memory as expert_memory
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.placement import LEAST_GPU_ROWS, Where
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.reader import POLL_S
from localrt.quant.ops.protocol import Batch
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
    cancel_after,
    conversation,
    extend,
    needs_kernels,
    pack_tiny,
    passing,
    place_on_gpu,
    tokens,
    wide_mixture,
)
from tests.waits import naps, wait_for

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


@few(30)
@given(data=st.data(), slack=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_cancelled_long_pass(model: Model, data: st.DataObject, slack: tuple[int, int]) -> None:
    where = data.draw(placements(passing(model.store)))
    stops = data.draw(
        st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1, LONG])), min_size=2, max_size=6)
    )
    with crossing(model, where, slack=slack) as decoder:
        for seed, (stop, size) in enumerate(stops):
            cache, twin = decoder.cache(100), model.resident.cache(100)
            batch = Batch.extend([(cache, tokens(LONG, seed=seed))])
            with pytest.raises(CancelledError):
                decoder.forward(batch, rows=[0], check=cancel_after(stop - 1))
            assert cache.length == 0
            text = tokens(size, seed=seed)
            assert_same(
                [extend(decoder, cache, text, [0])], [extend(model.resident, twin, text, [0])]
            )


def test_prefill_copies_little_of_the_head(model: Model) -> None:
    with on_gpu(model, dict.fromkeys(passing(model.store), Where.SSD_LINK)) as decoder:
        cache = decoder.cache(200)
        for seed in range(8):
            extend(decoder, cache, tokens(10, seed=seed), [])
        for resource in ("ssd", "link"):
            tasks = [t.name for t in decoder.weights.tasks() if t.resource == resource]
            heads = sum(name.startswith("head") for name in tasks)
            # What is on its way to the GPU when a pass begins goes there.
            assert heads < len(tasks) / 4


def test_cancel_while_stalled(model: Model) -> None:
    """Copies wait for a read that does not come; a cancelled pass does not."""
    hangs, awake = threading.Event(), threading.Event()

    class HangingFiles(StoreFiles):
        def read_into(self, name: str, offset: int, out: np.ndarray) -> None:
            if hangs.is_set():
                awake.wait(60)
            super().read_into(name, offset, out)

    files = HangingFiles(model.store.path, {unit.file for unit in model.store.manifest.units})
    where = dict.fromkeys(passing(model.store), Where.SSD_LINK)
    with on_gpu(model, where, files=files) as decoder:
        cache, twin = decoder.cache(100), model.resident.cache(100)
        expected = [extend(model.resident, twin, [n]) for n in range(3)]
        seen = [extend(decoder, cache, [0])]
        hangs.set()
        started = time.perf_counter()

        def check() -> None:
            if time.perf_counter() - started > 0.1:
                raise CancelledError("stop")

        def use_up_what_is_there() -> None:
            for _ in range(100):
                decoder.forward(Batch.extend([(cache, [1])]), check=check)

        with naps() as found, pytest.raises(CancelledError):
            use_up_what_is_there()
        assert 0 < max(found) <= POLL_S <= 0.05  # at once, but for what a busy machine adds
        hangs.clear()
        awake.set()
        cache.trim(1)
        seen += [extend(decoder, cache, [n]) for n in (1, 2)]
        assert_same(seen, expected)


def test_units_arrive_between_rewinds(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the new beginnings of reading and of copying."""
    where = dict.fromkeys(passing(model.store), Where.SSD_LINK)
    with on_gpu(model, where, stall_s=5.0) as decoder:
        weights = decoder.weights
        rewind = weights.cpu.rewind

        def rewind_slowly() -> None:
            rewind()
            time.sleep(0.03)

        monkeypatch.setattr(weights.cpu, "rewind", rewind_slowly)
        for _ in range(3):
            weights.abandon()
            weights.abandon()
            assert_same(conversation(decoder), model.expected)


# -- mixtures --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """With an expert for every token."""
    with closing(Model(pack_tiny("qwen2-moe", tmp_path_factory.mktemp("moe")))) as model:
        yield model


@few(25)
@given(data=st.data(), slack=PAGES)
def test_any_placement_of_a_mixture(
    tiny_mixture: Model, data: st.DataObject, slack: tuple[int, int]
) -> None:
    cpu, gpu, fetch = (data.draw(st.sampled_from([1e-6, 1e-4, 1e-2])) for _ in range(3))
    costs = ExpertCosts(cpu=cpu, gpu=gpu, fetch=fetch)
    names = [unit.name for unit in tiny_mixture.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    shells = [name for name in passing(tiny_mixture.store) if name not in experts]
    where = data.draw(placements(shells))
    least = len(experts) // 4  # as a plan leaves room for, of RAM
    fast = data.draw(st.integers(0, len(experts) - least))
    where |= dict.fromkeys(experts[:fast], Where.VRAM)
    where |= dict.fromkeys(experts[data.draw(st.integers(fast + least, len(experts))) :], Where.SSD)
    placement = replace(place_on_gpu(tiny_mixture.store, where, slack=slack), prefill_rows=LONG)
    if data.draw(st.booleans()):
        placement = replace(placement, gpu_rows=LEAST_GPU_ROWS)
    with on_gpu(tiny_mixture, where, placement=placement, expert_costs=costs) as decoder:
        assert_same(conversation(decoder), tiny_mixture.expected)
        sizes = data.draw(st.lists(st.sampled_from([1, 7, LONG]), min_size=2, max_size=5))
        assert_same(passes(decoder, sizes), passes(tiny_mixture.resident, sizes))
        check = cancel_after(data.draw(st.integers(1, 8)))

        def use_up_what_is_there() -> None:
            for _ in range(20):
                decoder.forward(Batch.extend([(decoder.cache(64), tokens(20))]), check=check)

        with pytest.raises(CancelledError):
            use_up_what_is_there()
        decoder.weights.memory.evict(data.draw(st.integers(1, 300_000)))
        assert_same(conversation(decoder), tiny_mixture.expected)


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


def test_no_more_fills_than_misses(mixture: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often an absent expert seems worth a slot."""
    with on_gpu(mixture, places(mixture, 0.2), expert_costs=replace(COSTS, fetch=1e-9)) as placed:
        hybrid, brought = stages(placed), list[object]()
        slots = hybrid.slots
        cache, bring = placed.cache(64), slots.bring
        for token in tokens(5):
            extend(placed, cache, [token])
        hybrid.settle()

        def candidate(place: int, gain: float = 0.0) -> int | None:
            absent = (~slots.cache.resident(place)).nonzero()[0].tolist()
            held = hybrid.memory.pool(place).holds
            return next((expert for expert in absent if held(place, expert)), None)

        monkeypatch.setattr(slots.cache, "candidate", candidate)
        monkeypatch.setattr(slots, "bring", lambda *args: (brought.append(args), bring(*args))[1])
        for number in range(500):
            hybrid.fill(number % slots.cache.layers)
            hybrid.settle()
        assert 0 < len(brought) <= hybrid.uses - hybrid.hits


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


def test_layers_whose_experts_differ_in_size(
    mixture: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_memory, "size_classes", lambda units: [[0, 2], [1]])
    want = conversation(mixture.resident)
    with on_gpu(mixture, places(mixture, 0.3, ssd=0.3), expert_costs=COSTS) as placed:
        assert len(stages(placed).memory.pools) > 1
        assert_same(conversation(placed), want)
        assert_same(conversation(placed), want)
