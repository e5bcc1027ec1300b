"""Texts that repeat themselves without end, and those that only look like it."""

from __future__ import annotations

import pytest

from localrt.engine.stopping import Repetition


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
