"""Recorded passes: segments of a placed model, several sequences, and the best logits alone; the
same to the bit as step by step, alone, and with all logits.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrt.engine.batch.sequence import generate
from localrt.engine.native.engine import NativeEngine
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder
from localrt.offload.placement import Where
from localrt.quant.cuda.driver import Cuda, Graph
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Span, is_best
from localrt.speculative.acceptance import TreePass
from localrt.speculative.tree import TokenTree
from tests.driver.inside.conftest import AT_ONCE, Kernels, hasty, made, on_gpu
from tests.engine.test_speculation import info_of
from tests.offload.placed import (
    Model,
    extend,
    needs_kernels,
    passing,
    tokens,
)
from tests.ops.layers import tree_mask
from tests.ops.oracles import best_of

pytestmark = [needs_kernels, pytest.mark.gpu]


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
        for length in range(255, 4096, 640):
            decoder.weights.reserve(cache, length)
            cache.advance(length - cache.length)
            seen += decode(decoder, cache, 1)
        seen += decode(decoder, decoder.cache(4096), 2)
        assert gpu.launches.count("record") == recorded
        return seen

    assert_recorded(coded, gpu, talk)
    assert gpu.launches.count("record") == 3  # the unit of the ring, the two, and the head


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


# -- several sequences -----------------------------------------------------------------------------

Forward = Callable[..., np.ndarray]
TREE = (-1, 0, 0, 1)


def batch_of(parts: Sequence[tuple[KVCache, list[int], bool]]) -> Batch:
    """Each cache's next tokens: a tree, or one after another."""
    plain = Batch.extend([(cache, ids) for cache, ids, _ in parts])
    spans, positions = list[Span](), list[np.ndarray]()
    for cache, ids, tree in parts:
        mask = tree_mask(list(TREE[: len(ids)])) if tree else None
        spans.append(Span(cache, len(ids), mask))
        depth = np.arange(len(ids)) if mask is None else mask.sum(1) - 1
        positions.append(cache.length + depth)
    return Batch(plain.tokens, np.concatenate(positions), tuple(spans))


class Chat:
    """A sequence, and what its passes gave."""

    def __init__(self, decoder: Decoder, seed: int, length: int) -> None:
        self.cache, self.seed = decoder.cache(700), seed
        self.seen = list[np.ndarray]()
        if length:
            decoder.weights.reserve(self.cache, length)  # its keys and values are zeros
            self.cache.advance(length)

    def part(self, turn: int, tree: bool) -> tuple[KVCache, list[int], bool]:
        count = len(TREE) if tree else 1
        return self.cache, tokens(count, seed=100 * self.seed + turn), tree

    def take(self, logits: np.ndarray, tree: bool) -> None:
        self.seen.append(logits)
        if tree:  # the first branch was right
            self.cache.trim(self.cache.length - len(TREE) + 2)


def chat(
    decoder: Decoder, forward: Forward, turns: Sequence[Sequence[tuple[int, bool]]],
    lengths: Sequence[int], *, together: bool,
) -> list[np.ndarray]:  # fmt: skip
    """What each of some chats is told by passes over the chats of each turn, some with trees."""
    chats = [Chat(decoder, seed, length) for seed, length in enumerate(lengths)]
    for turn, members in enumerate(turns):
        groups = [members] if together else [[each] for each in members]
        for group in groups:
            parts = [chats[which].part(turn, tree) for which, tree in group]
            logits = forward(batch_of(parts))
            first = 0
            for (which, tree), (_, ids, _) in zip(group, parts, strict=True):
                chats[which].take(logits[first : first + len(ids)], tree)
                first += len(ids)
    return [each for chat in chats for each in chat.seen]


def loaded(model: Model, ops: CudaOps) -> Decoder:
    return load_decoder(model.store, ops, model.config)


TURNS = st.lists(
    st.dictionaries(st.integers(0, 5), st.booleans(), min_size=1), min_size=1, max_size=4
)


