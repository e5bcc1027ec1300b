"""Markdown as lines: however an answer is cut into pieces, the same lines come out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.style import Style

from localrt.tui.chat.markdown import MarkdownLines, MarkdownStyles

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


def drawn(lines: MarkdownLines) -> str:
    return "\n".join(line.text.rstrip() for line in lines.lines)


def whole(source: str, width: int = 40) -> str:
    lines = MarkdownLines(STYLES, width)
    lines.append(source)
    lines.finish()
    return drawn(lines)


def test_blocks() -> None:
    assert whole(DOCUMENT) == DRAWN


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        # Formulas stay as they were written.
        (r"\[ x_1 * y_2 * z = \frac{a}{b} \]", r"\[ x_1 * y_2 * z = \frac{a}{b} \]"),
        (r"so \( a_1 \) and \(b*c*d\)", r"so \( a_1 \) and \(b*c*d\)"),
        ("It is\n\\[\na\n+ b\n- c\\\\\n\\]\nNow", "It is\n\n\\[\na\n+ b\n- c\\\\\n\\]\n\nNow"),
        ("$$\na\n- b\n$$", "$$\na\n- b\n$$"),
        ("with $a*b*c$ and $$d*e*f$$", "with $a*b*c$ and $$d*e*f$$"),
        ("- one\n  \\[\n  a\n  - b\n  \\]\n- two", " • one\n   \\[\n   a\n   - b\n   \\]\n • two"),
        ("`\\[ a \\]`\n\n\\[ no end", "\\[ a \\]\n\n[ no end"),
        ("from $5 *to* $6", "from $5 to $6"),
        (r"a list \[1\] is none", r"a list \[1\] is none"),
        # HTML's line end.
        ("one<br>two<BR/>three<br />four", "one\ntwo\nthree\nfour"),
        ("| a | b |\n|--|--|\n| 1<br>2 | 3 |", " a  b\n ────\n 1  3\n 2"),
        ("`<br>`", "<br>"),
        # Chinese and Japanese break anywhere, but not before a full stop nor after a bracket.
        (
            "Python 是一种广泛使用的解释型高级和通用的编程语言。",
            "Python 是一种广泛使用的解释型高级和通用\n的编程语言。",
        ),
        (
            "一二三四五六七八九十一二三四五六七八九十。",
            "一二三四五六七八九十一二三四五六七八九\n十。",
        ),
        (
            "一二三四五六七八九十一二三四五六七八九「十」",
            "一二三四五六七八九十一二三四五六七八九\n「十」",
        ),
        ("- Hello 一二三四五六七八九十一二三四五", " • Hello 一二三四五六七八九十一二三四五"),
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


@pytest.mark.parametrize("seed", range(5))
def test_stream_equals_whole(seed: int) -> None:
    chance = random.Random(seed)
    lines = MarkdownLines(STYLES, 40)
    place = 0
    while place < len(DOCUMENT):
        size = chance.randint(1, 7)
        lines.append(DOCUMENT[place : place + size])
        place += size
    assert drawn(lines) == DRAWN  # even before finish
    lines.finish()
    assert drawn(lines) == DRAWN


TOKENS = ("\n\n", "- ", "1. ", "```", "    ", "> ", "---", "\\[", "\\]", "$$", "<br>", "中文")


@settings(max_examples=60)
@given(st.lists(st.sampled_from([*"a \n2|*`#", *TOKENS]), max_size=40))
def test_streaming_any_text(pieces: list[str]) -> None:
    lines = MarkdownLines(STYLES, 40)
    for piece in pieces:
        before = [line.text for line in lines.lines]
        first = lines.append(piece)
        assert [line.text for line in lines.lines[:first]] == before[:first]
    lines.finish()
    assert drawn(lines) == whole("".join(pieces))


@pytest.mark.parametrize(
    ("opening", "line"),
    [
        ("```python\n", "x = 1\n"),
        ("", "- an item\n"),
        ("", "7. an item\n"),
        ("| a | bb |\n|---|---:|\n", "| an item | 1.5 |\n"),
        ("|a|b|\n|-|-|\n", f"| {'word ' * 9} | `code` |\n"),
    ],
)
def test_long_blocks(opening: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = MarkdownLines(STYLES, 40)
    lines.append(opening)
    parsed, parse = [], MarkdownIt.parse
    monkeypatch.setattr(
        MarkdownIt, "parse", lambda self, text: (parsed.append(len(text)), parse(self, text))[1]
    )
    changed, most = [], 0
    for _ in range(200):
        changed.append(lines.append(line))
        most = max(most, len(lines.lines) - changed[-1])
    assert changed[-1] > 130  # the first lines are no longer touched
    assert max(parsed) < 80 * len(opening + line)
    assert most < 80 * max(1, len(lines.lines) // 200)
    streamed = drawn(lines)
    lines.finish()
    assert [row.split() for row in streamed.splitlines()] == [
        row.split() for row in drawn(lines).splitlines()
    ]


def test_several_tables() -> None:
    """Each has its heading and its columns, in a quote, in items of a list and in slices."""
    small, large = "|a|b|\n|-|-|\n|1|2|\n", "|c|d|e|\n|-|-|-|\n|3|4|5|\n"
    rows = large + "|6|7|8|\n" * 45
    quote = "".join(f"> {line}\n" for line in f"{small}\n{large}".splitlines())
    items = "".join(
        f"- item\n\n  {each.replace(chr(10), chr(10) + '  ')}\n" for each in [small, large] * 20
    )
    for source in (quote, items, f"{rows}\n{small}", f"{rows}\n- {small}"):
        lines = MarkdownLines(STYLES, 40)
        for line in source.splitlines(keepends=True):
            lines.append(line)
        streamed = drawn(lines)
        lines.finish()
        assert streamed.split() == drawn(lines).split()
        assert drawn(lines) == whole(source)
    assert whole(quote).count("c") == whole(quote).count("a") == 1


def test_wrapping() -> None:
    text = whole("word " * 50 + "\n\n```\n" + "x" * 90 + "\n```", width=30)
    assert max(map(len, text.splitlines())) <= 30
    assert text.count("x") == 90
