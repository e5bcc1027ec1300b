"""Memory and copies on the driver: pinned RAM, freed memory, copies that wait for events."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from localrt.common.errors import MemoryBudgetError
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.launch import upload
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.reference.ops import free_gpu_memory
from tests.driver.standin import Driver
from tests.driver.torch_cuda import Kernels, _Runtime
from tests.offload.placed import PLENTY

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def copies(gpu: Kernels) -> CudaCopies:
    return CudaCopies()


def test_copies_wait_for_kernels(copies: CudaCopies) -> None:
    """Which read what is overwritten; kernels wait for the copy."""
    first, second = (copies.host_buffer(64) for _ in range(2))
    first[:], second[:] = 1, 2
    memory = copies.alloc(64)
    copies.copy_in(first, memory, None)
    read = memory + 0
    after = copies.record()
    copied = copies.copy_in(second, memory, after, wait=False)
    assert not copies.ended(copied)
    copies.wait(copied)
    again = memory + 0
    assert set(read.tolist()) == {1}
    assert set(again.tolist()) == {2}
    assert copies.ended(copied)
    copies.free(memory)
    copies.close()


def test_copies_from_several_threads(copies: CudaCopies) -> None:
    sources = [copies.host_buffer(4096) for _ in range(4)]
    memory = [copies.alloc(4096) for _ in range(4)]

    def copy(number: int) -> None:
        for value in range(20):
            sources[number][:] = number + 4 * value
            copies.copy_in(sources[number], memory[number], None)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(each.tolist()) for each in memory] == [{n + 76} for n in range(4)]
    for each in memory:
        copies.free(each)
    copies.close()


def test_freed_memory_is_the_gpus_again(copies: CudaCopies, driver: Driver) -> None:
    """While it is still referred to, and is being copied to; torch keeps none of it."""
    before = free_gpu_memory(DEVICE)
    memory = copies.alloc(1 << 20)
    view = memory[16:]
    assert free_gpu_memory(DEVICE) == before - (1 << 20)
    copies.copy_in(copies.host_buffer(1 << 20), memory, None, wait=False)
    copies.free(memory)
    assert torch.cuda.mem_get_info(0)[0] == before
    assert not driver.has(view.data_ptr(), 1)
    copies.close()


def test_unpinned_ram(copies: CudaCopies, driver: Driver) -> None:
    """What the system refuses is plain RAM, and nothing later fails for it."""
    driver.set(pinned=10_000)
    small, large = copies.host_buffer(4096), copies.host_buffer(40_960)
    assert copies.unpinned == 40_960
    assert driver.has(small.ctypes.data, 4096)
    memory = copies.alloc(40_960)
    for data in (small, large):
        data[:] = 7
        copies.copy_in(data, memory[: data.nbytes], None)
    assert set((memory + 1).tolist()) == {8}
    copies.free_host(large)
    copies.free_host(small)
    assert not driver.has(small.ctypes.data, 1)
    copies.free(memory)
    copies.close()


def test_most_pinned_ram(gpu: Kernels, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is pinned, what is freed counts no longer, and no other GPU gets a context for it."""
    copies, devices, call = CudaCopies("cuda:1", most_pinned=12_000), set[int](), _Runtime._call

    def noted(*args: Any) -> int:
        devices.add(torch.cuda.current_device())
        return call(*args)

    monkeypatch.setattr(_Runtime, "_call", noted)
    buffers = [copies.host_buffer(nbytes) for nbytes in (4096, 40_960, 4096, 8192)]
    pinned = [driver.has(data.ctypes.data, data.nbytes) for data in buffers]
    assert pinned == [True, False, True, False]
    assert copies.unpinned == 49_152
    for data in buffers:
        copies.free_host(data)
    assert driver.registered == 0
    last = copies.host_buffer(8192)
    assert driver.has(last.ctypes.data, last.nbytes)
    assert devices == {1}
    copies.close()


def test_full_gpu(copies: CudaCopies, driver: Driver) -> None:
    """torch's kept memory is given back first."""
    driver.set(memory=1 << 20)
    kept = torch.empty(700 << 10, dtype=torch.uint8, device=DEVICE)
    placed = CudaGpu(Clock(), CudaOps(), copies, capacity=PLENTY)
    with pytest.raises(MemoryBudgetError, match="no memory left"):
        placed.alloc(500 << 10)
    assert placed.used == 0
    del kept
    memory = copies.alloc(500 << 10)
    with pytest.raises(MemoryBudgetError, match="no memory left"), CudaOps().scope():
        torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    copies.free(memory)


def test_uploads(gpu: Kernels) -> None:
    """The host may change what it has given at once."""
    values = np.arange(8, dtype=np.int64)
    there = upload(values, DEVICE)
    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    for value in range(3):
        values[:] = value
        upload(values, DEVICE, out=out)
        assert out.tolist() == [value] * 8
    assert there.tolist() == list(range(8))
