"""A virtual card counts its memory and charges its time: no more, no less than a card would."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.errors import MemoryBudgetError
from localrt.offload.cards.clock import VirtualClock, later
from localrt.offload.placement import Where
from localrt.offload.reading.files import StoreFiles
from localrt.quant.ops.native.ops import NativeOps
from tests.offload.cards.carded import (
    CALL,
    FLOPS,
    LINK,
    MEMORY,
    on_card,
    pipeline_threads,
    place_on_card,
    placements,
    virtual_card,
)
from tests.offload.placed import (
    MODE,
    PLENTY,
    Model,
    extend,
    needs_kernels,
    open_decoder,
    passing,
)
from tests.waits import wait_for

pytestmark = needs_kernels


# -- memory ----------------------------------------------------------------------------------------


def test_memory_beyond_the_capacity_is_refused() -> None:
    card, _ = virtual_card(NativeOps(threads=1), capacity=10_000_000, name="small card")
    one = card.alloc(6_000_000)
    with pytest.raises(
        MemoryBudgetError, match=r"small card: 5 MB more .* 10 MB .*, of which 6 MB"
    ):
        card.alloc(5_000_000)
    other = card.alloc(4_000_000)
    assert card.used == 10_000_000
    for memory in (one, other):
        card.free(memory)
    assert card.used == 0


def test_a_placement_beyond_the_capacity_leaves_nothing_behind(model: Model) -> None:
    where = dict.fromkeys(passing(model.store), Where.VRAM)
    placement = place_on_card(model.store, where)
    size = sum(u.nbytes for u in model.store.manifest.units if u.name in where)
    before = pipeline_threads()
    for capacity, fits in ((size + placement.vram_ring, True), (size, False), (1, False)):
        card, clock = virtual_card(model.ops, capacity=capacity)
        options = {"mode": MODE, "budget": PLENTY, "card": card, "clock": clock}
        if fits:
            decoder = open_decoder(model.store, model.ops, model.config, placement, **options)
            assert card.used == capacity
            decoder.close()
        else:
            with pytest.raises(MemoryBudgetError):
                open_decoder(model.store, model.ops, model.config, placement, **options)
        assert card.used == 0
        assert pipeline_threads() == before


# -- time ------------------------------------------------------------------------------------------


def test_a_task_begins_when_its_resource_is_free_and_what_it_waits_for_has_happened() -> None:
    clock = VirtualClock(keep=10)
    for name, after, cost in (("a", None, 2.0), ("b", 1.0, 1.0), ("c", 7.0, 1.0)):
        clock.end("link", name, clock.begin("link"), after=after, cost_s=cost)
    assert [(t.name, t.start, t.end) for t in clock.tasks()] == [
        ("a", 0.0, 2.0),
        ("b", 2.0, 3.0),
        ("c", 7.0, 8.0),
    ]
    assert clock.now() == 0.0, "a copy is not yet a result"
    assert clock.end("gpu", "d", clock.begin("gpu"), after=8.0, cost_s=0.5) == 8.5
    assert clock.now() == 8.5


def test_work_that_is_done_here_is_charged_what_it_took_and_never_twice() -> None:
    clock = VirtualClock(keep=10)
    started = time.perf_counter()
    first, second = clock.begin("ssd"), clock.begin("ssd")
    time.sleep(0.02)
    clock.end("ssd", "a", first)
    time.sleep(0.01)
    clock.end("ssd", "b", second)
    wall = time.perf_counter() - started
    time.sleep(0.02)
    a, b = clock.tasks()
    assert a.end - a.start >= 0.02
    assert b.end - b.start >= 0.01
    assert clock.busy()["ssd"] <= wall


def test_of_two_marks_the_later_counts() -> None:
    event = object()
    assert later(1.0, 2.0) == later(2.0, 1.0) == 2.0
    assert later(None, 1.0) == later(1.0, None) == 1.0
    assert later(1.0, event) is event
    assert later(None, None) is None


@pytest.mark.parametrize("rows", [1, 40])
def test_copies_and_kernels_are_charged_by_the_card(model: Model, rows: int) -> None:
    names = passing(model.store)
    with on_card(model, dict.fromkeys(names, Where.LINK)) as decoder:
        cache = decoder.cache(200)
        for _ in range(4):
            extend(decoder, cache, [1] * rows, list(range(rows)))
        tasks = decoder.residency.tasks()
        for unit in model.store.manifest.units:
            if unit.name not in names:
                continue
            macs = sum(t.shape[0] * t.shape[1] for t in unit.tensors if len(t.shape) == 2)
            kernel = max(unit.nbytes / MEMORY, 2 * macs * rows / FLOPS) + CALL
            found = [t.end - t.start for t in tasks if (t.resource, t.name) == ("gpu", unit.name)]
            assert found == [pytest.approx(kernel)] * 4

        def agree() -> bool:
            counts = decoder.residency.counts()
            assert "ssd" not in counts.busy_s
            return bool(counts.busy_s["link"] == pytest.approx(counts.link_bytes / LINK))

        wait_for(agree)  # both are looked at in turn while the next pass's copies go on


def test_reads_and_the_cpus_work_are_charged_what_they_take_here(model: Model) -> None:
    class SlowFiles(StoreFiles):
        def read_into(self, name: str, offset: int, out: np.ndarray) -> None:
            time.sleep(0.004)
            super().read_into(name, offset, out)

    names = passing(model.store)
    files = SlowFiles(model.store.path, {unit.file for unit in model.store.manifest.units})
    where = {name: (Where.SSD_LINK, Where.SSD)[n % 2] for n, name in enumerate(names)}
    started = time.perf_counter()  # what it reads ahead counts from the first
    with on_card(model, where, files=files) as decoder:
        cache = decoder.cache(200)
        for token in range(6):
            extend(decoder, cache, [token])
        wall, counts = time.perf_counter() - started, decoder.residency.counts()
    # Two threads read; each waits 4 ms for at most 16 kB.
    assert counts.busy_s["ssd"] >= 0.9 * counts.ssd_read_bytes / MODE.block * 0.004 / 2
    assert 0 < counts.busy_s["cpu"] < wall
    assert counts.clock_s <= 1.1 * wall


@settings(max_examples=30)
@given(data=st.data(), slack=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_time_is_between_the_busiest_resource_and_the_sum(
    model: Model, data: st.DataObject, slack: tuple[int, int]
) -> None:
    where = data.draw(placements(passing(model.store)))
    link = data.draw(st.sampled_from([1e6, 1e8, 1e12]))
    with on_card(model, where, slack=slack, card={"link_bytes_s": link}) as decoder:
        cache = decoder.cache(100)
        for n in range(4):
            extend(decoder, cache, [1, 2] if n % 2 else [1])
        clock_s, tasks = decoder.residency.counts().clock_s, decoder.residency.tasks()
        moves = (
            4 * len(decoder.residency.stages) * 2 * 4 * 128 / link
        )  # activations that change sides
    for resource in {task.resource for task in tasks}:
        own = sorted((t.start, t.end) for t in tasks if t.resource == resource)
        assert all(b[0] >= a[1] - 1e-12 for a, b in pairwise(own)), "one thing after another"
        if resource in ("cpu", "gpu"):
            assert own[-1][1] <= clock_s
    done = [task for task in tasks if task.start < clock_s]
    assert clock_s <= sum(task.end - task.start for task in done) + moves
    # No unit is computed before it is copied.
    for name, place in where.items():
        times = {
            resource: [(t.start, t.end) for t in tasks if (t.resource, t.name) == (resource, name)]
            for resource in ("link", "gpu", "cpu")
        }
        computed = times["gpu"] if place.on_gpu else times["cpu"]
        if name.startswith("head") and not place.read and not place.copied:
            continue  # resident slices are one task
        assert len(computed) == 4
        if place.copied:
            assert computed[0][0] >= min(end for _, end in times["link"]) - 1e-12


def test_copies_hide_behind_computing_and_the_reverse(model: Model) -> None:
    """All streamed over a link that is as busy as the card: hardly more than one of both."""
    names = passing(model.store)
    where = dict.fromkeys(names, Where.LINK)
    with on_card(model, where, slack=(0, 40), card={"memory_bytes_s": LINK}) as decoder:
        cache = decoder.cache(100)
        extend(decoder, cache, [0])
        before = decoder.residency.counts()
        for token in range(10):
            extend(decoder, cache, [token])
        after = decoder.residency.counts()
    elapsed = after.clock_s - before.clock_s
    busy = {name: after.busy_s[name] - before.busy_s[name] for name in ("gpu", "link")}
    assert max(busy.values()) <= 1.05 * elapsed
    assert elapsed < 1.35 * max(busy.values())
