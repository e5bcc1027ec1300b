"""DRY against the plainest code that does the same, token by token."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.cli.options import add_sampling_arguments, sampling_options
from localrt.engine.sampling import Dry, Sampling, grown, repeat_lengths
from tests.engine.fake_session import ByteTokenizer

VOCAB = 256


class PairTokenizer(ByteTokenizer):
    """Bytes, but for two that stand for two characters each."""

    pairs: ClassVar = {1: b"a\n", 3: b"a."}

    def token_bytes(self, token: int) -> bytes:
        return self.pairs.get(token) or super().token_bytes(token)


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


@given(st.lists(st.integers(0, 2), max_size=40))
def test_repeat_lengths(tokens: list[int]) -> None:
    ids = np.array(tokens, np.int32)
    expected = []
    for at in range(len(tokens)):
        length = 0
        while length < at and tokens[at - length - 1] == tokens[-length - 1]:
            length += 1
        expected.append(length)
    assert repeat_lengths(ids).tolist() == expected
    one_by_one = np.zeros(0, np.int32), np.zeros(0, np.int32)
    for token in tokens:
        one_by_one = grown(*one_by_one, token)
    assert one_by_one[0].tolist() == tokens
    assert one_by_one[1].tolist() == expected


@given(
    st.lists(st.sampled_from(b"ab\n"), max_size=30),
    st.lists(st.sampled_from(b"ab\n"), max_size=12),
    st.sampled_from([-1, 1, 3, 8, 1000]),
    st.integers(1, 4),
)
def test_penalties(prompt: list[int], said: list[int], last: int, allowed: int) -> None:
    sampling = Sampling(
        dry_multiplier=0.8,
        dry_penalty_last_n=last,
        dry_allowed_length=allowed,
        dry_sequence_breakers=["\n"],
    )
    dry = Dry(sampling, prompt, ByteTokenizer())
    logits = np.linspace(-1, 1, VOCAB, dtype=np.float32)
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


def test_breakers() -> None:
    text = [ord(each) for each in "xyz"]
    for between, breaker, ends in (
        ([1], "\n", True),  # within one token
        ([3, ord("\n")], ".\n", True),  # begins at the end of one
        ([ord("."), ord("\n")], ".\n", True),
        ([ord("."), ord(" "), ord("\n")], ".\n", False),
    ):
        sampling = Sampling(dry_multiplier=1.0, dry_sequence_breakers=[breaker])
        dry = Dry(sampling, [*text, *between, *text[:2]], PairTokenizer())
        logits = np.zeros(VOCAB, np.float32)
        assert dry.applied(logits)[ord("z")] == -1
        dry = Dry(sampling, [*text, *between, *text, *between, text[0]], PairTokenizer())
        # What repeats would have three tokens in front of the breaker.
        assert (dry.applied(logits)[ord("y")] == 0) == ends


def test_long_repetition() -> None:
    sampling = Sampling(dry_multiplier=100.0, dry_base=100.0, dry_sequence_breakers=[])
    dry = Dry(sampling, [7] * 3000, None)
    logits = dry.applied(np.full(VOCAB, 5.0, np.float32))
    assert np.isfinite(logits).all()
    assert logits[7] < -1e37
    assert Dry(sampling, list(range(50)), None).applied(logits) is logits  # nothing is repeated


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {}),
        (["--dry-sequence-breaker", ";"], {"dry_sequence_breakers": [";"]}),
        (["--dry-sequence-breaker", "none"], {"dry_sequence_breakers": []}),
    ],
)
def test_command_line(flags: list[str], expected: dict[str, object]) -> None:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    assert sampling_options(parser.parse_args(flags)) == expected
