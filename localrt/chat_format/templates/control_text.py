"""Keeps text that merely spells a control token apart from the control tokens of a template.

Such text travels through a template in disguise, each character moved to a private plane of
Unicode, so that trimming and splitting treat it as any other text of its length. Knows strings
only: no tokenizer, no template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from localrt.models.tokenizers.vocabulary import TokenMatcher

Segment = tuple[str, bool]
"""Text, and whether control tokens written in it count."""

_PLANES = (16, 15, *range(13, 3, -1))  # of Unicode: for private use, then those without characters

# What control tokens look like, for whoever does not know the vocabulary's own.
_LOOKS_LIKE_ONE = re.compile(r"<[^\s<>]{1,64}>|\[[^\s\[\]]{1,32}\]")


class ControlMask:
    """Moves the characters of control tokens in ``given`` to a plane that it does not use.

    ``covered`` is ``given`` in that disguise: strings, lists and mappings at any depth. Without
    ``control_tokens``, everything that looks like one is taken for one.
    """

    def __init__(self, given: Any, control_tokens: Iterable[str] | None) -> None:
        self._matcher: TokenMatcher | None = None
        if control_tokens is not None:
            self._matcher = TokenMatcher(dict.fromkeys(control_tokens, 0))
        used = _planes(given)
        self._base = 0x10000 * next((plane for plane in _PLANES if plane not in used), _PLANES[0])
        first, last = chr(self._base), chr(self._base + 0xFFFF)
        self._disguised = re.compile(f"([{first}-{last}]+)")
        self.covered = self._cover(given)

    def uncover(self, text: str) -> str:
        """Rendered ``text`` as it would read without the disguise."""
        return "".join([piece for piece, _ in self.segments(text)])

    def segments(self, text: str) -> list[Segment]:
        """Rendered ``text``, cut where disguised stretches begin and end, and uncovered."""
        return [
            (self._reveal(piece), False) if index % 2 else (piece, True)
            for index, piece in enumerate(self._disguised.split(text))
            if piece
        ]

    def _cover(self, value: Any) -> Any:
        """``value`` with every control token in its strings disguised, at any depth."""
        match value:
            case str():
                return self._cover_text(value)
            case Mapping():
                return {self._cover(key): self._cover(item) for key, item in value.items()}
            case list() | tuple():
                return [self._cover(item) for item in value]
            case _:
                return value

    def _cover_text(self, text: str) -> str:
        pieces, end = [], 0
        for start, stop in self._spans(text):
            pieces += [text[end:start], *map(self._disguise, text[start:stop])]
            end = stop
        return "".join([*pieces, text[end:]]) if pieces else text

    def _spans(self, text: str) -> list[tuple[int, int]]:
        if self._matcher is None:
            return [found.span() for found in _LOOKS_LIKE_ONE.finditer(text)]
        return [(start, stop) for start, stop, _ in self._matcher.spans(text)]

    def _disguise(self, char: str) -> str:
        return chr(self._base + ord(char)) if ord(char) < 0x10000 else char

    def _reveal(self, text: str) -> str:
        return "".join([chr(ord(char) - self._base) for char in text])


def _planes(value: Any) -> set[int]:
    """The planes of Unicode, from the fourth on, that the strings in ``value`` use."""
    match value:
        case str():
            if not value or max(value) < "\U00040000":
                return set()
            return {ord(char) >> 16 for char in value}
        case Mapping():
            return set().union(*map(_planes, value), *map(_planes, value.values()))
        case list() | tuple():
            return set().union(*map(_planes, value))
        case _:
            return set()
