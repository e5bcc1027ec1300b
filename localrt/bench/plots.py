"""Draws plots as SVG and as pictures: lines over time, timelines, bars, heat maps and tables.

Colours are CSS variables named in `LIGHT` and `DARK`, so that one drawing serves both. Every text
is escaped here. Values that are not numbers are left out. Knows no report.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from localrt.common.formatting import format_seconds, one_line

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

LIGHT = {"paper": "#ffffff", "ink": "#1b2127", "faint": "#5d6873", "rule": "#d8dee4"}
LIGHT |= {"good": "#1f77b4", "bad": "#c8442b"}
DARK = {"paper": "#14181c", "ink": "#e6eaee", "faint": "#98a3ae", "rule": "#343c44"}
DARK |= {"good": "#5aa9e6", "bad": "#f0775a"}
# Colours of lines and areas, distinguishable with red-green colour blindness (Okabe and Ito).
_SERIES = ("#0072b2", "#d55e00", "#009e73", "#a8588a", "#b58900", "#6b7680")
_DARK_SERIES = ("#56b4e9", "#e8853a", "#2fc99b", "#d98fbd", "#e6c04a", "#9aa5af")
LIGHT |= {f"series{index}": value for index, value in enumerate(_SERIES)}
DARK |= {f"series{index}": value for index, value in enumerate(_DARK_SERIES)}

WIDTH = 760
_LEFT, _RIGHT, _TOP, _AXIS = 190, 16, 30, 24
_ROW = 20
_LABEL = 28  # characters that fit in the left margin
_FINE = 4  # drawn dots per pixel, then halved in size for smooth edges


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing of `WIDTH` by ``height`` pixels; ``body`` are SVG elements."""

    title: str
    height: int
    body: str


@dataclass(frozen=True, slots=True)
class Table:
    """Texts in rows; columns after the first are aligned to the right.

    The last cell of a row shorter than the headers spans the missing columns.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Span:
    """A span from ``start`` to ``end`` in seconds; ``shown`` describes it, ``good`` selects its
    colour.
    """

    start: float
    end: float
    good: bool
    shown: str


def number(value: Any) -> float | None:
    """Return ``value`` if it is a number that can be drawn, else None."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and abs(value) < 1e18 else None


def escape(text: object, limit: int = 400) -> str:
    """Return untrusted text for an element or an attribute, on one line."""
    return html.escape(one_line(text, limit))


def colour(name: str) -> str:
    """Return a colour's CSS variable."""
    return f"var(--{name})"


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, object]]],
    *,
    seconds: float,
    show: Callable[[float], str],
    stacked: bool = False,
) -> Figure:
    """Draw series of (seconds, value) from 0 to ``seconds``, added up if ``stacked``."""
    shapes: list[str] = []
    below: dict[float, float] = {}
    tops: dict[str, list[tuple[float, float, float]]] = {}
    for name, values in series.items():
        known = [(at, number(value)) for at, value in values]
        points = [(at, below.get(at, 0.0), value) for at, value in known if value is not None]
        tops[name] = [(at, base, base + value) for at, base, value in points]
        if stacked:
            below |= {at: top for at, _, top in tops[name]}
    most = max((top for points in tops.values() for *_, top in points), default=0.0)
    height, bottom = 190, 190 - _AXIS
    scale = (bottom - _TOP) / (most or 1.0)
    x = _seconds_to_x(seconds)

    def y(value: float) -> float:
        return bottom - value * scale

    for value in ticks(most, 4):
        shapes.append(_line(_LEFT, y(value), WIDTH - _RIGHT, y(value), "rule"))
        shapes.append(_text(_LEFT - 6, y(value) + 4, show(value), "end", fill="faint"))
    for index, (name, points) in enumerate(tops.items()):
        fill = colour(f"series{index % len(_SERIES)}")
        path = " ".join(f"{x(at):.1f} {y(top):.1f}" for at, _, top in points)
        if stacked and points:
            floor = " ".join(f"{x(at):.1f} {y(base):.1f}" for at, base, _ in reversed(points))
            shapes.append(f'<polygon points="{path} {floor}" fill="{fill}" fill-opacity="0.6"/>')
        elif points:
            shapes.append(
                f'<polyline points="{path}" fill="none" stroke="{fill}" stroke-width="1.5"/>'
            )
        shapes.append(f'<rect x="4" y="{_TOP + index * 18}" width="10" height="10" fill="{fill}"/>')
        shapes.append(_text(18, _TOP + index * 18 + 9, one_line(name, 18)))
    height = max(height, _TOP + len(tops) * 18 + 8)
    return _figure(title, height, [*shapes, *_time_axis(seconds, bottom)])


