"""Segments of a placed model, recorded and replayed: the same to the bit as step by step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CancelledError, LocalrtError
from localrt.common.files import PAGE
from localrt.models.decoder import Decoder
from localrt.offload.placement import Where
from localrt.quant.cuda.driver import Cuda, Graph
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Span
from tests.driver.inside.conftest import Kernels, hasty
from tests.driver.inside.gpus import AT_ONCE, made, on_gpu
from tests.offload.placed import (
    Model,
    cancel_after,
    extend,
    needs_kernels,
    pack_synthetic,
    passing,
    tokens,
)

pytestmark = [needs_kernels, pytest.mark.gpu]


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Two layers and a head of five slices."""
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"),
        vocab=2100,
        hidden=128,
        inner=64,
        layers=2,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


def mixed(coded: Model) -> dict[str, Where]:
    """A unit that comes through the ring, two that stay, one of the CPU's, and the head."""
    where = dict.fromkeys(passing(coded.store), Where.VRAM)
    return where | {"layers.0.attention": Where.LINK, "layers.1.mlp": Where.RAM}


Talk = Callable[[Decoder], list[np.ndarray]]


def placed(
    coded: Model,
    where: dict[str, Where],
    *,
    device: str = "cuda",
    recorded: bool = True,
    slack: tuple[int, int] = (2, 2),
) -> AbstractContextManager[Decoder]:
    return on_gpu(coded, where, slack=slack, make=made(device, recorded=recorded))


def assert_recorded(coded: Model, gpu: Kernels, talk: Talk) -> None:
    """Replayed, and to the bit what the same placement computes step by step."""
    with placed(coded, mixed(coded), device=AT_ONCE) as plain:
        wanted = talk(plain)
    assert "replay" not in gpu.launches
    with placed(coded, mixed(coded)) as decoder:
        seen = talk(decoder)
    assert "replay" in gpu.launches
    for number, (ours, theirs) in enumerate(zip(seen, wanted, strict=True)):
        assert np.array_equal(ours, theirs), number


def decode(decoder: Decoder, cache: KVCache, count: int, seed: int = 1) -> list[np.ndarray]:
    """Single tokens."""
    return [extend(decoder, cache, [token]) for token in tokens(count, seed=seed)]


def graphs() -> int:
    """How many there are."""
    gc.collect()
    return sum(isinstance(each, Graph) for each in gc.get_objects())


def tree(decoder: Decoder, cache: KVCache, mask: np.ndarray) -> np.ndarray:
    """Three rows, which the cache forgets."""
    held = cache.length
    batch = Batch(np.array([7, 8, 9]), held + mask.sum(1) - 1, (Span(cache, 3, mask),))
    seen = decoder.forward(batch, rows=[0, 2])
    cache.trim(held)
    return seen


@hasty
def test_tokens_and_trees(coded: Model, gpu: Kernels) -> None:
    branch = np.tril(np.ones((3, 3), bool))
    branch[2, 1] = False

    def talk(decoder: Decoder) -> list[np.ndarray]:
        cache = decoder.cache(40)
        seen = [extend(decoder, cache, tokens(5), [4]), *decode(decoder, cache, 2)]
        seen += [tree(decoder, cache, mask) for mask in (np.eye(3, dtype=bool), branch, branch)]
        for layers in ((AFTER_LAST,), (1, AFTER_LAST)):
            rows = np.empty((1, len(layers) * coded.config.hidden_size), np.float32)
            batch = Batch.extend([(cache, [3])])
            seen += [decoder.forward(batch, features=Features(layers, rows)), rows]
        return [*seen, *decode(decoder, cache, 2)]

    assert_recorded(coded, gpu, talk)
    # The unit of the ring, the two and the head, of tokens and of trees.
    assert gpu.launches.count("record") == 6


def test_a_cache_that_grows_and_memory_given_back(coded: Model, gpu: Kernels) -> None:
    def talk(decoder: Decoder) -> list[np.ndarray]:
        cache = decoder.cache(600)
        seen = decode(decoder, cache, 2)
        decoder.weights.reserve(cache, 300)
        seen += decode(decoder, cache, 2, seed=2)
        recorded, kept = gpu.launches.count("record"), graphs()
        assert decoder.weights.memory.evict(1) > 0
        seen += decode(decoder, cache, 1, seed=3)
        assert gpu.launches.count("record") == recorded  # nothing of the GPU has moved
        assert decoder.weights.memory.evict_gpu(1) > 0
        seen += decode(decoder, cache, 3, seed=4)
        if recorded:
            # What was beside the unit, the unit in the ring, and both together again.
            assert gpu.launches.count("record") == recorded + 3
            assert graphs() == kept  # nothing keeps those that are of no use now
        return seen

    assert_recorded(coded, gpu, talk)


def test_caches_grow_without_recording_again(coded: Model, gpu: Kernels) -> None:
    """To 4,096 tokens; nor does another sequence."""

    def talk(decoder: Decoder) -> list[np.ndarray]:
        cache = decoder.cache(4096)
        seen, recorded = decode(decoder, cache, 2), gpu.launches.count("record")
        for length in range(255, 4096, 320):
            decoder.weights.reserve(cache, length)
            cache.advance(length - cache.length)
            seen += decode(decoder, cache, 1)
        seen += decode(decoder, decoder.cache(4096), 2)
        assert gpu.launches.count("record") == recorded
        return seen

    assert_recorded(coded, gpu, talk)
    assert gpu.launches.count("record") == 3  # the unit of the ring, the two, and the head


