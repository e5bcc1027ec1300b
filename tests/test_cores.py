"""Default threads, on machines made of files."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from localrt.common.cores import Cores, default_threads, find_cores
from localrt.system.windows import count_records

CPU = "sys/devices/system/cpu"


def machine(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def siblings(*groups: str) -> dict[str, object]:
    """Topology files of physical cores, each written as Linux lists its logical cores."""
    files = {}
    for group in groups:
        first, _, last = group.replace(",", "-").partition("-")
        for number in {first, last or first}:
            files[f"{CPU}/cpu{number}/topology/thread_siblings_list"] = group
    return files


def each(name: str, *values: int) -> dict[str, object]:
    return {f"{CPU}/cpu{number}/{name}": value for number, value in enumerate(values)}


CLOCK = "cpufreq/cpuinfo_max_freq"
ALONE_8 = siblings(*map(str, range(8)))
RYZEN_5600 = siblings(*(f"{n},{n + 6}" for n in range(6)))  # two threads a core
CORE_12700 = {  # 8 performance cores of two threads, 4 efficiency cores
    **siblings(*(f"{n}-{n + 1}" for n in range(0, 16, 2)), *map(str, range(16, 20))),
    "sys/devices/cpu_core/cpus": "0-15",
    "sys/devices/cpu_atom/cpus": "16-19",
    **each(CLOCK, *[4_900_000] * 16, *[3_600_000] * 4),
}
RYZEN_8500 = {  # Zen 4 and Zen 4c
    **siblings(*(f"{n}-{n + 1}" for n in range(0, 12, 2))),
    **each(CLOCK, *[5_000_000] * 4, *[3_700_000] * 8),
}
RK3588 = {**ALONE_8, **each("cpu_capacity", 397, 397, 397, 397, 1024, 1024, 1024, 1024)}
THREE_KINDS = {**ALONE_8, **each("cpu_capacity", 310, 310, 310, 310, 750, 750, 750, 1024)}
NO_CAPACITY = {**ALONE_8, **each(CLOCK, *[1_400_000] * 4, *[2_800_000] * 4)}


@pytest.mark.parametrize(
    ("files", "allowed", "cores"),
    [
        (RYZEN_5600, range(12), Cores(6, 0, 6)),
        (RYZEN_5600, range(6), Cores(6, 0, 6)),
        (RYZEN_5600, {0, 6, 1}, Cores(2, 0, 2)),
        (CORE_12700, range(20), Cores(8, 4, 8)),
        (CORE_12700, {0, 1, 2, 16}, Cores(2, 1, 2)),
        (CORE_12700, range(16, 20), Cores(4, 0, 4)),  # the efficiency cores are all it has
        (ALONE_8, range(8), Cores(8, 0, 8)),  # a Zen 4 with SMT off
        (RYZEN_8500, range(12), Cores(6, 0, 6)),
        (RK3588, range(8), Cores(4, 4, 4)),
        (RK3588, {0, 1, 7}, Cores(1, 2, 1)),
        (RK3588, {0, 1}, Cores(2, 0, 2)),
        (THREE_KINDS, range(8), Cores(4, 4, 4)),
        (NO_CAPACITY, range(8), Cores(4, 4, 4)),
        ({**ALONE_8, **each("cpu_capacity", 1024, 850)}, range(8), Cores(8, 0, 8)),
        ({}, range(2), Cores(2, 0, 2)),  # a virtual machine that shows nothing
    ],
)
def test_find_cores(
    tmp_path: Path, files: Mapping[str, object], allowed: range | set[int], cores: Cores
) -> None:
    assert find_cores(machine(tmp_path, files), set(allowed)) == cores


V1, V2 = "sys/fs/cgroup/cpu", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("groups", "files", "threads"),
    [
        ("0::/app/worker", {f"{V2}/app/worker/cpu.max": "max 100000"}, 8),
        ("0::/app/worker", {f"{V2}/app/cpu.max": "300000 100000"}, 3),  # a parent's limit binds
        ("0::/", {f"{V2}/cpu.max": "20000 100000"}, 1),
        ("0::/", {f"{V2}/cpu.max": "1600000 100000"}, 8),
        ("3:cpu,cpuacct:/", {f"{V1}/cpu.cfs_quota_us": -1, f"{V1}/cpu.cfs_period_us": 100_000}, 8),
        (
            "3:cpu,cpuacct:/docker/abc",  # a folder of the host
            {f"{V1}/cpu.cfs_quota_us": 250_000, f"{V1}/cpu.cfs_period_us": 50_000},
            5,
        ),
        ("0::/", {f"{V2}/cpu.max": ""}, 8),
    ],
)
def test_limited_cpu_time(
    tmp_path: Path, groups: str, files: Mapping[str, object], threads: int
) -> None:
    root = machine(tmp_path, {**ALONE_8, **files, "proc/self/cgroup": groups})
    assert find_cores(root, set(range(8))) == Cores(8, 0, threads)


def windows(*cores: tuple[int, int, int]) -> bytes:
    """Records of (efficiency class, mask, group)."""
    form = "<IIBB20xHQH6x"
    return b"".join(struct.pack(form, 0, 48, 1, kind, 1, mask, at) for kind, mask, at in cores)


@pytest.mark.parametrize(
    ("records", "allowed", "processor", "counts"),
    [
        (windows((1, 3, 0), (1, 12, 0), (0, 16, 0)), 31, "Intel64, GenuineIntel", (2, 1)),
        (windows((1, 3, 0), (1, 12, 0), (0, 16, 0)), 17, "Intel64, GenuineIntel", (1, 1)),
        (windows((1, 3, 0), (0, 12, 0)), 15, "AMD64, AuthenticAMD", (2, 0)),
        (windows((0, 3, 0), (0, 3, 1)), 3, "AMD64, AuthenticAMD", (2, 0)),
        (b"", 3, "", (0, 0)),
    ],
)
def test_windows_records(
    records: bytes, allowed: int, processor: str, counts: tuple[int, int]
) -> None:
    assert count_records(records, allowed, processor) == counts


def test_here() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
    cores = find_cores()
    assert cores.threads <= cores.performance
