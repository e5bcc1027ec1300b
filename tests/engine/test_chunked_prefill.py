"""Chunked prefill: rows of passes on made-up times of passes, and turns on a device."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from localrt.engine.batch.chunked_prefill import PassTimes, PassTurns, UnreadPrompt, rows_of_pass
from tests.waits import wait_for

CHAT, BACKGROUND = False, True


def linear(base: float, row: float, sizes: tuple[int, ...] = (1, 8, 64, 512)) -> PassTimes:
    """Passes that take ``base`` seconds and ``row`` for each row."""
    times = PassTimes()
    for rows in sizes:
        times.add(rows, base + row * rows)
    return times


def prompt(length: int, background: bool = CHAT, client: str = "") -> UnreadPrompt:
    return UnreadPrompt(client, length, background)


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
    st.lists(st.booleans(), max_size=40),
    st.lists(st.tuples(st.integers(2, 900), st.booleans(), st.integers(0, 3)), max_size=12),
    st.tuples(st.floats(1e-3, 2), st.floats(1e-5, 0.02)) | st.none(),
    st.integers(0, 9),
)
def test_any_pass(
    answers: list[bool],
    asked: list[tuple[int, bool, int]],
    costs: tuple[float, float] | None,
    turn: int,
) -> None:
    prompts = [UnreadPrompt(client, length, background) for length, background, client in asked]
    times = PassTimes() if costs is None else linear(*costs)
    chosen, rows = rows_of_pass(answers, prompts, times, most=64, guess=32, pass_number=turn)
    assert chosen == sorted({*chosen})
    assert all(i in chosen for i, background in enumerate(answers) if not background)
    assert bool(chosen) == bool(answers)
    assert len(chosen) + sum(rows) <= 64
    assert all(0 <= share <= one.length for share, one in zip(rows, prompts, strict=True))
    if prompts and len(chosen) < 64:
        assert any(rows)


def share_beside(answers: list[bool], times: PassTimes, others: int = 0) -> int:
    """The rows that a chat's prompt of 900 tokens gets."""
    fixed = {"most": 512, "guess": 64, "pass_number": 0}
    (share,) = rows_of_pass(answers, [prompt(900)], times, others=others, **fixed)[1]
    return share


def test_next_tokens_are_in_time() -> None:
    """A prompt is cut so that nobody's next token is late, and no further."""
    times = linear(0.05, 0.001)
    assert 0.15 < 0.05 + 0.001 * (1 + share_beside([CHAT], times)) <= 0.16
    assert 0.07 < 0.05 + 0.001 * (1 + share_beside([CHAT], times, others=1)) <= 0.08
    assert share_beside([BACKGROUND], times) == 511  # nobody waits for the next token
    slow = linear(3.0, 0.001)  # weights are streamed: every token is late, and rows are cheap
    assert share_beside([CHAT], slow) == 511


def test_background_leaves_room() -> None:
    """It fills passes without making others wait, and is never stopped."""
    times, long = linear(0.05, 0.001), prompt(900, BACKGROUND)
    first, second = rows_of_pass([], [long, prompt(400)], times, most=512, guess=64, pass_number=0)[
        1
    ]
    assert second == 400
    assert first == 64
    (share,) = rows_of_pass([], [long], times, most=512, guess=64, pass_number=0)[1]
    assert 40 <= share <= 60
    many = [CHAT, *[BACKGROUND] * 20]
    dear = linear(0.05, 0.02)
    taken = [
        rows_of_pass(many, [], dear, most=512, guess=64, pass_number=turn)[0] for turn in range(20)
    ]
    assert all(0 in chosen and 2 <= len(chosen) <= 8 for chosen in taken)
    assert set().union(*taken) == set(range(21))


# -- turns of a device -----------------------------------------------------------------------------


def test_short_passes_get_as_much_time_as_long_ones() -> None:
    """Of a small model and a large one, whose passes take ten times as long."""
    now, log = [0.0], list[str]()
    turns = PassTurns(lambda: now[0])

    def work(name: str, seconds: float, passes: int) -> None:
        for _ in range(passes):
            with turns.turn(name):
                now[0] += seconds
                log.append(name)
        turns.leave(name)

    threads = [
        threading.Thread(target=work, args=("small", 1.0, 40)),
        threading.Thread(target=work, args=("large", 10.0, 4)),
    ]
    with turns.turn():
        for thread in threads:
            thread.start()
        wait_for(lambda: len(turns._waiting) == 2)
    for thread in threads:
        thread.join(60)
    places = [number for number, name in enumerate(log) if name == "large"]
    assert len(places) == 4
    assert all(10 <= later - sooner <= 12 for sooner, later in pairwise(places)), log


def test_batches_at_work() -> None:
    turns = PassTurns()
    with suppress(ZeroDivisionError), turns.turn("a"):
        raise ZeroDivisionError
    with turns.turn("b") as others:
        assert others == 1
    with turns.turn() as others:
        assert others == 2
    turns.leave("a")
    with turns.turn("b") as others:
        assert others == 0
