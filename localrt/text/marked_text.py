"""Texts with marks in them: what two have in common, where a mark is cut, what changes in them."""

from __future__ import annotations

import re

from localrt.text.call_notation import ID, NUMBERED, pattern

__all__ = [
    "ID",
    "MARK",
    "NUMBERED",
    "common_end",
    "common_start",
    "expression",
    "inside_mark",
    "marks_in",
    "snapped",
]

MARK = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]")
"""What the tokens look like that models mark the parts of an answer with."""

_LONGEST_MARK = 80  # characters
_IN_NO_MARK = set(">\n{},")


def expression(literal: str, *, strip: bool = True) -> str:
    """``literal`` as an expression, with what differs from call to call left open."""
    found = pattern(literal.strip() if strip else literal)
    found = found.replace(ID, r"(?P<id>[\w.:\-]+)", 1).replace(ID, r"[\w.:\-]+")
    return found.replace(NUMBERED, r"(?P<index>\d+)")


def marks_in(*texts: str) -> tuple[str, ...]:
    """The marks in ``texts``, each once."""
    return tuple(dict.fromkeys(mark for text in texts for mark in MARK.findall(text)))


def common_start(one: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def common_end(one: str, other: str) -> str:
    """What both end with."""
    return common_start(one[::-1], other[::-1])[::-1]


def inside_mark(text: str, at: int) -> bool:
    """Whether ``at`` is between the brackets of a tag."""
    opened = text.rfind("<", max(0, at - _LONGEST_MARK), at)
    return opened >= 0 and not set(text[opened:at]) & _IN_NO_MARK


def snapped(text: str, at: int) -> int:
    """``at``, or behind the tag that it is within."""
    return text.find(">", at) + 1 if inside_mark(text, at) and ">" in text[at:] else at
