"""Segments of a placed model, recorded and replayed: the same to the bit as step by step.

Recording is done as a GPU does it: what is replayed are launches and torch's steps with the
addresses that they had. Copies come as late as their events allow.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from localrt.common.errors import CancelledError, LocalrtError
from localrt.models.decoder import Decoder
from localrt.offload.pipeline.stage import Segment
from localrt.offload.placement import Where
from localrt.quant.cuda import graph
from localrt.quant.cuda.launch import emulate
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.features import AFTER_LAST, Features
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Span
from tests.offload.gpu.fake_cuda import on_late_gpu
from tests.offload.placed import (
    Model,
    cancel_after,
    extend,
    needs_kernels,
    passing,
    tokens,
)
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.tape import Steps, Tape

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tape]:
    """Runs what is launched on the CPU, and what was recorded again."""
    tape = Tape(Emulator())
    before = emulate(tape)
    monkeypatch.setattr(graph, "record", tape.record)
    yield tape
    emulate(before)


def mixed(coded: Model) -> dict[str, Where]:
    """A unit that comes through the ring, two that stay, one of the CPU's, and the head."""
    where = dict.fromkeys(passing(coded.store), Where.VRAM)
    return where | {"layers.0.attention": Where.LINK, "layers.1.mlp": Where.RAM}


Talk = Callable[[Decoder], list[np.ndarray]]


def assert_recorded(coded: Model, tape: Tape, talk: Talk) -> None:
    """Replayed, and to the bit what the same placement computes step by step."""
    with on_late_gpu(coded, mixed(coded), recorded=False) as plain:
        wanted = talk(plain)
    assert "replay" not in tape.events
    with on_late_gpu(coded, mixed(coded)) as decoder:
        seen = talk(decoder)
    assert "replay" in tape.events
    for number, (ours, theirs) in enumerate(zip(seen, wanted, strict=True)):
        assert np.array_equal(ours, theirs), number


def decode(decoder: Decoder, cache: KVCache, count: int, seed: int = 1) -> list[np.ndarray]:
    """Single tokens."""
    return [extend(decoder, cache, [token]) for token in tokens(count, seed=seed)]


def segments_of(decoder: Decoder) -> list[weakref.ref[Segment]]:
    """Those of the layers and of the head, in the latest pass."""
    weights = decoder.weights
    parts = [*weights.body, *weights._joined_head.parts(weights._head)]
    return [weakref.ref(part) for part in parts if isinstance(part, Segment)]


def tree(decoder: Decoder, cache: KVCache, mask: np.ndarray) -> np.ndarray:
    """Three rows, which the cache forgets."""
    held = cache.length
    batch = Batch(np.array([7, 8, 9]), held + mask.sum(1) - 1, (Span(cache, 3, mask),))
    seen = decoder.forward(batch, rows=[0, 2])
    cache.trim(held)
    return seen


def test_tokens_and_trees(coded: Model, tape: Tape) -> None:
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

    assert_recorded(coded, tape, talk)
    # The unit of the ring, the two and the head, of tokens and of trees.
    assert len(tape.recorded) == 6


def test_a_cache_that_grows_and_memory_given_back(coded: Model, tape: Tape) -> None:
    def talk(decoder: Decoder) -> list[np.ndarray]:
        cache = decoder.cache(600)
        seen = decode(decoder, cache, 2)
        decoder.weights.reserve(cache, 300)
        seen += decode(decoder, cache, 2, seed=2)
        segments = segments_of(decoder)
        recorded = len(tape.recorded)
        assert decoder.weights.memory.evict(1) > 0
        seen += decode(decoder, cache, 1, seed=3)
        assert len(tape.recorded) == recorded  # nothing of the GPU has moved
        assert decoder.weights.memory.evict_gpu(1) > 0
        seen += decode(decoder, cache, 3, seed=4)
        gc.collect()
        kept = [segment() for segment in segments if segment() is not None]
        if recorded:  # nothing keeps what was recorded of one; the other stays
            assert len(segments) - len(kept) == 1
            # What was beside the unit, the unit in the ring, and both together again.
            assert len(tape.recorded) == recorded + 3
        return seen

    assert_recorded(coded, tape, talk)


def test_caches_grow_without_recording_again(coded: Model, tape: Tape) -> None:
    """To 4,096 tokens; nor does another sequence."""

    def talk(decoder: Decoder) -> list[np.ndarray]:
        cache = decoder.cache(4096)
        seen, recorded = decode(decoder, cache, 2), len(tape.recorded)
        for length in range(255, 4096, 320):
            decoder.weights.reserve(cache, length)
            cache.advance(length - cache.length)
            seen += decode(decoder, cache, 1)
        seen += decode(decoder, decoder.cache(4096), 2)
        assert len(tape.recorded) == recorded
        return seen

    assert_recorded(coded, tape, talk)
    assert len(tape.recorded) == 3  # the unit of the ring, the two, and the head


def test_sequences_that_take_turns_and_end(coded: Model, tape: Tape) -> None:
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

    assert_recorded(coded, tape, talk)


def test_cancelled_passes(coded: Model, tape: Tape) -> None:
    def talk(decoder: Decoder) -> list[np.ndarray]:
        cache, seen = decoder.cache(40), list[np.ndarray]()
        for stop in (0, 0, 3, 4, 1, 5):
            if stop:
                with pytest.raises(CancelledError):
                    decoder.forward(Batch.extend([(cache, [11])]), check=cancel_after(stop - 1))
            seen += decode(decoder, cache, 1, stop)
        return seen

    assert_recorded(coded, tape, talk)


def test_a_pass_that_fails_while_it_is_recorded(
    coded: Model, tape: Tape, monkeypatch: pytest.MonkeyPatch
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

    assert_recorded(coded, tape, talk)
    assert failures


# -- what a token costs ----------------------------------------------------------------------------

ATTENTION = ["rms_norm", "linear", "rope_append", "attention", "attention_join", "linear"]
MLP = ["rms_norm", "linear", "quantize", "linear"]
ROTARY = ["aten::mul", "aten::cos", "aten::mul", "aten::sin", "aten::mul"]


def test_launches_and_waits_of_a_token(
    coded: Model, tape: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten launches a layer, or one a segment and a unit of the ring; the host waits only where rows
    leave the GPU.
    """
    waits = list[str]()
    for name in ("cpu", "item", "tolist", "to"):
        plain = getattr(Tensor, name)

        def noted(tensor: Tensor, *args: Any, _plain: Any = plain, **options: Any) -> Any:
            waits.append(_plain.__name__)
            return _plain(tensor, *args, **options)

        monkeypatch.setattr(Tensor, name, noted)
    events = list[list[str]]()
    for recorded in (False, True):
        with on_late_gpu(coded, mixed(coded), recorded=recorded) as decoder:
            cache = decoder.cache(40)
            decode(decoder, cache, 3)
            tape.events.clear()
            waits.clear()
            with Steps(tape):
                decode(decoder, cache, 1)
        events.append(list(tape.events))
        assert waits == ["cpu", "cpu"]  # before the CPU's unit, and the logits
    norm, product, *rest = ATTENTION
    first, settle, copy = [norm, product, *ROTARY, *rest], "aten::add_", "aten::copy_"
    assert events[0] == [*first, *MLP, *ATTENTION, settle, "rms_norm", "linear"]
    # Tokens and places; the embedding, and what the CPU made, where recordings read them.
    assert events[1] == [copy, copy, "replay", "replay", copy, "replay"]
