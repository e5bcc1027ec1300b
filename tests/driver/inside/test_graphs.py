"""Graphs on the driver: recorded late, replayed, given up, and beside what other threads do; which
shapes of passes are recorded; and what a GPU's measurements make of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from localrt.common.errors import MemoryBudgetError
from localrt.quant.cpu.abi import find_library
from localrt.quant.cuda import measuring
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.gpu_cache import ROWS
from localrt.quant.cuda.graph import Capture, Recordings, StaticPass, StaticStep, record
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.steps import move_rows
from localrt.quant.cuda.stream import CudaPass, Stream
from localrt.quant.cuda.tensor import UINT8, Tensor, empty, upload, zeros
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import RECORDED_PARTS, Batch
from tests.driver.inside.conftest import Kernels, hasty
from tests.driver.standin import Driver
from tests.planner.models import RATE


@pytest.fixture
def device(gpu: Kernels) -> Cuda:
    found: Cuda = device_of("cuda:0")
    return found


def counting(device: Cuda) -> tuple[Tensor, Callable[..., None]]:
    """A count on a GPU, and what adds one to it by way of new memory."""
    count, one = zeros(1, 4, device=device), upload(np.ones((1, 4), np.float32), device)

    def body(cut: object = None) -> None:
        more = empty(1, 4, device=device).put(count)
        move_rows(one, more, add=True)
        count.put(more)

    body()  # loads its kernel
    return count.clear(), body


def counted(count: Tensor) -> float:
    (value,) = set(count.to_host().ravel().tolist())
    return float(value)


@hasty
@pytest.mark.parametrize("index", [0, 1])
def test_replay(gpu: Kernels, index: int) -> None:
    """On a GPU that need not be the current one, of graphs that share memory."""
    device_of(f"cuda:{1 - index}").enter()
    device = device_of(f"cuda:{index}")
    capture, (count, body) = Capture(device), counting(device)
    replays = [record(body, capture)]
    taken = device.allocated_nbytes
    replays.append(record(body, capture))
    assert device.allocated_nbytes == taken
    assert counted(count) == 0  # recorded, not run
    for replay in (*replays, *replays):
        replay()
    assert counted(count) == 4


def registered(device: Cuda) -> object:
    data = np.zeros(1 << 16, np.uint8)
    assert device.register(data)

    class Held:
        def __del__(self) -> None:
            device.unregister(data)

    return Held()


ENDING: dict[str, Callable[[Cuda], object]] = {
    "pinned memory": lambda device: device.pinned((64,), np.uint8),
    "registered memory": registered,
    "a slab": lambda device: empty(20 << 20, dtype=UINT8, device=device),
    "a graph": lambda device: record(counting(device)[1], Capture(device)),
    "an event": lambda device: device.event(),
    "a stream": Capture,
}


@hasty
@pytest.mark.parametrize("kind", ENDING)
def test_what_ends_meanwhile(device: Cuda, kind: str) -> None:
    """As what is garbage may, whenever it is found."""
    count, add = counting(device)
    held = [ENDING[kind](device)]

    def body(cut: object) -> None:
        held.clear()
        add()

    record(body, Capture(device))()
    assert counted(count) == 1


def test_a_graph_that_does_not_fit(device: Cuda, driver: Driver) -> None:
    """It is tried once more, with what was kept; nothing stays open."""
    capture, (count, body), runs = Capture(device), counting(device), list[int]()
    driver.set(memory=20 << 20)

    def full(cut: object) -> None:
        runs.append(1)
        empty(20 << 20, dtype=UINT8, device=device)

    with pytest.raises(MemoryBudgetError):
        record(full, capture)
    assert len(runs) == 2
    driver.set()
    record(body, capture)()
    assert counted(count) == 1


def test_what_graphs_take(device: Cuda, driver: Driver) -> None:
    """Scratch, which ends with the last one, and what the driver keeps of each."""
    capture, scratch, total = Capture(device), 20 << 20, 8 << 30

    def body(cut: object) -> None:
        empty(scratch, dtype=UINT8, device=device)

    def beside_a_game(cut: object) -> None:
        body(cut)
        driver.set(memory=total - (500 << 20))

    assert capture.nbytes == 0
    for _ in range(2):
        first, second = record(body, capture), record(body, capture)
        assert capture.pool.nbytes == scratch
        both = capture.nbytes - scratch
        assert both > 0
        del second
        assert capture.nbytes == scratch + both // 2
        del first
        assert capture.nbytes == capture.pool.nbytes == 0
    third = record(beside_a_game, capture)
    assert capture.nbytes < scratch + (32 << 20)
    del third
    assert capture.nbytes == 0
    device.trim()
    assert device.allocated_nbytes == 0


@hasty
def test_other_threads(device: Cuda) -> None:
    """They allocate, pin and copy while this one records."""
    copies, capture = CudaCopies(), Capture(device)
    count, body = counting(device)
    seen: list[object] = []

    def work() -> None:
        source = copies.host_buffer(4096)
        source[:] = 7
        memory = copies.alloc(4096)
        copies.copy_in(source, memory, None)
        seen.append(set(memory.to_host().tolist()))
        copies.free(memory)
        copies.free_host(source)

    def and_others(cut: object = None) -> None:
        body()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        body()

    record(and_others, capture)()
    assert counted(count) == 2
    assert seen == [{7}]
    copies.close()


# -- shapes that are recorded ----------------------------------------------------------------------


@pytest.fixture
def recordings(gpu: Kernels) -> Recordings:
    return Recordings(CudaOps(device="cuda"))


@pytest.fixture
def cache(gpu: Kernels) -> KVCache:
    spec = AttentionSpec(
        heads=1, kv_heads=1, head_dim=8, eps=1e-6, rope=None, scale=1.0, window=None
    )
    return CudaOps(device="cuda").kv_cache([spec], 600)


def recorded(recordings: Recordings, cache: KVCache, rows: int) -> object:
    """What a pass of so many rows reads its inputs from."""
    step = recordings.begin(Batch.extend([(cache, [1] * rows)]), range(rows))
    return static_of(step) if recordings.takes(step, "all", 1) else None


def static_of(step: CudaPass) -> StaticPass:
    assert isinstance(step, StaticStep)
    return step.static


def test_a_shape_is_recorded_the_second_time(recordings: Recordings, cache: KVCache) -> None:
    assert recorded(recordings, cache, 1) is None
    first = recorded(recordings, cache, 1)
    assert first is not None
    assert recorded(recordings, cache, 2) is None
    assert recorded(recordings, cache, 1) is first
    recordings.forget()
    assert recorded(recordings, cache, 1) is None


def test_a_pass_records_few_parts(recordings: Recordings, cache: KVCache) -> None:
    """The others are computed step by step until a later pass."""
    batch, most = Batch.extend([(cache, [1])]), RECORDED_PARTS
    parts = [("a", most - 6), ("b", 6), ("c", 1), ("d", 2 * most)]
    zero = zeros(1, 8, device=device_of("cuda"))
    recordings.begin(batch, [0])
    taken = list[str]()
    for _ in range(4):
        step = recordings.begin(batch, [0])
        taken.append("".join(key for key, size in parts if recordings.takes(step, key, size)))
        for key in taken[-1]:
            recordings.run(step, Stream(zero), key, lambda step, x: x)
    assert taken == ["ab", "abc", "abcd", "abcd"]
    recordings.forget("b")
    step = recordings.begin(batch, [0])
    assert static_of(step).has("a")
    assert not static_of(step).has("b")


# -- measurements ----------------------------------------------------------------------------------


class Small(measuring.Size):
    shape = (64, 256)
    copied = 1 << 16
    read = 1 << 16
    copies = 2
    launches = 2


class Watch:
    """Says that everything takes a second; what is launched runs once."""

    def seconds(self, launch: Callable[[], object]) -> float:
        launch()
        return 1.0


def test_a_gpu_is_measured(device: Cuda, gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, prepare = set[str](), Cuda.prepare

    def noted(device: Cuda, program: Program) -> None:
        compiled.add(program.name)
        prepare(device, program)

    monkeypatch.setattr(Cuda, "prepare", noted)
    ops, steps = CudaOps(), list[tuple[int, int]]()
    rates = measuring.measure_gpu(
        ops, ["q4_0", "bf16"], stopwatch=Watch(), size=Small, on_step=lambda *s: steps.append(s)
    )
    assert rates.products == {"q4_0": (1 / (64 * 256),) * len(ROWS)}
    assert rates.memory_bytes_s == 2 * Small.copied
    assert rates.replay_s == 1 / Small.launches
    assert min(rates.to_gpu_bytes_s, rates.crossing_s) > 0
    assert 0 < rates.busy_cpu <= 1
    assert (rates.busy_cpu < 1 or rates.busy_link < 1) or find_library() is None
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {"linear", "linear_many", "quantize"} <= compiled
    # Of a GPU that is known, nothing but a new format.
    more = measuring.measure_gpu(ops, ["q8_0"], known=RATE, stopwatch=Watch(), size=Small)
    assert more.products.keys() == {"int4-g32", "q8_0"}
    assert replace(more, products=RATE.products) == RATE
