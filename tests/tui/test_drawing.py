"""What is drawn, as lines: Markdown, the footer, the loading line, the panel, lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style
from textual.content import Content

from localrt.common.markdown_parts import Part
from localrt.common.progress import Progress
from localrt.engine.types import Metrics
from localrt.service.status import LaneUse, MemoryUse
from localrt.tui.chat.bars import Phase, StatusBar, footer_line
from localrt.tui.chat.blocks import AnswerBlock, Styles, TurnBlock, UserTurn
from localrt.tui.chat.markdown import MarkdownStyles, lines_of
from localrt.tui.chat.panel import (
    PanelData,
    lane_text,
    memory_text,
    side_lines,
    sparkline,
    strip_lines,
)
from localrt.tui.loading_line import loading_line
from localrt.tui.screens.dialogs import hanging
from localrt.tui.text import clean, one_line
from tests.tui.fakes import STREAMED, VIEW

# -- Markdown --------------------------------------------------------------------------------------

STYLES = MarkdownStyles(
    dark=True,
    heading=Style(bold=True),
    code=Style(bold=True),
    code_block=Style(bgcolor="#202020"),
    quote=Style(italic=True),
    link=Style(underline=True),
    muted=Style(dim=True),
)

DOCUMENT = """# Title

Some **bold** text, `code` and a [link](http://example.org):

- one
- two with *em*
  - nested

1. first
2. second

```python
def f(x):

    return x + 1
```

| a | b |
|---|---|
| 1 | 2 |

> quoted
> twice

Roses are red
violets are <b>blue</b> ![a cat](cat.png)

---

The end."""

DRAWN = """\
Title

Some bold text, code and a link:

 • one
 • two with em
    • nested

 1 first
 2 second

 def f(x):

     return x + 1

 a  b
 ────
 1  2

▌ quoted
▌ twice

Roses are red
violets are <b>blue</b> [image: a cat]

────────────────────────────────────────

The end."""


def whole(source: str, width: int = 40) -> str:
    """A text drawn in one piece."""
    lines = lines_of(Part(source), {}, width, STYLES, STYLES.console())
    return "\n".join(line.text.rstrip() for line in lines)


def test_blocks() -> None:
    assert whole(DOCUMENT) == DRAWN


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        # Formulas stay as they were written.
        (r"\[ x_1 * y_2 * z = \frac{a}{b} \]", r"\[ x_1 * y_2 * z = \frac{a}{b} \]"),
        ("It is\n\\[\na\n+ b\n- c\\\\\n\\]\nNow", "It is\n\n\\[\na\n+ b\n- c\\\\\n\\]\n\nNow"),
        ("with $a*b*c$ and $$d*e*f$$", "with $a*b*c$ and $$d*e*f$$"),
        ("- one\n  \\[\n  a\n  - b\n  \\]\n- two", " • one\n   \\[\n   a\n   - b\n   \\]\n • two"),
        ("`\\[ a \\]`\n\n\\[ no end", "\\[ a \\]\n\n[ no end"),
        # HTML's line end.
        ("one<br>two<BR/>three<br />four", "one\ntwo\nthree\nfour"),
        ("| a | b |\n|--|--|\n| 1<br>2 | 3 |", " a  b\n ────\n 1  3\n 2"),
        # Chinese and Japanese break anywhere, but not before a full stop nor after a bracket.
        (
            "一二三四五六七八九十一二三四五六七八九十。",
            "一二三四五六七八九十一二三四五六七八九\n十。",
        ),
        (
            "| a | b |\n|--|--|\n| 一二三四五六七八九十一二三四五六七八九十 | x |",
            " a                                    b\n"
            " ──────────────────────────────────────\n"
            " 一二三四五六七八九十一二三四五六七   x\n 八九十",
        ),
    ],
)
def test_beyond_commonmark(source: str, shown: str) -> None:
    assert whole(source) == shown


TOKENS = ("\n\n", "- ", "1. ", "```", "    ", "> ", "---", "\\[", "\\]", "$$", "<br>", "中文")


# -- answers of any size ---------------------------------------------------------------------------

PLAIN_STYLE = Style()
ALL_STYLES = Styles(
    console=STYLES.console(),
    markdown=STYLES,
    graphics="",
    colors=True,
    **dict.fromkeys(
        ("base", "user", "waiting", "match", "match_now", "bar", "waiting_bar", "marked_bar"),
        PLAIN_STYLE,
    ),
    **dict.fromkeys(("notice", "error", "mark", "thinking", "attachment"), PLAIN_STYLE),
)


def rows(block: TurnBlock, width: int = 40) -> list[str]:
    """The lines of a block, section by section."""
    lines: list[str] = []
    for section in block.sections:
        lines += [line.text.rstrip() for line in section.lines(width, ALL_STYLES)]
        assert section.height(width) == (len(section.lines(width, ALL_STYLES)), True)
    return lines


TOKENS = ("\n\n", "- ", "1. ", "```", "    ", "> ", "---", "\\[", "\\]", "$$", "<br>", "中文")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*"a \n2|*`#", *TOKENS, "\n[x]: http://a.b\n", "[x]"]), max_size=40)
)
def test_sections_of_any_text(pieces: list[str]) -> None:
    """An answer that came in pieces, and is cut in sections, looks as it does in one piece."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("localrt.tui.chat.blocks._SMALL", 1)
        answer = AnswerBlock()
        for piece in pieces:
            answer.write(piece)
            rows(answer)
        answer.finish()
        assert "\n".join(rows(answer)).strip("\n") == whole("".join(pieces)).strip("\n")


@pytest.mark.parametrize(
    ("opening", "line"),
    [
        ("```python\n", "x = 1\n"),
        ("| a | bb |\n|---|---:|\n", "| an item | 1.5 |\n"),
        ("", "- a\n"),
    ],
)
def test_growing_block(opening: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long block that grows, only the end is laid out again."""
    monkeypatch.setattr("localrt.tui.chat.blocks._PIECE", 300)
    monkeypatch.setattr("localrt.tui.chat.blocks._SLICE", 100)
    drawn = list[int]()
    monkeypatch.setattr(
        "localrt.tui.chat.blocks.lines_of",
        lambda part, *how: (drawn.append(len(part.text)), lines_of(part, *how))[1],
    )
    answer = AnswerBlock()
    answer.write(opening)
    for _ in range(200):
        answer.write(line)
        drawn.clear()
        rows(answer)
        assert sum(drawn) < 1000
    grown = rows(answer)
    answer.finish()
    assert [row.split() for row in rows(answer)] == [row.split() for row in grown]
    assert len(rows(answer)) == len(whole(opening + 200 * line).splitlines())


def test_long_texts_that_are_no_markdown() -> None:
    """A message, and thinking that is unfolded, of many sections."""
    text = "\n".join(f"line {number} " + "word " * (number % 30) for number in range(1000))
    message, answer = UserTurn(text), AnswerBlock(f"<think>{text}</think>Yes.")
    answer.toggle()
    assert len(message.sections) > 3
    assert len(answer.sections) > 3
    for found in (rows(message), rows(answer)[1:-2]):
        assert "".join("".join(found).split()) == "".join(text.split())
        assert sum(row.lstrip().startswith("line") for row in found) == 1000
    assert rows(answer)[-2:] == ["", "Yes."]
    assert len(rows(AnswerBlock(f"<think>{text}"))) == 4, "the last lines, while it thinks"


def test_wrapping() -> None:
    text = whole("word " * 50 + "\n\n```\n" + "x" * 90 + "\n```", width=30)
    assert max(map(len, text.splitlines())) <= 30
    assert text.count("x") == 90


# -- bars ------------------------------------------------------------------------------------------

STATUS = StatusBar(
    model="SmolLM2-135M-Instruct",
    engine="native q4_1",
    phase=Phase.GENERATING,
    metrics=Metrics(decode_tok_s=41.2),
    used=312,
    ctx=8192,
)


@pytest.mark.parametrize(
    ("width", "shown", "dropped"),
    [
        (
            100,
            ["SmolLM2", "native q4_1", "answering", "41.2 tok/s", "context 312 of 8.2k", "Esc"],
            [],
        ),
        (40, ["SmolLM2", "answering"], ["tok/s", "8.2k"]),
        (12, ["answering"], ["SmolLM2"]),
    ],
)
def test_footer(width: int, shown: list[str], dropped: list[str]) -> None:
    line = footer_line(STATUS, width).plain
    assert all(part in line for part in shown)
    assert not any(part in line for part in dropped)
    assert len(line) <= max(width, len(" answering "))


def test_footer_long_name_and_guesses() -> None:
    name = "Qwen3-Coder-30B-A3B-Instruct-1M-UD-Q4_K_XL-imatrix-abliterated.gguf"
    for width in (80, 120):  # it is cut before what to press and how full the context is
        line = footer_line(replace(STATUS, model=name), width).plain
        assert "… · answering" in line
        assert "41.2 tok/s · context 312 of 8.2k · Esc stop" in line
        assert len(line) == width
    sources = {"model": 0.41, "ngram": 0.18, "said": 0.0}
    metrics = Metrics(decode_tok_s=41.2, accepted_per_pass=2.43, accepted_by_source=sources)
    guessing = replace(STATUS, metrics=metrics)
    wide = footer_line(guessing, 130).plain
    assert "guessed 59 %, 2.4 tokens per pass · 41.2 tok/s" in wide
    assert footer_line(guessing, 90).plain == footer_line(STATUS, 90).plain, "it goes first"


@pytest.mark.parametrize("width", [30, 100])
def test_loading_line(width: int) -> None:
    progress = Progress("download", 1_500_000_000, 4_000_000_000, "bytes", "model-00001-of-00002")
    line = loading_line(progress, width).plain
    assert line.startswith("Downloading")
    assert "38%" in line
    assert ("1.5 GB of 4 GB" in line) == (width > 30)
    assert ("model-00001" in line) == (width == 100)
    assert len(line) <= width


def test_safe_text() -> None:
    assert clean("a\tb\r\nc\x1b[2J\x7f\x9b") == "a\tb\nc\ufffd[2J\ufffd\ufffd"
    assert clean("a\u202eb\u2066c\u2028d\ud800") == "a\ufffdb\ufffdc\ufffdd\ufffd"
    assert one_line(ValueError("\nfirst\nsecond")) == "first"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


# -- the panel -------------------------------------------------------------------------------------

METRICS = replace(STREAMED.metrics or Metrics(), accepted_per_pass=1.0, accepted_by_source={})
PLAIN = replace(STREAMED, metrics=METRICS)  # no draft tokens change the rate
SLOW = {"ceiling_tok_s": 20.0}
RESIDENT = replace(STREAMED, streamed=False, last_pass=None, passes=None, ssd_read_bytes=None)
RESIDENT = replace(RESIDENT, token_bytes=97_000_000)
FLOW = RESIDENT.since(replace(RESIDENT, clock_s=9.0, tokens=0))
BETWEEN = replace(VIEW, status=replace(STREAMED, generating=False), reading=True)


@pytest.mark.parametrize(
    ("data", "said", "unsaid"),
    [
        (replace(VIEW, reading=True, percent=52), "Reading prompt 52 %", "41.2 tok/s"),
        (replace(VIEW, status=replace(STREAMED, **SLOW)), "1.8x the 22.9 possible without", ""),
        (replace(VIEW, status=replace(PLAIN, predicted_tok_s=39.4)), "39.4 were forecast", ""),
        (BETWEEN, "Live", "Guessed"),
        (
            PanelData(status=RESIDENT, flow=FLOW),
            "sets the pace, 97 MB per pass, 2.2 GB/s",
            "Last pass",
        ),
        (PanelData(), "loading", ""),
    ],
)
def test_side_panel(data: PanelData, said: str, unsaid: str) -> None:
    shown = " ".join(line.plain for line in side_lines(data, 38, 30))
    assert said in shown
    assert not unsaid or unsaid not in shown


@given(st.integers(20, 60), st.integers(3, 40))
def test_side_fits(width: int, height: int) -> None:
    lines = side_lines(VIEW, width, height)
    assert len(lines) <= height
    assert all(line.cell_length <= width for line in lines)


@given(st.integers(40, 100))
def test_strip_fits(width: int) -> None:
    lines = strip_lines(VIEW, width)
    assert len(lines) <= 6
    assert all(line.cell_length <= width for line in lines)


def test_small_drawings() -> None:
    assert sparkline([0, 1, 2, 4], 3) == "▃▅█"
    assert sparkline([0, 0], 5) == "▁▁"
    assert lane_text(LaneUse("cpu", ((0.0, 0.5),)), 1.0, 4) == "██  "
    assert memory_text(MemoryUse(170_000_000, 18_000_000_000)) == "0.2/18 GB"


@given(st.text(st.sampled_from("ab 字\n"), max_size=60), st.integers(6, 20))
def test_hanging(text: str, width: int) -> None:
    lines = hanging(Content(text), width).plain
    assert all(cell_len(line.rstrip()) <= width for line in lines.split("\n"))
    assert "".join(lines.split()) == "".join(text.split())
