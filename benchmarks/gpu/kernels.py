"""The kernels one at a time: right, batch-invariant, and how fast.

Speeds stand beside the ceiling (a device copy, read and written counted), cuBLAS in bf16 and, where
it is installed, bitsandbytes' 4-bit product. Weights are random bytes with sane scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.common.random_weights import random_packed
from benchmarks.gpu.timing import (
    Result,
    copies_beyond_cache,
    copy_bandwidth,
    guarded,
    launch_seconds,
)
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import tile
from localrt.quant.ops.cuda.kernels import products
from localrt.quant.ops.cuda.kernels.products import Cut, TiledMatrix, quantize
from localrt.quant.ops.cuda.kernels.rows import unpack_rows

FOUR_BIT = ("int4-g32", "int4-g128", "nf4", "mxfp4", "nvfp4", "q4_0", "q4_k")
OTHERS = ("q4_1", "q5_0", "q6_k", "q8_0", "int4-g32m", "int8-g128m")
SHAPES = ((4096, 4096), (14336, 4096))
PARTS = Cut(pairs=1, groups=1, parts=4)  # what short matrices get
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def put(name: str, rows: int, columns: int, device: str) -> tuple[TiledMatrix, np.ndarray]:
    """Random weights as the kernels take them, and their values."""
    tensor = random_packed(name, rows, columns)
    data = torch.from_numpy(tile(tensor)).to(device)
    factor = None
    if tensor.scale != 1.0:
        factor = torch.full((-(-rows // 16),), tensor.scale, device=device)
    return TiledMatrix(name, (rows, columns), data, factor), unpack(tensor)


def copy_of(weight: TiledMatrix) -> TiledMatrix:
    """The same matrix elsewhere in memory."""
    return replace(weight, data=weight.data.clone())


def check_copy(device: str) -> list[Result]:
    """The ceiling: device copy bandwidth, bytes read and written counted."""
    return [Result("copy bandwidth", True, values={"gb_s": copy_bandwidth(device) / 1e9})]


def check_products(device: str) -> list[Result]:
    """Every format against float64; a row's bits for any number of rows."""
    names = (*FOUR_BIT, *OTHERS) if device.startswith("cuda") else ("int4-g32", "nvfp4")
    results = []
    for name in names:
        results += guarded(f"product {name}", lambda n=name: [product(n, device)])
    return results


def product(name: str, device: str) -> Result:
    cuda = device.startswith("cuda")
    rows, columns, most = (352, 2048, 64) if cuda else (20, 256, 3)
    weight, values = put(name, rows, columns, device)
    x = torch.randn(most, columns, device=device).bfloat16()
    records = quantize(x)
    wanted = records.values()[0].cpu().numpy() @ values.T.astype(np.float64)
    out = torch.full((most, rows), float("nan"), device=device)
    products.product(records, weight, out)
    error = float(np.abs(out.cpu().numpy() - wanted).max() / np.abs(wanted).max())
    cuts: list[dict[str, Any]] = [{}, {"cut": PARTS}, {"gate": "silu"}] if cuda else []
    same = all(rows_are_equal(x, weight, **cut) for cut in cuts)
    dense = torch.empty(rows, columns, device=device)
    unpack_rows(weight, dense)
    unpacked = float(np.abs(dense.cpu().numpy() - values).max() / np.abs(values).max())
    # NF4's levels are 127ths; all else is exact but for the rounding of float32 sums.
    bound = 8e-3 if name == "nf4" else 1e-5
    ok = error < bound and same and unpacked < (bound if name == "nf4" else 1e-6)
    found: dict[str, Any] = {"relative_error": error, "bound": bound}
    found |= {"rows_bitwise_equal": same, "unpack_error": unpacked}
    return Result(f"product {name}", ok, values=found)


def rows_are_equal(x: torch.Tensor, weight: TiledMatrix, **how: Any) -> bool:
    """Whether a row's bits are the same with any number of rows before it."""
    most, width = len(x), weight.shape[0] // (2 if "gate" in how else 1)

    def multiply(rows: torch.Tensor, **how: Any) -> torch.Tensor:
        out = torch.full((len(rows), width), float("nan"), device=x.device)
        products.product(quantize(rows), weight, out, **how)
        return out

    gate = {"gate": how["gate"]} if "gate" in how else {}
    whole = multiply(x, **gate)
    counts = range(1, 9 if "cut" in how else most + 1)
    parts = ((count, multiply(x[most - count :], **how)) for count in counts)
    return all(torch.equal(part, whole[most - count :]) for count, part in parts)


