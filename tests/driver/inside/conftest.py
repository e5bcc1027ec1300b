"""In these tests localrt's calls of CUDA reach a driver: a card's, or the stand-in.

They are collected where there is a GPU. ``test_driver.py`` starts a process that has the stand-in;
on a card only those with the marker ``gpu`` run, which ask for nothing that only the stand-in has.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from localrt.common.errors import LocalrtError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock, Event, Gpu
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.placement import Placement, Where
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda import cublas, measuring, products
from localrt.quant.cuda import driver as calling
from localrt.quant.cuda import driver as devices
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.driver import Cuda, Graph, count_gpus
from localrt.quant.cuda.gpu_cache import GpuRates
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import UINT8, Tensor
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Forward
from tests.driver.standin import Driver, image, loaded
from tests.offload.placed import MODE, PLENTY, Model, open_decoder, pack_synthetic, place_on_gpu

STANDIN = "LOCALRT_STANDIN" in os.environ
"""Whether this process has the stand-in for CUDA's driver."""
if STANDIN:
    loaded()
GPUS = [f"cuda:{number}" for number in range(count_gpus())]
AT_ONCE = GPUS[-1] if GPUS else "cuda"
"""The stand-in does this one's work as it is submitted: no wait can be missing there."""

COSTS = ExpertCosts(cpu=4e-5, gpu=1.1e-5, fetch=5e-5)

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

    def refuse(*_: Any, **__: Any) -> GpuRates:
        raise LocalrtError("it is not measured")

    monkeypatch.setattr(measuring, "gpu_rates", refuse)
    monkeypatch.setattr(CudaCopies, "measure", partialmethod(CudaCopies.measure, 1 << 20))


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


def quantized(folder: Path, format_: str = "int4-g32", **recipe: Any) -> Path:
    """The model of a folder as a store within it, in a format that the kernels read."""
    from localrt.quantize.quantize import Recipe, quantize_model

    with closing(open_checkpoint(folder)) as source:
        made = Recipe(format_, **{"method": "rtn", **recipe})
        return quantize_model(source, folder / "store", made, threads=1).path


def synthetic(**sizes: int) -> Callable[..., Iterator[Model]]:
    """A fixture: a Llama of these sizes, in int4-g32."""

    def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
        folder, formats = tmp_path_factory.mktemp("llama"), {"": "int4-g32"}
        with closing(Model(pack_synthetic(folder, formats=formats, **sizes))) as model:
            yield model

    return pytest.fixture(scope="session")(made)


small = synthetic(vocab=256, hidden=64, inner=64, layers=2)
coded = synthetic(vocab=2100, hidden=128, inner=64, layers=2)  # its head has five slices


@pytest.fixture(scope="session")
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


# -- GPUs ------------------------------------------------------------------------------------------


class StepByStep(CudaOps):
    """Records nothing."""

    def recorder(self) -> None:  # type: ignore[override]
        return None

    def graphed(self, forward: Forward) -> Forward:
        return forward


def made(device: str, *, recorded: bool = True) -> Callable[[Clock], CudaGpu]:
    """What makes the GPU of a ``device``, which computes step by step if it is ``AT_ONCE`` or not
    ``recorded``.
    """
    kind = CudaOps if recorded and device != AT_ONCE else StepByStep
    return lambda clock: CudaGpu(
        clock, kind(device=device), CudaCopies(device=device), capacity=PLENTY
    )


class SameKernels(CudaGpu):
    """The stand-in's memory, copies and events with the CPU's kernels, which read that memory.

    Whoever computes what, results are the resident decoder's to the bit: our kernels on the two
    sides round differently. A kernel's work is done when it is called.
    """

    def __init__(self, clock: Clock, ops: NativeOps, *, capacity: int = PLENTY) -> None:
        kernels = NativeOps(threads=1, kv_format=ops.kv_format)  # with caches of their own
        super().__init__(clock, kernels, CudaCopies("cuda:0"), capacity=capacity)
        self._tensors = dict[int, Tensor]()  # what is allocated, by its address
        self.registered = 0  # pieces of RAM that were pinned so far

    def host_buffer(self, nbytes: int) -> Bytes:
        self.registered += 1
        return super().host_buffer(nbytes)

    def to_gpu(self, x: Any) -> Any:
        return x

    def to_host(self, x: Any) -> Any:
        return x

    def send(self, x: Array, routing: Routing) -> Callable[[], Array]:
        return lambda: x

    def wait(self, event: Event | None) -> None:
        """Kernels called later find what has been copied."""
        if event is not None:
            event.synchronize()

    def _alloc(self, nbytes: int) -> Any:
        made = self._copies.alloc(nbytes)
        self._tensors[made.address] = made
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(made.address))

    def free(self, memory: Any, unpacked: int = 0) -> None:
        Gpu.free(self, memory, unpacked)
        self._copies.free(self._tensors.pop(memory.ctypes.data))

    def _queue_copy(self, source: Bytes, out: Any, after: Event | None) -> None:
        device: Any = self._copies._device
        there = Tensor(device, None, out.ctypes.data, (out.nbytes,), (1,), UINT8)
        self._copies.queue(source, there, after)  # type: ignore[arg-type]


