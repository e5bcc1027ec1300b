"""Foreign text as it is shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localrt.cli import main
from localrt.common.errors import OptionError
from localrt.common.files import parse_json
from localrt.common.formatting import parse_duration, parse_size, printable


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


@pytest.mark.parametrize("parse", [parse_size, parse_duration])
def test_more_digits_than_any_size(parse: Callable[[str], object]) -> None:
    with pytest.raises(OptionError, match=r"^'999"):
        parse("9" * 400)


def test_json_nested_too_deeply() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


def test_errors_of_commands_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "./no\x1b[2Jmodel.gguf", "hi"]) != 0
    assert "\x1b" not in capsys.readouterr().err
