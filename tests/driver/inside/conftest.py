"""In these tests localrt's calls of CUDA reach a driver: ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localrt.quant.cuda import launch as launching
from localrt.quant.cuda import products
from localrt.quant.cuda.launch import emulate
from localrt.quant.cuda.programs import Program
from tests.driver import torch_cuda
from tests.driver.standin import Driver, image, loaded
from tests.driver.torch_cuda import Kernels
from tests.ops.cuda.emulator import Emulator


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """Kernels of the CPU's ``Ops`` run too."""
    before = emulate(Emulator())
    yield
    emulate(before)


@pytest.fixture(params=[0, 3], ids=["late", "hasty"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """No error of a GPU's is left unnoticed."""
    driver = loaded()
    driver.set(seed=request.param)
    yield driver
    driver.set()
    assert [driver.reset(device) for device in (0, 1)] == [0, 0]


@pytest.fixture
def gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kernels]:
    """torch computes on two GPUs, and so do our kernels, which nobody compiles for a GPU."""

    def machine_code(program: Program, capability: int, folder: Path) -> bytes:
        return image(program)

    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(launching, "machine_code", machine_code)
    launching._gpu.cache_clear()
    kernels = torch_cuda.install(driver, monkeypatch)
    start = launching._Gpu.launch

    def launch(gpu: Any, program: Program, *args: Any) -> None:
        kernels.launches.append(program.name)
        start(gpu, program, *args)

    monkeypatch.setattr(launching._Gpu, "launch", launch)
    yield kernels
    launching._gpu.cache_clear()
    products._counters.cache_clear()  # kept for each GPU
    assert not kernels.errors
    torch_cuda.close()
    assert driver.registered == 0
