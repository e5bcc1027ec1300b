"""A terminal's screen as SVG, or several of them one after another as one that moves.

What stays the same from frame to frame is drawn once, so that a recording of a minute is not much
larger than a picture. It needs no script and no font of its own; readers who want no motion see the
last frame. Knows strips of text, nothing of the app.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from textual.strip import Strip

_WIDTH, _HEIGHT, _SIZE = 8.4, 17.0, 14  # of a cell, and of the letters in it
_TOP, _MARGIN = 34.0, 8.0
_FONTS = "ui-monospace,'Cascadia Mono','SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"


@dataclass(frozen=True, slots=True)
class Frame:
    """What is on screen, for so many seconds."""

    lines: Sequence[Strip]
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text of one style in a line; without text its background alone."""

    row: int
    column: int
    cells: int
    text: str
    color: str
    decoration: str


def svg(frames: Sequence[Frame], title: str, theme: TerminalTheme) -> str:
    """The frames as a picture, in a window with a title; it begins again at its end."""
    lines = frames[0].lines
    columns, rows = max(line.cell_length for line in lines), len(lines)
    width = columns * _WIDTH + 2 * _MARGIN
    height = rows * _HEIGHT + _TOP + _MARGIN
    background = _background(frames[-1].lines, theme)
    seen: dict[_Piece, list[int]] = {}
    for number, frame in enumerate(frames):
        for piece in _pieces(frame.lines, theme, background):
            seen.setdefault(piece, []).append(number)
    # What lies behind text, of all frames, is drawn before it.
    layers: dict[tuple[bool, int, int], list[_Piece]] = {}
    for piece, numbers in seen.items():
        for first, end in _spans(numbers):
            layers.setdefault((bool(piece.text), first, end), []).append(piece)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<title>{escape(title)}</title>",
        f"<style>text{{font:{_SIZE}px {_FONTS};white-space:pre}}"
        ".b{font-weight:bold}.i{font-style:italic}.u{text-decoration:underline}"
        f"{_keyframes(frames, {layer[1:] for layer in layers})}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="{background}"/>',
        *(
            f'<circle cx="{18 + 18 * place}" cy="17" r="5.5" fill="{color}"/>'
            for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
        f'<text x="{width / 2:.0f}" y="22" text-anchor="middle" fill="#9aa0a6">'
        f"{escape(title)}</text>",
    ]
    for (_, first, end), pieces in sorted(layers.items(), key=lambda layer: layer[0]):
        drawn = "".join(_draw(piece) for piece in pieces)
        always = (first, end) == (0, len(frames))
        parts.append(drawn if always else f'<g class="f{first}-{end}">{drawn}</g>')
    return "\n".join([*parts, "</svg>\n"])


def _keyframes(frames: Sequence[Frame], spans: Iterable[tuple[int, int]]) -> str:
    """When the groups of a recording are to be seen."""
    starts = [0.0]
    for frame in frames:
        starts.append(starts[-1] + frame.seconds)
    total = starts[-1]
    rules = []
    for first, end in sorted(spans):
        if (first, end) == (0, len(frames)):
            continue
        name = f"f{first}-{end}"
        on, off = 100 * starts[first] / total, 100 * starts[end] / total
        steps = f"{on:.2f}%{{visibility:visible}}"
        if first:
            steps = "0%{visibility:hidden}" + steps
        if end < len(frames):
            steps += f"{off:.2f}%{{visibility:hidden}}"
        still = "visible" if end == len(frames) else "hidden"
        rules.append(
            f".{name}{{visibility:{still};animation:{name} {total:.1f}s step-end infinite}}"
            f"@keyframes {name}{{{steps}}}"
        )
    return "".join([*rules, "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"])


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of following numbers, as first and end."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1] = (spans[-1][0], number + 1)
        else:
            spans.append((number, number + 1))
    return spans


def _background(lines: Sequence[Strip], theme: TerminalTheme) -> str:
    """What lies behind most of a screen."""
    cells = Counter[str]()
    for line in lines:
        for segment in line:
            cells[_colors(segment.style or Style.null(), theme)[1]] += cell_len(segment.text)
    return cells.most_common(1)[0][0]


def _pieces(lines: Sequence[Strip], theme: TerminalTheme, plain: str) -> Iterable[_Piece]:
    """What is to be drawn on a background of the colour ``plain``."""
    for row, line in enumerate(lines):
        column = 0
        for segment in line:
            style = segment.style or Style.null()
            color, behind = _colors(style, theme)
            cells = cell_len(segment.text)
            if behind != plain:
                yield _Piece(row, column, cells, "", behind, "")
            text = segment.text.rstrip()
            start = len(text) - len(text.lstrip())
            if text:
                kinds = (("b", style.bold), ("i", style.italic), ("u", style.underline))
                decoration = " ".join(name for name, on in kinds if on)
                text = text[start:]
                yield _Piece(row, column + start, cell_len(text), text, color, decoration)
            column += cells


def _draw(piece: _Piece) -> str:
    x, y = _MARGIN + piece.column * _WIDTH, _TOP + piece.row * _HEIGHT
    if not piece.text:
        return (
            f'<rect x="{x:g}" y="{y:g}" width="{piece.cells * _WIDTH + 0.2:.5g}" '
            f'height="{_HEIGHT + 0.2:g}" fill="{piece.color}"/>'
        )
    kind = f' class="{piece.decoration}"' if piece.decoration else ""
    return (
        f'<text x="{x:g}" y="{y + 13:g}" textLength="{piece.cells * _WIDTH:.5g}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{piece.color}"{kind}>{escape(piece.text)}</text>'
    )


def _colors(style: Style, theme: TerminalTheme) -> tuple[str, str]:
    """Of the letters, and behind them."""

    def read(color: Color | None, *, foreground: bool) -> tuple[int, int, int]:
        color = color or Color.default()
        return tuple(color.get_truecolor(theme, foreground=foreground))

    front, back = read(style.color, foreground=True), read(style.bgcolor, foreground=False)
    if style.reverse:
        front, back = back, front
    if style.dim:
        front = tuple((each + other) // 2 for each, other in zip(front, back, strict=True))
    return _hex(front), _hex(back)


def _hex(color: Sequence[int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)
