"""Random routing to replay through a cache, and hypothesis' strategies for it."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from benchmarks.routing import Step, Trace


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
