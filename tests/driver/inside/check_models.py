"""Whole tiny models on the driver: bit for bit what the kernels give on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.device.gpu import Clock
from localrt.offload.experts.scheduler import ExpertCosts, schedule
from localrt.offload.placement import Where
from localrt.quant.cuda.cuda_memory import CudaCopies
from localrt.quant.cuda.launch import emulate
from localrt.quant.cuda.ops import CudaOps
from tests.driver.torch_cuda import Kernels
from tests.offload.gpu.placed_on_gpu import on_gpu
from tests.offload.placed import (
    PLENTY,
    Model,
    assert_same,
    conversation,
    extend,
    pack_synthetic,
    pack_tiny,
    passing,
    tokens,
)
from tests.ops.cuda.emulator import Emulator


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[None]:
    """Kernels of the CPU's ``Ops``."""
    before = emulate(Emulator())
    yield
    emulate(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"),
        vocab=256,
        hidden=64,
        inner=64,
        layers=2,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


def made(device: str) -> Callable[[Clock], CudaGpu]:
    return lambda clock: CudaGpu(
        clock, CudaOps(device=device), CudaCopies(device=device), capacity=PLENTY
    )


def all_in_turn(model: Model) -> dict[str, Where]:
    order = [Where.LINK, Where.SSD, Where.VRAM, Where.SSD_LINK, Where.RAM]
    return {name: order[n % 5] for n, name in enumerate(passing(model.store))}


def talk(decoder: Decoder) -> list[np.ndarray]:
    seen = conversation(decoder)
    cache = decoder.cache(40)
    for token in tokens(5):
        seen.append(extend(decoder, cache, [token]))
    return seen


def test_streamed(model: Model, gpu: Kernels) -> None:
    where = all_in_turn(model)
    seen = []
    for device in ("cpu", "cuda"):
        with on_gpu(model, where, slack=(2, 2), make=made(device)) as decoder:
            seen.append(talk(decoder))
    assert_same(*seen)
