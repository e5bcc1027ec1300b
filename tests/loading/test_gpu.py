"""Opening a GPU: planned with what is measured on it, by rule where that is not possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localrt.common.errors import LocalrtError
from localrt.common.progress import Progress
from localrt.loading.gpu import open_gpu
from localrt.offload.planner.machine import typical_machine
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
