"""Each kernel's accuracy, batch invariance and speed.

Speeds are compared with cuBLAS in bf16. Weights are random bytes with scales of moderate size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.common.random_store import random_packed
from benchmarks.gpu.configs import largest_error
from benchmarks.gpu.exchange import there
from benchmarks.gpu.timing import (
    Check,
    Values,
    copies_beyond_cache,
    launch_seconds,
)
from localrt.common.settings import Settings
from localrt.quant.cuda import products
from localrt.quant.cuda.device import Device
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.formats import TYPES
from localrt.quant.cuda.launch_shape import LaunchShape, best_shape
from localrt.quant.cuda.products import TiledMatrix, linear_program, quantize, unpack_rows
from localrt.quant.cuda.programs import machine_code
from localrt.quant.cuda.tensor import BFLOAT16, UINT8, Tensor, empty, upload
from localrt.quant.formats import PackedTensor, unpack
from localrt.quant.formats.codebook import CODEBOOKS
from localrt.quant.formats.tiled import tile

SHAPE = (14336, 4096)
PARTS = LaunchShape(pairs=1, groups=1, parts=4)  # used for short matrices
BATCHES = (1, 8, 16, 32, 64)
_REPEATED = 8  # repeats of the same tiles in speed tests


def put(tensor: PackedTensor, device: str, times: int = 1) -> TiledMatrix:
    """Weights tiled for the kernels and stacked ``times`` times."""
    rows, columns = times * tensor.shape[0], tensor.shape[1]
    gpu = device_of(device)
    data = upload(np.tile(tile(tensor).reshape(-1), times), gpu)
    factor = None
    if tensor.scale != 1.0:
        factor = upload(np.full(-(-rows // 16), tensor.scale, np.float32), gpu)
    return TiledMatrix(tensor.format.name, (rows, columns), data, factor)


def formats(device: str) -> Sequence[str]:
    """One format of each testable kind; codebook formats need the gguf package."""
    if not device.startswith("cuda"):
        names: Sequence[str] = ("int4-g32", "nvfp4", "q2_k", "iq2_xs", "int4-g128z", "nf4-f32")
    else:  # formats differing only in group size are one kind
        names = list(
            {TYPES[n].rpartition(",")[0]: n for n in (*reversed(TYPES), "int4-g32")}.values()
        )
    known = find_spec("gguf") is not None
    return [name for name in names if known or name not in CODEBOOKS]


def check_products(device: str) -> Iterator[Check]:
    """Each format against float64, and batch invariance of its rows."""
    yield from _missing()
    for name in formats(device):
        yield f"product {name}", partial(product, name, device)


def _missing() -> Iterator[Check]:
    if find_spec("gguf") is None:
        yield "codebooks", lambda: {"not run": "gguf is not installed"}


def product(name: str, device: str) -> Values:
    """Check one format."""
    cuda = device.startswith("cuda")
    rows, columns, most = (352, 2048, 64) if cuda else (20, 256, 3)
    tensor = random_packed(name, rows, columns)
    weight, values = put(tensor, device), unpack(tensor)
    x = random_rows(most, columns, device)
    records = quantize(x)
    wanted = records.values()[0] @ values.T.astype(np.float64)
    out = undefined(most, rows, x.device)
    products.product(records, weight, out)
    error = largest_error(out.to_host(), wanted)
    cuts: list[dict[str, Any]] = [{}, {"cut": PARTS}, {"gate": "silu"}] if cuda else []
    same = all(rows_are_equal(x, weight, **division) for division in cuts)
    dense = empty(rows, columns, device=x.device)
    unpack_rows(weight, dense)
    unpacked = largest_error(dense.to_host(), values)
    # NF4's levels are multiples of 1/127; otherwise only float32 sums are rounded.
    rounded = name in ("nf4", "nf4-f32", "fp4-f32")
    bound = 8e-3 if rounded else 1e-5
    return {
        "ok": error < bound and same and unpacked < (bound if rounded else 1e-6),
        "relative_error": error,
        "bound": bound,
        "rows_bitwise_equal": same,
        "unpack_error": unpacked,
    }


def random_rows(rows: int, columns: int, device: str) -> Tensor:
    """Normally distributed bf16 values."""
    return there(torch.randn(rows, columns).bfloat16(), device_of(device))


def undefined(rows: int, columns: int, device: Device) -> Tensor:
    """NaN, in float32."""
    return upload(np.full((rows, columns), np.nan, np.float32), device)


def rows_are_equal(x: Tensor, weight: TiledMatrix, **how: Any) -> bool:
    """Whether a row's bits are the same with any number of rows before it."""
    most, width = len(x), weight.shape[0] // (2 if "gate" in how else 1)

    def multiply(rows: Tensor, **how: Any) -> np.ndarray:
        out = undefined(len(rows), width, x.device)
        products.product(quantize(rows), weight, out, **how)
        return out.to_host()

    gate = {"gate": how["gate"]} if "gate" in how else {}
    whole = multiply(x, **gate)
    counts = range(1, 9 if "cut" in how else most + 1)
    parts = ((count, multiply(x[most - count :], **how)) for count in counts)
    return all(np.array_equal(part, whole[most - count :]) for count, part in parts)