def test_sequences_that_take_turns_and_end(coded: Model, gpu: Kernels) -> None:
    def talk(decoder: Decoder) -> list[np.ndarray]:
        one, two = decoder.cache(40), decoder.cache(40)
        seen = [extend(decoder, two, tokens(4), [3])]
        for seed in range(3):
            seen += decode(decoder, one, 1, seed) + decode(decoder, two, 1, seed + 9)
        batch = Batch.extend([(one, [3]), (two, [4])])
        seen.append(decoder.forward(batch))
        del one, two, batch
        for seed in range(2):  # caches of other sequences, where those were perhaps
            seen += decode(decoder, decoder.cache(40), 2, seed)
        return seen

    assert_recorded(coded, gpu, talk)


def test_cancelled_passes(coded: Model, gpu: Kernels) -> None:
    def talk(decoder: Decoder) -> list[np.ndarray]:
        cache, seen = decoder.cache(40), list[np.ndarray]()
        for stop in (0, 0, 3, 4, 1, 5):
            if stop:
                with pytest.raises(CancelledError):
                    decoder.forward(Batch.extend([(cache, [11])]), check=cancel_after(stop - 1))
            seen += decode(decoder, cache, 1, stop)
        return seen

    assert_recorded(coded, gpu, talk)


def test_a_pass_that_fails_while_it_is_recorded(
    coded: Model, gpu: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sum pending, which the next pass must not find."""
    attend, failures = CudaOps.norm_qkv_rope_append, list[int]()

    def fail_once(ops: CudaOps, x: Any, *args: Any) -> Any:
        if ops.recording is not None and not failures:
            failures.append(1)
            raise LocalrtError("the GPU refuses")
        return attend(ops, x, *args)

    monkeypatch.setattr(CudaOps, "norm_qkv_rope_append", fail_once)

    def talk(decoder: Decoder) -> list[np.ndarray]:
        cache, seen = decoder.cache(40), list[np.ndarray]()
        for token in tokens(3):
            with suppress(LocalrtError):
                seen.append(extend(decoder, cache, [token]))
                continue
            seen.append(extend(decoder, cache, [token]))
        return seen

    assert_recorded(coded, gpu, talk)
    assert failures


# -- what a token costs ----------------------------------------------------------------------------

ATTENTION = ["rms_norm", "linear", "rope_append", "attention", "attention_join", "linear"]
MLP = ["rms_norm", "linear", "quantize", "linear"]


def test_launches_and_waits_of_a_token(
    coded: Model, gpu: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten launches a layer, or one a segment and a unit of the ring; the host waits only where rows
    leave the GPU.
    """
    waits, copies, own = list[str](), list[str](), threading.current_thread()

    call = Cuda.call

    def noted(device: Cuda, name: str, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is own:
            for notes, kind in ((copies, "cuMemcpy"), (waits, "Synchronize")):
                if kind in name:
                    notes.append(name)
        return call(device, name, *args, **options)

    monkeypatch.setattr(Cuda, "call", noted)
    events, moves = list[list[str]](), list[int]()
    for recorded in (False, True):
        with placed(coded, mixed(coded), recorded=recorded) as decoder:
            cache = decoder.cache(40)
            decode(decoder, cache, 3)
            for notes in (gpu.launches, gpu.moves, waits, copies):
                notes.clear()
            decode(decoder, cache, 1)
            events.append([*gpu.launches, *copies])
            assert len(waits) == 2  # before the CPU's unit, and for the logits
            moves.append(len(gpu.moves))
    norm, product, *rest = ATTENTION
    first, settle = [norm, product, "rotary", *rest], "move_rows"
    within = "cuMemcpyDtoDAsync"
    steps = [*first, *MLP, *ATTENTION, settle, "rms_norm", "linear"]
    weights = ["cuMemcpyHtoDAsync"]  # the unit of the ring, for the next pass
    assert events[0] == [*steps, *weights]
    # The embedding, and what the CPU made, where recordings read them.
    assert sorted(events[1]) == sorted(["replay"] * 3 + [within, *weights, within])
    # Tokens and places, the embedding, rows to the CPU and back, and logits.
    assert moves == [5, 5]


# -- the head --------------------------------------------------------------------------------------


def head_of(coded: Model) -> list[str]:
    return [name for name in passing(coded.store) if name.startswith("head")]


def logits(decoder: Decoder, gpu: Kernels) -> tuple[list[np.ndarray], int]:
    """Of a prompt and of a token, and the products of the head in the latter."""
    cache, seen = decoder.cache(10), list[np.ndarray]()
    for text in (tokens(3), [7]):
        gpu.launches.clear()
        seen.append(extend(decoder, cache, text, [len(text) - 1]))
    return seen, gpu.launches.count("linear")


def test_products_of_the_head(coded: Model, gpu: Kernels) -> None:
    """One where its slices stay, few where they come through the ring."""
    head = head_of(coded)
    assert len(head) == 5
    where = dict.fromkeys(passing(coded.store), Where.RAM)
    largest = max(u.nbytes for u in coded.store.manifest.units if u.name in head)
    passing_through = where | dict.fromkeys(head, Where.LINK)
    room = 4 * largest // PAGE  # in all: two of them while two others come
    with placed(coded, where | dict.fromkeys(head, Where.VRAM)) as decoder:
        wanted, products = logits(decoder, gpu)
        assert products == 1
        assert decoder.weights.memory.evict_gpu(1) > 0
        seen, _ = logits(decoder, gpu)
        assert all(map(np.array_equal, seen, wanted))
    for slack, most in ((0, 5), (room, 3)):
        with placed(coded, passing_through, slack=(2, slack)) as decoder:
            seen, products = logits(decoder, gpu)
            assert all(map(np.array_equal, seen, wanted))
            assert products <= most
