"""The host's time for a step of a draft head on a GPU, with kernels left out.

    python -m benchmarks.gpu.head_step [--runs 5] [--json FILE]

An EAGLE-3 head of a resident model, on a GPU that computes nothing: launches and copies are only
counted, recordings are replayed with one call, and what is left is the host's, in time of the
thread, by the median. A tree is the pass over a known token, and rounds of 1, 2, 4 and 8 nodes.
Calls of a real driver come on top, a few microseconds each.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.random_store import RandomPackedCheckpoint
from benchmarks.common.record import Record, save, setting
from benchmarks.gpu.configs import TINY
from benchmarks.gpu.heads import FORMAT, RandomHead, engine_with_head
from localrt.loading.draft_head import HeadDrafter
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda import graph
from localrt.quant.cuda.device import Grid, device_of, emulate
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.stream import Cut
from localrt.quant.ops.kv import KVCache
from localrt.speculative.source import Rows

CONFIG = {**TINY, "vocab_size": 16_384, "num_hidden_layers": 2, "max_position_embeddings": 4096}
ROUNDS = (1, 2, 4, 8)
_WARM, _TREES = 8, 40
_STAGED = 256 << 10


class StubbedGpu:
    """Computes nothing. ``calls`` counts what a driver would be asked for, by name."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._records = False

    def call(self, name: str) -> None:
        """Count a call, unless it is only recorded."""
        if not self._records:
            self.calls[name] += 1

    def _counted(self, name: str, *args: Any) -> None:
        self.call(name)

    def launch(self, program: Program, grid: Grid, threads: int, args: Any) -> None:
        """See ``Launcher``."""
        self.call("launch")

    def prepare(self, program: Program) -> None:
        """See ``Launcher``."""

    def capture(self, body: Callable[[Cut], None], capture: Any) -> graph.Replay:
        """See ``graph.record``; nothing is cut."""
        self._records = True
        body(lambda between: None)
        self._records = False
        return lambda check=None: self.call("replay")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Stands for the GPU within."""
        device, before = device_of("cpu"), emulate(self)
        staging = np.empty(_STAGED, np.uint8)  # into which the host copies what is small

        def stage(to: int, values: Any) -> None:
            self.call("copy in")
            if values.nbytes <= _STAGED:
                staging[: values.nbytes] = values.reshape(-1).view(np.uint8)

        calls = {"copy_in": "copy in", "copy_out": "copy out", "copy": "copy"}
        calls |= {"clear": "clear", "synchronize": "wait"}
        counted = {name: partial(self._counted, told) for name, told in calls.items()}
        try:
            with (
                patch.multiple(device, stage=stage, **counted),
                patch.object(graph, "record", self.capture),
            ):
                yield
        finally:
            emulate(before)


@contextmanager
def opened() -> Iterator[tuple[HeadDrafter, KVCache]]:
    """A head's drafter for a session with 32 tokens, and its cache."""
    store, source = RandomPackedCheckpoint("Qwen2ForCausalLM", CONFIG, FORMAT), RandomHead(CONFIG)
    decoder = load_decoder(store, CudaOps(device="cpu"), read_config(store))
    engine, head = engine_with_head(decoder, source, 4096)
    session = engine.session(4000)
    drafter = HeadDrafter(head, session)
    session.extend([1] * 32)
    cache = drafter.cache(4000)
    drafter.compute(cache, Rows([1] * 31, np.arange(1, 32), 1), check=None)
    cache.trim(30)
    yield drafter, cache
    head.close()
    engine.close()


def tree(cache: KVCache) -> Iterator[tuple[str, Rows]]:
    """The steps of a tree of 15 nodes, each one's children being two."""
    cache.trim(30)
    yield "known", Rows([1], np.array([31]), 1)
    for level, count in enumerate(ROUNDS):
        total, first = 2 * count - 1, count - 1
        nodes = np.arange(total)
        depth = np.floor(np.log2(nodes + 1)).astype(int)
        mask = np.zeros((total, total), np.bool_)
        for node in nodes:
            at = node
            while at >= 0:
                mask[node, at] = True
                at = (at + 1) // 2 - 1
        assert depth[-1] == level
        yield (
            f"round of {count}",
            Rows(
                [1] * (total - first),
                32 + depth[first:],
                count,
                mask[first:],
                [(node + 1) // 2 - 1 for node in nodes[first:]],
            ),
        )


def measure() -> Record:
    """Microseconds and calls of each step of a tree: medians."""
    gpu = StubbedGpu()
    seconds: dict[str, list[float]] = {}
    calls: dict[str, Counter[str]] = {}
    with gpu.used(), opened() as (drafter, cache):
        for number in range(_WARM + _TREES):
            for name, rows in tree(cache):
                gpu.calls.clear()
                started = time.thread_time()
                drafter.compute(cache, rows, check=None)
                if number >= _WARM:
                    seconds.setdefault(name, []).append(time.thread_time() - started)
                    calls[name] = gpu.calls.copy()
    steps = {
        name: {"host_us": round(1e6 * statistics.median(taken), 1), "calls": dict(calls[name])}
        for name, taken in seconds.items()
    }
    return {"steps": steps, "host_us": round(sum(step["host_us"] for step in steps.values()), 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, save, print."""
    parser = make_parser(__doc__, results="head_step")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    runs = sorted((measure() for _ in range(args.runs)), key=lambda run: float(run["host_us"]))
    median = runs[len(runs) // 2]
    save(args.json, {**setting(cited_command("gpu.head_step", arguments), "numpy"), "runs": runs})
    for name, step in median["steps"].items():
        print(f"{name}: {step['host_us']} us; calls: {step['calls']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
