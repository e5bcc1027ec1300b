"""The CPU kernels one at a time, compared with ggml's: GB/s, share of the read floor, GFLOP/s.

    python -m benchmarks.kernels [--formats q4_0,q4_k] [--rows 1,8,64] [--isa avx2] [--json FILE]

Every product runs over copies that together exceed the last-level cache, so that weights come from
memory. Each kernel alternates with its bounds, the floor (plain reading) and the peak (int8
products from registers), and with ggml (with weights repacked or not, whichever is faster) if
llama-cpp-python is installed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common.command import cited_command, isa_name, listed, make_parser
from benchmarks.common.random_store import random_packed
from benchmarks.common.record import Record, Results, captioned, markdown_table
from benchmarks.common.turns import by_turns, timed
from benchmarks.kernels.ggml import TYPES, GgmlProduct, NotRepackedError, find_ggml
from localrt.offload import hardware
from localrt.quant.cpu.abi import layout_of
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import FORMATS
from localrt.quant.ops.protocol import MlpSpec, MlpWeights

KNOWN = [name for name, format in FORMATS.items() if layout_of(format) is not None]
SHAPES = ((4096, 4096), (14336, 4096))
EXPERT = (768, 2048)  # inner, hidden
WORKING_SET = 256 << 20
MAX_COPIES = 64
PEAK_ROUNDS = 2_000_000  # a few milliseconds
SETTLING = 0.03  # seconds: longer than Linux takes to move one of two threads to another core


def copies(name: str, *shapes: tuple[int, int]) -> int:
    """How many sets of matrices of these shapes exceed any cache."""
    nbytes = sum(rows * FORMATS[name].row_bytes(cols) for rows, cols in shapes)
    return max(2, min(MAX_COPIES, WORKING_SET // nbytes))


@dataclass(frozen=True, slots=True)
class Line:
    """A kernel to time: ``call(i)`` computes with the i-th of ``count`` copies."""

    name: str
    shape: tuple[int, int]
    rows: int
    nbytes: int
    count: int
    call: Callable[[int], object]
    ggml: dict[str, Callable[[int], object]]


class Bench:
    """The bounds to compare with: reading the working set once, and PEAK_ROUNDS of products."""

    def __init__(self, ops: NativeOps, runs: int) -> None:
        self._ops, self._runs = ops, runs
        self._data = np.ones(WORKING_SET, np.uint8)
        self._operations = ops.multiply(PEAK_ROUNDS)

    def measure(self, line: Line) -> Record:
        """Medians of interleaved runs of the kernel and its bounds."""

        def every(call: Callable[[int], object]) -> Callable[[], None]:
            def run() -> None:
                for index in range(line.count):
                    call(index)

            return run

        calls = {
            "localrt": every(line.call),
            "floor": lambda: self._ops.read_all(self._data),
            "peak": lambda: self._ops.multiply(PEAK_ROUNDS),
            **{kind: every(call) for kind, call in line.ggml.items()},
        }
        turns = {name: timed(call, settle=SETTLING) for name, call in calls.items()}
        samples = by_turns(turns, self._runs)
        taken = {name: statistics.median(seconds) for name, seconds in samples.items()}
        seconds = taken["localrt"] / line.count
        ggml = {kind: taken[kind] / line.count for kind in line.ggml}
        return {
            "name": f"{line.name} {'x'.join(map(str, line.shape))}, {line.rows} rows",
            "format": line.name,
            "shape": list(line.shape),
            "rows": line.rows,
            "seconds": seconds,
            "bytes_s": line.nbytes / seconds,
            "floor_bytes_s": WORKING_SET / taken["floor"],
            "operations_s": 2 * line.rows * line.shape[0] * line.shape[1] / seconds,
            "peak_operations_s": self._operations / taken["peak"],
            "ggml_seconds": ggml or None,
            "times_ggml": min(ggml.values()) / seconds if ggml else None,
        }


def products(ops: NativeOps, ggml: Any, name: str, rows: Sequence[int]) -> Iterator[Line]:
    """A format's products at every number of rows."""
    for shape in SHAPES:
        count = copies(name, shape)
        packed = [random_packed(name, *shape, seed=seed) for seed in range(count)]
        data = [tensor.data for tensor in packed]
        weights = [ops.weight(shape, [tensor]) for tensor in packed]
        for many in rows:
            x = np.random.default_rng(1).standard_normal((many, shape[1])).astype(np.float32)
            out = np.empty((many, shape[0]), np.float32)

            def ours(index: int, x: Any = x, out: Any = out, weights: Any = weights) -> None:
                ops.linear(x, weights[index], out)

            theirs = {}
            if ggml is not None and name in TYPES:
                for kind in ("repacked", "plain"):
                    with suppress(NotRepackedError):
                        theirs[kind] = GgmlProduct(ggml, kind, name, shape, data, x)
            peers: dict[str, Callable[[int], object]] = {k: p.run for k, p in theirs.items()}
            yield Line(name, shape, many, weights[0].nbytes, count, ours, peers)
            for product in theirs.values():
                product.close()


