"""Sampling: what each setting keeps, that drawing follows the distribution, and DRY against the
plainest code that does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import OptionError
from localrt.engine.answer import AnswerState
from localrt.engine.request import Request
from localrt.engine.sampling import (
    Dry,
    Sampling,
    adjust_logits,
    best_suffice,
    distribution,
    draw,
    ends_middle,
    sampling_defaults,
)
from tests.engine.fake_session import ByteTokenizer, ScriptedSession
from tests.ops.oracles import best_of

NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logits_of(*probs: float) -> np.ndarray:
    return np.log(np.array(probs, np.float32))


def kept(logits: np.ndarray, **settings: Any) -> list[int]:
    return sorted(distribution(logits, Sampling(**{**NEUTRAL, **settings})).tokens.tolist())


@pytest.mark.parametrize("temperature", [5e-324, 1e-7])
def test_tiny_temperature(temperature: float) -> None:
    logits = np.array([-3e4, 12.5, np.nextafter(np.float32(12.5), np.float32(0)), 9.0], np.float32)
    sampling = Sampling(temperature=temperature, top_k=0)
    assert sampling.greedy == (temperature < 1e-8)
    candidates = distribution(logits, sampling)
    assert candidates.tokens[0] == 1
    assert candidates.probs[0] > 0.999
    assert candidates.probs.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"top_k": 2}, [2, 3]),
        ({"top_p": 0.5}, [2, 3]),  # 0.4 falls short, the token that crosses stays
        ({"min_p": 0.6}, [2, 3]),
        ({"top_k": 3, "top_p": 0.75}, [2, 3]),  # renormalized: 0.44 + 0.33
    ],
)
def test_filters(settings: dict[str, Any], tokens: list[int]) -> None:
    assert kept(logits_of(0.1, 0.2, 0.4, 0.3), **settings) == tokens


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_k": 900}, {"min_p": 0.3}])
def test_ties_in_large_vocabulary(settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).integers(0, 20, 5000).astype(np.float32) / 4
    best = np.argsort(-logits, kind="stable")
    result = distribution(logits, Sampling(**{**NEUTRAL, **settings}))
    count = settings.get("top_k", int((logits >= logits.max() + np.log(0.3)).sum()))
    assert result.tokens.tolist() == best[:count].tolist()


def test_temperature_ties_and_flat_tops() -> None:
    result = distribution(
        np.array([0.0, 1.0], np.float32), Sampling(**NEUTRAL | {"temperature": 0.5})
    )
    np.testing.assert_allclose(result.probs[0], 1 / (1 + np.exp(-2.0)), rtol=1e-6)
    assert kept(np.array([1, 3, 3, 3], np.float32), top_k=2) == [1, 2]
    assert kept(np.array([1, 5, 5, 0], np.float32), temperature=0) == [1]
    tokens = kept(np.linspace(0, 1e-3, 1000).astype(np.float32), top_p=0.1)
    assert 99 <= len(tokens) <= 101
    assert min(tokens) >= 899


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=60),
    st.floats(0.05, 5),
    st.integers(0, 70),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_any_settings(
    values: list[float], temperature: float, k: int, top_p: float, min_p: float, typical: float
) -> None:
    sampling = Sampling(
        temperature=temperature, top_k=k, top_p=top_p, min_p=min_p, typical_p=typical
    )
    result = distribution(np.array(values, np.float32), sampling)
    assert 1 <= len(result.tokens) <= len(values)
    assert len(set(result.tokens.tolist())) == len(result.tokens)
    assert abs(result.probs.sum() - 1) < 1e-9
    assert (np.diff(result.probs) <= 1e-12).all()
    assert draw(result, 0.0) in result.tokens
    assert draw(result, np.nextafter(1.0, 0.0)) in result.tokens


def test_draw() -> None:
    result = distribution(logits_of(0.05, 0.15, 0.5, 0.3), Sampling(**NEUTRAL))
    rng = np.random.default_rng(0)
    count = 20_000
    drawn = np.bincount([draw(result, rng.random()) for _ in range(count)], minlength=4)
    expected = np.array([0.05, 0.15, 0.5, 0.3]) * count
    # Chi-square of three degrees of freedom, of which more than this has p < 0.001.
    assert ((drawn - expected) ** 2 / expected).sum() < 16.27


def test_penalties() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.0], np.float32)
    sampling = Sampling(repetition_penalty=2.0)
    np.testing.assert_allclose(adjust_logits(logits, [0], [1], sampling), [1, -4, 1, 0])
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.25)
    np.testing.assert_allclose(
        adjust_logits(logits, [3, 3], [2, 2, 0], sampling), [1.25, -2, -0.25, 0]
    )
    sampling = Sampling(logit_bias={3: 10.0, 0: float("-inf")})
    assert adjust_logits(logits, [], [], sampling).tolist() == [float("-inf"), -2, 1, 10]
    assert logits.tolist() == [2, -2, 1, 0]
    assert adjust_logits(logits, [1], [2], Sampling()) is logits  # nothing is copied in vain
    with pytest.raises(OptionError, match="token 9"):
        adjust_logits(logits, [], [], Sampling(logit_bias={9: 1.0}))


@pytest.mark.parametrize(
    ("probs", "settings", "tokens"),
    [
        ((0.5, 0.3, 0.15, 0.05), {}, [2, 3]),  # the least likely of the top choices stays
        ((0.5, 0.3, 0.15, 0.05), {"temperature": 0}, [0]),
        ((0.95, 0.03, 0.02), {}, [0, 1, 2]),  # a single one is no choice
        ((0.5, 0.3, 0.15, 0.05), {"xtc_threshold": 0.51}, [0, 1, 2, 3]),
        ((0.5, 0.3, 0.15, 0.05), {"top_k": 2}, [1]),
    ],
)
def test_xtc(probs: tuple[float, ...], settings: dict[str, Any], tokens: list[int]) -> None:
    on = {**NEUTRAL, "xtc_probability": 0.5, "xtc_threshold": 0.1, **settings}
    logits = logits_of(*probs)
    found = distribution(logits, Sampling(**on), 0.49)
    assert sorted(found.tokens.tolist()) == tokens
    assert found.probs.sum() == pytest.approx(1)
    untouched = distribution(logits, Sampling(**{**on, "xtc_probability": 0.0}))
    assert distribution(logits, Sampling(**on), 0.5).tokens.tolist() == untouched.tokens.tolist()


@pytest.mark.parametrize(
    ("probs", "ends"),
    [
        ((0.9, 0.1), [0]),
        ((0.6, 0.15, 0.25), [1]),  # one of three likely ones
        ((0.25, 0.25, 0.25, 0.25), [3]),
        ((0.989, 0.009, 0.002), []),  # another goes on far more likely
    ],
)
def test_ends_middle(probs: tuple[float, ...], ends: list[int]) -> None:
    assert ends_middle(logits_of(*probs), ends or [1]) == bool(ends)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 1.1}, {"logit_bias": {"a": 1.0}}, {"xtc_threshold": 2}]
)
def test_bad_values(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        Sampling(**bad)


def test_defaults() -> None:
    assert sampling_defaults({}) == {}
    assert sampling_defaults({"eos_token_id": 2}) == {}
    assert sampling_defaults({"do_sample": False, "top_p": 0.9}) == {"temperature": 0.0}
    named = sampling_defaults({"do_sample": True, "temperature": 0.6, "top_p": 0.9})
    assert named == {"temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.0}


@pytest.mark.parametrize("more", [{}, {"do_sample": False}, {"temperature": 1.5}])
def test_suppressed_tokens(more: dict[str, Any]) -> None:
    """Of the ids in a model's config, those that it has are never drawn."""
    own: dict[str, Any] = sampling_defaults({"suppress_tokens": [2, 9, "x", -1], **more}, 4)
    sampling = Sampling(**{**NEUTRAL, **own})
    logits = adjust_logits(logits_of(0.1, 0.2, 0.6, 0.1), [], [], sampling)
    found = distribution(logits, sampling)
    assert 2 not in found.tokens[found.probs > 0]
    assert sampling_defaults({"suppress_tokens": "2", "eos_token_id": 2}) == {}


