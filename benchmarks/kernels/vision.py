"""The steps of a vision tower's block: numpy between products, beside our kernels.

    python -m benchmarks.kernels.vision [--rows 3136] [--hidden 1152] [--inner 4304] [--heads 16]

Weights are random. Medians, in milliseconds; the steps of both alternate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.command import ISAS, listed, make_parser
from localrt.common.errors import OptionError
from localrt.quant.choose import vision_steps
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import FORMATS, PackedTensor
from localrt.quant.ops.vision import VisionSteps

FORMATS_OF_TOWERS = ("bf16", "f16", "f32", "q8_0")


def matrix(ops: NativeOps, name: str, rows: int, columns: int) -> Any:
    """Of random bytes; scales and floats are small."""
    values = np.random.default_rng(0).integers(0, 256, (rows, FORMATS[name].row_bytes(columns)))
    data = values.astype(np.uint8)
    if name == "q8_0":
        data.reshape(rows, -1, 34)[..., 1] = 0x20
    else:  # the exponent's byte
        data[:, FORMATS[name].block_bytes - 1 :: FORMATS[name].block_bytes] = 0x3C
    return ops.weight((rows, columns), [PackedTensor(name, FORMATS[name], (rows, columns), data)])


def cases(
    steps: VisionSteps, rows: int, hidden: int, inner: int, heads: int, formats: Sequence[str]
) -> dict[str, Callable[[], Any]]:
    """A block's steps by what they are called."""
    ops, size = steps.ops, hidden // heads
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, rows, hidden), np.float32)
    wide = rng.random((rows, inner), np.float32)
    qkv = rng.standard_normal((rows, 3, heads, size), np.float32)
    q, k, v = (qkv[:, i] for i in range(3))
    cos = sin = rng.standard_normal((rows, size // 2), np.float32)
    norm = ops.vector(np.ones(hidden, np.float32))
    found: dict[str, Callable[[], Any]] = {
        "LayerNorm": lambda: steps.layer_norm(x, norm, norm, 1e-6),
        "rotation of q": lambda: steps.rotate(q, cos, sin),
        "attention": lambda: steps.attention(q, k, v, size**-0.5, (rows,)),
        "sum": lambda: steps.add(x, y),
        "gated activation": lambda: steps.gated(wide, "gelu_tanh"),
    }
    for name in formats:
        if name == "q8_0" and inner % 32:
            inner += 32 - inner % 32
        up, down = matrix(ops, name, inner, hidden), matrix(ops, name, hidden, inner)
        bias = ops.vector(np.ones(inner, np.float32))
        rows_of_inner = rng.random((rows, inner), np.float32)
        found[f"up and GELU, {name}"] = lambda up=up, bias=bias: steps.linear(
            x, up, bias, "gelu_tanh"
        )
        found[f"down, {name}"] = lambda down=down, y=rows_of_inner: steps.linear(y, down, norm)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = make_parser(__doc__, json=False)
    for name, default in (("rows", 3136), ("hidden", 1152), ("inner", 4304), ("heads", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--isa", choices=list(ISAS), default="")
    parser.add_argument("--formats", type=listed(FORMATS_OF_TOWERS), default=FORMATS_OF_TOWERS)
    args = parser.parse_args(arguments)
    try:
        ops = NativeOps(isa=args.isa)
    except OptionError as error:
        parser.error(str(error))
    shape = (args.rows, args.hidden, args.inner, args.heads, args.formats)
    ours, numpys = (cases(steps, *shape) for steps in (vision_steps(ops), VisionSteps(ops)))
    print(f"{ops.isa}, {args.rows} rows of {args.hidden}, {args.heads} heads, inner {args.inner}")
    print("| step | numpy, ms | kernels, ms |\n|---|---|---|")
    for name, ours_do in ours.items():
        times: list[list[float]] = [[], []]
        for _ in range(args.runs):
            for found, do in zip(times, (numpys[name], ours_do), strict=True):
                start = time.perf_counter()
                do()
                found.append(time.perf_counter() - start)
        numpy_ms, our_ms = (1e3 * median(found) for found in times)
        print(f"| {name} | {numpy_ms:.1f} | {our_ms:.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
