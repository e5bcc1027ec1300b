"""Placements on a GPU, and decoders that follow them on one that is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st

from localrt.common.files import PAGE
from localrt.models.checkpoints import StoreCheckpoint
from localrt.models.decoder import Decoder
from localrt.offload.device.gpu import Clock, Gpu
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.placement import Placement, Where
from tests.offload.gpu.fakes import FakeGpu, same_kernels
from tests.offload.placed import MODE, PLENTY, Model, open_decoder, passing

COSTS = ExpertCosts(cpu=4e-5, gpu=1.1e-5, fetch=5e-5)


def all_in_ram(decoder: Decoder) -> bool:
    """Whether every expert has been read: what is on the SSD is computed by the CPU."""
    return stages(decoder).memory.complete


def place_on_gpu(
    store: StoreCheckpoint, where: Mapping[str, Where], *, slack: tuple[int, int] = (0, 0)
) -> Placement:
    """``where`` for the units that it names, others in RAM; rings of the largest that pass.

    ``slack`` are pages on top, of the RAM's and of the GPU's ring.
    """
    units = store.manifest.units
    layers = sum(unit.name.endswith(".attention") for unit in units)
    largest = max(u.nbytes for u in units if u.name in passing(store))
    return Placement(
        where={unit.name: where.get(unit.name, Where.RAM) for unit in units},
        kv=("ram",) * layers,
        ram_ring=largest + slack[0] * PAGE,
        vram_ring=largest + slack[1] * PAGE,
    )


def places(
    model: Model, share: float, *, ssd: float = 0.0, shells: Where = Where.VRAM
) -> dict[str, Where]:
    """``share`` of the experts in VRAM, ``ssd`` of the others on disk; the rest in RAM."""
    names = [unit.name for unit in model.store.manifest.units]
    experts = [name for name in names if ".expert." in name]
    where = {n: shells for n in names if n.endswith((".mlp", ".attention")) or n.startswith("head")}
    cut = round(share * len(experts))
    where |= dict.fromkeys(experts[:cut], Where.VRAM)
    rest = experts[cut:]
    return where | dict.fromkeys(rest[: round(ssd * len(rest))], Where.SSD)


def stages(placed: Decoder) -> HybridExperts:
    """What runs the sparse layers on the GPU."""
    found = placed.weights.sparse["gpu"]
    assert isinstance(found, HybridExperts)
    return found


def gpu_of(decoder: Decoder) -> Any:
    """The GPU that a decoder is on."""
    lane = decoder.weights.gpu
    assert lane is not None
    return lane.gpu


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
    """The decoder that follows ``placement``, or that of ``where``, on a GPU that is not
    there, default one with the CPU's kernels.
    """
    clock = Clock(keep=100_000)
    gpu = (
        FakeGpu(clock, same_kernels(model.ops), capacity=capacity) if make is None else make(clock)
    )
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


def placements(names: list[str]) -> st.SearchStrategy[dict[str, Where]]:
    """Any place for each unit."""
    return st.fixed_dictionaries({name: st.sampled_from(list(Where)) for name in names})


def pipeline_threads(before: Sequence[str] = ()) -> list[str]:
    """The threads that pipelines have left running, seconds after they were told to end; those that
    ran ``before`` are not waited for.
    """
    others = (
        "localrt-kv-keeper",
        "localrt-live",
        "localrt-serve",
        "localrt-prompt",
    )  # of models of other tests
    deadline = time.monotonic() + 5
    while True:
        names = [t.name for t in threading.enumerate() if t.name.startswith("localrt-")]
        names = [name for name in names if not name.startswith(others)]
        if names == list(before) or not names or time.monotonic() > deadline:
            return names
        time.sleep(0.005)


# Each opens a decoder, so there are few. A race shows in some runs only: nothing can be shrunk.
some = settings(phases=(Phase.explicit, Phase.generate), max_examples=settings().max_examples // 4)
PAGES = st.tuples(st.integers(0, 90), st.integers(0, 90))
SHORTAGES = st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 300_000)), max_size=4)
"""Bytes of RAM and of the GPU's memory that others need before some passes."""
