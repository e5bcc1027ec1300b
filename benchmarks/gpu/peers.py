"""Products of others in the same run: torch's int4, cuBLAS in bf16, bitsandbytes, llama.cpp.

Each says microseconds for some numbers of rows, or why it did not run. Their matrices lie in memory
several times, as ours do, so that no cache holds them; llama.cpp's own test decides that itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import Result, copies_beyond_cache, launch_seconds

__all__ = ["check_peers"]

SHAPE = (14336, 4096)
ROWS = (1, 8, 16, 32, 64)
_GROUP = 128
_LLAMACPP = "test-backend-ops"
_TIMEOUT_S = 60
_RUN = re.compile(r"MUL_MAT\(type_a=(\w+),.*?\bm=(\d+),n=(\d+),k=(\d+).*?([\d.]+) us/run", re.ASCII)

Launches = Callable[[torch.Tensor], list[Callable[[], Any]]]


def check_peers(device: str) -> list[Result]:
    """One result a peer; a peer's trouble is not ours, so none fails."""
    cuda = device.startswith("cuda")
    shape, counts = (SHAPE, ROWS) if cuda else ((32, 64), ROWS[:1])
    peers: dict[str, Callable[[tuple[int, int], str], Launches]] = {"cuBLAS bf16": cublas}
    if cuda:
        peers |= {"torch int4": torch_int4, "bitsandbytes nf4": bitsandbytes}
    results = []
    for name, make in peers.items():
        values: dict[str, Any] = {}
        try:
            launches = make(shape, device)
            for rows in counts:
                x = torch.randn(rows, shape[1], device=device).bfloat16()
                with torch.inference_mode():
                    values[f"us_{rows}"] = launch_seconds(launches(x), device) * 1e6
        except Exception as error:  # noqa: BLE001  not installed, or it does not run here
            values["not run"] = f"{type(error).__name__}: {error}"[:200]
        results.append(Result(f"peer {name} {shape[0]}x{shape[1]}", True, values=values))
        if cuda:
            torch.cuda.empty_cache()
    return [*results, Result("peer llama.cpp", True, values=llamacpp())]


def cublas(shape: tuple[int, int], device: str) -> Launches:
    """``F.linear``."""
    count = copies_beyond_cache(2 * shape[0] * shape[1], device)
    weights = [torch.randn(shape, device=device).bfloat16() for _ in range(count)]
    return lambda x: [lambda w=w: F.linear(x, w) for w in weights]


def torch_int4(shape: tuple[int, int], device: str) -> Launches:
    """``aten._weight_int4pack_mm``, groups of 128."""
    rows, columns = shape
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    size = (columns // _GROUP, rows, 2)
    scales = torch.rand(size, dtype=torch.bfloat16, device=device)
    copies = [packed.clone() for _ in range(copies_beyond_cache(packed.nbytes, device))]
    multiply = torch.ops.aten._weight_int4pack_mm
    return lambda x: [lambda w=w: multiply(x, w, _GROUP, scales) for w in copies]


def bitsandbytes(shape: tuple[int, int], device: str) -> Launches:
    """Its NF4, blocks of 64."""
    from bitsandbytes import functional, matmul_4bit

    weight = torch.randn(shape, device=device).bfloat16()
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    copies = [packed.clone() for _ in range(copies_beyond_cache(packed.nbytes, device))]
    return lambda x: [lambda w=w: matmul_4bit(x, w.t(), quant_state=state) for w in copies]


def llamacpp() -> dict[str, Any]:
    """``test-backend-ops perf -o MUL_MAT``, if it is on the path: microseconds by type and size."""
    command = shutil.which(_LLAMACPP)
    if command is None:
        return {"not run": f"{_LLAMACPP} is not on the path"}
    try:
        done = subprocess.run(
            [command, "perf", "-o", "MUL_MAT"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        text = done.stdout
    except subprocess.TimeoutExpired as error:  # what it has said until then counts
        text = error.stdout.decode(errors="replace") if error.stdout else ""
    except OSError as error:
        return {"not run": str(error)}
    found = parse_perf(text)
    return found or {"not run": "it printed no product"}


def parse_perf(text: str) -> dict[str, float]:
    """``{"q4_0 4096x14336 of 1": 61.9}``: rows x columns, and the rows of the other factor."""
    return {
        f"{kind} {m}x{k} of {n}": float(us)
        for kind, m, n, k, us in _RUN.findall(text)
        if int(n) in ROWS
    }