def check_one_row(device: str) -> list[Result]:
    """One row at the sizes of a 7B: bandwidth, and beside what."""
    cuda = device.startswith("cuda")
    ceiling = copy_bandwidth(device)
    results = []
    for rows, columns in SHAPES if cuda else ((32, 64),):
        x = torch.randn(1, columns, device=device).bfloat16()
        y = torch.empty(1, rows, device=device, dtype=torch.bfloat16)
        plain = cublas_seconds(x, rows, device)
        theirs = bitsandbytes_seconds(x, rows, device) if cuda else None
        for name in FOUR_BIT if cuda else FOUR_BIT[:1]:
            seconds, nbytes = product_seconds(name, x, y, device)
            values = {
                "us": seconds * 1e6,
                "gb_s": nbytes / seconds / 1e9,
                "share_of_copy": nbytes / seconds / ceiling,
                "against_cublas_bf16": plain / seconds,
            }
            if theirs is not None:
                values["against_bitsandbytes_nf4"] = theirs / seconds
            results.append(Result(f"one row {name} {rows}x{columns}", True, values=values))
    return results


def check_batches(device: str) -> list[Result]:
    """2 to 64 rows: microseconds, and against cuBLAS."""
    cuda = device.startswith("cuda")
    results = []
    for rows, columns in SHAPES if cuda else ((32, 64),):
        for name in ("int4-g32", "nvfp4") if cuda else ("int4-g32",):
            values: dict[str, Any] = {}
            for batch in BATCHES if cuda else (2,):
                x = torch.randn(batch, columns, device=device).bfloat16()
                y = torch.empty(batch, rows, device=device, dtype=torch.bfloat16)
                seconds, _ = product_seconds(name, x, y, device)
                values[f"us_{batch}"] = seconds * 1e6
                values[f"against_cublas_{batch}"] = cublas_seconds(x, rows, device) / seconds
            results.append(Result(f"batches {name} {rows}x{columns}", True, values=values))
    return results


def check_unpacking(device: str) -> list[Result]:
    """A matrix to bf16, as prefill does it: bytes read and written."""
    cuda = device.startswith("cuda")
    rows, columns = SHAPES[1] if cuda else (32, 64)
    ceiling = copy_bandwidth(device)
    results = []
    for name in ("int4-g32", "q4_k", "nvfp4") if cuda else ("int4-g32",):
        copies = rotating(name, rows, columns, device)
        dense = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        launches = [lambda w=w, out=dense: unpack_rows(w, out) for w in copies]
        seconds = launch_seconds(launches, device)
        moved = copies[0].data.nbytes + dense.nbytes
        values = {"us": seconds * 1e6, "share_of_copy": moved / seconds / ceiling}
        results.append(Result(f"unpacking {name} {rows}x{columns}", True, values=values))
    return results


# -- parts -----------------------------------------------------------------------------------------


def rotating(name: str, rows: int, columns: int, device: str) -> list[TiledMatrix]:
    """Copies of a matrix that together exceed the cache."""
    weight, _ = put(name, rows, columns, device)
    count = copies_beyond_cache(weight.data.nbytes, device)
    return [weight, *(copy_of(weight) for _ in range(count - 1))]


_kept: dict[tuple[str, int, int], list[TiledMatrix]] = {}


def product_seconds(name: str, x: torch.Tensor, y: torch.Tensor, device: str) -> tuple[float, int]:
    """Seconds of one product, and bytes of its weight."""
    key = (name, y.shape[1], x.shape[1])
    if key not in _kept:
        _kept.clear()
        _kept[key] = rotating(*key, device)
    copies = _kept[key]
    records = quantize(x)  # once for all matrices that share its rows
    launches = [lambda w=w: products.product(records, w, y) for w in copies]
    return launch_seconds(launches, device), copies[0].data.nbytes


def cublas_seconds(x: torch.Tensor, rows: int, device: str) -> float:
    count = copies_beyond_cache(2 * rows * x.shape[1], device)
    weights = [torch.randn(rows, x.shape[1], device=device).bfloat16() for _ in range(count)]
    return launch_seconds([lambda w=w: F.linear(x, w) for w in weights], device)


def bitsandbytes_seconds(x: torch.Tensor, rows: int, device: str) -> float | None:
    """Its NF4 product; None where it is not installed or does not run."""
    try:
        from bitsandbytes import functional, matmul_4bit
    except Exception:  # noqa: BLE001  a broken install is none
        return None
    count = copies_beyond_cache(rows * x.shape[1] // 2, device)
    try:
        w = torch.randn(rows, x.shape[1], device=device).bfloat16()
        packed, state = functional.quantize_4bit(w, quant_type="nf4", blocksize=64)
        copies = [packed.clone() for _ in range(count)]
        with torch.inference_mode():
            launches = [lambda p=p: matmul_4bit(x, p.t(), quant_state=state) for p in copies]
            return launch_seconds(launches, device)
    except Exception as error:  # noqa: BLE001  a peer's trouble is not ours
        print(f"bitsandbytes: {error}")
        return None
