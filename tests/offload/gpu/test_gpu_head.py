"""The head on a GPU: one product where its slices stay, few where they come through the ring."""

from __future__ import annotations

import numpy as np

from localrt.models.decoder import Decoder
from localrt.offload.placement import Where
from localrt.offload.ring import PAGE
from tests.offload.gpu.fake_cuda import on_late_gpu
from tests.offload.placed import (
    Model,
    extend,
    needs_kernels,
    passing,
    tokens,
)
from tests.ops.cuda.emulator import Emulator

pytestmark = needs_kernels


def head_of(coded: Model) -> list[str]:
    return [name for name in passing(coded.store) if name.startswith("head")]


def logits(decoder: Decoder, emulator: Emulator) -> tuple[list[np.ndarray], int]:
    """Of a prompt and of a token, and the products of the head in each."""
    cache, seen = decoder.cache(10), list[np.ndarray]()
    for text in (tokens(3), [7]):
        emulator.launches.clear()
        seen.append(extend(decoder, cache, text, [len(text) - 1]))
        names = [program.name for program in emulator.launches]
    return seen, names.count("linear")


def test_products_of_the_head(coded: Model, emulator: Emulator) -> None:
    head = head_of(coded)
    assert len(head) == 5
    where = dict.fromkeys(passing(coded.store), Where.RAM)
    largest = max(u.nbytes for u in coded.store.manifest.units if u.name in head)
    passing_through = where | dict.fromkeys(head, Where.LINK)
    room = 4 * largest // PAGE  # in all: two of them while two others come
    with on_late_gpu(coded, where | dict.fromkeys(head, Where.VRAM)) as decoder:
        wanted, products = logits(decoder, emulator)
        assert products == 1
        assert decoder.weights.memory.evict_gpu(1) > 0
        seen, _ = logits(decoder, emulator)
        assert all(map(np.array_equal, seen, wanted))
    for slack, most in ((0, 5), (room, 3)):
        with on_late_gpu(coded, passing_through, slack=(2, slack)) as decoder:
            seen, products = logits(decoder, emulator)
            assert all(map(np.array_equal, seen, wanted))
            assert products <= most
