"""The CUDA accelerator without a GPU: its copies and its kernels on the CPU.

The CPU's kernels and the GPU's round in different places: results are near, not the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.models.decoder import Decoder
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.pipeline.caches import SplitCache
from localrt.offload.pipeline.lane import Lane
from localrt.offload.placement import Where
from localrt.quant.cuda import cuda_memory
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.products import TiledMatrix
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import relative_error
from tests.offload.experts.rates import Rate
from tests.offload.gpu.placed_on_gpu import on_gpu, pipeline_threads
from tests.offload.placed import (
    PLENTY,
    Model,
    cancel_after,
    extend,
    needs_kernels,
    pack_synthetic,
    pack_tiny,
    passing,
)
from tests.ops.cuda.emulator import Emulator

pytestmark = needs_kernels

# bf16 activations on one side, 8-bit ones on the other, through two layers.
BOUND = 0.06


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    """Kernels run on the CPU."""
    before = emulate(Emulator())
    yield
    emulate(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"),
        vocab=64,
        hidden=64,
        inner=64,
        layers=2,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


def cuda_gpu(clock: Clock) -> CudaGpu:
    return CudaGpu(clock, CudaOps(device="cpu"), CudaCopies(device="cpu"), capacity=PLENTY)


def on_cuda(
    model: Model, where: Mapping[str, Where], costs: ExpertCosts | None = None
) -> AbstractContextManager[Decoder]:
    return on_gpu(model, where, slack=(2, 2), make=cuda_gpu, expert_costs=costs)


def all_in_turn(model: Model) -> dict[str, Where]:
    order = [Where.LINK, Where.SSD, Where.VRAM, Where.SSD_LINK, Where.RAM]
    return {name: order[n % 5] for n, name in enumerate(passing(model.store))}


def test_two_devices(model: Model) -> None:
    with on_cuda(model, all_in_turn(model)) as decoder:
        cache, twin = decoder.cache(40), model.resident.cache(40)
        assert isinstance(cache, SplitCache)
        for text, rows in (([5, 6, 7], []), ([9, 10], [0, 1])):
            ours, theirs = (
                extend(d, c, text, rows) for d, c in ((decoder, cache), (model.resident, twin))
            )
            assert ours.shape == theirs.shape
            if rows:
                assert relative_error(ours, theirs) < BOUND
        cache.trim(3)
        twin.trim(3)
        assert cache.length == 3
        ours, theirs = extend(decoder, cache, [8]), extend(model.resident, twin, [8])
        assert relative_error(ours, theirs) < BOUND
        counts = decoder.weights.counts()
        assert counts.link_bytes > 0
        assert {"ssd", "link", "cpu", "gpu"} <= set(counts.busy_s)


def test_a_batch_and_a_cancelled_pass(model: Model) -> None:
    with on_cuda(model, all_in_turn(model)) as decoder:
        caches = [decoder.cache(10), decoder.cache(10)]
        with pytest.raises(CancelledError):
            decoder.forward(Batch.extend([(caches[0], [1])]), check=cancel_after(3))
        together = decoder.forward(Batch.extend([(cache, [3, 4]) for cache in caches]), rows=[1, 3])
        assert np.array_equal(together[0], together[1])
        twin = model.resident.cache(10)
        alone = extend(model.resident, twin, [3, 4], [1])
        assert relative_error(together[:1], alone) < BOUND
    assert not pipeline_threads()


def test_matrix_in_place(model: Model) -> None:
    gpu = cuda_gpu(Clock())
    lane = Lane(model.store, gpu.ops, Clock(), gpu=gpu)
    unit = next(u for u in model.store.manifest.units if u.name == "head.0")
    memory = gpu.alloc(unit.nbytes + 4096)
    (tensor,) = unit.tensors
    weight = lane.weights(unit, memory[4096:]).matrix(tensor.shape, tensor.name)
    (part,) = weight.parts
    assert isinstance(part, TiledMatrix)
    assert part.data.address == memory.address + 4096 + unit.tensors[0].offset


def test_measured_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "_SAMPLE", 32 << 20)
    link, memory = CudaCopies(device="cpu").measure()
    assert link > 1e7
    assert memory > 1e7


@pytest.mark.slow
def test_experts_on_both(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = pack_tiny("qwen3-moe", tmp_path_factory.mktemp("moe"))
    # Both have some of them to do, and the GPU fetches some.
    costs = ExpertCosts(cpu=Rate(1e-3, 0.0, 0.0), gpu=Rate(4e-4, 0.0, 0.0), fetch=5e-4)
    with closing(Model(folder)) as model:
        names = [unit.name for unit in model.store.manifest.units]
        experts = [name for name in names if ".expert." in name]
        where = {n: Where.VRAM for n in names if n.endswith((".mlp", ".attention"))}
        where |= dict.fromkeys(experts[: len(experts) // 2], Where.VRAM)
        with on_cuda(model, where, costs) as decoder:
            cache, twin = decoder.cache(40), model.resident.cache(40)
            errors = []
            for text in ([5, 6, 7], [8], [9], [10], [11, 12]):
                ours, theirs = (
                    extend(d, c, text) for d, c in ((decoder, cache), (model.resident, twin))
                )
                errors.append(relative_error(ours, theirs))
            counts, busy = decoder.weights.counts(), decoder.weights.counts().busy_s
    assert float(np.median(errors)) < BOUND  # a near tie may choose another expert
    assert 0 < counts.expert_hits < counts.expert_uses
    assert counts.link_bytes > 0
    assert busy["cpu"] > 0
