"""The accept rule: the target's own distribution for any tree, any sampler, penalties included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import cycle

import numpy as np
import pytest
from scipy.stats import chi2

from localrt.engine.sampling import Distribution, Dry, Sampling, adjust_logits, distribution, draw
from localrt.speculative.tree import ROOT, TokenTree

VOCAB, LENGTH = 6, 3
PROMPT = (1, 1, 4)

SETTINGS = {
    "plain": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "cold": Sampling(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0),
    "top-k": Sampling(temperature=1.3, top_k=3, top_p=1.0, min_p=0.0),
    "top-p": Sampling(temperature=1.0, top_k=0, top_p=0.8, min_p=0.0),
    "min-p": Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.3),
    "typical": Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=0.7),
    "penalties": Sampling(
        temperature=1.0,
        top_k=0,
        top_p=0.95,
        min_p=0.0,
        repetition_penalty=1.4,
        frequency_penalty=0.8,
        presence_penalty=0.5,
        logit_bias={2: 0.7},
    ),
    "dry": Sampling(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, dry_multiplier=0.9, dry_allowed_length=1
    ),
    "xtc": Sampling(
        temperature=0.9, top_k=0, top_p=1.0, min_p=0.0, xtc_probability=0.4, xtc_threshold=0.15
    ),
}


def target(history: tuple[int, ...]) -> np.ndarray:
    """Logits that depend on all that came before."""
    seed = hash((17, *history)) & 0xFFFFFFFF
    return (np.random.default_rng(seed).normal(size=VOCAB) * 1.5).astype(np.float32)


@cache
def chances(generated: tuple[int, ...], name: str, excluding: bool) -> Distribution:
    """``excluding``: XTC acts on this token."""
    sampling = SETTINGS[name]
    logits = adjust_logits(target((*PROMPT, *generated)), PROMPT, generated, sampling)
    if sampling.avoids_repetition:
        logits = Dry(sampling, (*PROMPT, *generated), None).applied(logits)
    return distribution(logits, sampling, 0.0 if excluding else 1.0)


def exact_chances(generated: tuple[int, ...], name: str) -> dict[int, float]:
    """By token, over what XTC may do."""
    share = SETTINGS[name].xtc_probability
    found: dict[int, float] = {}
    for excluding, weight in ((True, share), (False, 1 - share)):
        each = chances(generated, name, excluding)
        for token, p in zip(each.tokens.tolist(), each.probs.tolist(), strict=True):
            found[token] = found.get(token, 0.0) + weight * p
    return {token: p for token, p in found.items() if p}


def choose(generated: tuple[int, ...], name: str, rng: np.random.Generator) -> int:
    sampling = SETTINGS[name]
    excluding = sampling.excludes_top and rng.random() < sampling.xtc_probability
    return draw(chances(generated, name, excluding), rng.random())


def plain(name: str, rng: np.random.Generator) -> tuple[int, ...]:
    out: tuple[int, ...] = ()
    while len(out) < LENGTH:
        out = (*out, choose(out, name, rng))
    return out


def verify(
    tree: TokenTree, choose: Callable[[int, tuple[int, ...]], int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The accepted guesses and the bonus token, and the accepted nodes."""
    tokens: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    node: int | None = ROOT
    while node is not None:
        tokens += (choose(node, tokens),)
        node = tree.follow(node, tokens[-1])
        path += () if node is None else (node,)
    return tokens, path


def speculative(
    name: str, rng: np.random.Generator, propose: Callable[[], TokenTree]
) -> tuple[int, ...]:
    out: tuple[int, ...] = ()
    while len(out) < LENGTH:
        done = out
        tokens, _ = verify(propose(), lambda _, said, done=done: choose((*done, *said), name, rng))
        out = (*out, *tokens)
    return out[:LENGTH]


def random_tree(rng: np.random.Generator) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(8):
        parent = int(rng.integers(-1, node)) if node else ROOT
        token = int(rng.integers(VOCAB))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
        else:
            break
    return TokenTree.of(tokens, parents, [0.0] * len(tokens), "x")


@pytest.mark.parametrize(
    "name",
    [n if n in ("plain", "top-p") else pytest.param(n, marks=pytest.mark.slow) for n in SETTINGS],
)
def test_the_distribution_is_the_targets(name: str) -> None:
    """Chi-squared of all answers of three tokens against their exact probabilities."""
    seeds = 6000
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for said, p in exact.items():
            for token, chance in exact_chances(said, name).items():
                longer[(*said, token)] = p * chance
        exact = longer
    rng = np.random.default_rng(5)
    shapes = np.random.default_rng(6)
    guesses = cycle([random_tree(shapes) for _ in range(499)])  # which know nothing of the draws
    counts = Counter(speculative(name, rng, lambda: next(guesses)) for _ in range(seeds))
    assert set(counts) <= set(exact)
    # Rare answers are counted together, as the test wants five of each at least.
    observed, expected = [0.0], [0.0]
    for answer, p in exact.items():
        if p * seeds < 5:
            observed[0] += counts[answer]
            expected[0] += p * seeds
        else:
            observed.append(counts[answer])
            expected.append(p * seeds)
    pairs = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    assert statistic < chi2.ppf(0.9999, max(len(pairs) - 1, 1))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_shared_seed_gives_the_same_tokens(name: str) -> None:
    for seed in range(100):
        shapes = np.random.default_rng(seed)
        ours = speculative(
            name,
            np.random.default_rng(seed),
            lambda: random_tree(shapes),  # noqa: B023
        )
        assert ours == plain(name, np.random.default_rng(seed))


def test_the_walk_follows_the_matching_child() -> None:
    tree = TokenTree.of([5, 6, 7, 8], [ROOT, 0, ROOT, 1], [0, 0, 0, 0], "x")
    says = {ROOT: 5, 0: 6, 1: 9}
    assert verify(tree, lambda node, _: says[node]) == ((5, 6, 9), (0, 1))
    assert tree.follow(ROOT, 7) == 2
    assert tree.follow(2, 7) is None
    assert verify(TokenTree.empty(), lambda *_: 3) == ((3,), ())
