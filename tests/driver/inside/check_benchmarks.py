"""Benchmarks on a GPU: how they time launches, what they read of its memory, and their checks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.gpu import attention, facts, grouped, loaded_child, recurrent, timing
from benchmarks.gpu.kernels import random_rows
from benchmarks.gpu.timing import free_memory, results_of, watch
from localrt.quant.cuda import cuda_memory
from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.products import quantize
from localrt.quant.cuda.tensor import UINT8, empty
from tests.driver.inside.conftest import Kernels

MIB = 1 << 20


@pytest.fixture
def device(gpu: Kernels) -> Iterator[Cuda]:
    found: Cuda = device_of("cuda:0")
    yield found
    timing._capture.cache_clear()  # which keeps the GPU


def test_launches_are_timed_in_a_graph(device: Cuda, gpu: Kernels) -> None:
    rows = [random_rows(2, 64, "cuda") for _ in range(3)]
    launches = [lambda x=x: quantize(x) for x in rows]
    gpu.launches.clear()
    assert timing.launch_seconds(launches, "cuda") >= 0
    graph = ["record", *["quantize"] * 3, *["replay"] * (timing.RUNS + 2)]
    assert gpu.launches == [*["quantize"] * 2, *graph]
    assert timing.copies_beyond_cache(64 * MIB, "cuda") * 64 * MIB >= 8 * device.cache_nbytes


@pytest.mark.parametrize("kind", ["attention", "recurrent layers", "experts"])
def test_kernels_pass_as_on_a_gpu(device: Cuda, kind: str) -> None:
    """With a row's bits alone and among others, which only a GPU has to keep."""
    torch.manual_seed(0)  # as gpu_check does
    checks = {
        "attention": lambda: attention.check_attention("cuda"),
        "experts": lambda: [
            ("", lambda: grouped.checked(grouped.SMALL["small mxfp4"], (1, 4), "cuda"))
        ],
        "recurrent layers": lambda: recurrent.check_recurrent("cuda"),
    }
    results = list(results_of(kind, checks[kind]))
    assert results
    assert all(result.ok for result in results), [result.line() for result in results]


def test_ceiling_leaves_no_memory_taken(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_COPIED", 32 * MIB)
    before = device.allocated_nbytes
    assert timing.copy_bandwidth("cuda") > 0
    assert device.allocated_nbytes == before


def test_peak_is_what_was_taken_at_most(device: Cuda) -> None:
    free = free_memory("cuda")
    peak = watch(device, free)
    kept = empty(3 * MIB, dtype=UINT8, device=device, pool=device.persistent)
    for size in (40 * MIB, 20 * MIB):
        empty(size, dtype=UINT8, device=device)
        device.trim()
    assert kept.nbytes + 40 * MIB <= peak() <= kept.nbytes + 44 * MIB
    again = watch(device, free_memory("cuda"))
    assert again() == 0


def test_facts(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_COPIED", 8 * MIB)
    monkeypatch.setattr(facts, "_PIECES", (2 * MIB, 8 * MIB))
    monkeypatch.setattr(timing, "_COPIED", 8 * MIB)
    for name in ("_LAUNCHES", "_RUNS"):
        monkeypatch.setattr(facts, name, 3)
    results = list(results_of("facts", lambda: facts.check_facts("cuda")))
    assert all(result.ok for result in results), [result.line() for result in results]
    assert results[1].values.keys() == {"gb_s_2_mb", "gb_s_8_mb"}
    assert len(results[2].values) == 7


def test_slower_link(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent besides changes no copy."""
    monkeypatch.setattr(cuda_memory, "_SAMPLE", MIB)
    monkeypatch.setattr(loaded_child, "_THROTTLE_SAMPLE", 1000)
    with loaded_child.throttled(1.0):
        copies = cuda_memory.CudaCopies(most_pinned=64 * MIB)
    assert type(copies) is not cuda_memory.CudaCopies, "only meanwhile"
    copies._times = 2.5  # type: ignore[attr-defined]
    source, out = copies.host_buffer(4096), copies.alloc(4096)
    source[:] = np.arange(4096, dtype=np.uint16).view(np.uint8)[:4096]
    copied: list[int] = []
    plain = Cuda.copy_in

    def noted(self: Cuda, to: int, values: np.ndarray, stream: object = None) -> None:
        copied.append(values.nbytes)
        plain(self, to, values, stream)

    monkeypatch.setattr(Cuda, "copy_in", noted)
    copies.copy_in(source, out, None)
    assert copied == [4096, *[1000] * 10, 240]
    np.testing.assert_array_equal(out.to_host(), source)
    copies.free(out)
    copies.close()