def tokens_of(rows: np.ndarray, sampling: Sampling) -> list[int]:
    """An answer's tokens."""
    answer = AnswerState(Request(prompt=[1], sampling=sampling), ScriptedSession(int), None)
    for row in rows:
        answer.accept(row)
    return answer.generated


@given(
    seed=st.integers(0, 1 << 32),
    vocab=st.integers(1, 500),
    ties=st.integers(0, 3),
    excluded=st.sampled_from([0.0, 0.5, 0.99]),
    settings=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 20.0]),
            "top_k": st.integers(1, 64),
            "top_p": st.sampled_from([1.0, 0.9, 0.0]),
            "min_p": st.sampled_from([0.0, 0.05, 1.0]),
            "typical_p": st.sampled_from([1.0, 0.5]),
            "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
            "xtc_threshold": st.sampled_from([0.0, 0.02, 0.3]),
            "seed": st.integers(0, 1 << 64 - 1),
        }
    ),
)
def test_best_logits_give_the_same_tokens(
    seed: int, vocab: int, ties: int, excluded: float, settings: dict[str, Any]
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=(6, vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits / ties)
    logits[rng.random(logits.shape) < excluded] = -np.inf
    logits[:, rng.integers(vocab)] = 1.0
    sampling = Sampling(**settings)
    assert best_suffice(sampling)
    assert tokens_of(best_of(logits), sampling) == tokens_of(logits, sampling)


@pytest.mark.parametrize(
    ("settings", "enough"),
    [
        ({}, True),
        ({"top_k": 65}, False),
        ({"temperature": 0.0, "top_k": 0}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"dry_multiplier": 0.8}, False),
    ],
)
def test_where_the_best_logits_are_enough(settings: dict[str, Any], enough: bool) -> None:
    assert best_suffice(Sampling(**settings)) == enough
    request = Request(prompt=[1], sampling=Sampling(**settings))
    assert request.best_only == enough
    for options in ({"logprobs": 0}, {"fills_gap": True}, {"constraint": object}):
        assert not replace(request, **options).best_only


