"""What routers choose: as a trained mixture did, or random; and its replay through a cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from localrt.offload.experts.cache import ExpertCache, Values

TRACE = Path(__file__).parents[1] / "data/mixture/routing.npz"


class Step(NamedTuple):
    """What one layer asked for in one pass: best first, the first ``used`` columns are chosen."""

    layer: int
    experts: NDArray[Any]  # (rows, width)
    scores: NDArray[Any]  # (rows, width)


@dataclass(frozen=True)
class Trace:
    """Every layer of every pass, in the order in which they were asked."""

    layers: int
    count: int
    used: int
    steps: tuple[Step, ...]


def trained_trace(tokens: int = 20_000, path: Path = TRACE) -> Trace:
    """The first tokens of prose and of code, as many of each; scores are saved as square roots, of
    twice as many experts as are chosen.
    """
    with np.load(path) as file:
        halves = [np.array_split(file[name], 2) for name in ("experts", "scores")]
    experts, roots = (np.concatenate([each[: tokens // 2] for each in half]) for half in halves)
    scores = (roots.astype(np.float32) / 255) ** 2
    steps = (
        Step(layer, experts[token, layer][None].astype(np.int32), scores[token, layer][None])
        for token in range(len(experts))
        for layer in range(experts.shape[1])
    )
    _, layers, width = experts.shape
    return Trace(layers, int(experts.max()) + 1, width // 2, tuple(steps))


class LRU:
    """The least recently used expert goes first, on one clock for all layers. Like ``Learned``."""

    def __init__(self, layers: int, count: int) -> None:
        self.value: Values = np.zeros((layers, count))
        self._clock = 0.0

    def touch(self, layer: int, chosen: NDArray[Any], *_: object) -> None:
        """See ``Learned``."""
        self._clock += 1.0
        self.value[layer, chosen] = self._clock


def replay(trace: Trace, cache: ExpertCache[Any]) -> float:
    """The share of hits, every miss being brought in if it is worth it."""
    for layer, experts, scores in trace.steps:
        demand = cache.touch(layer, experts, scores)
        for expert in demand.experts[~demand.resident].tolist():
            worth = float(cache.policy.value[layer, expert])
            if len(cache) < cache.capacity or (cache.room and worth >= cache.least):
                cache.admit(layer, expert)
        cache.release(layer)
    return cache.hits / cache.demands


def hit_rates(trace: Trace, slots: int) -> tuple[float, float]:
    """Least recently used, and the product's policy, from an empty cache."""
    sizes = (trace.layers, trace.count, trace.used, slots)
    policy: Any = LRU(*sizes[:2])
    lru = replay(trace, ExpertCache(*sizes, policy=policy))
    return lru, replay(trace, ExpertCache(*sizes))


def random_trace(
    *,
    layers: int = 3,
    count: int = 8,
    used: int = 2,
    passes: tuple[int, ...] = (1,) * 40,
    skew: float = 0.8,
    seed: int = 0,
) -> Trace:
    """``passes`` gives the rows of each; experts are drawn in proportion to rank^-skew."""
    random = np.random.default_rng(seed)
    tokens = sum(passes)
    logits = -skew * np.log(np.arange(1, count + 1)) + random.gumbel(size=(tokens, layers, count))
    experts = np.argsort(-logits, axis=-1)[..., : min(2 * used, count)]
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    scores = np.take_along_axis(shares, experts, -1)
    parts = np.split(np.arange(tokens), np.cumsum(passes)[:-1])
    steps = (
        Step(layer, experts[rows, layer], scores[rows, layer])
        for rows in parts
        for layer in range(layers)
    )
    return Trace(layers, count, used, tuple(steps))


traces = st.builds(
    lambda layers, count, used, passes, skew, seed: random_trace(
        layers=layers,
        count=count,
        used=min(used, count),
        passes=tuple(passes),
        skew=skew,
        seed=seed,
    ),
    st.integers(1, 4),
    st.integers(1, 10),
    st.integers(1, 4),
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.floats(0, 2),
    st.integers(0, 1000),
)
