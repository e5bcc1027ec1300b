"""The campaigns disk, interleavings, memory, soak and terminal in short."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.command import ROOT
from localrt.common.errors import LocalrtError
from tests.campaigns import memory, soak, terminal
from tests.campaigns.campaign import Run
from tests.conftest import needs_kernels
from tests.models.vision.tiny import qwen_folder

DISK = """
from pathlib import Path
from tests.campaigns import disk
from tests.campaigns.campaign import Run
disk.preload()
disk.FAULTS = {{"vanished": disk.FAULTS["vanished"]}}
run = Run("disk", Path({folder!r}), seed=1, seconds=60.0, count=1)
disk.disk(run)
assert not run.failures, run.failures
assert run.record["cases"], "something was tried"
"""
FLAT = {"memory": 100 << 20, "threads": 9, "descriptors": 30, "cache": 0}


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux and a compiler"
)
def test_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISK.format(folder=str(tmp_path))],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@needs_kernels
@pytest.mark.parametrize("case", ["users", "unloading", "forks"])
def test_interleavings(case: str) -> None:
    command = [sys.executable, "-m", "tests.campaigns.interleavings", "child", case, "1", "0", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "tried\n"), done.stderr[-3000:]


@pytest.mark.timeout(300)
def test_memory(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        memory.MemoryLimit.create(1 << 30).remove()
    except LocalrtError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(memory, "find_model", lambda name: tiny_folder)
    monkeypatch.setattr(memory, "_TURNS", 1)
    run = Run("memory", tmp_path, seed=1, seconds=60, count=1)
    memory.body(run)
    assert run.done("wave") == 1
    assert run.failures == []


@pytest.mark.parametrize(
    ("grows", "found"),
    [
        ({}, []),
        ({"memory": 1 << 20}, ["memory"]),
        ({"memory": 1 << 17}, []),  # 13 MB in all
        ({"threads": 1, "descriptors": 1}, ["threads", "descriptors"]),
        ({"cache": 1 << 20}, ["cache"]),
    ],
)
def test_what_is_not_flat(tmp_path: Path, grows: dict[str, int], found: list[str]) -> None:
    run = Run("soak", tmp_path, seed=1, seconds=1, count=1)
    samples = [
        {name: size + number * grows.get(name, 0) for name, size in FLAT.items()}
        for number in range(100)
    ]
    soak.judge(run, "clients", [dict.fromkeys(FLAT, 0)] * 5 + samples)
    assert [what.split()[1] for what in run.failures] == found


@pytest.mark.timeout(300)
def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_CLIENTS", 12)
    run = Run("soak", tmp_path, seed=1, seconds=3, count=40)
    soak.body(run)
    assert run.done("one-shot") == 40
    assert run.done("client: polite") > 0 < run.done("app: keys")
    # Memory still grows at the beginning, and a busy machine is slow.
    timely = ("clients:", "one-shot: memory", "app", "polite")
    assert [what for what in run.failures if not what.startswith(timely)] == []


@pytest.mark.timeout(300)
def test_an_app_that_ends_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_KEYS", ["\x11"])  # Ctrl+Q, which no run types
    run = Run("soak", tmp_path, seed=1, seconds=120, count=0)
    soak.app(run, qwen_folder(tmp_path / "model"), tmp_path)
    assert "app: it ended with 0: no report" in run.failures


@pytest.mark.parametrize("case", ["SIGTSTP", "SIGTERM", "pastes", "keys"])
def test_terminal(case: str, tmp_path: Path) -> None:
    terminal.CASES[case](random.Random(1), tmp_path)
