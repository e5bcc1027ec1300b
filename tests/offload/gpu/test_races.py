"""Threads that read, copy and compute: what one does while another begins anew or gives up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.common.errors import CancelledError
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.device.gpu import Gpu
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.placement import LEAST_GPU_ROWS, Where
from localrt.offload.reading.link import LinkSource
from localrt.offload.reading.reader import UnitReader
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import tokens
from tests.offload.experts.rates import Rate
from tests.offload.gpu.fakes import FakeGpu
from tests.offload.gpu.placed_on_gpu import PAGES, on_gpu, place_on_gpu, placements, some
from tests.offload.gpu.test_long_passes import LONG, passes
from tests.offload.placed import (
    Model,
    assert_same,
    cancel_after,
    conversation,
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
    copy_in, free_host, forget = Gpu.copy_in, FakeGpu.free_host, LinkSource.forget
    reading, faults = dict[int, Any](), list[str]()
    go, copying = hold_copies(monkeypatch)

    def copy_slowly(gpu: Gpu, name: str, source: Any, *args: Any, **options: Any) -> None:
        """Under way until RAM is freed, or copying is given up."""
        reading[threading.get_ident()] = source
        copying.set()
        go.wait(60)
        copy_in(gpu, name, source, *args, **options)
        del reading[threading.get_ident()]

    def free_now(gpu: FakeGpu, memory: Any) -> int:
        if any(np.shares_memory(source, memory) for source in list(reading.values())):
            faults.append("a copy reads what is freed")
        go.set()
        return free_host(gpu, memory)

    def forget_and_go(source: LinkSource) -> None:
        go.set()
        forget(source)

    monkeypatch.setattr(Gpu, "copy_in", copy_slowly)
    monkeypatch.setattr(FakeGpu, "free_host", free_now)
    monkeypatch.setattr(LinkSource, "forget", forget_and_go)
    where = dict.fromkeys(passing(model.store), Where.LINK)
    with on_gpu(model, where) as decoder:
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
    with on_gpu(model, where, stall_s=5.0) as decoder:
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
    with on_gpu(mixture, where, placement=placement, expert_costs=costs) as decoder:
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
