"""Products of 1 to 64 rows with packed weights, beside cuBLAS in bf16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.common.random_store import random_packed
from benchmarks.common.record import Record
from benchmarks.gpu.timing import copies_beyond_cache, launch_seconds
from localrt.quant.cuda import products
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.products import TiledMatrix, quantize
from localrt.quant.cuda.tensor import BFLOAT16, Tensor, empty, upload
from localrt.quant.formats.convert import bf16_bits
from localrt.quant.formats.tiled import tile

SHAPE = (14336, 4096)
FORMATS = ("int4-g32", "nf4", "mxfp4", "nvfp4", "q4_k", "q6_k", "q8_0", "q2_k", "iq4_xs")
ROWS = (1, 8, 16, 32, 64)
_REPEATED = 8  # of the same tiles in a matrix


def kernels() -> Iterator[tuple[str, Record]]:
    """Each format's microseconds, and its speed relative to cuBLAS."""
    plain = {rows: _cublas_seconds(rows) for rows in ROWS}
    for name in FORMATS:
        weights = _rotating(name)
        values: Record = {}
        for rows in ROWS:
            y = empty(rows, SHAPE[0], dtype=BFLOAT16, device=device_of("cuda"))
            records = quantize(random_rows(rows, SHAPE[1]))
            launches = [partial(products.product, records, each, y) for each in weights]
            seconds = launch_seconds(launches)
            values |= {f"us_{rows}": 1e6 * seconds, f"times_cublas_{rows}": plain[rows] / seconds}
        yield f"{name} {SHAPE[0]}x{SHAPE[1]}", values


def random_rows(rows: int, columns: int) -> Tensor:
    """Normally distributed bf16 values."""
    values = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    return upload(bf16_bits(values), device_of("cuda"), dtype=BFLOAT16)


def _rotating(name: str) -> Sequence[TiledMatrix]:
    """Copies of a matrix with repeated tiles, which together exceed the cache."""
    gpu = device_of("cuda")
    packed = random_packed(name, SHAPE[0] // _REPEATED, SHAPE[1])
    data = upload(np.tile(tile(packed).reshape(-1), _REPEATED), gpu)
    factor = None
    if packed.scale != 1.0:
        factor = upload(np.full(SHAPE[0] // 16, packed.scale, np.float32), gpu)
    weight = TiledMatrix(name, SHAPE, data, factor)

    def copied() -> Tensor:
        return empty(*data.shape, dtype=data.dtype, device=gpu).put(data)

    count = copies_beyond_cache(data.nbytes)
    return [weight, *(replace(weight, data=copied()) for _ in range(count - 1))]


def _cublas_seconds(rows: int) -> float:
    """Time of bf16 ``F.linear`` with uncached weights."""
    count = copies_beyond_cache(2 * SHAPE[0] * SHAPE[1])
    weights = [torch.randn(SHAPE, device="cuda").bfloat16() for _ in range(count)]
    x = torch.randn(rows, SHAPE[1], device="cuda").bfloat16()
    return launch_seconds([partial(F.linear, x, each) for each in weights], by_torch=True)
