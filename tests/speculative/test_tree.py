"""Token trees, and the accept rule: the tokens of plain decoding for any tree and any sampler. A
tree's rows, and a cache that keeps the accepted ones, have the bits of plain decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.engine.sampling import Distribution, Dry, Sampling, adjust_logits, distribution, draw
from localrt.models.decoder import Decoder
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import KV_FORMATS, CacheFormat
from localrt.quant.ops.protocol import Batch, Span
from localrt.speculative.acceptance import TreePass
from localrt.speculative.tree import ROOT, TokenTree, merge
from tests.conftest import needs_kernels
from tests.models.tiny import load_ours, save_tiny, tokens
from tests.ops.cuda.conftest import emulator as emulator


@st.composite
def trees(draw: st.DrawFn, name: str = "a") -> TokenTree:
    size = draw(st.integers(0, 25))
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for node in range(size):
        parent = draw(st.integers(-1, node - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        token = draw(st.integers(0, 40).filter(lambda t, taken=taken: t not in taken))
        above = 0.0 if parent == ROOT else scores[parent]
        tokens.append(token)
        parents.append(parent)
        scores.append(above - draw(st.floats(0, 5)))
    return TokenTree.of(tokens, parents, scores, name)


def path_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The nodes from the first level down to ``node``; none for the last known token."""
    nodes: list[int] = []
    while node != ROOT:
        nodes.insert(0, node)
        node = int(tree.parents[node])
    return tuple(nodes)


