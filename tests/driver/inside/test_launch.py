"""Kernels through the real bindings: contexts, modules, arguments, and what a driver refuses; and
that the stand-in refuses it, and does its work when somebody waits for it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from localrt.common.errors import LocalrtError
from localrt.quant.cuda import driver as calling
from localrt.quant.cuda import programs
from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.launch import launch
from localrt.quant.cuda.programs import Compiled, Program
from localrt.quant.cuda.steps import _Norm, norm
from localrt.quant.cuda.tensor import FLOAT32, Tensor, empty, upload, zeros
from tests.driver.inside.conftest import Kernels, forget
from tests.driver.standin import Driver, image
from tests.ops.cuda.emulator import Emulator

NORM = Program.of("rms_norm", OUT="float", RECORDS=0)


@pytest.fixture
def compiled(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that NVRTC has compiled; its machine code is what the driver gets."""
    seen: list[str] = []

    def compile_program(program: Program, capability: int) -> Compiled:
        seen.append(program.name)
        made = plain(program, capability)
        return Compiled(image(program, made.code), made.log)

    plain = programs.compile_program
    monkeypatch.setattr(programs, "compile_program", compile_program)
    monkeypatch.setattr(calling, "machine_code", programs.machine_code)
    return seen


def inputs(device: Any) -> tuple[Tensor, Tensor]:
    """Rows and a weight."""
    rows = np.arange(192, dtype=np.float32).reshape(3, 64)
    weight = np.linspace(0, 1, 64, dtype=np.float32)
    return upload(rows, device), upload(weight, device)


def normed(device: str) -> list[float]:
    """What ``NORM`` makes."""
    x, weight = inputs(device_of(device))
    values: list[float] = norm(x, weight, 1e-6, out=FLOAT32).to_host().tolist()
    return values


def arguments(x: Tensor, weight: Tensor, out: Tensor) -> Any:
    """Those of ``NORM``."""
    width = x.shape[1]
    return _Norm(x.address, None, weight.address, out.address, width, width, width, 1e-6)


@pytest.fixture
def expected() -> list[float]:
    """Of ``normed``."""
    before = emulate(Emulator())
    found = normed("cpu")
    emulate(before)
    return found


def test_machine_code_of_nvrtc(compiled: list[str], expected: list[float]) -> None:
    """Compiled once, kept on the disk, and once a module of each GPU."""
    for _ in range(2):
        for device in ("cuda:0", "cuda:1"):
            assert normed(device) == expected
        forget()
    assert sorted(compiled) == ["move_bytes", "rms_norm"]


def test_threads_without_a_context(gpu: Kernels, expected: list[float]) -> None:
    """A thread that has called nothing of CUDA's."""
    device = device_of("cuda:1")
    x, weight = inputs(device)
    out = empty(*x.shape, device=device)

    def start() -> None:
        assert int(cuda.cuCtxGetCurrent()[1]) == 0
        launch(device, NORM, (3, 1, 1), 256, arguments(x, weight, out))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert out.to_host().tolist() == expected


def test_what_a_gpu_refuses_is_one_line(gpu: Kernels) -> None:
    x = zeros(1, 64, device=device_of("cuda"))
    args = arguments(x, x, x)
    for grid, threads in (((1, 0, 1), 256), ((1, 1 << 17, 1), 256), ((1, 1, 1), 2048)):
        with pytest.raises(LocalrtError, match=r"^the GPU refuses a kernel: invalid argument$"):
            launch(x.device, NORM, grid, threads, args)


def test_memory_that_was_freed(gpu: Kernels, driver: Driver) -> None:
    """Whoever waits for the kernel hears of it, and whoever comes later."""
    device = device_of("cuda")
    x = zeros(1, 64, device=device)
    args = arguments(x, x, x)
    assert x.block is not None
    x.block.free()
    device.trim()
    launch(device, NORM, (1, 1, 1), 256, args)
    for _ in range(2):
        with pytest.raises(LocalrtError, match="illegal memory access"):
            device.synchronize()
    assert driver.reset(0) == 700


def test_prepare(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in memory: the disk may have no room."""

    def full(*_: object, **options: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(programs, "write_bytes", full)
    device, gate = device_of("cuda"), Program.of("quantize", IN="float", FINE=0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(device.prepare, [NORM, gate]))
    device.prepare(gate)
    normed("cuda")
    normed("cuda")
    assert sorted(compiled) == ["move_bytes", "quantize", "rms_norm"]
