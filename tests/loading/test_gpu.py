"""Loading onto a GPU: its rates are measured, and passes launch only what was compiled."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from localrt.common.errors import CancelledError, LocalrtError
from localrt.common.progress import Progress
from localrt.loading import native
from localrt.loading.context import LoadContext
from localrt.loading.first_passes import run_first_passes
from localrt.loading.gpu import open_gpu
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import Checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.offload.account import PREFILL_ROWS
from localrt.planning.machine import typical_machine
from localrt.quant.cuda.device import Grid, emulate
from localrt.quant.cuda.memory import Pool, PoolBlock
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program, kernels_folder
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.planner.models import RATE
from tests.store.synthetic import SyntheticCheckpoint

FORMATS = {"": "q4_k", "down_proj": "q6_k", "lm_head": "q6_k", "embed_tokens": "q4_k"}


class FakeGpu:
    """Launches nothing, and keeps what it compiled in ``folder``. ``broken`` kernels do not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiled: dict[Program, None] = {}
        self.launches = 0
        self.broken = ""

    def prepare(self, program: Program) -> None:
        if program.name == self.broken:
            raise LocalrtError(f"the kernel {program.name} does not compile")
        self.compiled[program] = None
        (self.folder / f"{len(self.compiled)}.cubin").touch()

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        self.launches += 1
        if program not in self.compiled:
            self.prepare(program)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGpu]:
    """What kernels would have written is zero: routers then choose, and nothing is not a number."""
    take = Pool.take

    def zeroed(pool: Pool, nbytes: int) -> PoolBlock:
        block = take(pool, nbytes)
        ctypes.memset(block.address, 0, nbytes)
        return block

    monkeypatch.setattr(Pool, "take", zeroed)
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    folder = kernels_folder(tmp_path / "cache")
    folder.mkdir(parents=True)
    gpu = FakeGpu(folder)
    before = emulate(gpu)
    yield gpu
    emulate(before)


def load_whole(source: Checkpoint, **options: Any) -> Decoder:
    decoder = load_decoder(source, CudaOps(device="cpu"), read_config(source))
    run_first_passes(decoder, LoadContext(**options), most=PREFILL_ROWS)
    return decoder


def synthetic(folder: Path, formats: Mapping[str, str] = FORMATS) -> Any:
    return SyntheticCheckpoint(folder, formats=formats, hidden=256, inner=512)


def test_progress(gpu: FakeGpu, tmp_path: Path) -> None:
    source, steps = synthetic(tmp_path), list[Progress]()
    load_whole(source, progress=steps.append)
    assert {(step.stage, step.unit) for step in steps} == {("compile", "passes")}
    assert [step.done for step in steps] == list(range(len(steps)))
    assert {step.total for step in steps} == {len(steps)} != {1}


def test_logits_of_the_first_passes(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all rows where drafts could be checked, else of the last one."""
    asked: list[tuple[int, list[int] | None]] = []
    forward = Decoder.forward

    def noted(decoder: Decoder, batch: Batch, **options: Any) -> Any:
        asked.append((len(batch.tokens), options["rows"]))
        return forward(decoder, batch, **options)

    monkeypatch.setattr(Decoder, "forward", noted)
    load_whole(synthetic(tmp_path))
    assert max(asked)[0] > 64 > min(asked)[0]
    assert all(rows == (None if count <= 64 else [count - 1]) for count, rows in asked)


def test_kept_kernels(gpu: FakeGpu, tmp_path: Path) -> None:
    """Where the disk has the kernels, one row shows it."""
    source, steps = synthetic(tmp_path), list[Progress]()
    decoder = load_whole(source)
    before = gpu.launches
    decoder.forward(Batch.extend([(decoder.cache(1), [0])]))
    one = gpu.launches - before
    load_whole(source, progress=steps.append)
    assert gpu.launches == before + 2 * one
    assert len(steps) == 1


def test_compile_errors(gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Decoder] = []
    monkeypatch.setattr(Decoder, "close", lambda decoder: closed.append(decoder))
    source = synthetic(tmp_path)
    gpu.broken = "attention"
    with pytest.raises(LocalrtError, match="the kernel attention does not compile"):
        load_whole(source)
    gpu.broken, cancel = "", threading.Event()
    with pytest.raises(CancelledError):
        load_whole(source, cancel=cancel, progress=lambda step: cancel.set())
    assert len(closed) == 2


def test_why_not_our_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "make_ops", lambda *_, **__: TorchOps())
    monkeypatch.setattr(native, "why_not_our_kernels", lambda ops, attention, device: "no compiler")
    context = LoadContext()
    for format_ in (None, "bf16"):  # which is torch's anyway
        options = LoadOptions(device="cuda", format=format_, ctx=64)
        source = synthetic(tmp_path)
        native.load_native(source, options, context)[0].close()
    assert context.notes == ["no compiler"]


def test_open_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from localrt.quant.cuda import cuda_memory, measuring
    from localrt.quant.cuda.ops import CudaOps

    asked: list[set[str]] = []

    def rates(
        ops: CudaOps, formats: set[str], *, host: Any, on_step: Callable[[int, int], None]
    ) -> Any:
        asked.append(formats)
        if len(asked) > 1:
            raise LocalrtError("the GPU refuses a kernel")
        on_step(1, 4)
        return RATE

    monkeypatch.setattr(measuring, "gpu_rates", rates)
    monkeypatch.setattr(cuda_memory, "_SAMPLE", 1 << 20)
    ops, seen = CudaOps(device="cpu"), list[Progress]()
    monkeypatch.setattr(ops, "free_memory", lambda: 8 << 30)
    options: dict[str, Any] = {"threads": 1, "gpu_memory": None, "formats": {"q4_k"}}
    gpu = open_gpu(ops, **options, progress=seen.append)
    machine = gpu.on(typical_machine())
    assert asked == [{"q4_k"}]
    assert seen == [Progress("measure", 1, 4, "rates")]
    assert machine.link_bytes_s == RATE.to_gpu_bytes_s
    assert machine.link_latency_s == RATE.crossing_s
    assert machine.gpu is not None
    assert machine.gpu.kernels["int4-g32"].at(8) == RATE.products["int4-g32"][1]
    assert machine.sources["gpu"] == "measured"
    assert machine.sources["kernels"] == "typical"
    # A copy of bytes is measured even so.
    ruled = open_gpu(ops, **options).on(typical_machine()).gpu
    assert ruled is not None
    assert not ruled.kernels
    assert ruled.flops == 100 * ruled.bytes_s
