"""Graphs on the driver: recorded late, replayed, given up, and beside what other threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from localrt.common.errors import LocalrtError
from localrt.quant.cuda.capture import Capture, record
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.launch import CudaStopwatch
from localrt.quant.cuda.measuring import measure_gpu
from localrt.quant.cuda.ops import CudaOps
from tests.driver.standin import Driver
from tests.driver.torch_cuda import Kernels
from tests.ops.cuda.test_rates import Small


def counting(device: str = "cuda:0") -> tuple[torch.Tensor, Callable[..., None]]:
    """A count on a GPU, and what adds one to it by way of new memory."""
    count = torch.zeros(4, device=device)

    def body(cut: object = None) -> None:
        more = count + 1
        count.copy_(more)

    return count, body


@pytest.mark.parametrize("index", [0, 1])
def test_replay(gpu: Kernels, index: int) -> None:
    """On a GPU that need not be the current one, of graphs that share memory."""
    device = torch.device("cuda", index)
    with torch.inference_mode(), torch.cuda.device(device):
        capture, (count, body) = Capture(device), counting(str(device))
        replays = [record(body, capture)]
        reserved = torch.cuda.memory_reserved(device)
        replays.append(record(body, capture))
        assert torch.cuda.memory_reserved(device) == reserved
        assert count.tolist() == [0.0] * 4  # recorded, not run
        for replay in (*replays, *replays):
            replay()
        assert count.tolist() == [4.0] * 4


def test_a_body_that_fails(gpu: Kernels) -> None:
    """What was begun is given up, and the next one is recorded."""
    capture, (count, body) = Capture(torch.device("cuda", 0)), counting()

    def fails(cut: object = None) -> None:
        body()
        raise LocalrtError("no")

    def waits(cut: object = None) -> None:
        count.tolist()

    with torch.inference_mode():
        with pytest.raises(LocalrtError):
            record(fails, capture)
        with pytest.raises(RuntimeError, match="CAPTURE_UNSUPPORTED"):
            record(waits, capture)
        record(body, capture)()
        assert count.tolist() == [1.0] * 4


def test_memory_that_torch_keeps_makes_room(gpu: Kernels, driver: Driver) -> None:
    driver.set(memory=1 << 20)
    capture = Capture(torch.device("cuda", 0))
    out = torch.zeros(1, device="cuda")

    def body(cut: object = None) -> None:
        out.add_(torch.zeros(100_000, device="cuda").sum() + 1)

    with torch.inference_mode():
        torch.zeros(200_000, device="cuda")  # kept once it has ended
        record(body, capture)()
        assert out.tolist() == [1.0]


def test_a_graph_that_does_not_fit(gpu: Kernels, driver: Driver) -> None:
    """It is tried once more, with what torch has kept; nothing stays open."""
    driver.set(memory=1 << 20)
    capture, (count, body), runs = Capture(torch.device("cuda", 0)), counting(), list[int]()

    def full(cut: object) -> None:
        runs.append(1)
        torch.empty(1 << 20, device="cuda")

    with torch.inference_mode():
        with pytest.raises(torch.OutOfMemoryError):
            record(full, capture)
        assert len(runs) == 2
        record(body, capture)()
        assert count.tolist() == [1.0] * 4


def test_what_graphs_take(gpu: Kernels, driver: Driver) -> None:
    """Scratch, which ends with the last one, and what the driver keeps of each."""
    capture, scratch, total = Capture(torch.device("cuda", 0)), 20 << 20, 8 << 30

    def body(cut: object) -> None:
        torch.empty(scratch, dtype=torch.uint8, device="cuda")

    def beside_a_game(cut: object) -> None:
        body(cut)
        driver.set(memory=total - (500 << 20))

    for _ in range(2):  # torch refuses a pool that has ended
        assert capture.nbytes == capture.pool_nbytes == 0
        first, second = record(body, capture), record(body, capture)
        assert capture.pool_nbytes == scratch
        both = capture.nbytes - scratch
        assert both > 0
        del second
        assert capture.nbytes == scratch + both // 2
        del first
    third = record(beside_a_game, capture)
    assert capture.nbytes < scratch + (32 << 20)
    del third
    assert capture.nbytes == capture.pool_nbytes == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_other_threads(gpu: Kernels) -> None:
    """They allocate, pin and copy while this one records."""
    copies, capture = CudaCopies(), Capture(torch.device("cuda", 0))
    count, body = counting()
    seen: list[object] = []

    def work() -> None:
        source = copies.host_buffer(4096)
        source[:] = 7
        memory = copies.alloc(4096)
        copies.copy_in(source, memory, None)
        seen.append(set(memory.tolist()))
        copies.free(memory)
        copies.free_host(source)

    def and_others(cut: object = None) -> None:
        body()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        body()

    with torch.inference_mode():
        record(and_others, capture)()
        assert count.tolist() == [2.0] * 4
    assert seen == [{7}]
    copies.close()


def test_a_gpu_is_measured(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    from localrt.quant.cuda import launch

    monkeypatch.setattr(launch, "_WAKING_S", 1e-3)
    monkeypatch.setattr(launch, "_LEAST_CACHE", 1 << 10)
    watch = CudaStopwatch(torch.device("cuda", 0))
    rates = measure_gpu(CudaOps(), ["q4_0"], stopwatch=watch, size=Small)
    assert all(seconds > 0 for seconds in rates.products["q4_0"])
    assert min(rates.to_gpu_bytes_s, rates.crossing_s, rates.launch_s, rates.replay_s) > 0
