"""Passes of several sequences on the driver: recorded, and to the bits that each has alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder
from localrt.offload.placement import Where
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Span
from tests.driver.inside.conftest import Kernels
from tests.driver.inside.gpus import AT_ONCE, made, on_gpu
from tests.offload.placed import Model, needs_kernels, pack_synthetic, pack_tiny, passing, tokens
from tests.ops.layers import tree_mask

pytestmark = [needs_kernels, pytest.mark.gpu]

Forward = Callable[..., np.ndarray]
TREE = (-1, 0, 0, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A small Llama."""
    sizes = {"vocab": 256, "hidden": 64, "inner": 64, "layers": 2}
    folder = pack_synthetic(tmp_path_factory.mktemp("llama"), formats={"": "int4-g32"}, **sizes)
    with closing(Model(folder)) as model:
        yield model


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


def talk(
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


# -- all of a model on the GPU ---------------------------------------------------------------------


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
    model: Model, gpu: Kernels, turns: list[dict[int, bool]], lengths: list[int]
) -> None:
    """Those of each turn in a pass: as many as there are, with trees in some, across blocks."""
    ops = CudaOps(device="cuda")
    decoder = loaded(model, ops)
    rounds = [list(turn.items()) for turn in turns for _ in range(3)]
    wanted = talk(decoder, decoder.forward, rounds, lengths, together=False)
    seen = talk(decoder, ops.graphed(decoder.forward), rounds, lengths, together=True)
    for ours, theirs in zip(seen, wanted, strict=True):
        assert np.array_equal(ours, theirs)
    assert "replay" in gpu.launches


@pytest.mark.parametrize("chats", [2, 5, 8])
def test_a_pass_is_one_launch(model: Model, gpu: Kernels, chats: int) -> None:
    ops = CudaOps(device="cuda")
    decoder = loaded(model, ops)
    forward, caches = ops.graphed(decoder.forward), [decoder.cache(300) for _ in range(chats)]

    def launches() -> list[str]:
        gpu.launches.clear()
        forward(Batch.extend([(cache, [5]) for cache in caches]))
        return list(gpu.launches)

    first = launches()
    assert first.count("attention") == model.config.layers  # one of all chats
    assert "record" in launches()
    assert launches() == ["replay"]
    caches[0].reserve(290)  # a block more
    assert launches() == ["replay"]


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "deepseek-v2-dense"])
def test_states_and_latents(name: str, gpu: Kernels, tmp_path: Path) -> None:
    with closing(Model(pack_tiny(name, tmp_path))) as model:
        ops = CudaOps(device="cuda")
        decoder = loaded(model, ops)
        turns = [[(0, False), (1, False)]] * 3 + [[(0, False), (1, True), (2, False)]] * 3
        wanted = talk(decoder, decoder.forward, turns, [0, 0, 0], together=False)
        seen = talk(decoder, ops.graphed(decoder.forward), turns, [0, 0, 0], together=True)
    assert all(map(np.array_equal, seen, wanted))
    assert gpu.launches.count("replay") > 3


# -- streamed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chats", [2, 5])
def test_streamed_segments(model: Model, gpu: Kernels, chats: int) -> None:
    """Each is one launch, of all chats."""
    names = passing(model.store)
    where = dict.fromkeys(names, Where.VRAM)
    where[names[1]], where[names[3]] = Where.RAM, Where.LINK
    turns = [[(which, False) for which in range(chats)]] * 4

    def run(device: str, together: bool) -> list[np.ndarray]:
        gpu.launches.clear()
        with on_gpu(model, where, slack=(2, 2), make=made(device)) as decoder:
            return talk(decoder, decoder.forward, turns, [0] * chats, together=together)

    wanted = run(AT_ONCE, together=False)
    seen = run("cuda", together=True)
    assert all(map(np.array_equal, seen, wanted))
    assert gpu.launches.count("record") == 4  # one of each, and the head
    assert gpu.launches.count("replay") == 12
