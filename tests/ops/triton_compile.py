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

from localrt.quant.ops.triton import device as triton_device
from localrt.quant.ops.triton.latent import attend_latent_rows, latent_append

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


def latents() -> None:
    """DeepSeek-V2-Lite's sizes."""
    q, queries = (torch.zeros(2, 16, n, dtype=torch.bfloat16) for n in (192, 576))
    wide, cache = (torch.zeros(n, 576, dtype=torch.bfloat16) for n in (2, 256))
    angle, one = torch.zeros(2, 32), torch.zeros(1, dtype=torch.int64)
    turn: dict[str, Any] = {"cos": angle, "sin": angle, "norm": torch.ones(512), "eps": 1e-6}
    latent_append(q, wide, queries, cache, one, **turn, interleaved=True)
    for mask in (None, torch.ones(2, 2, dtype=torch.int8)):
        attend_latent_rows(queries, cache, one, rope=64, scale=0.1, mask=mask, longest=256)


def main() -> int:
    found: list[dict[str, Any]] = []
    driver.set_active(NoGpu(int(sys.argv[1])))
    compile_only(found)
    triton_device.compiled = lambda x: True  # type: ignore[assignment]
    triton_device.processors = lambda device: PROCESSORS  # type: ignore[assignment]
    latents()
    print(json.dumps({"triton": triton.__version__, "numpy": np.__version__, "kernels": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
