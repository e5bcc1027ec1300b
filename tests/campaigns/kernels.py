"""Random calls of the CPU kernels, built with the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import weakref
from typing import Any

import numpy as np

from benchmarks.common.command import ROOT
from localrt import system
from localrt.quant.cpu import abi
from localrt.quant.ops import arrays
from tests.campaigns.campaign import Run, campaign, in_children, try_here


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
