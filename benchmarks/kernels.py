"""The CPU kernels one at a time, beside ggml's: GB/s, share of the read floor, GFLOP/s.

    .venv/bin/python benchmarks/kernels.py [--formats q4_0,q4_k] [--rows 1,8,64] [--json FILE]

Every product runs over copies that together exceed the last-level cache, so that weights come from
memory. By turns with every line run what bounds it: the floor (plain reading) and the peak (int8
products from registers), and ggml at its better of weights repacked or not, where llama-cpp-python
is installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(1, str(ROOT / "benchmarks"))

import numpy as np  # noqa: E402
from random_packed import random_packed  # noqa: E402

from benchmarks.ggml_kernels import TYPES, GgmlProduct, find_ggml  # noqa: E402
from localrt.formatting import format_rate, table  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.quant.formats import FORMATS  # noqa: E402
from localrt.quant.ops.native.abi import layout_of  # noqa: E402
from localrt.quant.ops.native.ops import NativeOps  # noqa: E402
from localrt.quant.ops.protocol import MlpSpec, MlpWeights  # noqa: E402

SHAPES = ((4096, 4096), (14336, 4096))
EXPERT = (768, 2048)  # inner, hidden
WORKING_SET = 256 << 20
MAX_COPIES = 64
PEAK_ROUNDS = 2_000_000  # some milliseconds
SETTLING = 0.03  # seconds: longer than Linux takes to part two threads on one core


def copies(name: str, *shapes: tuple[int, int]) -> int:
    """How many sets of such matrices exceed any cache."""
    nbytes = sum(rows * FORMATS[name].row_bytes(cols) for rows, cols in shapes)
    return max(2, min(MAX_COPIES, WORKING_SET // nbytes))


def settle(call: Callable[[int], Any], count: int) -> None:
    """Lets the other's threads fall asleep, then this one's wake up, each on a core of its own."""
    time.sleep(0.03)
    start = time.perf_counter()
    for index in itertools.count():
        call(index % count)
        if time.perf_counter() - start > SETTLING:
            return


def interleaved(contestants: dict[str, tuple[Callable[[int], Any], int]], runs: int) -> dict:
    """Median seconds of one call of each: ``(call(i), how many i there are)``, by turns."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for run in range(runs + 1):
        for name, (call, count) in contestants.items():
            settle(call, count)
            start = time.perf_counter()
            for index in range(count):
                call(index)
            if run:
                samples[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(values) for name, values in samples.items()}


class Bounds:
    """What a kernel is measured against: the working set read once, PEAK_ROUNDS of products."""

    def __init__(self, ops: NativeOps) -> None:
        data = np.ones(WORKING_SET, np.uint8)
        self.operations = ops.multiply(PEAK_ROUNDS)
        self.contestants: dict[str, tuple[Callable[[int], Any], int]] = {
            "floor": (lambda _: ops.read_all(data), 1),
            "peak": (lambda _: ops.multiply(PEAK_ROUNDS), 1),
        }