# -- decoders --------------------------------------------------------------------------------------


@contextmanager
def on_gpu(
    model: Model,
    where: Mapping[str, Where],
    *,
    slack: tuple[int, int] = (0, 0),
    capacity: int = PLENTY,
    placement: Placement | None = None,
    make: Callable[[Clock], Gpu] | None = None,
    **options: Any,
) -> Iterator[Decoder]:
    """The decoder that follows ``placement``, or that of ``where``, on the GPU that is made, or on
    one with the CPU's kernels. Nothing is left of it.
    """
    clock, threads = Clock(keep=100_000), pipeline_threads()
    gpu = SameKernels(clock, model.ops, capacity=capacity) if make is None else make(clock)
    settings: dict[str, Any] = {"mode": MODE, "budget": PLENTY, "stall_s": 30.0, **options}
    decoder = open_decoder(
        model.store,
        model.ops,
        model.config,
        placement or place_on_gpu(model.store, where, slack=slack),
        gpu=gpu,
        clock=clock,
        **settings,
    )
    try:
        yield decoder
    finally:
        decoder.close()
        assert gpu.used == 0
    assert pipeline_threads(threads) == threads


def pipeline_threads(before: Sequence[str] = ()) -> list[str]:
    """The threads that pipelines run, once they are those ``before``, or seconds later."""
    names = ("localrt-reader", "localrt-experts")
    deadline = time.monotonic() + 5
    while True:
        found = [t.name for t in threading.enumerate() if t.name.startswith(names)]
        if found == list(before) or not found or time.monotonic() > deadline:
            return found
        time.sleep(0.005)


def gpu_of(decoder: Decoder) -> Any:
    """The GPU that a decoder is on."""
    lane = decoder.weights.gpu
    assert lane is not None
    return lane.gpu


def placements(names: list[str]) -> st.SearchStrategy[dict[str, Where]]:
    """Any place for each unit."""
    return st.fixed_dictionaries({name: st.sampled_from(list(Where)) for name in names})


def few(examples: int) -> settings:
    """As many of a hundred: each opens a decoder. A race shows in some runs only, and nothing can
    be shrunk.
    """
    return settings(
        phases=(Phase.explicit, Phase.generate),
        max_examples=max(2, examples * settings().max_examples // 100),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


PAGES = st.tuples(st.integers(0, 90), st.integers(0, 90))
SHORTAGES = st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 300_000)), max_size=4)
"""Bytes of RAM and of the GPU's memory that others need before some passes."""

# -- mixtures --------------------------------------------------------------------------------------


def places(model: Model, share: float) -> dict[str, Where]:
    """``share`` of the experts in VRAM, the others in RAM."""
    names = [unit.name for unit in model.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    shells = [n for n in names if n.endswith((".mlp", ".attention")) or n.startswith("head")]
    where = dict.fromkeys(shells, Where.VRAM)
    return where | dict.fromkeys(experts[: round(share * len(experts))], Where.VRAM)


def stages(placed: Decoder) -> HybridExperts:
    """What runs the sparse layers on the GPU."""
    found = placed.weights.sparse["gpu"]
    assert isinstance(found, HybridExperts)
    return found


def all_in_ram(decoder: Decoder) -> bool:
    """Whether every expert has been read: what is on the SSD is computed by the CPU."""
    return stages(decoder).memory.complete


def bring_some(hybrid: HybridExperts) -> None:
    """Copy the same experts to all slots."""
    cache = hybrid.slots.cache
    for expert, layer in islice(np.ndindex(cache.count, cache.layers), cache.capacity):
        hybrid.copies.bring(layer, expert)
    hybrid.settle()