def check_batches(device: str) -> Iterator[Check]:
    """Time 1 to 64 rows of each format, also relative to cuBLAS."""
    cuda = device.startswith("cuda")
    shape = SHAPE if cuda else (32, 256)
    counts = BATCHES if cuda else BATCHES[:1]
    names = formats(device)
    yield from _missing()
    if cuda:
        yield "compiling", partial(compiled, names, shape)
    plain = {rows: cublas_seconds(rows, shape, device) for rows in counts}

    def batches(name: str) -> Values:
        values: Values = {}
        copies = rotating(name, *shape, device)
        for rows in counts:
            y = empty(rows, shape[0], dtype=BFLOAT16, device=device_of(device))
            records = quantize(random_rows(rows, shape[1], device))
            launches = [partial(products.product, records, each, y) for each in copies]
            seconds = launch_seconds(launches, device)
            values[f"us_{rows}"] = seconds * 1e6
            values[f"against_cublas_{rows}"] = plain[rows] / seconds
        return values

    for name in names:
        yield f"batches {name} {shape[0]}x{shape[1]}", partial(batches, name)


def compiled(names: Sequence[str], shape: tuple[int, int]) -> Values:
    """Compile the coming kernels in parallel: one by one they take a minute."""
    gpu = device_of("cuda")
    major, minor = gpu.capability
    folder = Settings.from_environment().cache_dir / "kernels"
    programs = set()
    for name, rows in itertools.product(names, BATCHES):
        division = best_shape(name, rows, shape[0] // 16, gpu.processors)
        programs.add(linear_program(name, rows, division, None, BFLOAT16))
    started = time.perf_counter()
    with ThreadPoolExecutor() as threads:
        codes = list(threads.map(lambda p: machine_code(p, 10 * major + minor, folder), programs))
    seconds = time.perf_counter() - started
    return {"programs": len(codes), "bytes": sum(map(len, codes)), "s": seconds}


# -- parts -----------------------------------------------------------------------------------------


def rotating(name: str, rows: int, columns: int, device: str) -> list[TiledMatrix]:
    """Copies of a matrix with repeated tiles that together exceed the cache."""
    times = _REPEATED if rows % (16 * _REPEATED) == 0 else 1
    weight = put(random_packed(name, rows // times, columns), device, times)
    count = copies_beyond_cache(weight.data.nbytes, device)
    return [weight, *(replace(weight, data=_copied(weight.data)) for _ in range(count - 1))]


def _copied(data: Tensor) -> Tensor:
    return empty(*data.shape, dtype=UINT8, device=data.device).put(data)


def cublas_seconds(rows: int, shape: tuple[int, int], device: str) -> float:
    """Time of bf16 ``F.linear`` with uncached weights."""
    count = copies_beyond_cache(2 * shape[0] * shape[1], device)
    weights = [torch.randn(shape, device=device).bfloat16() for _ in range(count)]
    x = torch.randn(rows, shape[1], device=device).bfloat16()
    launches = [partial(F.linear, x, each) for each in weights]
    return launch_seconds(launches, device, by_torch=True)