def products(
    ops: NativeOps, ggml: Any, bounds: Bounds, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every format, shape and number of rows."""
    results = []
    for name in args.formats.split(","):
        for shape in SHAPES:
            count = copies(name, shape)
            packed = [random_packed(name, *shape, seed=seed) for seed in range(count)]
            data = [tensor.data for tensor in packed]
            weights = [ops.weight(shape, [tensor]) for tensor in packed]
            for rows in map(int, args.rows.split(",")):
                x = np.random.default_rng(1).standard_normal((rows, shape[1])).astype(np.float32)
                out = np.empty((rows, shape[0]), np.float32)

                def ours(index: int, x: Any = x, out: Any = out, weights: Any = weights) -> None:
                    ops.linear(x, weights[index], out)

                contestants: dict[str, Any] = {"localrt": (ours, count), **bounds.contestants}
                theirs = []
                if ggml is not None and name in TYPES:
                    for kind in ("repacked", "plain"):
                        product = GgmlProduct(ggml, kind, name, shape, data, x)
                        theirs.append(product)
                        contestants[kind] = (product.run, count)
                seconds = interleaved(contestants, args.runs)
                for product in theirs:
                    product.close()
                results.append(record(bounds, name, shape, rows, weights[0].nbytes, seconds))
    return results


def record(
    bounds: Bounds, name: str, shape: Any, rows: int, nbytes: int, medians: dict[str, float]
) -> dict[str, Any]:
    """One line of the JSON, from the median seconds of all; what is not ours is ggml's."""
    ggml = dict(medians)
    seconds, floor = ggml.pop("localrt"), WORKING_SET / ggml.pop("floor")
    peak = bounds.operations / ggml.pop("peak")
    operations = 2 * rows * shape[0] * shape[1]
    return {
        "format": name,
        "shape": list(shape),
        "rows": rows,
        "seconds": seconds,
        "bytes_s": nbytes / seconds,
        "floor_bytes_s": floor,
        "operations_s": operations / seconds,
        "peak_operations_s": peak,
        "ggml_seconds": ggml or None,
        "times_ggml": min(ggml.values()) / seconds if ggml else None,
    }


def experts(ops: NativeOps, bounds: Bounds, args: argparse.Namespace) -> list[dict[str, Any]]:
    """An expert's three matrices at one row, as one gated MLP."""
    results = []
    inner, hidden = EXPERT
    spec = MlpSpec(activation="silu", eps=1e-6)
    for name in args.formats.split(","):
        shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
        if any(cols % FORMATS[name].block for _, cols in shapes):
            continue
        count = copies(name, *shapes)
        units = []
        for seed in range(count):
            gate, up, down = (
                replace(random_packed(name, *shape, seed=seed), name=label)
                for label, shape in zip(("gate", "up", "down"), shapes, strict=True)
            )
            units.append(
                MlpWeights(
                    norm=ops.vector(np.ones(hidden, np.float32)),
                    gate_up=ops.weight((2 * inner, hidden), [gate, up]),
                    down=ops.weight((hidden, inner), [down]),
                )
            )
        x = np.random.default_rng(1).standard_normal((1, hidden)).astype(np.float32)

        def one(index: int, units: Any = units, x: Any = x) -> None:
            ops.norm_gated_mlp(x, units[index], spec)

        medians = interleaved({"localrt": (one, count), **bounds.contestants}, args.runs)
        nbytes = units[0].gate_up.nbytes + units[0].down.nbytes
        results.append(record(bounds, f"{name} expert", (3 * inner, hidden), 1, nbytes, medians))
    return results


def describe(results: list[dict[str, Any]]) -> str:
    """The table for people."""
    cells = [
        [
            r["format"],
            "x".join(map(str, r["shape"])),
            str(r["rows"]),
            f"{r['seconds'] * 1e3:.3f}",
            format_rate(r["bytes_s"] / 1e9),
            f"{100 * r['bytes_s'] / r['floor_bytes_s']:.0f} %",
            format_rate(r["operations_s"] / 1e9),
            f"{100 * r['operations_s'] / r['peak_operations_s']:.0f} %",
            f"{r['times_ggml']:.2f}x" if r["times_ggml"] else "",
        ]
        for r in results
    ]
    headers = ["format", "shape", "rows", "ms", "GB/s", "of floor", "GFLOP/s", "of peak", "ggml"]
    return table(cells, headers, "llrrrrrrr")


def main() -> int:
    parser = argparse.ArgumentParser(description="single CPU kernels beside ggml's")
    parser.add_argument("--formats", default="q4_0,q4_k,int4-g128,nf4,mxfp4,nvfp4")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,512")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--isa", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name in args.formats.split(","):
        if name not in FORMATS or layout_of(FORMATS[name]) is None:
            parser.error(f"unknown format {name}: known are {', '.join(FORMATS)}")
    ops = NativeOps(isa=args.isa)
    machine = hardware.probe()
    threads = machine.cpu.usable_cores
    ggml, bounds = find_ggml(threads), Bounds(ops)
    results = products(ops, ggml, bounds, args) + experts(ops, bounds, args)
    peak = statistics.median(r["peak_operations_s"] for r in results)
    print(
        f"{ops.isa} kernels, {threads} threads, int8 peak {peak / 1e9:.0f} GOP/s; floor (plain "
        "reading) and peak run by turns with each line; ggml: its better of repacked and plain"
    )
    print(describe(results))
    if args.json:
        try:
            theirs = version("llama-cpp-python")
        except PackageNotFoundError:
            theirs = None
        whole = {
            "machine": machine.to_dict(),
            "command": f"benchmarks/kernels.py --formats {args.formats} --rows {args.rows} "
            f"--runs {args.runs}",
            "isa": ops.isa,
            "llama_cpp_python": theirs,
            "peak_operations_s": peak,
            "results": results,
        }
        args.json.write_text(json.dumps(whole, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
