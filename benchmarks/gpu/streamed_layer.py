"""The host's time for a dense layer whose weights come over the link, with kernels left out.

    python -m benchmarks.gpu.streamed_layer [--runs 5] [--resident] [--json FILE]

A GPU that computes nothing takes launches; recordings are replayed as a graph is, with one call.
What is left is the host's: Python, without the threads that copy. A layer is the difference between
a deep and a shallow model, in time of the thread, by the median. Calls of a real driver come on
top, a few microseconds each: they are counted, as launches, replays and events.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from localrt.offload.placement import Placement, Where
from localrt.quant.cuda import graph
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.device import Grid, emulate
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.stream import Cut
from localrt.quant.ops.protocol import Batch

DEPTHS = (4, 28)
_WARM, _PASSES = 40, 60


class StubbedGpu(CudaGpu):
    """Computes nothing. ``calls`` counts what a driver would be asked for, by name."""

    def __init__(self, clock: Clock) -> None:
        copies = CudaCopies(device="cpu")
        super().__init__(clock, CudaOps(device="cpu"), copies, capacity=PLENTY)
        self.calls: dict[str, int] = {}
        self._records = False

    def call(self, name: str) -> None:
        """Count a call."""
        self.calls[name] = self.calls.get(name, 0) + 1

    def launch(self, program: Program, grid: Grid, threads: int, args: Any) -> None:
        """See ``Launcher``."""
        if not self._records:
            self.call(program.name)

    def prepare(self, program: Program) -> None:
        """See ``Launcher``."""

    def capture(self, body: Callable[[Cut], None], capture: Any) -> graph.Replay:
        """See ``graph.record``; a dense layer is not cut."""
        self._records = True
        body(lambda between: None)
        self._records = False
        return lambda check=None: self.call("replay")

    def _queue_copy(self, source: Any, out: Any, after: Event | None) -> None:
        self.call("copy")

    def wait(self, event: Event | None) -> None:
        """See ``Gpu``."""
        self.call("wait")

    def record(self, *read: Any, last: bool = False) -> Event | None:
        """See ``Gpu``."""
        self.call("event")
        return None


@contextmanager
def dense_layers(
    layers: int, folder: Path, *, resident: bool
) -> Iterator[tuple[Decoder, StubbedGpu]]:
    """A dense model of so many layers, all in RAM and copied in each pass, or all on the GPU."""
    store = small_store("Qwen3ForCausalLM", layers, folder)
    units = store.manifest.units
    where = {unit.name: Where.VRAM for unit in units} | dict.fromkeys(
        ("norm", "embedding"), Where.RAM
    )
    if not resident:
        where |= {unit.name: Where.LINK for unit in units if unit.name.startswith("layers.")}
    ring = 6 * max(unit.nbytes for unit in units)
    clock = Clock()
    gpu = StubbedGpu(clock)
    before, record = emulate(gpu), graph.record
    graph.record = gpu.capture
    placement = Placement(where=where, kv=("vram",) * layers, ram_ring=ring, vram_ring=ring)
    try:
        with placed(store, placement, gpu, clock=clock) as decoder:
            yield decoder, gpu
    finally:
        emulate(before)
        graph.record = record


def measure(layers: int, folder: Path, *, resident: bool) -> Record:
    """Seconds and calls of a pass of one token: the median."""
    samples = list[float]()
    with dense_layers(layers, folder, resident=resident) as (decoder, gpu):
        cache = decoder.cache(4000)
        for number in range(_WARM + _PASSES):
            if number == _WARM:
                gpu.calls.clear()
            started = time.thread_time()
            decoder.forward(Batch.extend([(cache, [1])]))
            samples.append(time.thread_time() - started)
        calls = {name: count / _PASSES for name, count in sorted(gpu.calls.items())}
    return {"host_s": statistics.median(samples[_WARM:]), "calls": calls}


def of_a_layer(*, resident: bool) -> Record:
    """What a layer adds to a pass."""
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(depth, Path(folder) / str(depth), resident=resident) for depth in DEPTHS]
    return {
        "host_us": added_us(found, DEPTHS, "host_s"),
        "calls": added_calls(found, DEPTHS),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print."""
    parser = make_parser(__doc__, results="streamed_layer")
    parser.add_argument("--resident", action="store_true", help="with all layers on the GPU")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    runs = [of_a_layer(resident=args.resident) for _ in range(args.runs)]
    median = middle(runs)
    record: Record = {
        **setting(cited_command("gpu.streamed_layer", arguments), "numpy"),
        "runs": runs,
        **median,
    }
    save(args.json, record)
    print(f"{median['host_us']} us a layer; calls: {median['calls']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
