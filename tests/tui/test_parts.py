"""The parts that need no app: footer, loading line, numbers, pace, threads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localrt.common.progress import Progress
from localrt.engine.types import Metrics
from localrt.tui.chat.bars import Phase, StatusBar, footer_line
from localrt.tui.chat.message_queue import RedrawLimit
from localrt.tui.loading_line import loading_line
from localrt.tui.text import clean, one_line

STATUS = StatusBar(
    model="SmolLM2-135M-Instruct",
    engine="native q4_1",
    phase=Phase.GENERATING,
    metrics=Metrics(decode_tok_s=41.2),
    used=312,
    ctx=8192,
)


def metrics(per_pass: float, sources: dict[str, float]) -> Metrics:
    return Metrics(decode_tok_s=41.2, accepted_per_pass=per_pass, accepted_by_source=sources)


@pytest.mark.parametrize(
    ("width", "shown", "dropped"),
    [
        (
            100,
            ["SmolLM2", "native q4_1", "answering", "41.2 tok/s", "context 312 of 8.2k", "Esc"],
            [],
        ),
        (60, ["SmolLM2", "answering", "41.2 tok/s"], ["Esc", "q4_1"]),
        (40, ["SmolLM2", "answering"], ["tok/s", "8.2k"]),
        (12, ["answering"], ["SmolLM2"]),
    ],
)
def test_footer(width: int, shown: list[str], dropped: list[str]) -> None:
    line = footer_line(STATUS, width).plain
    assert all(part in line for part in shown)
    assert not any(part in line for part in dropped)
    assert len(line) <= max(width, len(" answering "))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_footer_long_name(width: int) -> None:
    """It is cut before what to press and how full the context is."""
    name = "Qwen3-Coder-30B-A3B-Instruct-1M-UD-Q4_K_XL-imatrix-abliterated.gguf"
    line = footer_line(replace(STATUS, model=name), width).plain
    assert "… · answering" in line
    assert name[:8] in line
    assert "41.2 tok/s · context 312 of 8.2k · Esc stop" in line
    assert len(line) == width


def test_footer_sides_apart() -> None:
    assert all("  " in footer_line(STATUS, width).plain.strip() for width in range(50, 130))


def test_footer_guesses() -> None:
    sources = {"model": 0.41, "ngram": 0.18, "said": 0.0}
    guessing = replace(STATUS, metrics=metrics(2.43, sources))
    wide = footer_line(guessing, 130).plain
    assert "guessed 59 %, 2.4 tokens per pass · 41.2 tok/s" in wide
    assert footer_line(guessing, 90).plain == footer_line(STATUS, 90).plain, "it goes first"
    none_came_true = replace(STATUS, metrics=metrics(1.0, {"ngram": 0.0}))
    assert footer_line(none_came_true, 130).plain == footer_line(STATUS, 130).plain


@pytest.mark.parametrize("width", [30, 60, 100])
def test_loading_line(width: int) -> None:
    progress = Progress("download", 1_500_000_000, 4_000_000_000, "bytes", "model-00001-of-00002")
    line = loading_line(progress, width).plain
    assert line.startswith("Downloading")
    assert "38%" in line
    assert ("1.5 GB of 4 GB" in line) == (width > 30)
    assert ("model-00001" in line) == (width == 100)
    assert len(line) <= width


def test_loading_line_without_total() -> None:
    assert loading_line(None, 60).plain.startswith("Opening")
    assert "12 layers" in loading_line(Progress("load", 12, None, "layers"), 60).plain
    assert "100%" in loading_line(Progress("load", 9, 8, "layers"), 60).plain


def test_safe_text() -> None:
    assert clean("a\tb\r\nc\x1b[2J\x7f\x9b") == "a\tb\nc\ufffd[2J\ufffd\ufffd"
    assert one_line(ValueError("\nfirst\nsecond")) == "first"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_redraw_limit() -> None:
    wall = cpu = 0.0
    pace = RedrawLimit(wall=lambda: wall, cpu=lambda: cpu, cores=2)
    assert pace.due()
    cpu += 0.005  # a drawing that took 5 ms ...
    wall += 0.2
    assert not pace.due()
    wall += 0.06  # ... allows the next after 250 ms
    assert pace.due()
    cpu += 30  # however dear, half a second is the longest wait
    wall += 0.51
    assert pace.due()
