"""In these tests localrt's calls of CUDA reach a driver: ours."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localrt.loading import gpu as opening
from localrt.quant.cuda import cublas, cuda_memory, products
from localrt.quant.cuda import driver as calling
from localrt.quant.cuda import driver as devices
from localrt.quant.cuda.driver import Cuda, Graph
from localrt.quant.cuda.programs import Program
from tests.driver.standin import GPUS, Driver, image, loaded

once = pytest.mark.parametrize("driver", [0], ids=["late"], indirect=True)
"""What is counted is the same however hasty the driver is."""


@dataclass
class Kernels:
    """What has been started, in order: kernels by their names, and ``record`` and ``replay`` of
    graphs; apart from them, kernels that move few values to a GPU or back.
    """

    launches: list[str] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)


@pytest.fixture(params=[0, 3], ids=["late", "hasty"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """No error of a GPU's is left unnoticed."""
    driver = loaded()
    driver.begin()
    driver.set(seed=request.param)
    yield driver
    forget()
    driver.set()
    assert not any(driver.reset(device) for device in range(len(GPUS)))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs' rates are not measured, which takes minutes here, but copies of a megabyte."""
    monkeypatch.setattr(opening, "_rates", lambda *_, **__: None)
    monkeypatch.setattr(cuda_memory, "_SAMPLE", 1 << 20)


@pytest.fixture
def gpu(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kernels]:
    """New GPUs, for which nobody compiles."""
    kernels = Kernels()

    def machine_code(program: Program, capability: int, folder: Path) -> bytes:
        return image(program)

    def noted(kind: type, name: str, note: str | None = None) -> None:
        plain = getattr(kind, name)

        def call(self: Any, *args: Any) -> Any:
            name = note or args[0].name
            (kernels.moves if name == "move_bytes" else kernels.launches).append(name)
            return plain(self, *args)

        monkeypatch.setattr(kind, name, call)

    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calling, "machine_code", machine_code)
    monkeypatch.setattr(cublas, "find_spec", lambda name: None)  # torch would need a real GPU
    forget()
    noted(Cuda, "launch")
    noted(Cuda, "begin_graph", "record")
    noted(Graph, "replay", "replay")
    yield kernels
    forget()
    assert driver.registered == 0


def forget() -> None:
    """Begin anew with GPUs, and what is kept for each."""
    for kept in (products._counters, cublas.multiplies):
        kept.cache_clear()
    gc.collect()
    for name in GPUS:
        devices.device_of(name).trim()
    devices._cuda.cache_clear()
    gc.collect()
