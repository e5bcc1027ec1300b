"""Foreign text as it is shown; sizes as text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.cli import main
from localrt.common.errors import OptionError
from localrt.common.files import parse_json
from localrt.common.formatting import format_bytes, parse_duration, parse_size, printable


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


SIZES = {
    **{"8GB": 8_000_000_000, "512MiB": 512 << 20, "1.5GB": 1_500_000_000, "2 gib": 2 << 30},
    **{"4096": 4096, "100kB": 100_000, "3g": 3_000_000_000, "7B": 7, 4096: 4096},
}


@pytest.mark.parametrize("text", SIZES)
def test_parse_size(text: str | int) -> None:
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "GB", "8 apples", "-1GB", "0", 0, -5, "1e9", "nan", "1.2.3MB", True, None, 1.5]
)
def test_parse_size_errors(text: object) -> None:
    with pytest.raises(OptionError) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@given(st.integers(1, 10**14), st.text(max_size=12))
def test_size_round_trip(count: int, text: str) -> None:
    assert parse_size(format_bytes(count)) == pytest.approx(count, rel=0.06)
    with suppress(OptionError):
        assert parse_size(text) > 0


def test_format_bytes() -> None:
    sizes = [0, 999, 98_123_456, 1_117_000_000, 8_000_000_000, 999_600]
    shown = ["0 B", "999 B", "98 MB", "1.1 GB", "8 GB", "1 MB"]
    assert [format_bytes(size) for size in sizes] == shown


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
