"""What the profiler's trace says of a GPU's work."""

from __future__ import annotations

from typing import Any

import pytest

from localrt.quant.cuda.counting import use_of


def event(
    kind: str, name: str, at: float = 0.0, lasts: float = 0.0, tid: int = 1
) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": at, "dur": lasts, "tid": tid}


def test_counts() -> None:
    use = use_of(
        [
            event("cuda_runtime", "cudaGraphLaunch"),
            event("localrt", "cuLaunchKernel"),
            event("cuda_driver", "cuLaunchKernel"),  # the same, seen again
            event("cuda_runtime", "cudaLaunchKernel"),
            event("cuda_runtime", "cudaMemcpyAsync"),
            event("cuda_runtime", "cudaStreamSynchronize"),
            event("cuda_runtime", "cudaEventSynchronize", tid=2),
            event("cuda_runtime", "cudaDeviceSynchronize"),  # the profiler's own
            event("kernel", "linear", 10.0, 20.0),
            event("kernel", "norm", 25.0, 15.0),  # beside the other
            event("kernel", "linear", 60.0, 10.0),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5.0, 30.0),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 80.0, 30.0),
            {"ph": "M", "name": "process_name"},
        ],
        seconds=1e-4,
    )
    assert use is not None
    assert (use.kernels, use.launches, use.waits, use.reader_waits) == (3, 3, 1, 1)
    assert use.busy_s == pytest.approx(40e-6)
    assert use.link_s == pytest.approx(30e-6)
    assert (use.idle_s, use.link_idle_s) == pytest.approx((20e-6, 0.0))


def test_a_trace_without_kernels_says_nothing() -> None:
    assert use_of([event("cuda_runtime", "cudaStreamSynchronize")], 1.0) is None
