"""The kernels of ``quant/cuda/src`` as machine code: compiled by NVRTC for one GPU and cached on
disk. For a GPU newer than the compiler they are PTX, which the driver compiles when it loads them.

A ``Program`` is one kernel with its macros. Only those that a model needs are compiled. Compiled
code is cached by sources, macros, the GPU's generation and the compiler's version, so it is never
out of date. This module knows neither tensors nor launches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

from localrt.common.errors import LocalrtError, MissingExtraError
from localrt.common.extras import install
from localrt.common.files import write_bytes

OLDEST = 75
"""The first generation of GPUs with products of 8-bit integers: Turing."""

NO_COMPILER = f"CUDA's compiler is missing: {install('gpu')}"

_FLAGS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")


@dataclass(frozen=True, slots=True)
class Program:
    """The kernel of ``quant/cuda/src/NAME.cu``, compiled for ``macros``."""

    name: str
    macros: tuple[tuple[str, str], ...]

    @classmethod
    @lru_cache(maxsize=None, typed=True)  # called by every launch
    def of(cls, name: str, **macros: object) -> Program:
        """The program with macros given by name."""
        return cls(name, tuple((key, str(value)) for key, value in macros.items()))

    @property
    def text(self) -> str:
        """The source text to compile."""
        defined = "".join(f"#define {key} {value}\n" for key, value in self.macros)
        return f'{defined}#include "{self.name}.cu"\n'


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code or PTX, and the compiler's figures: registers, shared memory, spills."""

    code: bytes
    log: str


@cache
def sources() -> Mapping[str, bytes]:
    """The files of ``quant/cuda/src`` by their names."""
    folder = files("localrt.quant.cuda").joinpath("src")
    return {
        entry.name: entry.read_bytes()
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith((".cu", ".cuh"))
    }


def machine_code(program: Program, capability: int, folder: Path) -> bytes:
    """``program`` for GPUs of ``capability`` (89 is 8.9), from the cache in ``folder`` if it is
    there.

    Raises:
        MissingExtraError: there is no NVRTC.
        LocalrtError: it does not compile: the GPU is too new or too old.
    """
    version, _ = toolchain()
    made_from = "\0".join((version, str(capability), *_FLAGS, program.text, *sources())).encode()
    key = hashlib.sha256(b"\0".join((made_from, *sources().values())))
    path = folder / f"{program.name}-{key.hexdigest()[:24]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_program(program, capability).code
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path, code)  # nothing checks it when it is read
    except OSError:
        pass  # it is compiled again next time
    return code


def kept_kernels(cache: Path) -> int:
    """The number of compiled programs in localrt's ``cache`` folder."""
    return len(list(kernels_folder(cache).glob("*.cubin")))


def kernels_folder(cache: Path) -> Path:
    """Where compiled programs are kept."""
    return cache / "kernels"


def compile_program(program: Program, capability: int) -> Compiled:
    """See ``machine_code``; always compiles."""
    nvrtc, found = _nvrtc(), sources()
    names = [name.encode() for name in found]
    (made,) = _checked(
        nvrtc.nvrtcCreateProgram(
            program.text.encode(), b"program.cu", len(names), [*found.values()], names
        )
    )
    try:
        newest = max(_checked(nvrtc.nvrtcGetSupportedArchs())[0])
        target = f"sm_{capability}" if capability <= newest else f"compute_{newest}"
        options = [f"--gpu-architecture={target}", *_FLAGS]
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(made, len(encoded), encoded)
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(made))[0])
        _checked(nvrtc.nvrtcGetProgramLog(made, log))
        said = log.rstrip(b" \0").decode(errors="replace")
        if int(status) != 0:
            first = next((line for line in said.splitlines() if "error" in line), str(status))
            raise LocalrtError(
                f"the kernel {program.name} does not compile for a GPU of compute capability "
                f"{capability / 10}: {first}"
            )
        if capability <= newest:
            code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(made))[0])
            _checked(nvrtc.nvrtcGetCUBIN(made, code))
        else:
            code = bytearray(_checked(nvrtc.nvrtcGetPTXSize(made))[0])
            _checked(nvrtc.nvrtcGetPTX(made, code))
        return Compiled(bytes(code), said)
    finally:
        nvrtc.nvrtcDestroyProgram(made)


@cache
def toolchain() -> tuple[str, str]:
    """NVRTC's version, and a digest of the sources.

    Raises:
        MissingExtraError: there is no NVRTC.
    """
    version = ".".join(map(str, _checked(_nvrtc().nvrtcVersion())))
    digest = hashlib.sha256(b"\0".join((*map(str.encode, sources()), *sources().values())))
    return version, digest.hexdigest()[:24]


def has_compiler() -> bool:
    """Whether NVRTC is installed and works."""
    try:
        _nvrtc()
    except MissingExtraError:
        return False
    return True


@cache
def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise MissingExtraError(f"{NO_COMPILER} ({error})") from error
    module: ModuleType = nvrtc
    return module


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a call without its status, which is checked."""
    status, *values = answer
    if int(status) != 0:
        raise LocalrtError(f"the CUDA compiler failed: {status}")
    return tuple(values)
