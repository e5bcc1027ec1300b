"""The CUDA kernels on a CPU: compiled by g++ against ``emulated.h``, run by ``emulator.cpp``.

What is compiled is kept in ``build/emulated`` by what it was compiled from.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

from localrt.quant.cuda.device import Grid
from localrt.quant.cuda.programs import Program, sources

_HERE = Path(__file__).parent
_BUILT = _HERE.parents[2] / "build" / "emulated"
_FLAGS = ("-std=c++17", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-mfma")


class Emulator:
    """See ``Launcher``. ``launches`` are the programs that ran, in order."""

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed
        self.launches: list[Program] = []

    def launch(self, program: Program, grid: Grid, threads: int, args: ctypes.Structure) -> None:
        """Run it, blocks and threads in an order of ``seed``."""
        self.launches.append(program)
        size, run = (ctypes.c_uint * 3)(*grid), runtime().emulate
        kernel, nbytes = _kernel(program)
        assert ctypes.sizeof(args) == nbytes, f"{program.name} takes {nbytes} bytes of arguments"
        run(kernel, ctypes.byref(args), size, threads, self.seed)

    def prepare(self, program: Program) -> None:
        """Nothing: what is launched is compiled then."""


@cache
def runtime() -> ctypes.CDLL:
    """What kernels need to run, for all of this process."""
    text = (_HERE / "emulator.cpp").read_text(encoding="utf-8")
    return ctypes.CDLL(str(built("runtime", text, "-O2")), mode=ctypes.RTLD_GLOBAL)


@cache
def _kernel(program: Program) -> tuple[ctypes.c_void_p, int]:
    """Its function, and the bytes of its argument."""
    library = ctypes.CDLL(str(compiled(program)))
    nbytes = ctypes.c_uint.in_dll(library, "run_size").value
    return ctypes.cast(library.run, ctypes.c_void_p), nbytes


def compiled(program: Program) -> Path:
    """The kernel as a library: ``run``, ``run_size`` of its argument, and ``run_name``."""
    header = (_HERE / "emulated.h").read_text(encoding="utf-8")
    kernel = joined(program.text, lambda name: sources()[name].decode())
    text = f"{header}{kernel}\n"
    # A kernel's one argument is a struct by its value.
    text += (
        "template <class A> void call(void (*kernel)(A), const void* args) "
        "{ kernel(*(const A*)args); }\n"
        "template <class A> constexpr unsigned size(void (*)(A)) { return sizeof(A); }\n"
        f'extern "C" {{\nvoid run(const void* args) {{ call({program.name}, args); }}\n'
        f"unsigned run_size = size({program.name});\n"
        f'const char* run_name = "{program.name}";\n}}\n'
    )
    return built(program.name, text, "-O1")


def joined(text: str, read: Callable[[str], str]) -> str:
    """C++ with what it includes in its place, once each; ``read`` gives a file by its name."""
    seen: set[str] = set()

    def inlined(text: str) -> str:
        lines = []
        for line in text.splitlines():
            if not line.startswith('#include "'):
                lines.append(line)
                continue
            name = line.split('"')[1]
            if name not in seen:
                seen.add(name)
                lines.append(inlined(read(name)))
        return "\n".join(line for line in lines if line != "#pragma once")

    return inlined(text)


def built(name: str, text: str, *flags: str) -> Path:
    """A shared library of C++; two processes may make the same at once."""
    key = hashlib.sha256("\0".join((text, *flags, *_FLAGS)).encode()).hexdigest()[:20]
    path = _BUILT / f"{name}-{key}.so"
    if not path.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        command = ["g++", *flags, *_FLAGS, "-x", "c++", "-", "-o", str(aside)]
        subprocess.run(command, input=text, text=True, check=True)
        aside.replace(path)
    return path
