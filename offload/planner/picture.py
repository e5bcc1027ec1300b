"""A timeline of the pipeline as SVG: one row for each resource, tasks coloured by what they are.

Written by hand, without a library, so that it opens anywhere; colours follow the reader's light or
dark scheme. Tasks too short to see are drawn together with their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from localrt.offload.planner.explain import explain, one_line
from localrt.offload.planner.plan import Plan
from localrt.offload.planner.simulate import RESOURCES, Resource, SimulatedTask

_WIDTH, _LEFT, _RIGHT = 1200, 96, 24
_TOP, _ROW, _GAP = 92, 44, 14
_SHORTEST = 0.6  # pixels
_LABELS: dict[Resource, str] = {"ssd": "SSD reads", "link": "Link", "cpu": "CPU", "gpu": "GPU"}
# (kind, label, light, dark): told apart by lightness too, for those who do not see all colours.
_KINDS = (
    ("attention", "attention", "#2f6fb5", "#6ba7e8"),
    ("mlp", "MLP", "#e0912f", "#e8a64e"),
    ("expert", "experts", "#8a55b0", "#b98adf"),
    ("head", "head", "#3d9367", "#6cc596"),
    ("kv", "keys and values", "#15858c", "#58c3ca"),
    ("pass", "sampling", "#7b7f86", "#a2a7af"),
    ("crossing", "crossing", "#c0405a", "#ea7b90"),
)


@dataclass(slots=True)
class _Bar:
    """One or several tasks of a kind without a gap that could be seen."""

    kind: str
    start: float
    end: float
    first: SimulatedTask
    count: int = 1
    nbytes: int = 0


def to_svg(plan: Plan) -> str:
    """The last two passes of the plan's replay."""
    tasks = plan.simulation.tasks
    rows = [name for name in RESOURCES if any(task.resource == name for task in tasks)]
    begin = min((task.start for task in tasks if task.kind == "pass"), default=0.0)
    end = max((task.end for task in tasks), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end - begin, 1e-9)
    bottom = _TOP + len(rows) * (_ROW + _GAP)
    height = bottom + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(one_line(plan), quote=True)}">',
        _style(),
        f'<rect class="back" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="32">{escape(_title(plan))}</text>',
        f'<text class="sub" x="{_LEFT}" y="54">{escape(one_line(plan))}</text>',
    ]
    parts += _axis(begin, end, scale, bottom)
    parts += _passes(tasks, begin, scale, bottom)
    for number, name in enumerate(rows):
        y = _TOP + number * (_ROW + _GAP)
        share = plan.busy_share(name)
        width = _WIDTH - _LEFT - _RIGHT
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{width}" height="{_ROW}"/>')
        parts.append(f'<text class="label" x="{_LEFT - 10}" y="{y + 20}">{_LABELS[name]}</text>')
        parts.append(f'<text class="small" x="{_LEFT - 10}" y="{y + 36}">{share:.0%} busy</text>')
        bars = _bars([task for task in tasks if task.resource == name], scale)
        parts += [_rect(bar, begin, scale, y) for bar in bars if bar.end > begin]
    parts += _legend({task.kind for task in tasks}, bottom + 48)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def to_html(plan: Plan) -> str:
    """A page with the picture and the explanation."""
    title = escape(f"{plan.request.shape.name}: plan")
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        "<style>:root{color-scheme:light dark}"
        "body{margin:2rem auto;max-width:1240px;padding:0 1rem;font:15px/1.5 system-ui,sans-serif}"
        "svg{max-width:100%;height:auto}"
        "pre{overflow-x:auto;font:13px/1.5 ui-monospace,monospace}</style></head>\n"
        f"<body>\n{to_svg(plan)}<pre>{escape(explain(plan))}</pre>\n</body></html>\n"
    )


