"""A streamed answer in two parts: what the model thinks, and what it says.

The rule is that of ``localrt.text.thinking``; a closing tag alone, which only the whole text could
tell, is text. It knows no tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from localrt.text.thinking import OPENINGS, overlap

__all__ = ["Piece", "ThoughtStream", "parted"]


class Piece(NamedTuple):
    """What a piece of an answer adds to its thinking, and to its text."""

    thinking: str
    text: str


class ThoughtStream:
    """Takes an answer's text piece by piece, and gives each in its two parts.

    Space around thoughts is left out; several spans are joined by an empty line.
    """

    def __init__(self) -> None:
        self._held = ""
        self._closing = ""  # while the model thinks
        self._answering = False
        self._gap = ""  # before the next thought
        self._thought = False  # whether there has been a span
        self._began = False  # whether the open span has shown anything

    def push(self, piece: str, *, last: bool = False) -> Piece:
        """The parts that are certain, now that ``piece`` has come; all of them with the last."""
        found = self._push(piece)
        rest = self._flush() if last else Piece("", "")
        return Piece(found.thinking + rest.thinking, found.text + rest.text)

    def _push(self, piece: str) -> Piece:
        if self._answering:
            return Piece("", piece)
        self._held += piece
        thinking = ""
        while True:
            if self._closing:
                inside, closed, rest = self._held.partition(self._closing)
                if not closed:
                    cut = len(inside) - overlap(inside, self._closing)
                    cut = len(inside[:cut].rstrip())
                    self._held = inside[cut:]
                    return Piece(thinking + self._shown(inside[:cut]), "")
                thinking += self._shown(inside.rstrip())
                self._closing, self._held = "", rest
            start = self._held.lstrip()
            opening = next((each for each in OPENINGS if start.startswith(each)), "")
            if opening:
                self._closing = opening.replace("<", "</")
                self._held = start.removeprefix(opening)
                self._thought, self._began = True, False
            elif any(each.startswith(start) for each in OPENINGS):
                return Piece(thinking, "")  # the start of a tag, or nothing yet
            else:
                return Piece(thinking, self._answer())

    def _flush(self) -> Piece:
        if not self._closing:
            return Piece("", self._answer())
        held, self._held = self._held, ""
        return Piece(self._shown(held[: len(held) - overlap(held, self._closing)].rstrip()), "")

    def _answer(self) -> str:
        self._answering = True
        held, self._held = self._held, ""
        return held.lstrip() if self._thought else held

    def _shown(self, thought: str) -> str:
        if not self._began:
            thought = thought.lstrip()
        if not thought:
            return ""
        gap = "" if self._began else self._gap
        self._began, self._gap = True, "\n\n"
        return gap + thought


def parted(text: str) -> Piece:
    """The two parts of a whole answer, as its stream would give them."""
    return ThoughtStream().push(text, last=True)
