"""Stop strings: found across pieces, never shown, and nothing else is swallowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localrt.engine.answer import StopMatcher


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.stopped:
            return text, True
    return text + matcher.flush(), False


def test_a_stop_that_spans_pieces() -> None:
    assert shown(["Hello\n", "Us", "er", ": hi"], ["\nUser:"]) == ("Hello", True)


def test_a_false_start_is_shown_in_the_end() -> None:
    assert shown(["a\nUs", "ual"], ["\nUser:"]) == ("a\nUsual", False)
    assert shown(["a\nUser"], ["\nUser:"]) == ("a\nUser", False)


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abcE") == "abc"
    assert matcher.push("x") == "Ex"


def test_the_earliest_of_several_stops_wins() -> None:
    assert shown(["one STOP two ###"], ["###", "STOP"]) == ("one ", True)
    matcher = StopMatcher(["###", "STOP"])
    matcher.push("one STOP")
    assert matcher.matched == "STOP"


@given(st.text("ab#", max_size=30), st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3))
def test_equals_searching_the_whole_text(text: str, stops: list[str]) -> None:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    # A longer stop may end later than a shorter one that begins after it: pieces of one character
    # stop at the first that completes.
    for size in (1, 2, 5):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        result, stopped = shown(pieces, stops)
        assert stopped == bool(found)
        assert text.startswith(result)
        if not stopped:
            assert result == text
        assert not any(stop in result for stop in stops)
