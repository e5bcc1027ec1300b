"""Rows of passes by the goals of answers, on made-up times of passes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import OptionError
from localrt.engine.batch.latency_goals import (
    GOALS,
    Goal,
    PassTimes,
    UnreadPrompt,
    even_shares,
    goal_of,
    rows_of_pass,
)

CHAT, COMPLETION, BACKGROUND = GOALS.values()
goals = st.sampled_from([*GOALS.values()])


def linear(base: float, row: float, sizes: tuple[int, ...] = (1, 8, 64, 512)) -> PassTimes:
    """Passes that take ``base`` seconds and ``row`` for each row."""
    times = PassTimes()
    for rows in sizes:
        times.add(rows, base + row * rows)
    return times


def prompt(length: int, goal: Goal = CHAT, client: str = "", deadline: float = 0.0) -> UnreadPrompt:
    return UnreadPrompt(client, length, goal, deadline)


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 10)), max_size=20))
def test_pass_times(seen: list[tuple[int, float]]) -> None:
    times = PassTimes()
    assert times.seconds(5) is None
    assert times.rows_within(1.0) == 0
    for rows, seconds in seen:
        times.add(rows, seconds)
    taken = [times.seconds(rows) or 0.0 for rows in range(1, 3000, 7)] if seen else []
    assert all(more >= less - 1e-9 for less, more in pairwise(taken))
    for limit in (0.01, 0.3, 20.0):
        rows = times.rows_within(limit)
        if rows:
            assert (times.seconds(rows) or 0.0) <= limit * (1 + 1e-9)
            assert (times.seconds(rows + 2) or 0.0) > limit * (1 - 1e-9)


@given(
    st.lists(goals, max_size=40),
    st.lists(st.tuples(st.integers(2, 900), goals, st.integers(0, 3)), max_size=12),
    st.tuples(st.floats(1e-3, 2), st.floats(1e-5, 0.02)) | st.none(),
    st.integers(0, 9),
)
def test_any_pass(
    answers: list[Goal],
    asked: list[tuple[int, Goal, int]],
    costs: tuple[float, float] | None,
    turn: int,
) -> None:
    prompts = [UnreadPrompt(client, length, goal, length) for length, goal, client in asked]
    times = PassTimes() if costs is None else linear(*costs)
    chosen, rows = rows_of_pass(answers, prompts, times, most=64, guess=32, pass_number=turn)
    assert chosen == sorted({*chosen})
    assert all(i in chosen for i, goal in enumerate(answers) if not goal.background)
    assert bool(chosen) == bool(answers)
    assert len(chosen) + sum(rows) <= 64
    assert all(0 <= share <= one.length for share, one in zip(rows, prompts, strict=True))
    if prompts and len(chosen) < 64:
        assert any(rows)


def test_next_tokens_keep_their_goal() -> None:
    """A prompt is cut so that nobody's next token is late, and no further."""
    times = linear(0.05, 0.001)
    (share,) = rows_of_pass([CHAT], [prompt(900)], times, most=512, guess=64, pass_number=0)[1]
    assert 0.15 < 0.05 + 0.001 * (1 + share) <= 0.16
    (share,) = rows_of_pass([COMPLETION], [prompt(900)], times, most=512, guess=64, pass_number=0)[
        1
    ]
    assert 0.095 < 0.05 + 0.001 * (1 + share) <= 0.11  # twice a pass without prompts, at least
    (share,) = rows_of_pass([BACKGROUND], [prompt(900)], times, most=512, guess=64, pass_number=0)[
        1
    ]
    assert share == 511  # nobody waits for the next token
    slow = linear(3.0, 0.001)  # weights are streamed: the goal is out of reach, and rows are cheap
    (share,) = rows_of_pass([CHAT], [prompt(900)], slow, most=512, guess=64, pass_number=0)[1]
    assert share == 511


def test_background_leaves_room() -> None:
    """It fills passes without making others wait, and is never stopped."""
    times, long = linear(0.05, 0.001), prompt(900, BACKGROUND)
    first, second = rows_of_pass([], [long, prompt(400)], times, most=512, guess=64, pass_number=0)[
        1
    ]
    assert second == 400
    assert first == 50
    (share,) = rows_of_pass([], [long], times, most=512, guess=64, pass_number=0)[1]
    assert 40 <= share <= 60
    many = [CHAT, *[BACKGROUND] * 20]
    dear = linear(0.05, 0.02)
    taken = [
        rows_of_pass(many, [], dear, most=512, guess=64, pass_number=turn)[0] for turn in range(20)
    ]
    assert all(0 in chosen and 2 <= len(chosen) <= 8 for chosen in taken)
    assert set().union(*taken) == set(range(21))


def test_earliest_deadline_first() -> None:
    chat, completion = prompt(300, CHAT, deadline=5.0), prompt(300, COMPLETION, deadline=6.0)
    rows = rows_of_pass([], [chat, completion], PassTimes(), most=400, guess=64, pass_number=0)[1]
    assert rows == [300, 100]
    later = completion._replace(deadline=4.0)
    rows = rows_of_pass([], [chat, later], PassTimes(), most=400, guess=64, pass_number=0)[1]
    assert rows == [100, 300]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), max_size=12), st.integers(0, 99))
def test_even_shares(prompts: list[tuple[int, int]], room: int) -> None:
    shares = even_shares(prompts, room)
    lengths = [length for _, length in prompts]
    assert sum(shares) == min(room, sum(lengths)) or sum(shares) <= room
    assert all(0 <= share <= length for share, length in zip(shares, lengths, strict=True))


def test_unknown_class() -> None:
    assert goal_of("completion") == COMPLETION
    with pytest.raises(OptionError, match="one of interactive, completion, background, is 'x'"):
        goal_of("x")
    assert Goal(1.0).next_s == math.inf
