"""Passes that give way to others, and limits of cores that change while a model is loaded."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import localrt
from localrt.common.cores import find_cores
from localrt.quant.cpu import ops as native_ops
from tests.conftest import needs_kernels
from tests.inside import engine_of
from tests.test_system import ALONE_8, V2, machine
from tests.waits import wait_for

pytestmark = needs_kernels


def allowed() -> bool:
    """Whether threads of this system can be of the idle class."""
    if sys.platform != "linux":
        return False
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)).result()
        except OSError:
            return False
    return True


linux = pytest.mark.skipif(not allowed(), reason="needs Linux's classes of threads")


def idle_threads() -> set[int]:
    """The threads of this process that give way."""
    found = set()
    for folder in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            if os.sched_getscheduler(int(folder.name)) == os.SCHED_IDLE:
                found.add(int(folder.name))
    return found


@linux
def test_same_answer(tiny_folder: Path) -> None:
    with localrt.load(tiny_folder, threads=2) as model:
        expected = model.generate("one two", max_tokens=12, temperature=0).token_ids
    before = idle_threads()
    with localrt.load(tiny_folder, threads=2, gentle=True) as model:
        assert model.generate("one two", max_tokens=12, temperature=0).token_ids == expected
        assert threading.get_native_id() not in idle_threads()
        assert len(idle_threads() - before) >= 2  # the one of the passes, and the kernels'
        with model.live() as live:
            assert live.generate("one two", max_tokens=12, temperature=0).token_ids == expected
    wait_for(lambda: idle_threads() <= before)


QUOTA = f"{V2}/box/cpu.max"


class Limits:
    """Of a process on eight cores, in a control group made of files."""

    def __init__(self, root: Path) -> None:
        self.root, self.allowed = root, set(range(8))
        machine(root, {**ALONE_8, "proc/self/cgroup": "0::/box"})
        self.quota("max")

    def quota(self, quota: object) -> None:
        machine(self.root, {QUOTA: f"{quota} 100000"})

    def threads(self) -> int:
        return find_cores(self.root, self.allowed).threads


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limits:
    found = Limits(tmp_path)
    monkeypatch.setattr(native_ops, "_RECHECK", 0.0)
    monkeypatch.setattr(native_ops, "default_threads", found.threads)
    return found


def test_an_engine_follows_them(tiny_folder: Path, limits: Limits) -> None:
    def answer(model: localrt.Model) -> list[int]:
        return list(model.generate("one two", max_tokens=6, temperature=0).token_ids)

    with localrt.load(tiny_folder, threads=3) as model:
        (fixed,), expected = engine_of(model).weights.implementations, answer(model)
        limits.quota(100_000)
        assert answer(model) == expected
        assert fixed.threads == 3
    limits.quota("max")
    with localrt.load(tiny_folder) as model:
        (ops,) = engine_of(model).weights.implementations
        assert ops.threads == 8
        for quota, threads in [(100_000, 1), (350_000, 4), ("max", 8)]:
            limits.quota(quota)
            assert answer(model) == expected
            assert ops.threads == threads
        limits.allowed = {1}  # cores taken away
        assert answer(model) == expected
        assert ops.threads == 1
