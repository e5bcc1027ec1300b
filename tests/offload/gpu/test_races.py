"""Placements on a GPU that does everything as late as it may: nothing is read before it has come,
nothing is overwritten before it has been read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.common.errors import CancelledError
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Clock, Gpu
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.placement import LEAST_GPU_ROWS, Where
from localrt.offload.reading.link import LinkSource
from localrt.offload.reading.reader import UnitReader
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import tokens
from tests.offload.experts.rates import Rate
from tests.offload.gpu.fakes import POISON, LateGpu
from tests.offload.gpu.placed_on_gpu import PAGES, on_gpu, place_on_gpu, placements, some
from tests.offload.gpu.test_hybrid_experts import places
from tests.offload.gpu.test_long_passes import LONG, passes
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
)
from tests.waits import wait_for

pytestmark = needs_kernels


@pytest.fixture(scope="module", params=["qwen3-moe", "gpt-oss"])
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    with closing(Model(pack_tiny(request.param, tmp_path_factory.mktemp("moe")))) as model:
        yield model


# -- the GPU itself -------------------------------------------------------------------------------


def late_gpu() -> LateGpu:
    return LateGpu(Clock(), NativeOps(threads=1), capacity=PLENTY)


def test_late_gpu_copies() -> None:
    gpu = late_gpu()
    out, source = gpu.alloc(8), np.arange(8, dtype=np.uint8)
    gpu.copy_in("a", source, out, None)
    assert list(out) == list(range(8))
    event = gpu.begin_copy("b", source, out, None)
    assert event is not None
    assert not event.query()
    assert set(out) == {POISON}
    source[:] = 3  # too early
    gpu.wait(event)
    assert event.query()
    assert set(out) == {3}
    event = gpu.begin_copy("c", source, out, None)
    assert event is not None
    event.synchronize()
    assert set(out) == {3}
    gpu.free(out)
    assert set(out) == {POISON}
    assert not gpu.faults


def test_late_gpu_finds_races() -> None:
    gpu = late_gpu()
    memory, source = gpu.alloc(8), np.zeros(8, np.uint8)
    early = gpu.record(memory[:4])
    used = gpu.record(memory[4:], last=True)
    assert list(memory[4:]) == [POISON] * 4
    gpu.copy_in("fine", source[:4], memory[:4], early)
    assert not gpu.faults
    gpu.begin_copy("race", source[:4], memory[4:], early)
    assert len(gpu.faults) == 1
    gpu.begin_copy("fine", source[:4], memory[4:], used)
    assert len(gpu.faults) == 1
    gpu.free_host(source)
    gpu.free(memory)
    assert len(gpu.faults) == 3


# -- dense models ----------------------------------------------------------------------------------


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """``go`` and ``held``: with ``held`` cleared, ``go`` is when copying begins anew."""
    resume, go, held = LinkSource.resume, threading.Event(), threading.Event()
    go.set()
    held.set()

    def resume_and_hold(source: LinkSource) -> None:
        if not held.is_set():
            go.clear()
        resume(source)

    monkeypatch.setattr(LinkSource, "resume", resume_and_hold)
    return go, held


def test_ram_freed_after_copies(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_in, free_host, forget = Gpu.copy_in, LateGpu.free_host, LinkSource.forget
    reading, faults = dict[int, Any](), list[str]()
    go, copying = hold_copies(monkeypatch)

    def copy_slowly(gpu: Gpu, name: str, source: Any, *args: Any, **options: Any) -> None:
        """Under way until RAM is freed, or copying is given up."""
        reading[threading.get_ident()] = source
        copying.set()
        go.wait(60)
        copy_in(gpu, name, source, *args, **options)
        del reading[threading.get_ident()]

    def free_now(gpu: LateGpu, memory: Any) -> int:
        if any(np.shares_memory(source, memory) for source in list(reading.values())):
            faults.append("a copy reads what is freed")
        go.set()
        return free_host(gpu, memory)

    def forget_and_go(source: LinkSource) -> None:
        go.set()
        forget(source)

    monkeypatch.setattr(Gpu, "copy_in", copy_slowly)
    monkeypatch.setattr(LateGpu, "free_host", free_now)
    monkeypatch.setattr(LinkSource, "forget", forget_and_go)
    where = dict.fromkeys(passing(model.store), Where.LINK)
    with on_gpu(model, where, late=True) as decoder:
        assert_same(conversation(decoder), model.expected)
        copying.clear()
        decoder.weights.abandon()
        wait_for(copying.is_set)
        assert decoder.weights.memory.evict(decoder.weights.memory.reclaimable)
        assert not faults
        assert_same(conversation(decoder), model.expected)


def test_copy_ends_between_rewinds(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be missing in the order that begins again: pass and copies wait for each other."""
    fetch, acquire = LinkSource.fetch, UnitReader.acquire
    go, held = hold_copies(monkeypatch)
    taken = threading.Event()

    def fetch_held(source: LinkSource, unit: StoredUnit, *args: Any) -> None:
        held.set()
        go.wait(60)
        fetch(source, unit, *args)

    def acquire_noted(reader: UnitReader, *args: Any) -> Any:
        found = acquire(reader, *args)
        taken.set()
        return found

    monkeypatch.setattr(LinkSource, "fetch", fetch_held)
    monkeypatch.setattr(UnitReader, "acquire", acquire_noted)
    where = dict.fromkeys(passing(model.store), Where.SSD_LINK)
    with on_gpu(model, where, late=True, stall_s=5.0) as decoder:
        weights = decoder.weights
        assert_same(conversation(decoder), model.expected)
        held.clear()
        weights.abandon()
        wait_for(held.is_set)
        weights.abandon()
        cpu = weights.cpu
        rewind = cpu.rewind

        def rewind_slowly() -> None:
            """The copy from before ends between the two readers' new beginnings."""
            rewind()
            taken.clear()
            go.set()
            taken.wait(0.3)
            time.sleep(0.05)

        monkeypatch.setattr(cpu, "rewind", rewind_slowly)
        weights.abandon()
        assert_same(conversation(decoder), model.expected)


