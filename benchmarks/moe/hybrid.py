"""The host's time for a mixture's layer whose experts GPU and CPU share, with kernels left out.

    python -m benchmarks.moe.hybrid [--share 0.3] [--runs 5] [--json FILE]

A GPU that computes nothing takes launches and makes choices up; recordings are replayed as a graph
is, with one call. So what is left is the host's: Python, and the CPU's experts, which are small and
reported apart. A layer is the difference between a deep and a shallow model, in time of the thread,
by the median. In a part of it a GPU would have nothing to do: from the choice's arrival to the next
graph. Calls of a real driver come on top, a few microseconds each: they are counted, as launches,
replays, copies, and events recorded and waited for.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import Record, save, setting
from benchmarks.common.stubbed_layers import (
    PLENTY,
    added_calls,
    added_us,
    middle,
    placed,
    small_store,
)
from localrt.models.decoder import Decoder
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock, Event
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.placement import Placement, Where
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda import graph
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.device import Grid, emulate
from localrt.quant.cuda.hybrid_exchange import HybridExchange
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.stream import Between, Cut
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Check

COUNT, USED = 128, 8
DEPTHS = (4, 20)
# Seconds of an expert of Qwen3-30B-A3B in Q4_K_M: DDR5-5600, an RTX 4060, PCIe 4.0 x8.
_CPU_S, _GPU_S, _FETCH_S, _LINK_LOAD = 5.5e-5, 2e-5, 2.12e-4, 0.17
_START_S = 1e-4  # of the host, for a copy and what computes with it
_PASSES = 40


class StubbedGpu:
    """See ``Launcher``: computes nothing, and makes choices up. ``calls`` counts what a driver
    would be asked for, by name; ``idle_s`` is the host's time from a ``wait`` to a replay.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.idle_s = 0.0
        self._waited: float | None = None
        self._recorded: list[Between] | None = None
        random = np.random.default_rng(0)
        self._chosen = [random.permutation(COUNT).astype(np.int32) for _ in range(1000)]
        self._shares = np.full(2 * COUNT, 0.1, np.float32)
        self._next = 0

    def launch(self, program: Program, grid: Grid, threads: int, args: Any) -> None:
        """See ``Launcher``."""
        if self._recorded is None:
            self.call(program.name)
        does = {"choose": self._choose, "to_host": self._send}.get(program.name)
        if does is None:
            return
        kernel = partial(does, grid[0], type(args).from_buffer_copy(args))
        kernel() if self._recorded is None else self._recorded.append(kernel)

    def prepare(self, program: Program) -> None:
        """See ``Launcher``."""

    def call(self, name: str) -> None:
        """Count a call."""
        self.calls[name] = self.calls.get(name, 0) + 1

    def record(self, body: Callable[[Cut], None], capture: Any) -> graph.Replay:
        """See ``graph.record``; a graph makes choices, and nothing else."""
        recorded = self._recorded = list[Between]([self._replay])

        def cut(between: Between) -> None:
            recorded.extend([between, self._replay])

        try:
            body(cut)
        finally:
            self._recorded = None

        def replay(check: Check | None = None) -> None:
            for each in recorded:
                each(check)

        return replay

    def waited(self) -> None:
        """The host has waited for the GPU, which has nothing to do from now on."""
        self._waited = time.thread_time()

    def _replay(self, check: object) -> None:
        self.call("replay")
        if self._waited is not None:
            self.idle_s += time.thread_time() - self._waited
            self._waited = None

    def _send(self, blocks: int, args: Any, check: object = None) -> None:
        ctypes.memmove(args.host_results, args.results, 4 * args.result_count)
        ctypes.memset(args.host_rows, 0, 4 * args.row_count)

    def _choose(self, rows: int, args: Any, check: object = None) -> None:
        shares = self._shares.ctypes.data
        for row in range(rows):
            self._next = (self._next + 1) % len(self._chosen)
            chosen = self._chosen[self._next].ctypes.data
            ctypes.memmove(args.chosen + 4 * row * args.ranked, chosen, 4 * args.ranked)
        ctypes.memmove(args.scores, shares, 4 * rows * args.ranked)
        ctypes.memmove(args.weights, shares, 4 * rows * args.used)


class _CountedGpu(CudaGpu):
    """Counts copies and events."""

    def __init__(self, clock: Clock, stub: StubbedGpu) -> None:
        copies = CudaCopies(device="cpu")
        super().__init__(clock, CudaOps(device="cpu"), copies, capacity=PLENTY)
        self._stub = stub

    def wait(self, event: Event | None) -> None:
        """See ``Gpu``."""
        self._stub.call("wait")

    def record(self, *read: Any, last: bool = False) -> Event | None:
        """See ``Gpu``."""
        self._stub.call("event")
        return None

    def to_gpu(self, x: Array) -> Array:
        """See ``Gpu``."""
        self._stub.call("copy")
        return super().to_gpu(x)

    def to_host(self, x: Array) -> Array:
        """See ``Gpu``."""
        self._stub.call("copy")
        return super().to_host(x)

    def send(self, x: Array, routing: Routing) -> Callable[[], Array]:
        """See ``Gpu``."""
        for name in ("event", "wait", "copy", "event", "wait"):  # and a copy when it is received
            self._stub.call(name)
        return super().send(x, routing)

    def _queue_copy(self, source: Any, out: Any, after: Event | None) -> None:
        for name in ("copy", "event"):
            self._stub.call(name)
        super()._queue_copy(source, out, after)


