"""What a process may take: the user's word, the machine, and the limits of its groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrt.offload import memory
from localrt.offload.memory import MemoryState, current_rss, memory_state, peak_rss, ram_budget

GB = 10**9
MARGIN = 6 << 20  # within a hard limit, for what is counted in pages


@pytest.mark.parametrize(
    ("word", "state", "rss", "budget"),
    [
        (4 * GB, MemoryState(16 * GB, 10 * GB), GB, 4 * GB),
        (40 * GB, MemoryState(16 * GB, 10 * GB), GB, 11 * GB),
        # A desktop keeps room, a limit binds.
        (None, MemoryState(8 * GB, 4 * GB), 0, 4 * GB - GB * 8 // 10),
        (None, MemoryState(64 * GB, 32 * GB), 0, 32 * GB - (2 << 30)),
        (None, MemoryState(GB, GB // 2, GB), GB // 4, GB * 3 // 4 - MARGIN),
        (8 * GB, MemoryState(GB, GB // 2, GB), GB // 4, GB * 3 // 4 - MARGIN),
        (GB // 8, MemoryState(GB, GB // 2, GB), GB // 4, GB // 8),
        (None, MemoryState(GB, 0, GB), 0, 0),
    ],
)
def test_budget(word: int | None, state: MemoryState, rss: int, budget: int) -> None:
    assert ram_budget(word, state=state, rss=rss) == budget


def test_here_and_now() -> None:
    rss, peak = current_rss(), peak_rss()
    assert peak is not None
    assert 10 << 20 < rss <= peak + (1 << 20)
    assert 0 < ram_budget(None) <= memory_state().available + 2 * rss
    assert ram_budget(50_000_000) == 50_000_000


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_meminfo(tmp_path: Path) -> None:
    text = (
        "MemTotal:       2000 kB\nMemFree:   100 kB\nMemAvailable:   1500 kB\nHugePages_Total: 0\n"
    )
    state = memory_state(machine(tmp_path, "0::/\n", {"proc/meminfo": text}))
    assert (state.total, state.available) == (2000 << 10, 1500 << 10)


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("cgroup", "files", "limit", "available"),
    [
        (  # a parent's limit binds, and page cache counts as free
            "0::/app/worker\n",
            {
                f"{V2}/app/worker/memory.max": "max\n",
                f"{V2}/app/memory.max": "100000000\n",
                f"{V2}/app/memory.current": "80000000\n",
                f"{V2}/app/memory.stat": "anon 5\ninactive_file 20000000\nactive_file 10000000\n",
            },
            100_000_000,
            50_000_000,
        ),
        (  # version 1, in a container that sees only the root
            "3:cpuset:/\n4:memory:/docker/abc\n0::/\n",
            {
                f"{V1}/memory.limit_in_bytes": "64000000\n",
                f"{V1}/memory.usage_in_bytes": "60000000\n",
                f"{V1}/memory.stat": "mapped_file 9\ntotal_inactive_file 8000000\n"
                "total_active_file 2000000\ntotal_mapped_file 4000000\n",
            },
            64_000_000,
            64_000_000 - (60_000_000 - 6_000_000),
        ),
        (  # systemd's MemoryHigh, lower than the hard limit
            "0::/app\n",
            {
                f"{V2}/app/memory.max": "max\n",
                f"{V2}/app/memory.high": "90000000\n",
                f"{V2}/app/memory.current": "30000000\n",
            },
            90_000_000,
            60_000_000,
        ),
        (  # mapped pages are programs in use
            "0::/app\n",
            {
                f"{V2}/app/memory.max": "500000000\n",
                f"{V2}/app/memory.current": "400000000\n",
                f"{V2}/app/memory.stat": "file_mapped 60000000\ninactive_file 200000000\n"
                "active_file 90000000\n",
            },
            500_000_000,
            500_000_000 - (400_000_000 - (290_000_000 - 60_000_000)),
        ),
        *(  # unlimited, or a group that is not seen here
            (
                f"4:memory:{path}\n",
                {f"{V1}/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"},
                None,
                0,
            )
            for path in ("/", "/../../outside")
        ),
    ],
)
def test_cgroups(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None, available: int
) -> None:
    state = memory_state(machine(tmp_path, cgroup, files))
    assert state.limit == limit
    if limit is not None:
        assert (state.total, state.available) == (limit, available)


@pytest.mark.parametrize(
    ("cgroup", "stat"),
    [
        ("0::/app/worker\n", {f"{V2}/app/memory.stat": "anon 60000000\n"}),
        ("4:memory:/app/worker\n", {f"{V1}/app/memory.stat": "rss 5\ntotal_rss 60000000\n"}),
    ],
)
@pytest.mark.parametrize(("own", "shared"), [(60_000_000, False), (20_000_000, True)])
def test_others_in_a_group(
    tmp_path: Path, cgroup: str, stat: dict[str, str], own: int, shared: bool
) -> None:
    """Processes in a parent's other groups share its limit with this one."""
    limits = {f"{V2}/app/memory.high": "400000000", f"{V1}/app/memory.limit_in_bytes": "400000000"}
    root = machine(tmp_path, cgroup, {**limits, **stat})
    assert memory_state(root, own).shared is shared


@pytest.mark.parametrize(
    ("limit", "shared", "available", "needed"),
    [
        (None, True, 250, 8),
        (400, False, 3, 0),
        (400, True, 3, 48),  # of 50
        (400, True, 51, 0),
        (64_000, True, 250, 8),
        (400, True, 150, -21),
        (200, True, 3, 24),  # the limit has been lowered
    ],
)
def test_pressure(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, shared: bool, available: int, needed: int
) -> None:
    """In MiB: what is to be freed so that others do not end this process before the next look."""
    monkeypatch.setattr(memory, "_INTERVAL_S", 0.0)
    size = None if limit is None else limit << 20
    state = MemoryState(64 << 30, available << 20, size, shared)
    monkeypatch.setattr(memory, "memory_state", lambda: state)
    ram, vram = memory.MemoryPressure(lambda: None)()
    assert (round(ram / (1 << 20)), vram) == (needed, 0)


def test_memory_pressure_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter(megabytes << 20 for megabytes in (100, 150, 300, 508))
    pressure = memory.MemoryPressure(free_vram=lambda: next(free))
    assert pressure() == (0, 0)  # just now
    monkeypatch.setattr(memory, "_INTERVAL_S", 0.0)
    assert [pressure()[1] >> 20 for _ in range(4)] == [56, 0, 0, -100]
