"""Measures a GPU: products, copies, the link while the CPU is busy, and the cost of a launch.

It takes a second or two besides compiling, and about 200 MB each of RAM and GPU memory. It is done
once: ``gpu_rates`` saves the rates. It knows formats, not models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.device import Device
from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.formats import TYPES
from localrt.quant.cuda.gpu_cache import FINE_RATES, RATES, ROWS, GpuCache, GpuRates
from localrt.quant.cuda.graph import Capture, record
from localrt.quant.cuda.launch import CudaStopwatch, Stopwatch, gpu_file, noting
from localrt.quant.cuda.linear import linear
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.products import TiledMatrix, quantize
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, UINT8, upload, zeros
from localrt.quant.cuda.weight import CudaWeight
from localrt.quant.formats import FORMATS
from localrt.quant.formats.convert import bf16_bits
from localrt.quant.formats.tiled import tile_span
from localrt.quant.ops.arrays import aligned_buffer

_FORMATS = ("int4-g32", "q4_k")
_RUNS = 5
_THREADS = 4  # threads that compile

Step = Callable[[int, int], None]
"""Called with the number of steps done and their total."""


class Size:
    """Sizes of a measurement: matrix, bytes, copies, launches; smaller in tests."""

    shape = (4096, 4096)
    copied = 64 << 20
    read = 96 << 20  # beyond the CPU's caches
    copies = 16
    launches = 100


def gpu_rates(
    ops: CudaOps,
    formats: Iterable[str],
    *,
    host: NativeOps | None = None,
    file: GpuCache | None = None,
    on_step: Step | None = None,
) -> GpuRates:
    """The rates of the GPU of ``ops``; missing ones are measured and saved.

    ``formats`` are the formats of products to measure; unpacked ones are ignored.

    Raises:
        LocalrtError: the GPU cannot be measured.
    """
    device = device_of(ops.device)
    file = file or gpu_file(device)
    part = FINE_RATES if ops.fine else RATES
    known = GpuRates.from_dict(file.read(part))
    wanted = _packed(formats) or (_FORMATS[:1] if known is None else ())
    missing = [name for name in wanted if known is None or name not in known.products]
    if known is not None and not missing:
        return known
    rates = measure_gpu(ops, missing, host=host, known=known, on_step=on_step)
    file.write(part, rates.to_dict())
    device.trim()  # so that other programs can use the memory
    return rates


def measure_gpu(
    ops: CudaOps,
    formats: Iterable[str] = _FORMATS,
    *,
    host: NativeOps | None = None,
    known: GpuRates | None = None,
    on_step: Step | None = None,
    stopwatch: Stopwatch | None = None,
    size: type[Size] = Size,
) -> GpuRates:
    """Measure the GPU of ``ops``; if its rates are ``known``, only products in new ``formats``.

    ``host`` computes while the GPU does. Nothing is saved.

    Raises:
        LocalrtError: the GPU refuses a kernel, or has no memory left.
    """
    device = device_of(ops.device)
    stopwatch = stopwatch or CudaStopwatch(device)
    names = _packed(formats)
    steps = len(names) + (3 if known is None else 0)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if on_step is not None:
            on_step(done, steps)

    products: dict[str, tuple[float, ...]] = {}
    with ops.scope():
        weights = {name: _weight(ops, name, size) for name in names}
        _compile(ops, weights.values())
        for name, weight in weights.items():
            products[name] = _product_seconds(ops, weight, stopwatch)
            step()
        if known is not None:
            return replace(known, products={**known.products, **products})
        memory = _memory_bytes_s(device, stopwatch, size)
        replay_s = _replay_seconds(device, stopwatch, size)
        step()
        link = _Link(ops, size)
        try:
            to_gpu = link.to_gpu_bytes_s()
            step()
            busy_link, busy_cpu = link.beside(host or _host(), to_gpu)
            crossing_s = link.crossing_s()
            step()
        finally:
            link.close()
    return GpuRates(
        products=products,
        memory_bytes_s=memory,
        to_gpu_bytes_s=to_gpu,
        busy_link=busy_link,
        busy_cpu=busy_cpu,
        crossing_s=crossing_s,
        replay_s=replay_s,
    )


def _packed(formats: Iterable[str]) -> tuple[str, ...]:
    """The formats with a kernel that accept the measured columns."""
    return tuple(
        name
        for name in sorted(set(formats))
        if name in TYPES and Size.shape[1] % tile_span(FORMATS[name]) == 0
    )


def _weight(ops: CudaOps, name: str, size: type[Size]) -> CudaWeight:
    rows, columns = size.shape
    nbytes = rows * FORMATS[name].row_bytes(columns)
    # Any two of these bytes make a float16 of moderate size.
    values = np.random.default_rng(0).integers(0x20, 0x40, nbytes, np.uint8)
    data = upload(values, device_of(ops.device))
    return CudaWeight(size.shape, (TiledMatrix(name, size.shape, data),), fine=ops.fine)


def _products(ops: CudaOps, weight: CudaWeight) -> Iterator[Callable[[], object]]:
    """Functions that start a product for each batch size of ``ROWS``, quantizing included."""
    for count in ROWS:
        values = np.random.default_rng(0).standard_normal((count, weight.shape[1]), np.float32)
        x = upload(bf16_bits(values), device_of(ops.device), dtype=BFLOAT16)
        yield partial(linear, x, weight, dtype=FLOAT32)


def _compile(ops: CudaOps, weights: Iterable[CudaWeight]) -> None:
    """Compile the kernels to be timed, in parallel."""
    programs: dict[Program, None] = {}
    with noting(programs):
        for weight in weights:
            for start in _products(ops, weight):
                start()
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(device_of(ops.device).prepare, programs))


def _product_seconds(ops: CudaOps, weight: CudaWeight, stopwatch: Stopwatch) -> tuple[float, ...]:
    """Seconds per weight for each batch size of ``ROWS``."""
    rows, columns = weight.shape
    return tuple(stopwatch.seconds(start) / (rows * columns) for start in _products(ops, weight))


def _memory_bytes_s(device: Device, stopwatch: Stopwatch, size: type[Size]) -> float:
    source, target = (zeros(size.copied, dtype=UINT8, device=device) for _ in range(2))
    return 2 * size.copied / stopwatch.seconds(lambda: target.put(source))


def _replay_seconds(device: Cuda, stopwatch: Stopwatch, size: type[Size]) -> float:
    """Seconds of a small kernel in a recorded pass."""
    x = upload(np.ones((1, 64), np.float32), device)

    def body() -> None:
        for _ in range(size.launches):
            quantize(x)

    body()
    replay = record(lambda cut: body(), Capture(device))
    return stopwatch.seconds(replay) / size.launches


class _Link:
    """Measures copies from pinned RAM to the GPU."""

    def __init__(self, ops: CudaOps, size: type[Size]) -> None:
        self._device, self._size = device_of(ops.device), size
        self._copies = CudaCopies(ops.device)
        self._source = self._copies.host_buffer(size.copied)
        self._source[:] = 1
        self._there = self._copies.alloc(size.copied)

    def close(self) -> None:
        """Free the RAM and GPU memory."""
        self._device.synchronize()
        self._copies.close()
        self._copies.free(self._there)

    def to_gpu_bytes_s(self) -> float:
        """Bytes per second."""
        copy = partial(self._copies.copy_in, self._source, self._there, None)
        return self._size.copied / _median(copy)

    def beside(self, host: NativeOps | None, to_gpu: float) -> tuple[float, float]:
        """Shares of their rates that link and CPU reach while both read RAM; 1 without a CPU."""
        if host is None:
            return 1.0, 1.0
        data = aligned_buffer(self._size.read)
        data[:] = 1
        alone = _median(lambda: host.read_all(data))
        started = time.perf_counter()
        for _ in range(self._size.copies):
            end = self._copies.copy_in(self._source, self._there, None, wait=False)
        count = 0
        while not count or not self._copies.ended(end):
            host.read_all(data)
            count += 1
        seconds = time.perf_counter() - started
        link = self._size.copies * self._size.copied / seconds / to_gpu
        return min(1.0, link), min(1.0, alone * count / seconds)

    def crossing_s(self) -> float:
        """Seconds to move a row between CPU and GPU, including the host's wait."""
        row = np.zeros((1, self._size.shape[1]), np.float32)
        return _median(lambda: self._copies.to_host(self._copies.to_gpu(row))) / 2


def _host() -> NativeOps | None:
    return NativeOps() if find_library() else None


def _median(call: Callable[[], object]) -> float:
    """Median seconds of a synchronous call."""
    call()
    samples = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
