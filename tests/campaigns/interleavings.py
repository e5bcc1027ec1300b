"""Threads that meet at bad moments, and forks at any: answers stay the same, and nothing hangs."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

from benchmarks.common.command import ROOT
from tests.campaigns.campaign import Run, campaign, in_children, try_here

_POOL = ROOT / "build" / "campaigns" / "pool"
_BUILD = "g++ -std=c++17 -O1 -g -fsanitize=thread -pthread -Iquant/cpu/csrc -o"
_SOURCES = ("tests/campaigns/pool.cpp", "quant/cpu/csrc/pool.cpp")
_draws = threading.local()


def body(run: Run) -> None:
    """Delay threads at locks and queues, fork, and run the kernels' threads under a sanitizer."""
    from tests.campaigns.test_interleavings import CASES

    _POOL.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*_BUILD.split(), _POOL, *_SOURCES], cwd=ROOT, check=True)
    in_children(run, ("kernels' threads", *CASES), at_once=20)


def kernels_threads(draw: random.Random) -> None:
    """One run of ``pool.cpp``."""
    done = subprocess.run([_POOL, f"{draw.getrandbits(16)}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000] + done.stdout


def _delay(seed: int) -> None:
    """Do nothing, let another thread run, or sleep for up to 3 ms."""
    if not hasattr(_draws, "draw"):
        thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
        _draws.draw = random.Random(f"{seed} {getattr(thread, 'name', '')}")
    chance = _draws.draw.random()
    if chance > 0.5:
        time.sleep(0 if chance < 0.95 else (chance - 0.95) * 0.06)


def delay_threads(seed: int) -> None:
    """Give every lock and queue made from now on such delays."""

    class Delayed:
        def __init__(self, make: Any) -> None:
            self.lock = make()

        def acquire(self, *args: Any, **options: Any) -> Any:
            _delay(seed)
            return self.lock.acquire(*args, **options)

        def release(self) -> None:
            self.lock.release()
            _delay(seed)

        __enter__ = acquire

        def __exit__(self, *_error: object) -> None:
            self.release()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.lock, name)

        def get(self, *args: Any, **options: Any) -> Any:
            _delay(seed)
            return self.lock.get(*args, **options)

    kinds: tuple[Any, ...] = (threading.Lock, threading.RLock, queue.SimpleQueue)
    delayed = {make: partial(Delayed, make) for make in kinds}
    for module in list(sys.modules.values()):
        for name in ("Lock", "RLock", "SimpleQueue"):
            if (make := vars(module).get(name)) in delayed:
                setattr(module, name, delayed[make])
    sys.setswitchinterval(1e-5)


def child(case: str, seed: str, first: str, count: str) -> None:
    """Make tries of ``case``; threads of a model are delayed."""
    from tests.campaigns import test_interleavings

    attempt = test_interleavings.CASES.get(case, kernels_threads)
    if attempt is not kernels_threads:
        kind = "mixture" if "mixture" in case else "dense"
        test_interleavings.expected_answers(kind)  # before threads are delayed
        delay_threads(int(seed) + int(first))
    try_here(attempt, 240, case, seed, first, count)


if __name__ == "__main__":
    campaign("interleavings", body, count=500, child=child)
