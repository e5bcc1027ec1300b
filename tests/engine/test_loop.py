"""The generation loop on a scripted session, and what ends an answer: limits, cancelling, stop
strings, texts that repeat themselves without end.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localrt
from localrt.common.progress import Progress
from localrt.engine.answer import StopMatcher
from localrt.engine.batch.sequence import generate
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.engine.stopping import LineLimit, LineMatcher, Repetition, ThinkingLimit, ThinkingState
from localrt.engine.types import Chunk
from tests.engine.fake_session import ByteTokenizer, ScriptedSession

GREEDY = Sampling(temperature=0)
PROMPT = [1, 2, 3]
TEXT = "hello world"


def spell(text: str = TEXT) -> ScriptedSession:
    """A session that answers PROMPT with ``text`` and then end-of-sequence (299)."""
    return ScriptedSession(lambda n: ord(text[n - 3]) if n - 3 < len(text) else 299)


def run(session: Any, **settings: Any) -> list[Chunk]:
    request = Request(
        **{"prompt": PROMPT, "sampling": GREEDY, "eos_ids": frozenset({299}), **settings}
    )
    return list(generate(session, ByteTokenizer(), request))  # type: ignore[arg-type]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_eos() -> None:
    chunks = run(spell())
    assert text_of(chunks) == TEXT
    assert [c.finish_reason for c in chunks[:-1]] == [None] * len(TEXT)
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].metrics.completion_tokens == len(TEXT)
    assert [t for c in chunks for t in c.token_ids] == [ord(c) for c in TEXT]


def test_length_and_stop() -> None:
    chunks = run(spell(), stop=("o w",))
    assert (text_of(chunks), chunks[-1].finish_reason) == ("hell", "stop")
    session = spell()
    chunks = run(session, max_tokens=4)
    assert (text_of(chunks), chunks[-1].finish_reason) == ("hell", "length")
    # The last token is not computed: nobody asked for what follows it.
    assert len(session.tokens) == len(PROMPT) + 3
    full = run(ScriptedSession(lambda n: 65, capacity=8))
    assert (text_of(full), full[-1].finish_reason) == ("AAAAA", "length")


def test_kept_prefix() -> None:
    session = spell()
    run(session)
    session.computed.clear()
    longer = [*PROMPT, *map(ord, TEXT), 299, 7]
    chunks = run(session, prompt=longer, max_tokens=1)
    assert session.computed == [[299, 7]]
    assert chunks[-1].metrics.cached_tokens == len(longer) - 2
    assert chunks[-1].metrics.prompt_tokens == len(longer)


def test_cancel() -> None:
    cancel = threading.Event()
    request = Request(prompt=PROMPT, sampling=GREEDY, cancel=cancel)
    stream = generate(spell(), ByteTokenizer(), request)  # type: ignore[arg-type]
    shown = next(stream).text + next(stream).text
    cancel.set()
    last = list(stream)
    assert shown == "he"
    assert [c.finish_reason for c in last] == ["cancelled"]
    chunks = run(spell(), cancel=cancel)  # at once
    assert [c.finish_reason for c in chunks] == ["cancelled"]
    assert chunks[0].metrics.completion_tokens == 0


def test_progress() -> None:
    steps: list[Progress] = []
    session = spell()
    run(session, on_progress=steps.append)
    assert [(p.stage, p.done, p.total, p.unit) for p in steps] == [("prefill", 3, 3, "tokens")]
    steps.clear()
    session.computed.clear()
    # The next turn's prompt repeats six tokens: a pass ends there, and three are in the cache.
    longer = [*PROMPT, 9, 9, 9, 9]
    run(session, prompt=longer, repeated=(6,), max_tokens=1, on_progress=steps.append)
    assert session.computed == [[9, 9, 9], [9]]
    assert [(p.done, p.total) for p in steps] == [(3, 4), (4, 4)]


# -- stop strings ----------------------------------------------------------------------------------


def before_stop(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(map(matcher.push, pieces))
    return text + matcher.flush(), matcher.matched


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["Hello\n", "Us", "er", ": hi"], ["\nUser:"], "Hello", "\nUser:"),
        (["one STOP two ###"], ["###", "STOP"], "one ", "STOP"),
    ],
)
def test_stop_strings(pieces: list[str], stops: list[str], text: str, matched: str | None) -> None:
    assert before_stop(pieces, stops) == (text, matched)


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
        ("\na", ""),
        ("a\n   ", "a\n   "),  # its end is not known
    ],
)
def test_indentation(text: str, expected: str) -> None:
    assert shown([text], 4)[0] == expected
    assert shown(list(text), 4) == (expected, expected != text)


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


# -- texts that repeat themselves ------------------------------------------------------------------


def ends(text: str, size: int = 5) -> bool:
    repetition = Repetition()
    return any(repetition.push(text[at : at + size]) for at in range(0, len(text), size))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I do not know. " * 90, True),
        ("A beginning. " + "\n" * 1300, True),
        ("x" * 2000 + "end", True),
        ("x" * 1100, False),  # a line, as of a table
        ("".join(f"{number}. Tea\n" for number in range(400)), False),
        ("".join(f"| {number} | {number * number} |\n" for number in range(300)), False),
        ("".join(f"    values[{n}] = 0\n" for n in range(200)), False),
        (("Row, row, row your boat,\n" * 3 + "Gently down the stream.\n") * 5, False),
        ("".join(f"{'A refrain that comes again. ' * 4}\n" for _ in range(12)), True),
    ],
)
def test_repetition(text: str, expected: bool) -> None:
    assert ends(text) == expected
    assert ends(text, size=300) == expected
