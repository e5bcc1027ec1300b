"""The head on a GPU: one product where its slices stay, few where they come through the ring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.offload.placement import Where
from localrt.offload.ring import PAGE
from localrt.quant.cuda.launch import emulate
from tests.offload.gpu.fake_cuda import on_late_gpu
from tests.offload.placed import (
    Model,
    extend,
    needs_kernels,
    pack_synthetic,
    passing,
    tokens,
)
from tests.ops.cuda.emulator import Emulator

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """One layer and a head of five slices."""
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"),
        vocab=2100,
        hidden=128,
        inner=64,
        layers=1,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    emulator = Emulator()
    before = emulate(emulator)
    yield emulator
    emulate(before)


def head_of(model: Model) -> list[str]:
    return [name for name in passing(model.store) if name.startswith("head")]


def logits(decoder: Decoder, emulator: Emulator) -> tuple[list[np.ndarray], int]:
    """Of a prompt and of a token, and the products of the head in each."""
    cache, seen = decoder.cache(10), list[np.ndarray]()
    for text in (tokens(3), [7]):
        emulator.launches.clear()
        seen.append(extend(decoder, cache, text, [len(text) - 1]))
        names = [program.name for program in emulator.launches]
    return seen, names.count("linear")


def test_products_of_the_head(model: Model, emulator: Emulator) -> None:
    head = head_of(model)
    assert len(head) == 5
    where = dict.fromkeys(passing(model.store), Where.RAM)
    largest = max(u.nbytes for u in model.store.manifest.units if u.name in head)
    passing_through = where | dict.fromkeys(head, Where.LINK)
    room = 4 * largest // PAGE  # in all: two of them while two others come
    with on_late_gpu(model, where | dict.fromkeys(head, Where.VRAM)) as decoder:
        wanted, products = logits(decoder, emulator)
        assert products == 1
        assert decoder.weights.memory.evict_gpu(1) > 0
        seen, _ = logits(decoder, emulator)
        assert all(map(np.array_equal, seen, wanted))
    for slack, most in ((0, 5), (room, 3)):
        with on_late_gpu(model, passing_through, slack=(2, slack)) as decoder:
            seen, products = logits(decoder, emulator)
            assert all(map(np.array_equal, seen, wanted))
            assert products <= most
