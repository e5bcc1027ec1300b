"""Measures how to read this disk: direct or through the page cache, how many threads, block size.

Each way is tried in turn on existing files with a pipeline's pattern: pieces with gaps between
them, repeatedly; the median decides. There is no single winner across disks and machines. (io_uring
was tried too, with fio: it was not faster at any depth or block size.)
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localrt import system
from localrt.common.errors import CheckpointError, reason_of
from localrt.common.files import PAGE
from localrt.offload.reading.files import ReadMode, StoreFiles
from localrt.quant.ops.arrays import aligned_buffer

_MB = 1 << 20
_CANDIDATES = (
    ReadMode(direct=True, threads=1, block=4 * _MB),
    ReadMode(direct=True, threads=2, block=1 * _MB),
    ReadMode(direct=True, threads=2, block=2 * _MB),
    ReadMode(direct=True, threads=4, block=1 * _MB),
    ReadMode(direct=False, threads=1, block=1 * _MB),
    ReadMode(direct=False, threads=2, block=1 * _MB),
)
# The page cache costs processor time, and memory that a budget does not see: it must win clearly.
_CACHE_MUST_WIN = 1.5
_PIECE = 8 * _MB
_ASSUMED_BYTES_S = 1e9


@dataclass(frozen=True, slots=True)
class DiskProfile:
    """Read speed in bytes per second with ``mode``, and CPU seconds per byte read."""

    mode: ReadMode
    read_bytes_s: float
    cpu_s_per_byte: float

    @classmethod
    def assumed(cls) -> DiskProfile:
        """The profile assumed for an unmeasured disk."""
        return cls(ReadMode(), _ASSUMED_BYTES_S, 0.0)

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DiskProfile:
        """The inverse of ``to_dict``."""
        mode = ReadMode(**values["mode"])
        return cls(mode, float(values["read_bytes_s"]), float(values["cpu_s_per_byte"]))


def measure_disk(paths: Sequence[Path], *, sample: int = 48 * _MB, rounds: int = 3) -> DiskProfile:
    """Measure the best way to read ``paths``: files of one folder, some hundred megabytes in all.

    Takes about a second on a fast disk, and few samples on a slow one. If the files hold not even a
    page, the profile is an assumption.

    Raises:
        CheckpointError: a file cannot be read.
    """
    ranges = _ranges(paths)
    if not any(size for _, _, size in ranges):
        return DiskProfile.assumed()
    results: dict[ReadMode, list[tuple[float, float]]] = {mode: [] for mode in _CANDIDATES}
    started = time.perf_counter()
    for number in range(rounds + 1):
        for mode in _CANDIDATES:
            rate = _time(paths[0].parent, _jobs(ranges, sample, mode.block), mode)
            # The pieces that a pipeline reads are the same in each pass: some disks, and the hosts
            # of virtual ones, are faster from the second time on.
            if number or rounds == 0:
                results[mode].append(rate)
        if number and time.perf_counter() - started > 4.0:
            break
    speeds = {mode: statistics.median(s for s, _ in seen) for mode, seen in results.items()}
    best = max((m for m in speeds if m.direct), key=lambda mode: speeds[mode])
    cached = max((m for m in speeds if not m.direct), key=lambda mode: speeds[mode])
    if speeds[cached] > _CACHE_MUST_WIN * speeds[best]:
        best = cached
    return DiskProfile(best, speeds[best], statistics.median(c for _, c in results[best]))


_Job = tuple[str, int, int]  # file, offset, bytes


def _ranges(paths: Sequence[Path]) -> list[_Job]:
    try:
        return [(path.name, 0, path.stat().st_size // PAGE * PAGE) for path in paths]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {reason_of(error)}") from error


def _jobs(ranges: Sequence[_Job], nbytes: int, block: int) -> list[_Job]:
    """Blocks of ``nbytes`` in total, in pieces with gaps between them, like streamed units."""
    jobs: list[_Job] = []
    left = nbytes
    for gap in (_PIECE, 0):  # without gaps where the files are small
        for name, _, size in ranges:
            for piece in range(0 if gap else _PIECE, size, 2 * _PIECE):
                for start in range(piece, min(piece + _PIECE, size), block):
                    count = min(block, piece + _PIECE - start, size - start, left)
                    if count <= 0:
                        return jobs
                    jobs.append((name, start, count))
                    left -= count
    return jobs


def _time(folder: Path, jobs: Sequence[_Job], mode: ReadMode) -> tuple[float, float]:
    """Bytes per second, and processor seconds per byte."""
    _forget(folder, jobs)
    files = StoreFiles(folder, [name for name, _, _ in jobs], direct=mode.direct)
    buffers = [aligned_buffer(mode.block) for _ in range(mode.threads)]
    try:
        busy, started = time.process_time(), time.perf_counter()

        def work(number: int) -> None:
            for name, offset, count in jobs[number :: mode.threads]:
                files.read_into(name, offset, buffers[number][:count])

        with ThreadPoolExecutor(mode.threads) as pool:
            list(pool.map(work, range(mode.threads)))
        seconds = time.perf_counter() - started
        busy = time.process_time() - busy
    finally:
        files.close()
    total = sum(count for _, _, count in jobs)
    return total / seconds, busy / total


def _forget(folder: Path, jobs: Sequence[_Job]) -> None:
    """Drop the files from the cache, where the system lets us."""
    for name in dict.fromkeys(name for name, _, _ in jobs):
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            system.drop_cached(descriptor)
        finally:
            os.close(descriptor)
