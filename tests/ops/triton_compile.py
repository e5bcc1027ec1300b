"""Compile the kernels for a GPU that need not be there: a script, for ``test_triton_compile.py``.

    python -m tests.ops.triton_compile CAPABILITY

Runs a packed model's passes with every launch ending at the machine code, and prints one JSON: per
compiled kernel its name, registers' spills in bytes, shared memory in bytes and instructions used.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from localrt.quant.formats import FORMATS
from localrt.quant.ops import triton_device
from localrt.quant.ops.triton_attention import attend
from localrt.quant.ops.triton_linear import Tiles, dense_linear, tiled_linear
from localrt.quant.ops.triton_rows import unpack_rows
from localrt.quant.ops.triton_steps import gate, norm, rope_append, rotate_blocks
from tests.ops.packed import random_tensor

LINEAR = ("q4_0", "q4_k", "q6_k", "mxfp4", "nvfp4", "nf4", "int4-g128m", "int8-g16m")
PROCESSORS = 24


class NoGpu:
    """What Triton asks a driver for when it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_only(found: list[dict[str, Any]]) -> None:
    """Make every launch compile and nothing else."""
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        ptx = kernel.asm["ptx"]
        found.append(
            {
                "kernel": self.fn.__name__,
                "shared": kernel.metadata.shared,
                "mma": sorted({i for i in ("mma.sync", "wgmma", "tcgen05") if i in ptx}),
                "cubin": len(kernel.asm["cubin"]),
            }
        )
        return kernel

    JITFunction.run = run


def tiles(name: str, rows: int, columns: int) -> Tiles:
    from localrt.quant.formats.tiled import tile
    from localrt.quant.ops.triton_formats import layout_of

    tensor = random_tensor(name, rows, columns)
    data = torch.from_numpy(tile(tensor))
    layout = layout_of(FORMATS[name])
    assert layout is not None
    views = data, data.view(torch.float16), data.view(torch.int32)
    return Tiles(layout, (rows, columns), *views, torch.ones(rows // 16))


def main() -> int:
    found: list[dict[str, Any]] = []
    driver.set_active(NoGpu(int(sys.argv[1])))
    compile_only(found)
    triton_device.compiled = lambda x: True  # type: ignore[assignment]
    triton_device.processors = lambda device: PROCESSORS  # type: ignore[assignment]
    x = torch.zeros(64, 512, dtype=torch.bfloat16)
    out = torch.zeros(64, 1024)
    for name in LINEAR:
        weight = tiles(name, 1024, 512)
        for rows in (1, 64):
            tiled_linear(x[:rows], weight, out[:rows])
        tiled_linear(x[:1], weight, torch.zeros(1, 512, dtype=torch.bfloat16), gate="silu")
        unpack_rows(weight, out[:, :512], first=16)
        unpack_rows(weight, out[:2, :512], index=torch.zeros(2, dtype=torch.int64))
    dense_linear(x, torch.zeros(1024, 512, dtype=torch.bfloat16), out, bias=torch.zeros(1024))
    norm(out, torch.ones(1024), 1e-6, pending=out, out=torch.bfloat16)
    gate(torch.zeros(2, 1024, dtype=torch.bfloat16), "gelu_tanh")
    rotate_blocks(x, 128)
    one, angles = torch.zeros(1, dtype=torch.int64), torch.zeros(2, 64)
    for size in (64, 128, 256):
        cache = torch.zeros(2, 256, size, dtype=torch.bfloat16)
        q = torch.zeros(2, 4, size, dtype=torch.bfloat16)
        qkv = torch.zeros(2, 8 * size, dtype=torch.bfloat16)
        weight = torch.ones(size)
        angle = angles[:, : size // 2]
        rope_append(
            qkv, q, cache, cache, one, cos=angle, sin=angle, q_norm=weight, k_norm=weight, eps=1e-6
        )
        places = torch.zeros(2, dtype=torch.int64)
        common: dict[str, Any] = {"scale": 0.1, "longest": 256}
        plain = {"window": None, "softcap": None, "mask": None}
        tree = {"window": 16, "softcap": 30.0, "mask": torch.ones(2, 2, dtype=torch.int8)}
        for options in (plain, tree):
            attend(q, cache, cache, one, places, **common, **options)
    print(json.dumps({"triton": triton.__version__, "numpy": np.__version__, "kernels": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
