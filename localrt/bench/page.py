"""Shows a benchmark as one HTML file that loads nothing: its table, and a plot of each figure.

Colours are CSS variables, light or dark as the browser prefers. Every text is escaped, since a
model's name may be anybody's.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from localrt.bench.report import facts, lay_out, shown
from localrt.bench.workload import BenchOptions, Outcome
from localrt.common.formatting import format_bytes, format_rate, format_seconds, one_line
from localrt.offload.hardware import Machine

_PLOTS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "decode_tok_s": ("Decoding, tok/s", format_rate),
    "prefill_tok_s": ("Reading a prompt, tok/s", format_rate),
    "ttft_s": ("First token (less is better)", format_seconds),
    "peak_ram_bytes": ("Peak RAM (less is better)", format_bytes),
    "peak_vram_bytes": ("Peak VRAM (less is better)", format_bytes),
    "joules_per_token": ("Energy per token (less is better)", "{:.2f} J".format),
}
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 760, 190, 106, 30, 20


def to_html(outcome: Outcome, options: BenchOptions, *, name: str, machine: Machine) -> str:
    """Return the page."""
    layout = lay_out(outcome, options, name=name, machine=machine)
    known = facts(machine)
    versions: Any = known["versions"]
    notes = [
        layout.heading,
        f"{format_bytes(machine.memory.total)} of RAM, {machine.system}",
        ", ".join(f"{package} {version}" for package, version in versions.items()),
        str(known["command"]),
    ]
    body = [f"<h1>{_escape(name)}</h1>"]
    body += [f"<p>{_escape(note)}</p>" for note in notes if note]
    body.append(_table(layout.headers, layout.rows))
    body += [f"<p>{_escape(note)}</p>" for note in layout.notes]
    body += _plots(outcome)
    return _PAGE.format(title=_escape(name), style=_CSS, body="\n".join(body))


def _escape(text: str, limit: int = 400) -> str:
    """Return text for an element or an attribute, on one line."""
    return html.escape(one_line(text, limit))


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = []
    for tag, row in (("th", headers), *(("td", row) for row in rows)):
        cells = [f"<{tag}>{_escape(cell)}</{tag}>" for cell in row]
        if len(row) < len(headers):  # the last cell spans the missing columns
            span = len(headers) - len(row) + 1
            cells[-1] = cells[-1].replace("<td>", f'<td colspan="{span}">', 1)
        lines.append("".join(cells))
    return f'<div class="wide"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'


def _plots(outcome: Outcome) -> Iterator[str]:
    """Yield a plot of each figure that any result has."""
    by = f", by {outcome.varied.replace('_', '-')}" if outcome.varied else ""
    for metric, (title, show) in _PLOTS.items():
        rows: list[tuple[str, float | None, str]] = []
        for result in outcome.results:
            value = result.metrics.get(metric)
            name = f"{result.engine} {result.setting}".strip()
            rows.append((result.setting if outcome.varied else name, value, shown(value, show)))
        if any(value for _, value, _ in rows):
            yield _bars(title + by, rows)


def _bars(title: str, rows: Sequence[tuple[str, float | None, str]]) -> str:
    """Draw a bar for each name, value and value as text, as SVG."""
    most = max(value or 0.0 for _, value, _ in rows)
    shapes = [f'<text class="title" x="4" y="16">{_escape(title)}</text>']
    for index, (name, value, text) in enumerate(rows):
        top = _TOP + _ROW * index
        width = (value or 0.0) / most * (_WIDTH - _LEFT - _RIGHT)
        shapes += [
            f'<text class="name" x="{_LEFT - 6}" y="{top + 14}">{_escape(name, 28)}</text>',
            f'<rect x="{_LEFT}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{top + 14}">{_escape(text, 40)}</text>',
        ]
    size = f"0 0 {_WIDTH} {_TOP + _ROW * len(rows) + 8}"
    return f'<svg viewBox="{size}" role="img" aria-label="{_escape(title)}">{"".join(shapes)}</svg>'


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""

_CSS = """:root { --paper: #ffffff; --ink: #1b2127; --faint: #5d6873; --rule: #d8dee4;
  --bar: #1f77b4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181c; --ink: #e6eaee; --faint: #98a3ae; --rule: #343c44; --bar: #5aa9e6; } }
body { background: var(--paper); color: var(--ink); margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color-scheme: light dark; }
h1 { font-size: 1.5rem; }
p { color: var(--faint); margin: 0.2rem 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--rule); text-align: right; }
th { color: var(--faint); font-weight: normal; }
th:first-child, td:first-child, td[colspan] { text-align: left; }
svg { display: block; width: 100%; height: auto; margin: 1rem 0; font-size: 12px; }
text { fill: var(--ink); } .title { font-size: 13px; font-weight: bold; }
.name { text-anchor: end; } rect { fill: var(--bar); }"""