@contextmanager
def stubbed() -> Iterator[StubbedGpu]:
    """Within, kernels and recordings are left to a stub."""
    stub, before = StubbedGpu(), emulate(None)
    emulate(stub)
    with ExitStack() as held:
        held.callback(emulate, before)
        held.enter_context(replaced(graph, "record", stub.record))
        begin, receive = HybridExchange.begin, HybridExchange.receive
        held.enter_context(replaced(HybridExchange, "begin", _counted(stub, begin, "event")))
        held.enter_context(
            replaced(HybridExchange, "receive", _counted(stub, receive, "wait", then=stub.waited))
        )
        yield stub


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Within, ``owner`` has another attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _counted(
    stub: StubbedGpu,
    called: Callable[..., Any],
    name: str,
    then: Callable[[], None] = lambda: None,
) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        stub.call(name)
        result = called(*args)
        then()
        return result

    return counted


@contextmanager
def shared_layers(stub: StubbedGpu, layers: int, share: float, folder: Path) -> Iterator[Decoder]:
    """A mixture of so many layers, a ``share`` of whose experts is on the GPU, others in RAM."""
    store = small_store(
        "Qwen3MoeForCausalLM", layers, folder,
        moe_intermediate_size=64, num_experts=COUNT, num_experts_per_tok=USED, norm_topk_prob=True,
    )  # fmt: skip
    names = [unit.name for unit in store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    where = dict.fromkeys(names, Where.VRAM) | {"norm": Where.RAM, "embedding": Where.RAM}
    where |= dict.fromkeys(experts[round(share * len(experts)) :], Where.RAM)
    clock = Clock()
    costs = ExpertCosts(
        cpu=lambda rows: rows * _CPU_S,
        gpu=lambda rows: rows * _GPU_S,
        fetch=_FETCH_S,
        link_load=_LINK_LOAD,
        start=_START_S,
    )
    placement = Placement(where=where, kv=("vram",) * layers)
    gpu = _CountedGpu(clock, stub)
    with placed(store, placement, gpu, clock=clock, expert_costs=costs) as decoder:
        yield decoder


def warm(decoder: Decoder) -> KVCache:
    """Decode until all experts are in RAM, the GPU's slots are full, and the pass is recorded."""
    hybrid: Any = decoder.weights.sparse["gpu"]  # type: ignore[attr-defined]
    slots, cache = hybrid.slots.cache, decoder.cache(4000)
    decode(decoder, cache)
    while not hybrid.memory.whole or len(slots) < slots.capacity:
        decode(decoder, cache)
    for _ in range(5):
        decode(decoder, cache)
    return cache


def decode(decoder: Decoder, cache: KVCache) -> None:
    """One token."""
    decoder.forward(Batch.extend([(cache, [1])]))


def measure(stub: StubbedGpu, layers: int, share: float, folder: Path) -> Record:
    """Seconds and calls of a pass, medians; ``cpu_s`` are the CPU's experts, ``idle_s`` the host's
    seconds in which the GPU has nothing to do.
    """
    spent = 0.0
    run_experts = NativeOps.run_experts

    def timed(*args: Any, **options: Any) -> None:
        nonlocal spent
        started = time.thread_time()
        run_experts(*args, **options)
        spent += time.thread_time() - started

    samples, calls, hits = list[tuple[float, float, float]](), dict[str, int](), 0.0
    with (
        replaced(NativeOps, "run_experts", timed),
        shared_layers(stub, layers, share, folder) as decoder,
    ):
        cache = warm(decoder)
        before = decoder.weights.counts()
        stub.calls.clear()
        for _ in range(_PASSES):
            spent, stub.idle_s, started = 0.0, 0.0, time.thread_time()
            decode(decoder, cache)
            took = time.thread_time() - started - spent
            samples.append((took, spent, stub.idle_s - spent))
        after, calls = decoder.weights.counts(), dict(stub.calls)
    hits = (after.expert_hits - before.expert_hits) / (after.expert_uses - before.expert_uses)
    host, cpu, idle = (statistics.median(sample) for sample in zip(*samples, strict=True))
    return {
        "host_s": host,
        "cpu_s": cpu,
        "idle_s": idle,
        "calls": {name: count / _PASSES for name, count in sorted(calls.items())},
        "hits": hits,
    }


def of_a_layer(share: float) -> Record:
    """What a layer adds to a pass."""
    with tempfile.TemporaryDirectory() as folder, stubbed() as stub:
        found = [measure(stub, depth, share, Path(folder) / str(depth)) for depth in DEPTHS]
    return {
        "host_us": added_us(found, DEPTHS, "host_s"),
        "cpu_us": added_us(found, DEPTHS, "cpu_s"),
        "idle_us": added_us(found, DEPTHS, "idle_s"),
        "hits": round(found[1]["hits"], 3),
        "calls": added_calls(found, DEPTHS),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print."""
    parser = make_parser(__doc__, results="hybrid")
    parser.add_argument("--share", type=float, default=0.3, help="of the experts, on the GPU")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    median = middle([of_a_layer(args.share) for _ in range(args.runs)])
    record: Record = {
        **setting(cited_command("moe.hybrid", arguments), "numpy"),
        "experts": COUNT,
        "used": USED,
        "share": args.share,
        **median,
    }
    save(args.json, record)
    print(
        f"{median['host_us']:.0f} us of the host a layer, in {median['idle_us']:.0f} of which the "
        f"GPU has nothing to do, and {median['cpu_us']:.0f} us of small experts on the CPU; "
        f"{sum(median['calls'].values()):.1f} calls of the driver: "
        + ", ".join(f"{count:g} {name}" for name, count in median["calls"].items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