@given(turns=TURNS, lengths=st.lists(st.sampled_from([0, 254, 255, 300]), min_size=6, max_size=6))
@settings(
    max_examples=2 + settings().max_examples // 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_chats(
    small: Model, gpu: Kernels, turns: list[dict[int, bool]], lengths: list[int]
) -> None:
    """Those of each turn in a pass: as many as there are, with trees in some, across blocks."""
    ops = CudaOps(device="cuda")
    decoder = loaded(small, ops)
    rounds = [list(turn.items()) for turn in turns for _ in range(3)]
    wanted = chat(decoder, decoder.forward, rounds, lengths, together=False)
    seen = chat(decoder, ops.graphed(decoder.forward), rounds, lengths, together=True)
    for ours, theirs in zip(seen, wanted, strict=True):
        assert np.array_equal(ours, theirs)
    assert "replay" in gpu.launches


def test_a_pass_is_one_launch(small: Model, gpu: Kernels) -> None:
    ops = CudaOps(device="cuda")
    decoder = loaded(small, ops)
    forward, caches = ops.graphed(decoder.forward), [decoder.cache(300) for _ in range(5)]

    def launches() -> list[str]:
        gpu.launches.clear()
        forward(Batch.extend([(cache, [5]) for cache in caches]))
        return list(gpu.launches)

    first = launches()
    assert first.count("attention") == small.config.layers  # one of all chats
    assert "record" in launches()
    assert launches() == ["replay"]
    caches[0].reserve(290)  # a block more
    assert launches() == ["replay"]


# -- the best logits alone -------------------------------------------------------------------------

VOCAB = 2100
LENGTH = 8
RANDOM = Sampling(temperature=1.5, top_p=0.9, min_p=0.0, seed=5)


@pytest.fixture
def engine(coded: Model, gpu: Kernels) -> Iterator[NativeEngine]:
    decoder = load_decoder(coded.store, CudaOps(device="cuda"), coded.config)
    with closing(NativeEngine(decoder, replace(info_of("llama"), vocab_size=VOCAB))) as engine:
        yield engine


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy to the host."""
    seen, plain = list[int](), Cuda.copy_out

    def copy_out(device: Cuda, values: Any, *where: Any) -> None:
        seen.append(values.nbytes)
        plain(device, values, *where)

    monkeypatch.setattr(Cuda, "copy_out", copy_out)
    return seen


def answer(engine: NativeEngine, session: Any = None, **options: Any) -> list[int]:
    request = Request(prompt=tokens(5), max_tokens=LENGTH, **options)
    chunks = generate(session or engine.session(64), None, request)
    return [token for chunk in chunks for token in chunk.token_ids]


def all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "best_only", property(lambda request: False))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), RANDOM], ids=["greedy", "random"])
def test_the_same_answer_from_fewer_bytes(
    engine: NativeEngine, copied: list[int], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answer(engine, sampling=sampling)
    # The first passes of each kind, which are not recorded.
    assert copied.count(4 * VOCAB) <= 2
    copied.clear()
    assert answer(engine, sampling=sampling) == found
    assert copied == []
    all_logits(monkeypatch)
    assert answer(engine, sampling=sampling) == found
    assert copied == LENGTH * [4 * VOCAB]


def test_trees_of_the_best(engine: NativeEngine) -> None:
    tree = TokenTree.of([7, 8, 9], [-1, 0, 0], [-1.0, -2.0, -3.0], "own")
    seen = []
    for best_only in (False, True):
        session = engine.session(64)
        session.best_only = best_only
        session.extend(tokens(5))
        for _ in range(3):
            logits = session.extend_tree(4, tree)
        assert is_best(logits) == best_only
        seen.append(logits)
    every, best = seen
    assert best.tobytes() == best_of(every).tobytes()
    assert TreePass(tree, best).likeliest() == TreePass(tree, every).likeliest()
