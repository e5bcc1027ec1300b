"""Lines that end an answer: too little indentation, and too much time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localrt
from localrt.engine.stopping import LineLimit, LineMatcher


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
def test_the_answer_ends_before_a_line_of_an_outer_block(text: str, expected: str) -> None:
    assert shown([text], 4)[0] == expected
    assert shown(list(text), 4) == (expected, expected != text)


@given(st.lists(st.text("a \n\t", max_size=5), max_size=8), st.integers(0, 3))
def test_pieces_make_no_difference(pieces: list[str], indent: int) -> None:
    assert shown(pieces, indent) == shown(["".join(pieces)], indent)


def test_after_its_time_it_ends_with_the_line() -> None:
    now = 0.0
    matcher = LineMatcher(LineLimit(seconds=1.0), lambda: now)
    text = matcher.push("a\nb")
    now = 2.0
    text += matcher.push("c") + matcher.push("d\n")
    assert (text, matcher.stopped) == ("a\nbcd", True)
    assert matcher.push("e") + matcher.flush() == ""


def test_an_answer_of_a_model_ends_so(tiny: localrt.Model) -> None:
    options = {"temperature": 1.5, "top_k": 0, "max_tokens": 300, "ignore_eos": True}
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
