"""Passes that give way to other programs: which threads compute, and the same answers."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import localrt
from localrt.common.cores import giving_way
from tests.server.conftest import needs_kernels
from tests.waits import wait_for


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
def test_own_thread() -> None:
    """The thread gives way, and what it starts; the one that asks does not."""
    mine, before = threading.get_native_id(), idle_threads()
    with giving_way("gentle") as thread:
        own = thread.submit(threading.get_native_id).result()
        assert own in idle_threads()
        assert mine not in idle_threads()
    wait_for(lambda: idle_threads() <= before)


@linux
@needs_kernels
@pytest.mark.parametrize("ram", [None, "streamed"])
def test_same_answer(tiny_folder: Path, ram: str | None) -> None:
    options = {} if ram is None else {"shrinkable": True}
    with localrt.load(tiny_folder, threads=2, **options) as model:  # type: ignore[arg-type]
        expected = model.generate("one two", max_tokens=12, temperature=0).token_ids
    before = idle_threads()
    with localrt.load(tiny_folder, threads=2, gentle=True, **options) as model:  # type: ignore[arg-type]
        assert model.generate("one two", max_tokens=12, temperature=0).token_ids == expected
        assert threading.get_native_id() not in idle_threads()
        assert len(idle_threads() - before) >= 2  # the one of the passes, and the kernels'
        with model.live() as live:
            assert live.generate("one two", max_tokens=12, temperature=0).token_ids == expected
    wait_for(lambda: idle_threads() <= before)


def test_not_a_flag(tiny_folder: Path) -> None:
    with pytest.raises(localrt.OptionError, match="gentle must be true or false"):
        localrt.load(tiny_folder, gentle="yes")  # type: ignore[arg-type]