def _style() -> str:
    light = "".join(f".{kind}{{fill:{colour}}}" for kind, _, colour, _ in _KINDS)
    dark = "".join(f".{kind}{{fill:{colour}}}" for kind, _, _, colour in _KINDS)
    return (
        "<style>"
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
        "fill:#1c1f24}"
        ".title{font-size:18px;font-weight:600}.sub,.key{font-size:13px}.sub,.small,.tick,.turned{fill:#5a616b}"
        ".label{font-size:13px;font-weight:600;text-anchor:end}"
        ".small{font-size:11px;text-anchor:end}.tick{font-size:11px;text-anchor:middle}"
        ".turned{font-size:11px}"
        ".back{fill:#ffffff}.lane{fill:#f0f2f5}.grid{stroke:#dfe3e8;stroke-width:1}"
        ".turn{stroke:#5a616b;stroke-width:1;stroke-dasharray:4 3}"
        f"{light}"
        "@media(prefers-color-scheme:dark){text{fill:#e6e8eb}.sub,.small,.tick,.turned{fill:#a2a9b3}"
        f".back{{fill:#16191d}}.lane{{fill:#21262c}}.grid{{stroke:#30363d}}.turn{{stroke:#a2a9b3}}{dark}}}"
        "</style>"
    )


def _title(plan: Plan) -> str:
    request = plan.request
    memory = f"{request.budgets.ram / 1e9:.3g} GB RAM"
    if request.uses_gpu and request.machine.gpu is not None:
        memory += f", {request.budgets.vram / 1e9:.3g} GB of {request.machine.gpu.name}"
    return f"{request.shape.name}: two passes, simulated ({memory})"


def _axis(begin: float, end: float, scale: float, bottom: int) -> Iterator[str]:
    """Ticks at round numbers of milliseconds."""
    whole = (end - begin) * 1e3
    step = 10 ** math.floor(math.log10(max(whole / 8, 1e-6)))
    step = next(step * times for times in (1, 2, 5, 10) if whole / (step * times) <= 10)
    for number in range(int(whole / step) + 1):
        value = number * step
        x = _LEFT + value / 1e3 * scale
        yield _line("grid", x, _TOP - 8, bottom - _GAP + 6)
        unit = " ms" if number == 0 else ""
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 8}">{value:g}{unit}</text>'


def _passes(
    tasks: Sequence[SimulatedTask], begin: float, scale: float, bottom: int
) -> Iterator[str]:
    """Where each pass begins."""
    for number, task in enumerate(task for task in tasks if task.kind == "pass"):
        x = _LEFT + (task.start - begin) * scale
        yield _line("turn", x, _TOP - 14, bottom - _GAP + 6)
        yield f'<text class="turned" x="{x + 4:.1f}" y="{_TOP - 12}">pass {number + 1}</text>'


def _bars(tasks: Sequence[SimulatedTask], scale: float) -> list[_Bar]:
    """Tasks in order; short ones of a kind become one bar."""
    bars: list[_Bar] = []
    for task in sorted(tasks, key=lambda each: each.start):
        last = bars[-1] if bars else None
        narrow = (task.end - task.start) * scale < 2
        if (
            last is not None
            and last.kind == task.kind
            and narrow
            and (task.start - last.end) * scale < _SHORTEST
            and (last.end - last.start) * scale < 12
        ):
            last.end, last.count = max(last.end, task.end), last.count + 1
            last.nbytes += task.nbytes
        else:
            bars.append(_Bar(task.kind, task.start, task.end, task, nbytes=task.nbytes))
    return bars


def _rect(bar: _Bar, begin: float, scale: float, y: int) -> str:
    start = max(bar.start, begin)
    x, width = _LEFT + (start - begin) * scale, (bar.end - start) * scale
    inner = width - 0.8 if width > 2.4 else max(width, _SHORTEST)  # a hair between neighbours
    name = bar.first.name if bar.count == 1 else f"{bar.first.name} and {bar.count - 1} more"
    text = f"{name}: {(bar.end - bar.start) * 1e3:.2f} ms"
    if bar.nbytes:
        text += f", {bar.nbytes / 1e6:.1f} MB"
    return (
        f'<rect class="{bar.kind}" x="{x:.2f}" y="{y + 4}" width="{inner:.2f}" '
        f'height="{_ROW - 8}"><title>{escape(text)}</title></rect>'
    )


def _line(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'


def _legend(kinds: set[str], y: int) -> Iterator[str]:
    x = _LEFT
    for kind, label, _, _ in _KINDS:
        if kind in kinds:
            yield f'<rect class="{kind}" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>'
            yield f'<text class="key" x="{x + 18}" y="{y}">{label}</text>'
            x += 36 + 8 * len(label)
