"""Foreign text as it is shown."""

from __future__ import annotations

import pytest

from localrt.cli import main
from localrt.common.formatting import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("é 中 🙂 a\u200db", "é 中 🙂 a\u200db"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("gone\rcome\x08\x7f", r"gone\rcome\x08\x7f"),
        ("\x9b31m\x85", r"\x9b31m\x85"),
        ("txt.\u202eexe \u2066", r"txt.\u202eexe \u2066"),
    ],
)
def test_text_for_a_terminal_moves_nothing(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_errors_of_commands_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "./no\x1b[2Jmodel.gguf", "hi"]) != 0
    assert "\x1b" not in capsys.readouterr().err
