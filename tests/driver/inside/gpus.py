"""Decoders that follow placements on the GPUs of this process, and who computes their experts."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from localrt.models.decoder import Decoder
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock, Event, Gpu
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.placement import Placement, Where
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.driver import count_gpus
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.tensor import UINT8, Tensor
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Forward
from tests.driver.standin import loaded
from tests.offload.placed import MODE, PLENTY, Model, open_decoder, place_on_gpu

STANDIN = "LOCALRT_STANDIN" in os.environ
"""Whether this process has the stand-in for CUDA's driver."""
if STANDIN:
    loaded()
GPUS = [f"cuda:{number}" for number in range(count_gpus())]
AT_ONCE = GPUS[-1] if GPUS else "cuda"
"""The stand-in does this one's work as it is submitted: no wait can be missing there."""

COSTS = ExpertCosts(cpu=4e-5, gpu=1.1e-5, fetch=5e-5)

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

    @property
    def pinned(self) -> dict[int, int]:
        """Bytes of pinned RAM by their address."""
        return {at: data.nbytes for at, data in self._copies._pinned.items()}

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


def places(model: Model, share: float, *, ssd: float = 0.0) -> dict[str, Where]:
    """``share`` of the experts in VRAM, ``ssd`` of the others on disk; the rest in RAM."""
    names = [unit.name for unit in model.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    shells = [n for n in names if n.endswith((".mlp", ".attention")) or n.startswith("head")]
    where = dict.fromkeys(shells, Where.VRAM)
    cut = round(share * len(experts))
    where |= dict.fromkeys(experts[:cut], Where.VRAM)
    rest = experts[cut:]
    return where | dict.fromkeys(rest[: round(ssd * len(rest))], Where.SSD)


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
