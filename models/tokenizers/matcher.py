"""Finds the leftmost, longest of many fixed strings in a text: the added tokens of a vocabulary.

Vocabularies hold thousands of them (Gemma 6,400), too many for one alternation of Python's ``re``;
here a place in the text costs one dictionary lookup unless two characters already fit. Knows
strings and numbers only, not what a token means.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping

__all__ = ["TokenMatcher"]


class TokenMatcher:
    """The strings of ``tokens`` (text -> id), to be looked for in any number of texts."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: token for text, token in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: sorted(sizes, reverse=True) for head, sizes in lengths.items()}
        first = "".join(sorted({head[0] for head in self._lengths}))
        self._start = re.compile(f"[{re.escape(first)}]") if first else None

    def spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        """``(start, stop, token)`` of each match, left to right, never overlapping."""
        position = 0
        while self._start is not None and (found := self._start.search(text, position)):
            start = found.start()
            match = self._longest_at(text, start)
            if match is None:
                position = start + 1
            else:
                position = match[0]
                yield start, *match

    def _longest_at(self, text: str, start: int) -> tuple[int, int] | None:
        """Where the longest token that begins at ``start`` ends, and its id."""
        head = text[start : start + 2]
        sizes = self._lengths.get(head, ())
        for size in (*sizes, 1) if len(head) == 2 else sizes:
            token = self._tokens.get(text[start : start + size])
            if token is not None:
                return start + len(text[start : start + size]), token
        return None

    def split(self, text: str, ignored: Container[int] = ()) -> Iterator[str | int]:
        """``text`` as an alternation of plain stretches (never empty) and token ids.

        Tokens in ``ignored`` remain text, in which no other token is found.
        """
        end = 0
        for start, stop, token in self.spans(text):
            if token in ignored:
                continue
            if start > end:
                yield text[end:start]
            yield token
            end = stop
        if end < len(text):
            yield text[end:]