def expert(ops: NativeOps, name: str) -> Iterator[Line]:
    """An expert's three matrices at one row, as one gated MLP."""
    inner, hidden = EXPERT
    spec = MlpSpec(activation="silu", eps=1e-6)
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if any(cols % FORMATS[name].block for _, cols in shapes.values()):
        return
    count = copies(name, *shapes.values())
    units = []
    for seed in range(count):
        gate, up, down = (
            replace(random_packed(name, *shape, seed=seed), name=label)
            for label, shape in shapes.items()
        )
        units.append(
            MlpWeights(
                norm=ops.vector(np.ones(hidden, np.float32)),
                gate_up=ops.weight((2 * inner, hidden), [gate, up]),
                down=ops.weight((hidden, inner), [down]),
            )
        )
    x = np.random.default_rng(1).standard_normal((1, hidden)).astype(np.float32)
    nbytes = units[0].gate_up.nbytes + units[0].down.nbytes

    def one(index: int) -> None:
        ops.norm_gated_mlp(x, units[index], spec)

    yield Line(f"{name} expert", (3 * inner, hidden), 1, nbytes, count, one, {})


_SHAPE, _ROWS = [14336, 4096], (1, 8, 64, 512)
"""The lines shown in the docs."""


def kernels_table(record: Mapping[str, Any], *, every_row: bool = False) -> str:
    """A table with a line per matrix and a column per number of rows."""
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for r in record["rows"]:
        if every_row or (r["shape"] == _SHAPE and r["rows"] in _ROWS):
            kind, rate, most = (
                ("floor", r["bytes_s"], r["floor_bytes_s"])
                if r["rows"] < 8
                else ("peak", r["operations_s"], r["peak_operations_s"])
            )
            ggml = f", {r['times_ggml']:.2f}x" if r["times_ggml"] else ""
            line = lines.setdefault((r["format"], "x".join(map(str, r["shape"]))), {})
            line[r["rows"]] = f"{r['seconds'] * 1e3:.3f} ms, {rate / most:.0%} of {kind}{ggml}"
    counts = sorted({count for line in lines.values() for count in line})
    headers = ["format", "matrix", *(f"{count} row{'s' if count > 1 else ''}" for count in counts)]
    rows = [[*key, *(line.get(count, "") for count in counts)] for key, line in lines.items()]
    about = f"{record['isa']} kernels, and how many times ggml's speed that is,"
    return captioned(record, markdown_table(headers, rows), about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every format, shape and number of rows, then an expert of each format."""
    parser = make_parser(__doc__, runs=5)
    formats = ["q4_0", "q4_k", "int4-g128", "nf4", "mxfp4", "nvfp4"]
    parser.add_argument("--formats", type=listed(KNOWN), default=formats)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,512")
    parser.add_argument("--isa", type=isa_name, default="")
    args = parser.parse_args(arguments)
    ops = NativeOps(isa=args.isa)
    ggml, bench = find_ggml(hardware.probe().cpu.cores.threads), Bench(ops, args.runs)
    command = cited_command("kernels", arguments)
    results = Results(args.json, command, "llama-cpp-python", isa=ops.isa)
    rows = [int(text) for text in args.rows.split(",")]
    for name in args.formats:
        for line in products(ops, ggml, name, rows):
            results.put(bench.measure(line))
    for name in args.formats:
        for line in expert(ops, name):
            results.put(bench.measure(line))
    print(kernels_table(results.record, every_row=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
