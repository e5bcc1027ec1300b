"""Where thinking ends: one rule, for whole answers and for those that still grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt import Thinking, split_thinking


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello", Thinking("", "Hello")),
        # One span at the beginning.
        ("<think>so</think>\n\nYes", Thinking("so", "Yes")),
        ("\n<think>\nso\n</think>Yes", Thinking("so", "Yes")),
        ("<think></think>Yes", Thinking("", "Yes")),
        # Two spans: both are thinking; one further down is part of the answer.
        ("<think>so</think>\n<think>or so</think>Yes", Thinking("so\n\nor so", "Yes")),
        ("<think>so</think>Yes <think>no</think>", Thinking("so", "Yes <think>no</think>")),
        # Other spellings; each ends with its own tag.
        ("<thinking>so</think></thinking>Yes", Thinking("so</think>", "Yes")),
        ("<reasoning>so</reasoning> <think>or</think>Yes", Thinking("so\n\nor", "Yes")),
        ("Yes <reasoning>no</reasoning>", Thinking("", "Yes <reasoning>no</reasoning>")),
        # Not closed yet.
        ("<reasoning>so far</reas", Thinking("so far", "", open=True)),
        ("<think", Thinking("", "", open=True)),
        ("<think>so far</thi", Thinking("so far", "", open=True)),
        ("<think>so</think><think>or", Thinking("so\n\nor", "", open=True)),
        ("<thi", Thinking("", "", open=True)),
        ("<thing> is", Thinking("", "<thing> is")),
        # The opening tag was in the prompt.
        ("so</think>Yes", Thinking("so", "Yes")),
        # Somebody asks about the tags.
        ("The tag <think> opens, </think> closes", None),
        ("`</think>` closes", None),
        ("```\n</think>\n```", None),
    ],
)
def test_where_thinking_ends(text: str, parts: Thinking | None) -> None:
    assert split_thinking(text) == (parts or Thinking("", text))


_PIECES = ["<think>", "</think>", "<thinking>", "</thinking>", "a ", "\n"]


@given(st.sampled_from(["<think>", "<thinking>"]), st.lists(st.sampled_from(_PIECES), max_size=6))
def test_what_was_thinking_stays_thinking_as_the_text_grows(
    opening: str, pieces: list[str]
) -> None:
    text = opening + "".join(pieces)
    whole = split_thinking(text)
    for end in range(len(text)):
        parts = split_thinking(text[:end])
        assert not (parts.open and parts.answer)
        assert whole.thinking.startswith(parts.thinking)
        if parts.answer:
            assert whole.answer.startswith(parts.answer)