def timeline(title: str, rows: Mapping[str, Sequence[Span]], *, seconds: float) -> Figure:
    """Draw a row of spans for each name; bad ones are also thicker, so that they do not differ by
    colour alone.
    """
    x = _seconds_to_x(seconds)
    shapes = []
    bottom = _TOP + _ROW * len(rows)
    for index, (name, spans) in enumerate(rows.items()):
        top = _TOP + _ROW * index
        shapes.append(_text(_LEFT - 6, top + 13, one_line(name, _LABEL), "end"))
        for span in spans:
            width = max(x(span.end) - x(span.start), 2.0)
            margin = 5 if span.good else 2
            fill = colour("good" if span.good else "bad")
            shapes.append(
                f'<rect x="{x(span.start):.1f}" y="{top + margin}" width="{width:.1f}" '
                f'height="{_ROW - 2 * margin}" fill="{fill}" fill-opacity="0.75" '
                f'stroke="{colour("paper")}" stroke-width="0.5">'
                f"<title>{escape(span.shown)}</title></rect>"
            )
    return _figure(title, bottom + _AXIS, [*shapes, *_time_axis(seconds, bottom)])


def bars(title: str, rows: Sequence[tuple[str, object, str]]) -> Figure:
    """Draw a bar for each (name, value, value as text)."""
    values = [number(value) for _, value, _ in rows]
    most = max((abs(value) for value in values if value is not None), default=0.0) or 1.0
    shapes = []
    for index, ((name, _, shown), value) in enumerate(zip(rows, values, strict=True)):
        top = _TOP + _ROW * index
        width = abs(value or 0.0) / most * (WIDTH - _LEFT - _RIGHT - 90)
        shapes.append(_text(_LEFT - 6, top + 14, one_line(name, _LABEL), "end"))
        shapes.append(
            f'<rect x="{_LEFT}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}" '
            f'fill="{colour("good")}"/>'
        )
        shapes.append(_text(_LEFT + width + 6, top + 14, one_line(shown, 40)))
    return _figure(title, _TOP + _ROW * len(rows) + 8, shapes)


def heat_map(
    title: str,
    columns: Sequence[str],
    rows: Sequence[str],
    values: Sequence[Sequence[object]],
    show: Callable[[float], str],
) -> Figure:
    """Draw ``values`` (rows, columns): larger ones are darker; a missing one is an empty cell."""
    known = [found for row in values for value in row if (found := number(value)) is not None]
    least, most = min(known, default=0.0), max(known, default=0.0)
    width = max((WIDTH - _LEFT - _RIGHT) / max(len(columns), 1), 2)
    cut = max(4, int(width / 7))
    shapes = [
        _text(_LEFT + (index + 0.5) * width, _TOP + 10, one_line(name, cut), "middle", fill="faint")
        for index, name in enumerate(columns)
    ]
    for index, (name, row) in enumerate(zip(rows, values, strict=True)):
        top = _TOP + 18 + index * (_ROW + 4)
        shapes.append(_text(_LEFT - 6, top + 16, one_line(name, _LABEL), "end"))
        for column, value in enumerate(map(number, row)):
            left = _LEFT + column * width
            strength = 0.0 if value is None else (value - least) / ((most - least) or 1.0)
            opacity = 0.0 if value is None else 0.08 + 0.62 * strength
            shapes.append(
                f'<rect x="{left + 1:.1f}" y="{top}" width="{width - 2:.1f}" height="{_ROW + 2}" '
                f'fill="{colour("good")}" fill-opacity="{opacity:.2f}" '
                f'stroke="{colour("rule")}"/>'
            )
            shown = "-" if value is None else one_line(show(value), cut)
            shapes.append(_text(left + width / 2, top + 16, shown, "middle"))
    return _figure(title, _TOP + 26 + len(rows) * (_ROW + 4), shapes)


