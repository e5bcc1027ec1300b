"""Splits a model's thinking from its answer, by one rule for library, server and app.

``chunk.text`` has a model's thinking as ``<think>...</think>``, whatever tags the model itself
writes. The rule is the same for complete texts and for texts that still grow:

- Every ``<think>...</think>`` at the beginning is thinking, one or several with only space between;
  so is ``<thinking>`` or ``<reasoning>``, which models without a trained tag write.
- A span that is not closed is thinking to its end, and there is no answer yet.
- Servers that keep the opening tag in the prompt send only the closing one: the text before it is
  thinking, unless it has a backtick or an opening tag.
- All other tags belong to the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from localrt.common.errors import OptionError


class ThinkingDelta(NamedTuple):
    """The text that a piece of an answer adds to the thinking, and to the answer itself."""

    thinking: str
    text: str


class ThoughtStream:
    """Takes an answer's text piece by piece, and splits each into thinking and text.

    Space around thoughts is left out; several spans are joined by an empty line.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._closing = ""  # while the model thinks
        self._answering = False
        self._gap = ""  # before the next thought
        self.has_thought = False  # whether a thought has begun so far
        self._began = False  # whether the open span has shown anything

    @property
    def is_open(self) -> bool:
        """Whether the text ends within a thought, or a tag that may begin one."""
        return bool(self._closing or (self._buffer.strip() and not self._answering))

    def push(self, piece: str, *, last: bool = False) -> ThinkingDelta:
        """Add ``piece`` and return the parts that are certain now; with ``last``, all of them."""
        found = self._push(piece)
        rest = self._flush() if last else ThinkingDelta("", "")
        return ThinkingDelta(found.thinking + rest.thinking, found.text + rest.text)

    def _push(self, piece: str) -> ThinkingDelta:
        if self._answering:
            return ThinkingDelta("", piece)
        self._buffer += piece
        thinking = ""
        while True:
            if self._closing:
                inside, closed, rest = self._buffer.partition(self._closing)
                if not closed:
                    cut = len(inside) - overlap(inside, self._closing)
                    cut = len(inside[:cut].rstrip())
                    self._buffer = inside[cut:]
                    return ThinkingDelta(thinking + self._shown(inside[:cut]), "")
                thinking += self._shown(inside.rstrip())
                self._closing, self._buffer = "", rest
            start = self._buffer.lstrip()
            opening = next((each for each in OPENINGS if start.startswith(each)), "")
            if opening:
                self._closing = opening.replace("<", "</")
                self._buffer = start.removeprefix(opening)
                self.has_thought, self._began = True, False
            elif any(each.startswith(start) for each in OPENINGS):
                return ThinkingDelta(thinking, "")  # the start of a tag, or nothing yet
            else:
                return ThinkingDelta(thinking, self._answer())

    def _flush(self) -> ThinkingDelta:
        if not self._closing:
            return ThinkingDelta("", self._answer())
        buffer, self._buffer = self._buffer, ""
        return ThinkingDelta(
            self._shown(buffer[: len(buffer) - overlap(buffer, self._closing)].rstrip()), ""
        )

    def _answer(self) -> str:
        self._answering = True
        buffer, self._buffer = self._buffer, ""
        return buffer.lstrip() if self.has_thought else buffer

    def _shown(self, thought: str) -> str:
        if not self._began:
            thought = thought.lstrip()
        if not thought:
            return ""
        gap = "" if self._began else self._gap
        self._began, self._gap = True, "\n\n"
        return gap + thought


def parted(text: str) -> ThinkingDelta:
    """Split a whole answer into its two parts, as ``ThoughtStream`` does."""
    return ThoughtStream().push(text, last=True)


OPEN, CLOSE = "<think>", "</think>"
OPENINGS = (OPEN, "<thinking>", "<reasoning>")
THOUGHT_FIELDS = ("thinking", "reasoning", "reasoning_content")
"""The names that chat templates use for a message's field of thoughts."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """An answer in two parts; ``open`` says that the thinking has not ended."""

    thinking: str
    answer: str
    open: bool = False


def split_thinking(text: str) -> Thinking:
    """Split ``text`` into the thinking at its beginning and the answer, both stripped.

    ``text`` may be the beginning of a stream. Several spans at the beginning are all thinking; tags
    further down belong to the answer.

    >>> split_thinking("<think>Hm, two and two.</think>Four.")
    Thinking(thinking='Hm, two and two.', answer='Four.', open=False)
    >>> split_thinking("<think>Hm, two and")
    Thinking(thinking='Hm, two and', answer='', open=True)
    """
    if not isinstance(text, str):
        raise OptionError(f"text must be a string, is {text!r:.80}")
    stream = ThoughtStream()
    found = stream.push(text)
    if stream.is_open:
        return Thinking(found.thinking + stream.push("", last=True).thinking, "", open=True)
    if stream.has_thought:
        return Thinking(*found)
    before, closed, after = text.partition(CLOSE)
    if closed and OPEN not in before and "`" not in before:
        return Thinking(before.strip(), after.lstrip())
    return Thinking("", text)


def thoughts_apart(messages: Sequence[Any]) -> list[object]:
    """Move the thoughts of ``messages`` from contents to the fields that templates name.

    For templates that do not understand ``<think>`` in a content.
    """
    shaped: list[object] = []
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
    """Length of the longest end of ``text`` that is a proper beginning of ``mark``."""
    sizes = range(min(len(text), len(mark) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
