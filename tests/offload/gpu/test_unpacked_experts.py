"""Experts in formats that no kernel of the GPU reads: their bf16 copies count as its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.offload.placement import Where
from localrt.offload.shapes import shape_from_checkpoint
from localrt.offload.store import pack_store
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.ops import CudaOps
from tests.checkpoints.published.models import SMALL, publish
from tests.models.tiny import relative_error, tokens
from tests.offload.gpu.placed_on_gpu import on_gpu, place_on_gpu
from tests.offload.gpu.test_hybrid_experts import COSTS, stages
from tests.offload.placed import PLENTY, Model, extend, needs_kernels, pack_tiny
from tests.ops.cuda.emulator import Emulator

pytestmark = needs_kernels


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    """Kernels run on the CPU."""
    before = emulate(Emulator())
    yield
    emulate(before)


def store(name: str, folder: Path) -> Path:
    """A mixture in FP8, or as it was trained."""
    if name != "FP8":
        return pack_tiny("qwen3-moe", folder)
    published, _, _ = publish(folder, "qwen3-moe", SMALL["FP8"])
    with closing(open_checkpoint(published)) as source:
        return pack_store(source, folder / "store")


@pytest.mark.parametrize("name", ["FP8", "plain"])
def test_copies_count(name: str, tmp_path: Path) -> None:
    gpus = list[CudaGpu]()

    def make(clock: Clock) -> CudaGpu:
        ops, copies = CudaOps(device="cpu"), CudaCopies(device="cpu")
        gpus.append(CudaGpu(clock, ops, copies, capacity=PLENTY))
        return gpus[0]

    with closing(Model(store(name, tmp_path))) as model:
        units = {unit.name: unit for unit in shape_from_checkpoint(model.store).units}
        experts = [unit for unit in units.values() if unit.kind == "expert"]
        where = {n: Where.VRAM for n in units if n.endswith((".mlp", ".attention"))}
        where |= {unit.name: Where.VRAM for unit in experts[: len(experts) // 2]}
        dense = sum(units[n].nbytes for n in where if units[n].kind != "expert")
        with on_gpu(model, where, slack=(2, 2), make=make, expert_costs=COSTS) as decoder:
            cache, twin = decoder.cache(40), model.resident.cache(40)
            for text in (tokens(4, seed=1), [8], [9]):
                ours, theirs = extend(decoder, cache, text), extend(model.resident, twin, text)
            assert relative_error(ours, theirs) < 0.06
            (gpu,), slots = gpus, stages(decoder).slots
            keys = slots.cache.keys()
            held = [slots.cache.slot(*key) for key in keys]
            made = [slot.made[1] for slot in held if slot is not None and slot.made is not None]
            assert len(made) == len(held) > 0
            copies = [each.gate_up.nbytes + each.down.nbytes for each in made]
            assert set(copies) == {experts[0].unpacked}
            each = max(unit.nbytes for unit in experts) + experts[0].unpacked
            assert slots.slot_nbytes == each
            ring = place_on_gpu(model.store, where, slack=(2, 2)).vram_ring
            assert gpu.used == dense + slots.cache.capacity * each
            assert gpu.used <= dense + ring + len(experts) // 2 * each  # experts take the ring
            before = gpu.used
            freed = decoder.weights.memory.evict_gpu(1)
            assert gpu.used == before - freed
            assert freed == each
        assert gpu.used == 0