def table_figure(table: Table) -> Figure:
    """Draw a table, for pictures."""
    columns = len(table.headers)
    whole = [row for row in (table.headers, *table.rows) if len(row) == columns]
    longest = [max(len(one_line(row[index], 60)) for row in whole) for index in range(columns)]
    step = min(7.0, (WIDTH - 8) / (sum(longest) + 2 * columns))  # pixels per character
    size = min(12.0, step * 1.75)
    shapes = []
    for line, row in enumerate((table.headers, *table.rows)):
        left = 4.0
        for index, cell in enumerate(row):
            right = left + longest[index] * step
            starts = index == 0 or (len(row) < columns and index == len(row) - 1)
            at, anchor = (left, "start") if starts else (right, "end")
            fill = "ink" if line else "faint"
            text = one_line(cell, 60 if len(row) == columns else 90)
            shapes.append(_text(at, 14 + line * _ROW, text, anchor, size, fill))
            left = right + 2 * step
    return Figure("", _ROW * (len(table.rows) + 1) + 18, "".join(shapes))


def text_figure(text: str, size: int, fill: str) -> Figure:
    """Draw a line of text, for pictures."""
    return Figure("", size + 10, _text(4, size + 4, one_line(text, 110), size=size, fill=fill))


def drawn(figure: Figure) -> Image.Image:
    """Draw a figure's SVG in light colours, at twice its size."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH * _FINE, figure.height * _FINE), LIGHT["paper"])
    draw = ImageDraw.Draw(image, "RGBA")
    for shape in ElementTree.fromstring(f"<g>{figure.body}</g>"):
        _draw(draw, shape.tag, shape.attrib, shape.text or "")
    return image.reduce(_FINE // 2)


def _draw(draw: ImageDraw.ImageDraw, tag: str, attributes: Mapping[str, str], text: str) -> None:
    def sizes(*names: str) -> list[float]:
        return [_FINE * float(number) for name in names for number in attributes[name].split()]

    fill, stroke = (LIGHT.get(attributes.get(name, "")[6:-1]) for name in ("fill", "stroke"))
    if "fill-opacity" in attributes and fill:
        fill += f"{round(255 * float(attributes['fill-opacity'])):02x}"
    width = round(_FINE * float(attributes.get("stroke-width", 1)))
    match tag:
        case "text":
            x, y, size = sizes("x", "y", "font-size")
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[attributes["text-anchor"]]
            bold = attributes["font-weight"] == "bold"
            draw.text((x, y), text, fill, _font(size), anchor, stroke_width=int(bold))
        case "rect":
            x, y, across, down = sizes("x", "y", "width", "height")
            draw.rectangle((x, y, x + across, y + down), fill, stroke, width)
        case "polygon":
            draw.polygon(sizes("points"), fill)
        case "polyline":
            draw.line(sizes("points"), stroke, width, "curve")
        case "line":
            draw.line(sizes("x1", "y1", "x2", "y2"), stroke, width)


@cache
def _font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The system font with the most alphabets, else Pillow's own, which has Latin letters only."""
    from PIL import ImageFont

    for name in ("DejaVuSans.ttf", "Arial.ttf", "arial.ttf"):
        with suppress(OSError):
            return ImageFont.truetype(name, size)
    return ImageFont.load_default(size)


def ticks(most: float, count: int) -> list[float]:
    """Return about ``count`` round values from 0 to ``most``."""
    if not 1e-9 < most < 1e18:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(most / count))
    step *= next(factor for factor in (1, 2, 5, 10) if step * factor * count >= most * 0.999)
    return [index * step for index in range(int(most / step * 1.001) + 1)]


def _seconds_to_x(seconds: float) -> Callable[[float], float]:
    scale = (WIDTH - _LEFT - _RIGHT) / (seconds if seconds > 0 else 1.0)
    return lambda at: _LEFT + min(max(at, 0.0), seconds) * scale


def _time_axis(seconds: float, bottom: float) -> Iterator[str]:
    x = _seconds_to_x(seconds)
    yield _line(_LEFT, bottom, WIDTH - _RIGHT, bottom, "faint")
    for at in ticks(seconds, 6):
        yield _line(x(at), bottom, x(at), bottom + 4, "faint")
        shown = format_seconds(at) if at else "0"
        yield _text(x(at), bottom + 17, shown, "middle", fill="faint")


def _figure(title: str, height: float, shapes: Sequence[str]) -> Figure:
    heading = _text(4, 16, one_line(title, 90), size=13, weight="bold")
    return Figure(title, math.ceil(height), heading + "".join(shapes))


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour(stroke)}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    size: float = 12,
    fill: str = "ink",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{colour(fill)}">{escape(text)}</text>'
    )
