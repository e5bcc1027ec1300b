"""What the planner expects of a mixture on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from localrt.offload.placement import Where
from localrt.offload.shapes import shape_from_checkpoint
from localrt.planning.costs import Costs
from localrt.planning.machine import GpuProfile, KernelRate, MachineProfile
from localrt.planning.simulate import simulate
from tests.offload.gpu.placed_on_gpu import place_on_gpu, places
from tests.offload.placed import Model, needs_kernels, wide_mixture

pytestmark = needs_kernels

EXPERT_S = 2e-3  # of an expert on the CPU: about what copying two takes
LINK, MEMORY, FLOPS, CALL = 2.5e7, 1e9, 1e10, 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A mixture of many experts in a store."""
    opened = wide_mixture(tmp_path_factory.mktemp("moe"), 8)
    yield opened
    opened.close()


def machine(costs_of: int) -> MachineProfile:
    """A slow GPU, and a CPU that takes ``EXPERT_S`` for an expert."""
    rate = KernelRate((1,), (EXPERT_S / costs_of,))
    return MachineProfile(
        name="test",
        ssd_bytes_s=1e9,
        ram_bytes_s=100 * LINK,
        kernels={"f32": rate, "bf16": rate},
        attention=KernelRate((1,), (1e-12,)),
        call_s=0.0,
        token_s=0.0,
        link_bytes_s=LINK,
        link_latency_s=0.0,
        gpu=GpuProfile(name="slow", vram_bytes=1 << 30, bytes_s=MEMORY, flops=FLOPS, call_s=CALL),
    )


def test_what_is_in_no_memory_is_read_and_never_copied(model: Model) -> None:
    shape = shape_from_checkpoint(model.store)
    largest = max((u for u in shape.units if u.kind == "expert"), key=lambda unit: unit.nbytes)
    costs = Costs(shape=shape, machine=machine(largest.macs))
    half = simulate(costs, place_on_gpu(model.store, places(model, 0.2, ssd=0.5)), passes=40)
    read = 0.8 * 0.5 * sum(u.nbytes * u.use for u in shape.units if u.kind == "expert")
    assert half.nbytes["ssd"] == pytest.approx(read, rel=0.1)
    none = simulate(costs, place_on_gpu(model.store, places(model, 0.2, ssd=1.0)), passes=40)
    assert none.nbytes["ssd"] == pytest.approx(2 * read, rel=0.1)
    assert none.nbytes["link"] == 0
    assert Where.VRAM in places(model, 0.2).values()


def test_sharing_takes_the_host_time(model: Model) -> None:
    """For each layer where not all experts are on the GPU, which computes its own meanwhile; an
    ideal GPU costs nothing.

    It is so much here that no expert is copied, which would take the host as long again.
    """
    shape = shape_from_checkpoint(model.store)
    largest = max((u for u in shape.units if u.kind == "expert"), key=lambda unit: unit.nbytes)
    layers = len({unit.layer for unit in shape.routed})
    slow = machine(largest.macs)
    assert slow.gpu is not None

    def seconds(
        share: float, shared_s: float, call_s: float = CALL, memory: float = MEMORY
    ) -> float:
        gpu = replace(slow.gpu, call_s=call_s, bytes_s=memory)
        costs = Costs(shape=shape, machine=replace(slow, shared_s=shared_s, gpu=gpu))
        return simulate(costs, place_on_gpu(model.store, places(model, share)), passes=10).seconds

    assert seconds(0.0, 2.0) - seconds(0.0, 1.0) == pytest.approx(layers)
    assert seconds(1.0, 1.0) == seconds(1.0, 0.0)
    assert seconds(0.5, 1.0) == pytest.approx(seconds(0.5, 0.0) + layers, rel=0.01)
    slowest = seconds(0.9, 0.0, memory=1e3)
    assert seconds(0.9, 0.01, memory=1e3) == pytest.approx(slowest, rel=1e-3)
    assert seconds(0.0, 1.0, call_s=0.0) == seconds(0.0, 0.0, call_s=0.0)
