"""Our libcuda.so.1, for the real bindings: loaded once, in a process that has no other.

The system finds a library that is loaded by the name it has: what opens ``libcuda.so.1`` later
gets this one. It takes as modules what ``image`` makes: the kernel for the CPU, alone or behind the
machine code of NVRTC.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from localrt.quant.cuda.programs import Program
from tests.ops.cuda.emulator import built, compiled, joined, runtime

_SOURCES = Path(__file__).with_name("libcuda")
_FLAGS = ("-O1", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1")


GPUS = 3
"""The work of the last one is done as it is submitted: no wait can be missing there."""


class Driver:
    """What the stand-in has for tests alone."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def set(self, *, memory: int = 8 << 30, pinned: int = 1 << 62, seed: int = 0) -> None:
        """Bytes of each GPU, and of RAM that may be pinned from now on. Work runs when somebody
        waits for it; with a ``seed``, some of it sooner.
        """
        size = ctypes.c_size_t
        self._library.standin_set(size(memory), size(pinned), ctypes.c_uint(seed))

    def begin(self) -> None:
        """Empty GPUs: what is left in them, and is freed late, does not count any more."""
        self._library.standin_begin()

    def has(self, address: int, nbytes: int) -> bool:
        """Whether all of it is a GPU's memory, or pinned."""
        return bool(self._library.standin_has(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)))

    @property
    def registered(self) -> int:
        """Pieces of RAM that are registered."""
        return int(self._library.standin_registered())

    def reset(self, device: int) -> int:
        """Forget a GPU's fault, and say which it was: 0 is none."""
        return int(self._library.standin_reset(device))


def call(name: str, *args: Any) -> Any:
    """What a function of the driver returns, which must not refuse."""
    from cuda.bindings import driver

    status, *values = getattr(driver, name)(*args)
    assert int(status) == 0, f"{name}: {status.name}"
    return values[0] if len(values) == 1 else values or None


@cache
def loaded() -> Driver:
    """The driver, begun."""
    runtime()
    text = joined('#include "libcuda.cpp"', lambda name: (_SOURCES / name).read_text("utf-8"))
    library = ctypes.CDLL(str(built("libcuda", text, *_FLAGS)))
    from cuda.bindings import driver

    (status,) = driver.cuInit(0)
    assert int(status) == 0, status
    _, count = driver.cuDeviceGetCount()
    assert count == GPUS, "it is another driver"
    return Driver(library)


def image(program: Program, code: bytes = b"") -> bytes:
    """A module of ``program``: behind ``code``, its machine code, if that is given."""
    return code + b"emulated kernel:" + str(compiled(program)).encode()
