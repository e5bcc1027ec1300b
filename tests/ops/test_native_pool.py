"""The kernels' threads come back from sleep, and may run wherever the process may."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localrt.quant.cpu import ops as native_ops
from localrt.quant.cpu.ops import NativeOps
from tests.conftest import needs_kernels
from tests.ops.packed import random_tensor
from tests.real_models import real_model
from tests.waits import wait_for

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux"),
]

ASLEEP = 0.02  # longer than workers wait for the next job awake


def threads() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def wait_until_asleep(workers: Iterable[int]) -> None:
    """Only then are they through with what they were woken for, and may run where they may."""
    states = [Path(f"/proc/self/task/{worker}/stat") for worker in workers]
    end, looks = time.perf_counter() + 30, 0
    while looks < 3:  # in a row: one may sleep for a moment, waiting for another
        assert time.perf_counter() < end, "they do not sleep"
        time.sleep(ASLEEP)
        asleep = all(
            state.read_text("utf-8").rpartition(")")[2].split()[0] == "S" for state in states
        )
        looks = looks + 1 if asleep else 0


def rounds_with_pauses(ops: NativeOps) -> None:
    weight = ops.weight((512, 256), [random_tensor("q4_0", 512, 256)])
    x = np.ones((1, 256), np.float32)
    expected = ops.linear(x, weight)
    for _ in range(5):
        time.sleep(ASLEEP)
        np.testing.assert_array_equal(ops.linear(x, weight), expected)


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    """The cores of this process, which has them again afterwards."""
    cores = os.sched_getaffinity(0)
    yield cores
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("when", ["never", "before", "while they run"])
def test_cores_are_those_of_the_process(when: str, allowed: set[int]) -> None:
    """A pause takes none from the threads; bound to one core they stay there."""
    one, before = {min(allowed)}, threads()
    if when == "before":
        os.sched_setaffinity(0, one)
    ops = NativeOps(threads=3)
    workers = threads() - before
    assert len(workers) >= 2
    rounds_with_pauses(ops)
    wait_until_asleep(workers)
    if when == "while they run":
        for worker in workers:
            os.sched_setaffinity(worker, one)
        rounds_with_pauses(ops)
        wait_until_asleep(workers)
    cores = allowed if when == "never" else one
    assert all(os.sched_getaffinity(worker) == cores for worker in workers)


# Of a change: threads, rows of the product that follows, whether the threads are asleep by then.
changes = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40), st.booleans()), max_size=8)


@given(changes)
@example([(6, 1, False), (1, 1, False), (6, 40, True), (2, 40, False)])
def test_other_numbers_of_threads(changes: list[tuple[int, int, bool]]) -> None:
    """Those that are too many end, missing ones start, and products keep their bits."""
    fixed = NativeOps(threads=3)
    weight = fixed.weight((512, 256), [random_tensor("q4_k", 512, 256)])
    x = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    expected = fixed.linear(x, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_ops, "_RECHECK", 0.0)
        patch.setattr(native_ops, "default_threads", lambda: 2)
        before = threads()
        ops = NativeOps()
        for count, rows, asleep in changes:
            if asleep:
                wait_until_asleep(threads() - before)
            patch.setattr(native_ops, "default_threads", lambda count=count: count)
            ops.follow_limits()
            np.testing.assert_array_equal(ops.linear(x[:rows], weight), expected[:rows])
            assert ops.threads == count
            wait_for(lambda count=count: len(threads() - before) == count - 1)  # type: ignore[misc]


def run_script(code: str) -> None:
    """In a process of its own: it forks, or limits itself."""
    head = """
        import os, resource, sys, time
        from pathlib import Path
        import numpy as np
        from localrt.quant.cpu import ops as native_ops
        from localrt.quant.cpu.ops import NativeOps
        from tests.ops.test_native_pool import rounds_with_pauses, threads, wait_until_asleep
    """
    script = textwrap.dedent(head) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_fork() -> None:
    run_script("""
        before, allowed = threads(), os.sched_getaffinity(0)
        native_ops.default_threads, native_ops._RECHECK = lambda: 3, 0.0
        ops = NativeOps()
        workers = threads() - before
        rounds_with_pauses(ops)
        wait_until_asleep(workers)
        child = os.fork()
        if not child:
            native_ops.default_threads = lambda: 2
            ops.follow_limits()
            assert ops.threads == 3
            rounds_with_pauses(ops)
            rounds_with_pauses(NativeOps(threads=2))
            del ops
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert all(os.sched_getaffinity(worker) == allowed for worker in workers)
        rounds_with_pauses(ops)
    """)


SMALL_STACKS = """
import threading
def answer():
    import localrt
    with localrt.load({path!r}, threads=2, draft="off") as model:
        print(model.generate("The capital of France is " * 40, max_tokens=2).text)
threading.stack_size(16 << 20)
thread = threading.Thread(target=answer)
thread.start()
thread.join()
"""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="a thread's stack follows the limit there")
@pytest.mark.parametrize("kilobytes", [128, 192])
def test_threads_of_small_stacks(kilobytes: int) -> None:
    """musl gives a thread 128 kB, and kernels take up to 254."""
    import resource  # which only POSIX has

    code = SMALL_STACKS.format(path=str(real_model("smollm2")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_STACK, (kilobytes << 10, resource.RLIM_INFINITY)
        ),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