def words(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Every node by the tokens that lead to it."""
    return {
        tuple(tree.tokens[list(path_to(tree, node))].tolist()): float(tree.scores[node])
        for node in range(len(tree))
    }


@settings(max_examples=30)
@given(trees())
def test_mask(tree: TokenTree) -> None:
    mask = tree.mask()
    for node in range(len(tree)):
        assert tuple(np.flatnonzero(mask[node])) == path_to(tree, node)
        assert tree.depths[node] == len(path_to(tree, node))
        assert all(tree.parents[child] == node for child in tree.children(node))
    whole = tree.pass_mask()
    assert whole[:, 0].all()
    assert not whole[0, 1:].any()
    assert (whole[1:, 1:] == mask).all()
    assert (tree.positions(7) == tree.depths + 7).all()


@settings(max_examples=30)
@given(trees(), st.integers(0, 30), st.integers(1, 6))
def test_trim(tree: TokenTree, budget: int, depth: int) -> None:
    kept = tree.trim(budget, depth)
    before, after = words(tree), words(kept)
    possible = [score for path, score in before.items() if len(path) <= depth]
    assert len(kept) == min(budget, len(possible))
    assert all(before[path] == score for path, score in after.items())
    assert all(len(path) == 1 or path[:-1] in after for path in after)
    best = sorted(possible, reverse=True)[: len(kept)]
    assert sorted(after.values(), reverse=True) == best


@settings(max_examples=30)
@given(trees("a"), trees("b"), st.integers(0, 60))
def test_merge(a: TokenTree, b: TokenTree, budget: int) -> None:
    both, one, other = merge([a, b], budget), words(a), words(b)
    found = words(both)
    assert len(found) == len(both) == min(budget, len(one | other))
    for path, score in found.items():
        assert score == max(one.get(path, -np.inf), other.get(path, -np.inf))
        node = list(found).index(path)
        names = {n for n, t in (("a", one), ("b", other)) if path in t}
        assert set(both.proposed_by(node)) == names


VOCAB, LENGTH = 6, 3
PROMPT = (1, 1, 4)
Said = tuple[int, ...]

NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS = {
    name: Sampling(**{**NEUTRAL, **settings})
    for name, settings in {
        "plain": {},
        "cold": {"temperature": 0.7},
        "top-k": {"temperature": 1.3, "top_k": 3},
        "top-p": {"top_p": 0.8},
        "min-p": {"temperature": 1.5, "min_p": 0.3},
        "typical": {"typical_p": 0.7},
        "penalties": {
            "top_p": 0.95,
            "repetition_penalty": 1.4,
            "frequency_penalty": 0.8,
            "presence_penalty": 0.5,
            "logit_bias": {2: 0.7},
        },
        "dry": {"dry_multiplier": 0.9, "dry_allowed_length": 1},
        "xtc": {"temperature": 0.9, "xtc_probability": 0.4, "xtc_threshold": 0.15},
    }.items()
}


@cache
def target(said: Said) -> np.ndarray:
    """Logits that depend on all that came before."""
    seed = hash((17, *PROMPT, *said)) & 0xFFFFFFFF
    return (np.random.default_rng(seed).normal(size=VOCAB) * 1.5).astype(np.float32)


@cache
def chances(said: Said, name: str, excluding: bool) -> Distribution:
    """``excluding``: XTC acts on this token."""
    sampling = SETTINGS[name]
    logits = adjust_logits(target(said), PROMPT, said, sampling)
    if sampling.avoids_repetition:
        logits = Dry(sampling, (*PROMPT, *said), None).applied(logits)
    return distribution(logits, sampling, 0.0 if excluding else 1.0)


def choose(logits: np.ndarray, said: Said, name: str, rng: np.random.Generator) -> int:
    assert (logits == target(said)).all()
    sampling = SETTINGS[name]
    excluding = sampling.excludes_top and rng.random() < sampling.xtc_probability
    return draw(chances(said, name, excluding), rng.random())


def plain(name: str, rng: np.random.Generator) -> Said:
    said: Said = ()
    while len(said) < LENGTH:
        said = (*said, choose(target(said), said, name, rng))
    return said


def speculative(name: str, rng: np.random.Generator, propose: Callable[[], TokenTree]) -> Said:
    said: Said = ()
    while len(said) < LENGTH:
        tree = propose()
        paths = [(), *(path_to(tree, node) for node in range(len(tree)))]
        words = [tuple(tree.tokens[list(path)].tolist()) for path in paths]
        rows = np.array([target((*said, *word)) for word in words])
        computed = TreePass(tree, rows)
        logits: Any = computed.first
        while logits is not None:
            said = (*said, choose(logits, said, name, rng))
            logits = computed.after(said[-1])
        assert computed.rows == [0, *(1 + node for node in computed.path)]
    return said[:LENGTH]


def random_tree(rng: np.random.Generator) -> TokenTree:
    nodes: list[tuple[int, int]] = []  # (parent, token)
    for node in range(8):
        parent = int(rng.integers(-1, node)) if node else ROOT
        found = parent, int(rng.integers(VOCAB))
        if found in nodes:
            break
        nodes.append(found)
    return TokenTree.of([t for _, t in nodes], [p for p, _ in nodes], [0.0] * len(nodes), "x")


@pytest.mark.parametrize("name", SETTINGS)
def test_same_seed_same_tokens(name: str) -> None:
    for seed in range(100):
        shapes = np.random.default_rng(seed)
        ours = speculative(name, np.random.default_rng(seed), lambda it=shapes: random_tree(it))  # type: ignore[misc]
        assert ours == plain(name, np.random.default_rng(seed))


CAPACITY = 1024
# Two branches that part and part again: 0-1-2-3-8-9, 0-4-5, 6-7, and many leaves.
PARENTS = [ROOT, 0, 1, 2, 0, 4, ROOT, 6, 3, 8, *[5] * 9, 18, 19, 20]


# Within a block of the cache, at its end, and behind; of windows too.
HELD = [
    *(("gemma3", held) for held in (3, 239, 250, 255, 256, 505)),
    *((name, 250) for name in ("llama", "gemma2", "gemma4", "cohere2")),
]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, CacheFormat], Decoder]:
    """A tiny model by its name and the format of its cache, each loaded once."""

    @functools.cache
    def saved(name: str) -> Path:
        folder = tmp_path_factory.mktemp("tiny")
        save_tiny(name, folder)
        return folder

    @functools.cache
    def loaded(name: str, kv_format: CacheFormat) -> Decoder:
        return load_ours(saved(name), NativeOps(threads=2, kv_format=kv_format), context=CAPACITY)

    return loaded


def some_tree() -> TokenTree:
    ids = list(range(10, 10 + len(PARENTS)))
    return TokenTree.of(ids, PARENTS, [0.0] * len(ids), "test")


def tree_pass(decoder: Decoder, cache: Any, token: int, tree: TokenTree) -> Any:
    held = cache.length
    ids = np.concatenate([[token], tree.tokens])
    positions = np.concatenate([[held], tree.positions(held)])
    span = Span(cache, 1 + len(tree), tree.pass_mask())
    return decoder.forward(Batch(ids, positions, (span,)))


@needs_kernels
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("name", "held"), HELD)
def test_paths(load: Any, name: str, kv_format: CacheFormat, held: int) -> None:
    decoder, tree = load(name, kv_format), some_tree()
    prompt = tokens(held)
    cache = decoder.cache(CAPACITY)
    decoder.forward(Batch.extend([(cache, prompt)]), rows=[])
    logits = tree_pass(decoder, cache, 7, tree)
    for leaf in (7, 9, 14, 21):
        path = path_to(tree, leaf)
        alone = decoder.cache(CAPACITY)
        decoder.forward(Batch.extend([(alone, prompt)]), rows=[])
        for row, token in zip((ROOT, *path), (7, *tree.tokens[list(path)].tolist()), strict=True):
            (plain,) = decoder.forward(Batch.extend([(alone, [token])]))
            assert np.array_equal(logits[1 + row], plain)
    # What is kept of the tree has the bits as well: decoding goes on the same.
    cache.select(held, [0, *(1 + node for node in path)])
    assert cache.length == alone.length
    more = [decoder.forward(Batch.extend([(c, tokens(20, seed=5))])) for c in (cache, alone)]
    assert np.array_equal(*more)
