"""The curve over K as an SVG: tokens per pass, seconds of a pass, tokens per second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, EDGE = 420, 200, 44
PANELS = (
    ("tokens_per_pass", "tokens per target pass"),
    ("verify_s", "seconds of a pass"),
    ("tok_s", "tokens per second"),
)


def draw_curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Three panels, one below the other, over K on a logarithmic axis."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT * len(PANELS)}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (key, title) in enumerate(PANELS):
        parts += _panel(rows, key, title, number * HEIGHT)
    return "\n".join([*parts, "</svg>"])


def _panel(rows: Sequence[Mapping[str, Any]], key: str, title: str, top: int) -> list[str]:
    points = [(int(row["tree_budget"]), float(row[key])) for row in rows if row.get(key)]
    if not points:
        return []
    high = max(value for _, value in points)
    last = max(1.0, math.log2(max(k for k, _ in points)))

    def place(k: int, value: float) -> tuple[float, float]:
        x = EDGE + (WIDTH - 2 * EDGE) * math.log2(k) / last
        return x, top + HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * value / high

    base = top + HEIGHT - EDGE
    drawn = [
        f'<text x="{EDGE}" y="{top + 26}" font-weight="bold">{title}</text>',
        f'<path d="M{EDGE} {top + EDGE}V{base}H{WIDTH - EDGE}" fill="none" stroke="#888"/>',
        f'<text x="{EDGE - 6}" y="{top + EDGE + 4}" text-anchor="end">{high:.3g}</text>',
        f'<text x="{EDGE - 6}" y="{base + 4}" text-anchor="end">0</text>',
    ]
    drawn += [
        f'<text x="{place(k, 0)[0]:.1f}" y="{base + 16}" text-anchor="middle">{k}</text>'
        for k, _ in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(k, v) for k, v in points))
    drawn.append(f'<polyline points="{line}" fill="none" stroke="#2266aa" stroke-width="2"/>')
    drawn += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#2266aa"/>'
        for x, y in (place(k, v) for k, v in points)
    ]
    return drawn
