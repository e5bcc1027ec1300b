"""The CPU kernels one at a time: GB/s of packed bytes, share of the read floor, GFLOP/s.

    .venv/bin/python benchmarks/kernels.py [--formats q4_0,q4_k] [--rows 1,8,64,512] [--json FILE]

Every product runs over copies that together exceed the last-level cache, so that weights come from
memory. The floor is the best of several read kernels in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from localrt import hardware  # noqa: E402
from localrt.formatting import format_rate, table  # noqa: E402
from localrt.quant.formats import FORMATS, PackedTensor  # noqa: E402
from localrt.quant.ops.native_abi import layout_of  # noqa: E402
from localrt.quant.ops.native_ops import NativeOps, NativeWeight  # noqa: E402

SHAPES = ((4096, 4096), (14336, 4096), (768, 2048), (2048, 768))
WORKING_SET = 512 << 20
MAX_COPIES = 64


def copies(ops: NativeOps, name: str, rows: int, cols: int) -> list[NativeWeight]:
    """Different weights of one shape, together larger than any cache."""
    format_ = FORMATS[name]
    nbytes = rows * format_.row_bytes(cols)
    rng = np.random.default_rng(0)
    made = []
    for _ in range(max(1, min(MAX_COPIES, WORKING_SET // nbytes))):
        data = rng.integers(0, 64, (rows, format_.row_bytes(cols)), dtype=np.uint8)
        made.append(ops.weight((rows, cols), [PackedTensor("w", format_, (rows, cols), data)]))
    return made


def measure(ops: NativeOps, weights: list[NativeWeight], rows: int, runs: int) -> float:
    """Median seconds of one product."""
    cols = weights[0].stack.cols
    x = np.random.default_rng(1).standard_normal((rows, cols)).astype(np.float32)
    samples = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        for weight in weights:
            ops.linear(x, weight)
        samples.append((time.perf_counter() - start) / len(weights))
    return statistics.median(samples[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description="single CPU kernels")
    parser.add_argument("--formats", default="q4_0,q4_k,q5_0,q6_k,q8_0,mxfp4")
    parser.add_argument("--rows", default="1,2,4,8,16,64,512")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--isa", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ops = NativeOps(isa=args.isa)
    machine = hardware.probe()
    floor = hardware.measure_memory_read(machine.cpu.usable_cores)
    results: list[dict[str, Any]] = []
    for name in args.formats.split(","):
        if name not in FORMATS or layout_of(FORMATS[name]) is None:
            parser.error(f"unknown format {name}: known are {', '.join(FORMATS)}")
        for rows, cols in SHAPES:
            weights = copies(ops, name, rows, cols)
            nbytes = weights[0].nbytes
            for batch in map(int, args.rows.split(",")):
                seconds = measure(ops, weights, batch, args.runs)
                results.append(
                    {
                        "format": name,
                        "shape": [rows, cols],
                        "rows": batch,
                        "seconds": seconds,
                        "gb_s": nbytes / seconds / 1e9,
                        "floor_share": nbytes / seconds / floor,
                        "gflop_s": 2 * batch * rows * cols / seconds / 1e9,
                    }
                )
    cells = [
        [
            r["format"],
            "x".join(map(str, r["shape"])),
            str(r["rows"]),
            f"{r['seconds'] * 1e3:.3f}",
            format_rate(r["gb_s"]),
            f"{100 * r['floor_share']:.0f} %",
            format_rate(r["gflop_s"]),
        ]
        for r in results
    ]
    headers = ["format", "shape", "rows", "ms", "GB/s", "of floor", "GFLOP/s"]
    print(f"{ops.isa} kernels, {machine.cpu.usable_cores} threads, floor {floor / 1e9:.1f} GB/s")
    print(table(cells, headers, "llrrrrr"))
    if args.json:
        record = {
            "machine": machine.to_dict(),
            "command": "benchmarks/kernels.py",
            "isa": ops.isa,
            "floor_bytes_s": floor,
            "results": results,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
