"""What ends an answer: stop strings, lines, and thinking that is too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localrt
from localrt.engine.answer import StopMatcher
from localrt.engine.stopping import LineLimit, LineMatcher, ThinkingLimit, ThinkingState

# -- stop strings ----------------------------------------------------------------------------------


def before_stop(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(map(matcher.push, pieces))
    return text + matcher.flush(), matcher.matched


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["Hello\n", "Us", "er", ": hi"], ["\nUser:"], "Hello", "\nUser:"),
        (["a\nUs", "ual"], ["\nUser:"], "a\nUsual", None),  # a false start
        (["a\nUser"], ["\nUser:"], "a\nUser", None),
        (["one STOP two ###"], ["###", "STOP"], "one ", "STOP"),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], text: str, matched: str | None) -> None:
    assert before_stop(pieces, stops) == (text, matched)


def test_stop_shows_what_is_certain() -> None:
    matcher = StopMatcher(["END"])
    assert (matcher.push("abcE"), matcher.push("x")) == ("abc", "Ex")


@given(st.text("ab#", max_size=30), st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3))
def test_stop_in_pieces(text: str, stops: list[str]) -> None:
    found = any(stop in text for stop in stops)
    # A longer stop may end later than a shorter one that begins after it: pieces of one character
    # stop at the first that completes.
    for size in (1, 2, 5):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        result, matched = before_stop(pieces, stops)
        assert (matched is not None) == found
        assert text.startswith(result)
        assert found or result == text
        assert not any(stop in result for stop in stops)


# -- lines -----------------------------------------------------------------------------------------


def shown(pieces: list[str], indent: int) -> tuple[str, bool]:
    matcher = LineMatcher(LineLimit(indent))
    text = "".join(map(matcher.push, pieces))
    return text + matcher.flush(), matcher.stopped


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1\n    b = 2\n", "a = 1\n    b = 2\n"),
        ("a\n    b\n\ndef f():", "a\n    b"),
        ("a\n\n\n    b\n   c", "a\n\n\n    b"),  # blank lines are of any block
        ("a\r\n    b\r\nc", "a\r\n    b\r"),
        ("a\n\t\t\t\tb\nc", "a\n\t\t\t\tb"),
        ("\n    a", "\n    a"),
        ("\na", ""),
        ("a\n   ", "a\n   "),  # its end is not known
    ],
)
def test_indentation(text: str, expected: str) -> None:
    assert shown([text], 4)[0] == expected
    assert shown(list(text), 4) == (expected, expected != text)


@given(st.lists(st.text("a \n\t", max_size=5), max_size=8), st.integers(0, 3))
def test_indentation_in_pieces(pieces: list[str], indent: int) -> None:
    assert shown(pieces, indent) == shown(["".join(pieces)], indent)


def test_line_seconds() -> None:
    now = 0.0
    matcher = LineMatcher(LineLimit(seconds=1.0), lambda: now)
    text = matcher.push("a\nb")
    now = 2.0
    text += matcher.push("c") + matcher.push("d\n")
    assert (text, matcher.stopped) == ("a\nbcd", True)
    assert matcher.push("e") + matcher.flush() == ""


def test_min_indent(tiny: localrt.Model) -> None:
    (newline,) = tiny.tokenize("\n", add_special=False)
    options = {"temperature": 1.5, "top_k": 0, "max_tokens": 40, "logit_bias": {newline: 3.0}}
    for seed in range(20):  # the first whose answer has a line that starts at the margin
        whole = tiny.generate("hi", seed=seed, **options).text
        lines = [line for line in whole.split("\n")[1:] if line.strip()]
        first = next((line for line in lines if line == line.lstrip()), None)
        if first is not None:
            break
    assert first is not None
    answer = tiny.generate("hi", min_indent=1, seed=seed, **options)
    assert answer.finish_reason == "stop"
    assert answer.text.rstrip() == whole[: whole.index("\n" + first)].rstrip()


# -- thinking --------------------------------------------------------------------------------------

OPEN, CLOSE, WORD = 1, 2, 3


def think(wanted: list[int], limit: ThinkingLimit, *, inside: bool = False) -> list[int]:
    """The tokens that come of those that a model ``wanted``, one by one."""
    thinking, said = ThinkingState(limit, inside=inside), []
    for want in wanted:
        forced = thinking.take()
        said.append(want if forced is None else forced)
        inside = said[-1] == OPEN or (inside and said[-1] != CLOSE)
        thinking.follow(inside, forced=forced is not None)
    return said


def test_thinking_limit() -> None:
    limit = ThinkingLimit(2, ((9, CLOSE, 8),))
    words = [WORD] * 6
    assert think(words, limit, inside=True) == [WORD, WORD, 9, CLOSE, 8, WORD]
    assert think([OPEN, *words], limit) == [OPEN, WORD, WORD, 9, CLOSE, 8, WORD]
    assert think([OPEN, WORD, CLOSE, WORD, WORD, WORD], limit)[-3:] == [WORD] * 3
    # All thinking counts, and what begins again ends at once, by the last way.
    twice = ThinkingLimit(2, ((CLOSE,), (7, CLOSE)))
    assert think([OPEN, WORD, WORD, 0, OPEN, 0, 0, WORD], twice) == [
        *(OPEN, WORD, WORD, CLOSE),
        *(OPEN, 7, CLOSE, WORD),
    ]


def test_tokens_behind_thinking() -> None:
    thinking = ThinkingState(ThinkingLimit(None, ((CLOSE, 8),), then=(8,)), inside=True)
    thinking.follow(True, forced=False)
    assert thinking.free
    thinking.follow(False, forced=False)
    assert (thinking.take(), thinking.take(), thinking.free) == (8, None, False)


@given(st.lists(st.sampled_from([OPEN, CLOSE, WORD]), max_size=30), st.integers(1, 5))
def test_drafts_end_where_tokens_are_forced(wanted: list[int], most: int) -> None:
    thinking = ThinkingState(ThinkingLimit(most, ((CLOSE,),)), inside=False)
    inside, free = False, 99
    for want in wanted:
        forced = thinking.take()
        assert forced is None or free <= 1
        token = want if forced is None else forced
        inside = token == OPEN or (inside and token != CLOSE)
        thinking.follow(inside, forced=forced is not None)
        free = thinking.ahead(99)
        assert 1 <= free <= 99
    assert thinking.tokens <= most