# -- mixtures --------------------------------------------------------------------------------------


def test_copies_of_a_failed_pass(mixture: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = ExpertCosts(cpu=Rate(0.0, 1e-2, 0.0), gpu=Rate(1e-6, 0.0, 0.0), fetch=1e-6)
    compute, failed = HybridExperts._at_once, list[int]()

    def fail_once(stage: HybridExperts, turn: Any, arrivals: Any) -> None:
        if arrivals and turn.routed.place == 0 and not failed:
            failed.extend(arrivals)
            raise CancelledError("stop")
        compute(stage, turn, arrivals)

    monkeypatch.setattr(HybridExperts, "_at_once", fail_once)
    with on_gpu(mixture, places(mixture, 0.3), late=True, expert_costs=costs) as decoder:
        cache, twin = decoder.cache(64), mixture.resident.cache(64)
        for token in tokens(30):
            before = len(failed)
            with suppress(CancelledError):
                ours = extend(decoder, cache, [token])
            if len(failed) > before:
                ours = extend(decoder, cache, [token])
            assert_same([ours], [extend(mixture.resident, twin, [token])])
    assert failed


@settings(some, max_examples=8)
@given(data=st.data(), slack=PAGES)
def test_any_placement_of_a_mixture(
    mixture: Model, data: st.DataObject, slack: tuple[int, int]
) -> None:
    cpu, gpu, fetch = (data.draw(st.sampled_from([1e-6, 1e-4, 1e-2])) for _ in range(3))
    costs = ExpertCosts(cpu=Rate(0.0, cpu, cpu / 9), gpu=Rate(gpu, 0.0, 0.0), fetch=fetch)
    names = [unit.name for unit in mixture.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    shells = [name for name in passing(mixture.store) if name not in experts]
    where = data.draw(placements(shells))
    few = len(experts) // 4  # as a plan leaves room for, of RAM
    fast = data.draw(st.integers(0, len(experts) - few))
    where |= dict.fromkeys(experts[:fast], Where.VRAM)
    where |= dict.fromkeys(experts[data.draw(st.integers(fast + few, len(experts))) :], Where.SSD)
    placement = replace(place_on_gpu(mixture.store, where, slack=slack), prefill_rows=LONG)
    if data.draw(st.booleans()):
        placement = replace(placement, gpu_rows=LEAST_GPU_ROWS)
    with on_gpu(mixture, where, placement=placement, late=True, expert_costs=costs) as decoder:
        assert_same(conversation(decoder), mixture.expected)
        sizes = data.draw(st.lists(st.sampled_from([1, 7, LONG]), min_size=2, max_size=5))
        assert_same(passes(decoder, sizes), passes(mixture.resident, sizes))
        check = cancel_after(data.draw(st.integers(1, 8)))

        def use_up_what_is_there() -> None:
            for _ in range(20):
                decoder.forward(Batch.extend([(decoder.cache(64), tokens(20))]), check=check)

        with pytest.raises(CancelledError):
            use_up_what_is_there()
        decoder.weights.memory.evict(data.draw(st.integers(1, 300_000)))
        assert_same(conversation(decoder), mixture.expected)
