"""Opening a GPU: planned with what is measured on it, by rule where that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localrt import system
from localrt.common.errors import LocalrtError
from localrt.common.progress import Progress
from localrt.loading.gpu import open_gpu
from localrt.planning.machine import typical_machine
from tests.planner.models import RATE

torch = pytest.importorskip("torch")


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


def test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that its driver would move to RAM is not used, and half of RAM may be pinned."""
    from localrt.loading import gpu
    from localrt.offload import memory
    from localrt.quant.cuda.cuda_memory import CudaCopies
    from localrt.quant.cuda.ops import CudaOps

    gib, kept, made = 1 << 30, list[int](), list[CudaCopies]()
    start = CudaCopies.__init__

    def noted(copies: CudaCopies, *args: Any, **options: Any) -> None:
        made.append(copies)
        start(copies, *args, **options)

    monkeypatch.setattr(gpu, "_rates", lambda *_: RATE)
    monkeypatch.setattr(memory, "memory_state", lambda: memory.MemoryState(32 * gib, 20 * gib))
    monkeypatch.setattr(CudaCopies, "__init__", noted)
    monkeypatch.setattr(CudaCopies, "total_nbytes", 8 * gib)
    monkeypatch.setattr(CudaCopies, "keep_free", lambda _, nbytes: kept.append(nbytes))
    ops = CudaOps(device="cpu")
    monkeypatch.setattr(ops, "free_memory", lambda: 7 * gib)
    opened = {}
    for platform, pinned, left in (("linux", None, 0), ("windows", 16 * gib, gib // 2)):
        monkeypatch.setattr(system, "pinnable_nbytes", lambda ram, pinned=pinned: pinned)
        monkeypatch.setattr(system, "spilling_nbytes", lambda vram, left=left: left)
        opened[platform] = open_gpu(ops, threads=1, gpu_memory=None)
    assert kept == [gib // 2]
    assert [copies._may_pin for copies in made] == [None, 16 * gib]
    assert opened["linux"].free_memory() == 7 * gib
    assert opened["windows"].free_memory() == 7 * gib - gib // 2
    assert opened["windows"].capacity == opened["linux"].capacity - gib // 2
