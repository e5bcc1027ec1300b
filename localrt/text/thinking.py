"""Where a model's thinking ends and its answer begins: the one rule of library, server and app.

``chunk.text`` has a model's thinking as ``<think>...</think>``, whatever the model itself writes
around it. The rule, for a whole text as for one that still grows:

- Every ``<think>...</think>`` at the beginning is thinking, one or several with only space between;
  so is ``<thinking>`` or ``<reasoning>``, which models write that were not taught a tag.
- A span that is not closed is thinking to its end, and so far there is no answer.
- Servers that keep the opening tag in the prompt send the closing one alone: what is before it is
  thinking, unless a backtick or an opening tag is there too.
- All other tags belong to the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.errors import OptionError

__all__ = [
    "CLOSE",
    "OPEN",
    "OPENINGS",
    "THOUGHT_FIELDS",
    "Thinking",
    "overlap",
    "split_thinking",
    "thoughts_apart",
]

OPEN, CLOSE = "<think>", "</think>"
OPENINGS = (OPEN, "<thinking>", "<reasoning>")
THOUGHT_FIELDS = ("thinking", "reasoning", "reasoning_content")
"""What chat templates call the field of a message for its thoughts."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """An answer in two parts; ``open`` while the thinking has not ended."""

    thinking: str
    answer: str
    open: bool = False


def split_thinking(text: str) -> Thinking:
    """The thinking that ``text`` begins with, and what follows it, both without space around.

    ``text`` may be what a stream has brought so far. Several spans at the beginning are all
    thinking; tags further down belong to the answer.

    >>> split_thinking("<think>Hm, two and two.</think>Four.")
    Thinking(thinking='Hm, two and two.', answer='Four.', open=False)
    >>> split_thinking("<think>Hm, two and")
    Thinking(thinking='Hm, two and', answer='', open=True)
    """
    if not isinstance(text, str):
        raise OptionError(f"text must be a string, is {text!r:.80}")
    thoughts: list[str] = []
    rest = text.lstrip()
    while opening := next((each for each in OPENINGS if rest.startswith(each)), ""):
        closing = opening.replace("<", "</")
        inside, closed, after = rest[len(opening) :].partition(closing)
        if not closed:
            thoughts.append(inside[: len(inside) - overlap(inside, closing)])
            return Thinking(_joined(thoughts), "", open=True)
        thoughts.append(inside)
        rest = after.lstrip()
    if rest and any(
        each.startswith(rest) for each in OPENINGS
    ):  # the start of a tag: the next piece tells
        return Thinking(_joined(thoughts), "", open=True)
    if thoughts:
        return Thinking(_joined(thoughts), rest)
    before, closed, after = text.partition(CLOSE)
    if closed and OPEN not in before and "`" not in before:
        return Thinking(before.strip(), after.lstrip())
    return Thinking("", text)


def _joined(thoughts: list[str]) -> str:
    return "\n\n".join(thought.strip() for thought in thoughts if thought.strip())


def thoughts_apart(messages: Sequence[Any]) -> list[Any]:
    """``messages`` whose thoughts are in fields of their own, as templates name them.

    For templates that do not read ``<think>`` in a content.
    """
    shaped: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and message.get("role") == "assistant":
            parts = split_thinking(content)
            if parts.thinking:
                message = {**message, "content": parts.answer}
                for name in THOUGHT_FIELDS:
                    message.setdefault(name, parts.thinking)
        shaped.append(message)
    return shaped


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark``."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
