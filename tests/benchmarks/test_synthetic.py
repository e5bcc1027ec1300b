"""Synthetic traces have the skew and the locality that they say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.moe.routing_trace import RoutingTrace
from benchmarks.moe.synthetic import PRESETS, synthetic_odds, synthetic_trace
from localrt.errors import OptionError


def repeats(trace: RoutingTrace, back: int) -> float:
    """The share of choices made within the ``back`` tokens before."""
    chosen = trace.experts[:, :, : trace.header.used].astype(int)
    found = []
    for token in range(back, trace.tokens):
        for layer in range(trace.header.layers):
            recent = np.unique(chosen[token - back : token, layer])
            found.append(np.isin(chosen[token, layer], recent).mean())
    return float(np.mean(found))


def test_a_seed_gives_one_trace() -> None:
    first, again = (synthetic_trace("mixtral", tokens=20, layers=3, seed=4) for _ in range(2))
    assert np.array_equal(first.experts, again.experts)
    assert np.array_equal(first.scores, again.scores)
    other = synthetic_trace("mixtral", tokens=20, layers=3, seed=5)
    assert not np.array_equal(first.experts, other.experts)


def test_prompts_are_one_pass() -> None:
    trace = synthetic_trace("mixtral", prompt=30, tokens=5, layers=2)
    assert [tokens.stop - tokens.start for tokens in trace.passes()] == [30, 1, 1, 1, 1, 1]
    assert len(synthetic_trace("mixtral", tokens=5, layers=2).passes()) == 5


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_trace(name: str) -> None:
    trace = synthetic_trace(name, tokens=8, layers=2)
    assert "synthetic" in trace.header.model
    assert (np.diff(trace.scores.astype(float), axis=-1) <= 0).all()  # best first


def test_qwen3_repeats_as_was_measured() -> None:
    """45 % of the choices at the next token, 80 % within eight."""
    trace = synthetic_trace("qwen3-30b", tokens=250, layers=4)
    assert repeats(trace, 1) == pytest.approx(0.45, abs=0.04)
    assert repeats(trace, 8) == pytest.approx(0.80, abs=0.05)


def test_uniform_has_neither_skew_nor_locality() -> None:
    trace = synthetic_trace("uniform", tokens=250, layers=4)
    assert repeats(trace, 1) == pytest.approx(8 / 128, abs=0.01)


def test_an_unknown_preset() -> None:
    with pytest.raises(OptionError, match="one of mixtral"):
        synthetic_trace("gpt-5")


def test_odds_tell_of_the_next_token() -> None:
    trace = synthetic_trace("qwen3-30b", tokens=60, layers=2)
    odds = synthetic_odds("qwen3-30b", tokens=60, layers=2)
    best = np.argsort(-odds, axis=-1)[..., :32]
    found = [
        np.isin(trace.experts[token + 1, layer, :8], best[token, layer]).mean()
        for token in range(59)
        for layer in range(2)
    ]
    assert np.mean(found) > 0.6
