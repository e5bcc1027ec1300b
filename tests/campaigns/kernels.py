"""Random calls of the CPU kernels, built with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import re
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.common.command import ROOT
from localrt import system
from localrt.quant.cpu import abi
from localrt.quant.ops import arrays
from tests.campaigns.campaign import Run, campaign

_TOLD = re.compile(r"ERROR: |runtime error:|Timeout|Error: ")


def in_children(run: Run, cases: Iterable[str], *, at_once: int, **environment: str) -> None:
    """Try all ``cases`` until ``run`` is over: ``at_once`` tries for each child of its module."""
    for case in cases:
        while run.goes_on(case):
            first = run.done(case)
            count = min(at_once, run.count - first)
            command = [sys.executable, "-m", "tests.campaigns.kernels", "child", case]
            command += [f"{number}" for number in (run.seed, first, count)]
            given = os.environ | environment
            child = subprocess.run(command, cwd=ROOT, env=given, capture_output=True)
            output, told = (text.decode(errors="replace") for text in (child.stdout, child.stderr))
            for line in output.splitlines():
                if line.startswith("found "):
                    run.found(case, line[6:], child.stderr)
                run.tried(case, line == "tried")
            if child.returncode:
                why = next(filter(_TOLD.search, told.splitlines()), told[-200:])
                run.found(case, f"exit status {child.returncode}: {why}", child.stderr)
                run.tried(case, run.done(case) < first + count)


def try_here(
    attempt: Callable[[random.Random], None], patience_s: int, case: str, *numbers: str
) -> None:
    """Be such a child. A try that takes longer than ``patience_s`` shows its stacks and ends it."""
    seed, first, count = map(int, numbers)
    for number in range(first, first + count):
        faulthandler.dump_traceback_later(patience_s, exit=True)
        try:
            attempt(random.Random(f"{seed} {case} {number}"))
        except Exception as error:  # noqa: BLE001 - it is noted, and the next try begins
            traceback.print_exc()
            print(f"found {type(error).__name__}: {' '.join(f'{error}'.split())[:200]}")
        print("tried", flush=True)


def body(run: Run) -> None:
    """Call every group of kernels with random arguments, under sanitizers."""
    from tests.campaigns.test_kernels import CASES

    build = ["scripts/sanitize", "--build"]
    preload = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    in_children(run, CASES, at_once=100, LD_PRELOAD=preload.strip(), **options)


def _exact_buffer(nbytes: int, **_options: Any) -> Any:
    """Zeros of which the sanitizer knows where they end."""
    library, place = ctypes.CDLL(None), ctypes.c_void_p()
    assert library.posix_memalign(ctypes.byref(place), 64, max(nbytes, 1)) == 0
    buffer = (ctypes.c_uint8 * nbytes).from_address(place.value or 0)
    weakref.finalize(buffer, library.free, place)
    ctypes.memset(buffer, 0, nbytes)
    return np.frombuffer(buffer, np.uint8)


def child(case: str, *numbers: str) -> None:
    """Make tries of ``case``, with sanitizers if they are preloaded."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        abi._FOLDER = ROOT / "build" / "sanitized"
        arrays.aligned_buffer = system.map_zeros = system.reserve_zeros = _exact_buffer
        arrays._LARGEST_REGION = 0  # one for each weight
    from tests.campaigns.test_kernels import CASES  # it asks the library what it can

    try_here(CASES[case], 300, case, *numbers)


if __name__ == "__main__":
    campaign("kernels", body, count=5000, child=child)
