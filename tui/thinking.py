"""Where a model's thinking ends and its answer begins: ``<think>...</think>`` at the start.

Pure functions on text. Some templates put the opening tag into the prompt, so that an answer has
the closing one alone; tags further down are part of the answer, since people ask about them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Thought", "split_thinking"]

_NAMES = ("think", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Thought:
    """An answer in two parts. ``open`` while the thinking has not ended."""

    thinking: str
    answer: str
    open: bool

    @property
    def present(self) -> bool:
        """Whether there is any thinking."""
        return self.open or bool(self.thinking.strip())


def split_thinking(text: str) -> Thought:
    """The thinking at the beginning of ``text``, and the rest.

    The first characters of an opening tag count as thinking that has just begun: what will become
    of them is known with the next piece.
    """
    start = text.lstrip()
    for name in _NAMES:
        opening, closing = f"<{name}>", f"</{name}>"
        if start.startswith(opening):
            inside, closed, rest = start[len(opening) :].partition(closing)
            if closed:
                return Thought(inside.strip(), rest.lstrip("\n"), open=False)
            return Thought(_without_tail(inside, closing).strip(), "", open=True)
        if start and opening.startswith(start):
            return Thought("", "", open=True)
    for name in _NAMES:
        closing = f"</{name}>"
        position = text.find(closing)
        if position >= 0 and f"<{name}>" not in text[:position] and "```" not in text[:position]:
            rest = text[position + len(closing) :]
            return Thought(text[:position].strip(), rest.lstrip("\n"), open=False)
    return Thought("", text, open=False)


def _without_tail(text: str, tag: str) -> str:
    """The text without the first part of ``tag`` at its end."""
    for length in range(len(tag) - 1, 0, -1):
        if text.endswith(tag[:length]):
            return text[:-length]
    return text
