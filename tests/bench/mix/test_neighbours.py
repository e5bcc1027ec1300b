"""Neighbours work until they are stopped, and end with the benchmark whatever happens."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrt.bench.mix.mix import Neighbour
from localrt.bench.mix.neighbours import NeighbourHandlers, RunningNeighbour
from tests.waits import wait_for

ROOT = Path(__file__).parents[3]
WORK: dict[str, dict[str, Any]] = {
    "compiler": {"cores": 2, "busy_s": 0.01, "idle_s": 0.01},
    "video": {"frame_ms": 1.0, "work_mb": 0.01},
    "memory": {"bytes": 1 << 20},
    "disk": {"bytes": 1 << 20},
}


@pytest.mark.parametrize("kind", WORK)
def test_work_until_it_is_stopped(kind: str) -> None:
    before = threading.active_count()
    requests = NeighbourHandlers()
    requests.start(kind, None, WORK[kind])
    assert threading.active_count() == before + WORK[kind].get("cores", 1)
    found = requests.stop()
    assert threading.active_count() == before
    assert set(found) == {"video": {"frames", "dropped", "frame_ms"}, "disk": {"copies"}}.get(
        kind, set()
    )


def test_work_for_some_time() -> None:
    before = threading.active_count()
    NeighbourHandlers().start("memory", 0.01, WORK["memory"])
    wait_for(lambda: threading.active_count() <= before)


def test_a_failure_is_reported() -> None:
    requests = NeighbourHandlers()
    requests.start("memory", None, {"bytes": 1 << 60})
    assert "error" in requests.stop()


def test_a_process_that_died_is_reported() -> None:
    neighbour = Neighbour(name="film", kind="video", work=WORK["video"])
    with RunningNeighbour(neighbour) as running:
        psutil.Process(running.pid).kill()
        found = running.stop()
    assert "the process" in found["error"]
    assert found["frame_ms"] is None


PARENT = """
import sys
from contextlib import ExitStack
from localrt.bench.mix.mix import Neighbour
from localrt.bench.mix.neighbours import RunningNeighbour
work = {"cores": 1, "busy_s": 60.0, "idle_s": 1.0}
running = RunningNeighbour(Neighbour(name="cc", kind="compiler", work=work))
running.start()
print(running.pid, flush=True)
sys.stdin.read()
"""


def test_neighbours_end_when_the_benchmark_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    wait_for(lambda: ended(pid))


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # nobody has waited for it
    except psutil.NoSuchProcess:
        return True
