"""In these tests localrt's calls of CUDA reach a driver: a card's, or the stand-in.

They are collected where there is a GPU. ``test_driver.py`` starts a process that has the stand-in;
on a card only those with the marker ``gpu`` run, which ask for nothing that only the stand-in has.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from localrt.loading import gpu as opening
from localrt.quant.cuda import cublas, cuda_memory, products
from localrt.quant.cuda import driver as calling
from localrt.quant.cuda import driver as devices
from localrt.quant.cuda.driver import Cuda, Graph, count_gpus
from localrt.quant.cuda.programs import Program
from tests.driver.inside.gpus import GPUS, STANDIN
from tests.driver.standin import Driver, image, loaded
from tests.offload.placed import Model, pack_synthetic

collect_ignore_glob = [] if count_gpus() else ["test_*.py"]

hasty = pytest.mark.parametrize("begun", [0, 3], ids=["late", "hasty"], indirect=True)
"""Also with a driver that does some of its work sooner than somebody waits for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A card has no more than what is for any GPU."""
    if not STANDIN:
        here = Path(__file__).parent
        for item in items:
            if item.path.parent == here and item.get_closest_marker("gpu") is None:
                item.add_marker(pytest.mark.skip(reason="needs the stand-in for CUDA's driver"))


@dataclass
class Kernels:
    """What has been started, in order: kernels by their names, and ``record`` and ``replay`` of
    graphs; apart from them, kernels that move few values to a GPU or back.
    """

    launches: list[str] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)


@pytest.fixture
def begun(request: pytest.FixtureRequest) -> Iterator[None]:
    """New GPUs. No error of theirs is left unnoticed."""
    if STANDIN:
        loaded().begin()
        loaded().set(seed=getattr(request, "param", 0))
    yield
    if STANDIN:
        loaded().set()
        assert not any(loaded().reset(device) for device in range(len(GPUS)))


@pytest.fixture
def driver(begun: None) -> Driver:
    """The stand-in."""
    if not STANDIN:
        pytest.skip("needs the stand-in for CUDA's driver")
    return loaded()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs' rates are not measured, which takes minutes here, but copies of a megabyte."""
    monkeypatch.setattr(opening, "_rates", lambda *_, **__: None)
    monkeypatch.setattr(cuda_memory, "_SAMPLE", 1 << 20)


@pytest.fixture
def gpu(begun: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Kernels]:
    """GPUs whose launches are noted. For the stand-in nobody compiles."""
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

    if STANDIN:
        monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(calling, "machine_code", machine_code)
        monkeypatch.setattr(cublas, "find_spec", lambda name: None)  # torch would need a real GPU
    forget()
    noted(Cuda, "launch")
    noted(Cuda, "begin_graph", "record")
    noted(Graph, "replay", "replay")
    yield kernels
    forget()
    gc.freeze()  # what is left is not looked through again: collecting garbage would take seconds
    assert not STANDIN or loaded().registered == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Three layers and a head of four slices, its own matrix."""
    folder = pack_synthetic(tmp_path_factory.mktemp("llama"), vocab=1500, layers=3, hidden=128)
    with closing(Model(folder)) as model:
        yield model


def forget() -> None:
    """Begin anew with GPUs, and what is kept for each."""
    for kept in (products._counters, cublas.multiplies):
        kept.cache_clear()
    gc.collect()
    for name in GPUS:
        devices.device_of(name).trim()
    devices._cuda.cache_clear()
    gc.collect()
