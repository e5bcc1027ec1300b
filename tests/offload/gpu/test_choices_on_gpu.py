"""What a mixture's layer starts on a CUDA GPU step by step, and what it waits for.

Kernels are left out.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.random_store import RandomStore
from localrt.models.decoder import Decoder
from localrt.models.layers.moe import Routed
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock, Gpu
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.pipeline.opening import open_pipeline
from localrt.offload.pipeline.setup import Setup
from localrt.offload.placement import Placement, Where
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda import cuda_memory
from localrt.quant.cuda import ops as cuda_ops
from localrt.quant.cuda import routing as cuda_routing
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.launch import Grid, emulate
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program
from tests.offload.experts.rates import Rate
from tests.offload.gpu.fake_cuda import LateCudaGpu, StepByStep
from tests.offload.gpu.placed_on_gpu import all_in_ram
from tests.offload.placed import MODE, PLENTY, extend, needs_kernels
from tests.ops.cuda.emulator import Emulator
from tests.waits import wait_for

pytestmark = needs_kernels

COUNT, USED, LAYERS = 12, 3, 2
CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_experts": COUNT,
    "num_experts_per_tok": USED,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


class Choosing:
    """See ``Launcher``: computes nothing, and makes choices up; ``names`` are what was started."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._random = np.random.default_rng(0)

    def launch(self, program: Program, grid: Grid, threads: int, args: Any) -> None:
        """See ``Launcher``."""
        self.names.append(program.name)
        if program.name != "choose":
            return
        rows = grid[0]
        order = [self._random.permutation(COUNT)[: args.ranked] for _ in range(rows)]
        for at, values in (
            (args.chosen, np.array(order, np.int32)),
            (args.scores, np.full((rows, args.ranked), 0.1, np.float32)),
            (args.weights, np.full((rows, args.used), 0.1, np.float32)),
        ):
            ctypes.memmove(at, values.ctypes.data, values.nbytes)


@pytest.fixture
def gpu() -> Iterator[Choosing]:
    launcher = Choosing()
    before = emulate(launcher)
    yield launcher
    emulate(before)