BYTES = 256


def naive(tokens: Sequence[int], sampling: Sampling, breaks: Sequence[int]) -> dict[int, float]:
    """The penalty of each token, by comparing every position with the end. ``breaks`` are the
    places behind which a breaker ends.
    """
    start = 0 if sampling.dry_penalty_last_n < 0 else len(tokens) - sampling.dry_penalty_last_n
    start = max(0, start)
    reach = len(tokens) - max([at for at in breaks if at >= start], default=start)
    found: dict[int, float] = {}
    for at in range(start + 1, len(tokens)):
        length = 0
        while at - length > start and tokens[at - length - 1] == tokens[-length - 1]:
            length += 1
        length = min(length, reach)
        if length >= sampling.dry_allowed_length:
            power = float(length - sampling.dry_allowed_length)
            lost = sampling.dry_multiplier * sampling.dry_base**power
            found[tokens[at]] = max(found.get(tokens[at], 0.0), lost)
    return found


@given(
    st.lists(st.sampled_from(b"ab\n"), max_size=30),
    st.lists(st.sampled_from(b"ab\n"), max_size=12),
    st.sampled_from([-1, 1, 3, 8, 1000]),
    st.integers(1, 4),
)
def test_dry_penalties(prompt: list[int], said: list[int], last: int, allowed: int) -> None:
    sampling = Sampling(
        dry_multiplier=0.8,
        dry_penalty_last_n=last,
        dry_allowed_length=allowed,
        dry_sequence_breakers=["\n"],
    )
    dry = Dry(sampling, prompt, ByteTokenizer())
    logits = np.linspace(-1, 1, BYTES, dtype=np.float32)
    for token in (None, *said):
        if token is not None:
            dry.push(token)
            prompt = [*prompt, token]
        breaks = [at + 1 for at, each in enumerate(prompt) if each == ord("\n")]
        expected = logits.astype(np.float64)
        for each, lost in naive(prompt, sampling, breaks).items():
            if each != ord("\n"):
                expected[each] -= lost
        np.testing.assert_allclose(dry.applied(logits), expected, rtol=1e-6)


def test_long_repetition() -> None:
    sampling = Sampling(dry_multiplier=100.0, dry_base=100.0, dry_sequence_breakers=[])
    dry = Dry(sampling, [7] * 3000, None)
    logits = dry.applied(np.full(BYTES, 5.0, np.float32))
    assert np.isfinite(logits).all()
    assert logits[7] < -1e37
    assert Dry(sampling, list(range(50)), None).applied(logits) is logits  # nothing is repeated
