"""Policies: what they keep, and the traps that they avoid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from localrt.offload.experts.cache import Learned
from tests.offload.experts.routing import (
    Step,
    Trace,
    hit_rates,
    random_trace,
    trained_trace,
    with_the_future,
)


def touch(policy: object, layer: int, experts: np.ndarray, scores: np.ndarray, used: int) -> None:
    chosen, rows = np.unique(experts[:, :used], return_counts=True)
    policy.touch(layer, chosen, rows, experts, scores)  # type: ignore[attr-defined]


def test_scale_of_scores() -> None:
    policy = Learned(2, 4, 1)
    for _ in range(5):
        for layer, scale in ((0, 0.01), (1, 1.0)):
            touch(policy, layer, np.array([[2, 1]]), scale * np.array([[0.6, 0.4]]), 1)
    assert np.allclose(policy.value[0], policy.value[1], atol=0.02)


def test_zero_scores() -> None:
    policy = Learned(1, 4, 1)
    for rows in (1, 3):
        touch(policy, 0, np.array([[2, 1]] * rows), np.zeros((rows, 2)), 1)
    assert np.isfinite(policy.value).all()


def test_layers_at_once() -> None:
    """A pass of one row is learned as layer by layer."""
    trace = random_trace(layers=3, count=16, used=4)
    each, both = Learned(3, 16, 4), Learned(3, 16, 4)
    for first in range(0, len(trace.steps), 3):
        steps = trace.steps[first : first + 3]
        for layer, experts, scores in steps:
            touch(each, layer, experts, scores, 4)
        layers, experts, scores = zip(*steps, strict=True)
        rows = np.concatenate(experts), np.concatenate(scores)
        both.touch_rows(np.array(layers), *rows, 4)
    assert np.allclose(each.value, both.value, rtol=1e-9)


def test_nothing_to_learn() -> None:
    """Every expert used by every row, for long: all that it goes by is the same."""
    policy = Learned(2, 4, 4)
    policy.FORGET = 0.5  # type: ignore[misc]
    for _ in range(200):
        for layer in range(2):
            touch(policy, layer, np.array([[0, 1, 2, 3]]), np.full((1, 4), 0.25), 4)
    assert np.isfinite(policy.value).all()
    assert np.ptp(policy.value) < 1e-6


def test_sweep() -> None:
    """There are fewer slots than one pass asks for."""
    trace = random_trace(layers=12, count=4, used=1, passes=(1,) * 300, skew=1.5)
    lru, learned = hit_rates(trace, 10)
    assert lru < 0.15
    assert learned > lru + 0.3


def test_workloads() -> None:
    """Experts that stay popular, or that are so in long phases: it does well on both."""
    steady = random_trace(layers=4, count=16, used=2, passes=(1,) * 800, skew=1.2)
    steps = (
        step._replace(experts=(step.experts + index // 4 // 40 * 5) % 16)
        for index, step in enumerate(steady.steps)
    )
    changing = replace(steady, steps=tuple(steps))
    for trace, least in ((steady, 0.13), (changing, 0.04)):
        lru, learned = hit_rates(trace, 16)
        assert learned > lru + least


def test_drifting_scores() -> None:
    """Scores that drift: of 32 experts, a rank just behind the used ones is used soon."""
    random = np.random.default_rng(0)
    lasting, steps = random.standard_normal((4, 32)), []
    for _ in range(400):
        lasting = 0.95 * lasting + np.sqrt(1 - 0.95**2) * random.standard_normal((4, 32))
        for layer in range(4):
            logits = 2 * lasting[layer] + random.gumbel(size=32)
            scores = np.exp(logits) / np.exp(logits).sum()
            order = np.argsort(-scores)[:8]
            steps.append(Step(layer, order[None].astype(np.int32), scores[None, order]))
    lru, learned = hit_rates(Trace(4, 32, 4, tuple(steps)), 24)
    assert learned > lru + 0.05


def test_a_trained_mixture() -> None:
    """Caches of a quarter, half and three quarters of the experts, on prose and code."""
    trace = trained_trace(2_000)
    for slots, gain in ((96, 0.08), (192, 0.01), (288, -0.01)):
        (lru, learned), (_, optimum) = hit_rates(trace, slots), with_the_future(trace, slots)
        assert lru + gain < learned < optimum


def test_the_optimum_of_a_short_trace() -> None:
    """b, then a, b, c, b, c with two slots: only c's first use and what was never seen miss."""
    uses = [[1], [0], [1], [2], [1], [2]]
    steps = (Step(0, np.array([experts]), np.ones((1, 1))) for experts in uses)
    static, optimum = with_the_future(Trace(1, 3, 1, tuple(steps)), 2)
    assert (static, optimum) == (5 / 6, 3 / 6)