@contextmanager
def placed(
    folder: Path,
    share: float,
    costs: ExpertCosts,
    *,
    late: bool = False,
    recorded: bool = False,
) -> Iterator[Decoder]:
    """A mixture on a GPU, with room for a ``share`` of its experts."""
    store: Any = RandomStore("Qwen3MoeForCausalLM", CONFIG, "int4-g32", folder)
    names = [unit.name for unit in store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    where = dict.fromkeys(names, Where.VRAM) | {"norm": Where.RAM, "embedding": Where.RAM}
    where |= dict.fromkeys(experts[round(share * len(experts)) :], Where.RAM)
    clock = Clock()
    accelerator: Gpu
    gpu_ops = (CudaOps if recorded else StepByStep)(device="cpu")
    if late:
        accelerator = LateCudaGpu(clock, gpu_ops)
    else:
        copies = CudaCopies(device="cpu")
        accelerator = CudaGpu(clock, gpu_ops, copies, capacity=PLENTY)
    decoder = Decoder(
        open_pipeline(
            Setup(
                store=store,
                config=store.decoder,
                placement=Placement(where=where, kv=("vram",) * LAYERS, prefill_rows=1),
                ops=NativeOps(threads=1),
                clock=clock,
                gpu=accelerator,
                expert_costs=costs,
                mode=MODE,
                files=store,
                verify=False,
                budget=PLENTY,
            )
        )
    )
    try:
        wait_for(lambda: all_in_ram(decoder))
        yield decoder
    finally:
        decoder.close()
        if isinstance(accelerator, LateCudaGpu):
            assert not accelerator.faults, accelerator.faults[:3]


def turns_of(
    decoder: Decoder, passes: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What happens in each layer of each pass."""
    events = list[str]()

    def noted(kind: Any, name: str, event: str) -> None:
        called = getattr(kind, name)

        def note(*args: Any, **options: Any) -> Any:
            events.append(event)
            return called(*args, **options)

        monkeypatch.setattr(kind, name, note)

    noted(HybridExperts, "begin", "; ")
    noted(CudaCopies, "send", "send ")
    noted(CudaOps, "run_experts", "GPU ")
    noted(Routed, "read", "wait ")
    noted(NativeOps, "run_experts", "cpu ")
    cache = decoder.cache(200)
    for _ in range(passes):
        extend(decoder, cache, list(range(rows)))
    return "".join(events).split("; ")[1:]


@pytest.mark.parametrize("rows", [1, 3])
def test_layer_waits_once(
    gpu: Choosing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    costs = ExpertCosts(cpu=Rate(0.0, 1e-6, 0.0), gpu=Rate(0.0, 1e-7, 0.0), fetch=1e-6)
    with placed(tmp_path, 0.5, costs) as decoder:
        turns = turns_of(decoder, 30, rows, monkeypatch)
    assert any("cpu" in turn for turn in turns)
    assert any(turn.count("GPU") > 1 for turn in turns), "some are fetched"
    # Only the first pass finds nothing there.
    assert all(re.match("send GPU wait (GPU )*(cpu )?$", turn) for turn in turns[2 * LAYERS :])


def test_layer_on_gpu_does_not_wait(
    gpu: Choosing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = ExpertCosts(cpu=Rate(1.0, 0.0, 0.0), gpu=Rate(1e-6, 0.0, 0.0), fetch=1e-6)
    with placed(tmp_path, 1.0, fetches) as decoder:
        stage: Any = decoder.weights.sparse["gpu"]

        def filled() -> bool:  # by what has been read to RAM by then
            extend(decoder, decoder.cache(200), list(range(40)))
            return len(stage.slots.cache) == LAYERS * COUNT

        wait_for(filled)
        extend(decoder, decoder.cache(200), [1])
        before = decoder.weights.counts()
        turns = turns_of(decoder, 4, 1, monkeypatch)
        after = decoder.weights.counts()
    assert set(turns) == {"send GPU "}
    # What a layer chose is counted in the next pass.
    assert after.expert_uses - before.expert_uses == 4 * LAYERS * USED
    assert after.expert_hits - before.expert_hits == 4 * LAYERS * USED


def test_choices_stay_on_gpu(
    gpu: Choosing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer only the rows that the CPU computed."""
    costs = ExpertCosts(cpu=Rate(0.0, 1e-6, 0.0), gpu=Rate(0.0, 1e-7, 0.0), fetch=1.0)
    uploads = list[Any]()
    upload = cuda_memory.upload

    def note(values: Any, *args: Any, **options: Any) -> Any:
        uploads.append(values)
        return upload(values, *args, **options)

    with placed(tmp_path, 0.5, costs) as decoder:
        cache = decoder.cache(200)
        extend(decoder, cache, [1])
        for room in (cuda_memory, cuda_ops, cuda_routing):
            monkeypatch.setattr(room, "upload", note)
        gpu.names.clear()
        extend(decoder, cache, [1])
    of_layers = [values for values in uploads if values.dtype == np.float32][1:]  # the embedding's
    assert len(of_layers) == gpu.names.count("put") > 0
    assert len(uploads) <= 2 + len(of_layers)  # the pass's own numbers


def test_late_copies(gpu: Choosing, tmp_path: Path) -> None:
    """All by the GPU: slots are filled, read before anybody knows of what, and filled anew."""
    fetches = ExpertCosts(cpu=Rate(1.0, 0.0, 0.0), gpu=Rate(1e-6, 0.0, 0.0), fetch=1e-6)
    seen = []
    emulate(Emulator())
    for late in (False, True):
        with placed(tmp_path, 0.5, fetches, late=late) as decoder:
            cache = decoder.cache(200)
            seen.append([extend(decoder, cache, [token]) for token in (1, 2, 3, 4, 5, 6)])
            assert decoder.weights.counts().link_bytes > 0
    assert all(map(np.array_equal, *seen))
    assert all(np.isfinite(logits).all() for logits in seen[0])
