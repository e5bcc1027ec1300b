"""Policies: what they keep, and the traps that they avoid."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.moe.belady import replay
from benchmarks.moe.policies import LRU, MRS, POLICIES, Stale
from benchmarks.moe.synthetic import synthetic_trace
from localrt.offload.experts.cache import ExpertCache
from localrt.offload.experts.policy import Learned
from tests.offload.experts.routing import random_trace


def touch(policy: object, layer: int, experts: np.ndarray, scores: np.ndarray, used: int) -> None:
    chosen, rows = np.unique(experts[:, :used], return_counts=True)
    policy.touch(layer, chosen, rows, experts, scores)  # type: ignore[attr-defined]


def test_mrs_scores_go_to_their_experts() -> None:
    """Not to those that come first in the order of their numbers."""
    policy = MRS(1, 8, 2, alpha=0.5)
    touch(policy, 0, np.array([[6, 1, 4, 0]]), np.array([[0.4, 0.3, 0.2, 0.1]]), 2)
    assert np.allclose(policy.value[0], [0.05, 0.15, 0, 0, 0.1, 0, 0.2, 0])
    touch(policy, 0, np.array([[0, 1, 2, 3]]), np.array([[0.4, 0.3, 0.2, 0.1]]), 2)
    assert np.allclose(policy.value[0], [0.225, 0.225, 0.1, 0.05, 0.05, 0, 0.1, 0])


def test_mrs_counts_every_row_of_a_pass() -> None:
    policy = MRS(1, 4, 1, alpha=0.5)
    touch(policy, 0, np.array([[0, 1], [2, 3]]), np.array([[0.8, 0.2], [0.6, 0.4]]), 1)
    assert np.allclose(policy.value[0], 0.75 * np.array([0.4, 0.1, 0.3, 0.2]))


@pytest.mark.parametrize("kind", [MRS, Learned])
def test_the_size_of_scores_does_not_favour_a_layer(kind: type[MRS] | type[Learned]) -> None:
    policy = kind(2, 4, 1)
    for _ in range(5):
        for layer, scale in ((0, 0.01), (1, 1.0)):
            touch(policy, layer, np.array([[2, 1]]), scale * np.array([[0.6, 0.4]]), 1)
    assert np.allclose(policy.value[0], policy.value[1], atol=0.02)


@pytest.mark.parametrize("kind", [MRS, Learned])
def test_scores_of_nothing_are_no_trouble(kind: type[MRS] | type[Learned]) -> None:
    policy = kind(1, 4, 1)
    for rows in (1, 3):
        touch(policy, 0, np.array([[2, 1]] * rows), np.zeros((rows, 2)), 1)
    assert np.isfinite(policy.value).all()


def test_learned_copes_with_nothing_to_learn() -> None:
    """Every expert used by every row, for long: all that it goes by is the same."""
    policy = Learned(2, 4, 4)
    policy.FORGET = 0.5  # type: ignore[misc]
    for _ in range(200):
        for layer in range(2):
            touch(policy, layer, np.array([[0, 1, 2, 3]]), np.full((1, 4), 0.25), 4)
    assert np.isfinite(policy.value).all()
    assert np.ptp(policy.value) < 1e-6


def test_a_sweep_over_the_layers_defeats_lru_but_not_its_layerwise_form() -> None:
    """Each token uses two of three experts in every layer; there is room for two of three."""
    trace = random_trace(layers=12, count=4, used=1, passes=(1,) * 300, skew=1.5)
    slots = 10  # fewer than one pass asks for

    def rate(policy: str) -> float:
        return replay(
            trace, ExpertCache(12, 4, 1, slots, policy=POLICIES[policy](12, 4, 1))
        ).hit_rate

    assert rate("lru") < 0.15
    assert rate("stale") > rate("lru") + 0.15
    assert rate("mrs") > rate("lru") + 0.3
    assert rate("learned") > rate("lru") + 0.3


def test_ages_are_counted_by_a_layers_own_visits() -> None:
    for kind, first in ((LRU, 1), (Stale, 0)):
        policy = kind(2, 2, 1)
        for layer, expert in ((0, 0), (1, 0), (0, 1)):
            touch(policy, layer, np.array([[expert]]), np.array([[1.0]]), 1)
        # Of (0, 0) and (1, 0), the former was passed over in its own layer already.
        older = policy.value[0, 0] < policy.value[1, 0]
        assert older
        assert (policy.value[1, 0] == policy.value[0, 1]) == (first == 0)


def test_learned_finds_out_what_a_workload_goes_by() -> None:
    """Experts that alternate in long phases, or that stay popular: it does well on both."""
    layers, count, used = 4, 16, 2
    phases = random_trace(layers=layers, count=count, used=used, passes=(1,) * 800, skew=1.2)
    experts = (phases.experts + (np.arange(800) // 40 * 5)[:, None, None]) % count
    changing = type(phases)(phases.header, experts.astype(np.int16), phases.scores, phases.pass_of)
    for trace in (phases, changing):
        rates = {
            name: replay(
                trace, ExpertCache(layers, count, used, 16, policy=make(layers, count, used))
            ).hit_rate
            for name, make in POLICIES.items()
        }
        assert rates["learned"] >= max(rates.values()) - 0.03


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen2-57b"])
def test_on_published_skew_scores_beat_recency(name: str) -> None:
    trace = synthetic_trace(name, tokens=250, layers=8)
    header = trace.header

    def rate(policy: str, share: float) -> float:
        sizes = (header.layers, header.count, header.used)
        slots = int(share * header.layers * header.count)
        cache = ExpertCache(*sizes, slots, policy=POLICIES[policy](*sizes))
        return replay(trace, cache).hit_rate

    assert rate("mrs", 0.25) > rate("lru", 0.25) + 0.05
    assert rate("learned", 0.25) > rate("lru", 0.25) + 0.05
