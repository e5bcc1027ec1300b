"""Shows a report of ``localrt bench`` as one self-contained HTML file, or as a picture.

Reports are JSON objects of the kinds in `KINDS`; plots are drawn by ``plots.py``, light or dark as
the browser prefers. Every text from a report is escaped, since files may be untrusted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from localrt.bench.plots import (
    DARK,
    LIGHT,
    WIDTH,
    Figure,
    Span,
    Table,
    bars,
    drawn,
    escape,
    heat_map,
    lines,
    number,
    table_figure,
    text_figure,
    timeline,
)
from localrt.bench.sweep import (
    SOMETIMES,
    WORK,
    SweepReport,
    best_rows,
    failures,
    label,
    loading_settings,
)
from localrt.common.errors import OptionError
from localrt.common.files import read_text, write_bytes
from localrt.common.formatting import format_bytes, format_rate, format_seconds, one_line
from localrt.planning.verdict import meanings

NOT_MEASURED = "not measured"

Report = Mapping[str, Any]


Section = tuple[str, Sequence[Figure | Table]]


@dataclass(frozen=True, slots=True)
class Page:
    """A title, notes under it, and sections of figures and tables.

    ``pairs``: after the first, sections are shown two by two, side by side if there is room.
    """

    title: str
    notes: Sequence[str]
    sections: Sequence[Section]
    pairs: bool = False


def read_report(path: Path) -> Report:
    """Read a report from a file.

    Raises:
        OptionError: it cannot be read, or is not of a kind in `KINDS`.
    """
    text = read_text(path)
    try:
        report = json.loads(text)
    except (ValueError, RecursionError):
        report = None
    if not isinstance(report, dict) or report.get("kind") not in KINDS:
        raise OptionError(f"{path} is not a JSON report of `localrt bench` ({', '.join(KINDS)})")
    return report


def page_of(report: Report) -> Page:
    """Return the page of a report.

    Raises:
        OptionError: the report is damaged.
    """
    with readable(report["kind"]):
        return KINDS[report["kind"]](report)


@contextmanager
def readable(kind: str) -> Iterator[None]:
    """A context in which errors caused by a damaged report become an ``OptionError``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise OptionError(f"this {kind} is damaged: {one_line(repr(error))}") from error


def to_html(page: Page) -> str:
    """Return the page as one HTML file."""
    parts = [f"<h1>{escape(page.title)}</h1>"]
    parts += [f"<p>{escape(note)}</p>" for note in page.notes]
    for heading, blocks in page.sections:
        parts.append(f"<section>{f'<h2>{escape(heading)}</h2>' if heading else ''}")
        parts += [_block(block) for block in blocks]
        parts.append("</section>")
    body = "\n".join(parts)
    kind = "pairs" if page.pairs else "one"
    return _PAGE.format(title=escape(page.title), style=_style(), kind=kind, body=body)


def write_png(page: Page, path: Path) -> None:
    """Write the page as a picture in light colours, at twice its size.

    Raises:
        StorageError: the file cannot be written.
    """
    from PIL import Image

    figures = [text_figure(page.title, 19, "ink")]
    figures += [text_figure(note, 12, "faint") for note in page.notes]
    for heading, blocks in page.sections:
        figures.append(text_figure(heading, 15, "ink"))
        figures += [block if isinstance(block, Figure) else table_figure(block) for block in blocks]
    heights = [2 * figure.height for figure in figures]
    image = Image.new("RGB", (2 * (WIDTH + 20), 16 + sum(heights)), LIGHT["paper"])
    for figure, below in zip(figures, itertools.accumulate(heights), strict=True):
        image.paste(drawn(figure), (20, 16 + below - 2 * figure.height))
    data = BytesIO()
    image.save(data, "PNG")
    write_bytes(path, data.getvalue())


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
<body class="{kind}">
{body}
</body>
</html>
"""

_CSS = """body { background: var(--paper); color: var(--ink); margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color-scheme: light dark; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p { color: var(--faint); margin: 0.2rem 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--rule); text-align: right; }
th { color: var(--faint); font-weight: normal; }
th:first-child, td:first-child, td[colspan] { text-align: left; }
section { min-width: 0; }
@media (min-width: 70rem) {
  .pairs { max-width: 110rem; display: grid; grid-template-columns: 1fr 1fr; gap: 0 2rem; }
  .pairs h1, .pairs p, .pairs section:first-of-type { grid-column: 1 / -1; }
}
svg { display: block; width: 100%; height: auto; margin: 1rem 0; font-family: inherit; }"""


def _style() -> str:
    light, dark = (
        " ".join(f"--{name}: {value};" for name, value in colours.items())
        for colours in (LIGHT, DARK)
    )
    return (
        f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{_CSS}"
    )


def _block(block: Figure | Table) -> str:
    if isinstance(block, Figure):
        return (
            f'<svg viewBox="0 0 {WIDTH} {block.height}" role="img" '
            f'aria-label="{escape(block.title)}">{block.body}</svg>'
        )
    rows = []
    for tag, row in (("th", block.headers), *(("td", row) for row in block.rows)):
        cells = [f"<{tag}>{escape(cell)}</{tag}>" for cell in row]
        if len(row) < len(block.headers):  # the last cell spans the missing columns
            span = len(block.headers) - len(row) + 1
            cells[-1] = cells[-1].replace("<td>", f'<td colspan="{span}">', 1)
        rows.append("".join(cells))
    return f'<div class="wide"><table><tr>{"</tr><tr>".join(rows)}</tr></table></div>'


# -- the reports -----------------------------------------------------------------------------------


def shown(value: object, show: Callable[[float], str]) -> str:
    """Return a measured number as text; "not measured" for None."""
    known = number(value)
    return NOT_MEASURED if known is None else show(known)


def percent(share: float) -> str:
    """``"98 %"``."""
    return f"{100 * share:.0f} %"


def gpu_line(gpu: Report) -> str:
    """``"NVIDIA GeForce RTX 4060 (8.6 GB of VRAM, driver 580.95)"``."""
    memory, driver = shown(gpu.get("memory_bytes"), format_bytes), gpu.get("driver")
    return f"{gpu['name']} ({memory} of VRAM, driver {driver or 'unknown'})"


def machine_notes(report: Report) -> list[str]:
    """Return lines about the machine, the versions and the command."""
    machine = report["machine"]
    cpu, gpus = machine["cpu"], list(map(gpu_line, machine["gpus"]))
    facts = [
        cpu["name"],
        f"{cpu['physical_cores']} cores",
        f"{format_bytes(machine['memory']['total'])} of RAM",
        *(gpus or ["no NVIDIA GPU"]),
        machine["system"],
    ]
    rate = number(machine.get("memory_read_bytes_s"))
    if rate is not None:
        facts.insert(3, f"reads {format_bytes(rate)}/s from memory")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    notes = [", ".join(facts), versions, str(report["command"])]
    return [*notes, "interrupted: some of it is missing"] if report["interrupted"] else notes


def _runs(report: Report) -> str:
    return "one run" if report["runs"] == 1 else f"medians of {report['runs']} runs"


def mix_rows(server: Report) -> tuple[list[str], list[list[str]]]:
    """Return headers and a row for each application of a server."""
    times = [(name, at) for name in ("ttft_s", "tpot_s") for at in ("p50", "p95", "p99")]
    headers = ["application", "class", "goals met", "requests", "failed"]
    headers += [f"{'first token' if name == 'ttft_s' else 'per token'} {at}" for name, at in times]
    rows = []
    for app in server["apps"]:
        row = [app["app"], app["class"], shown(app["goals_met"], percent)]
        row += [shown(app[name], "{:g}".format) for name in ("requests", "failed")]
        row += [shown((app[name] or {}).get(at), format_seconds) for name, at in times]
        rows.append(
            [*row, shown(app["stalls"], "{:g}".format), shown(app["tokens_s"], format_rate)]
        )
    return [*headers, "stalls", "tok/s"], rows


def _mix(report: Report) -> Page:
    mix = report["mix"]
    seconds = number(mix["seconds"]) or 0.0
    sections: list[Section] = []
    for server in report["servers"]:
        met = shown(server["goals_met"], percent)
        heading = f"{server['server']}: {met} of the requests met their goals"
        joules = shown(server["joules_per_token"], lambda value: f"{value:.2f} J per token")
        share = shown(server["measuring_cpu_share"], lambda value: f"{value:.2%}")
        facts = [["energy", joules], ["CPU time of measuring", share]]
        for each in server["neighbours"]:
            if each["frame_ms"]:
                times = [f"{name} {value:.1f} ms" for name, value in each["frame_ms"].items()]
                facts.append([f"frames of {each['name']}", ", ".join(times)])
        tables = [Table(*mix_rows(server)), Table(["", "measured"], facts)]
        sections.append((heading, [*tables, *_timelines(server, seconds)]))
    notes = machine_notes(report)
    notes += [f"{one['server']} did not run: {one['reason']}" for one in report.get("skipped", ())]
    return Page(f"{mix['name']}: {format_seconds(seconds)} of requests", notes, sections)


def _timelines(server: Report, seconds: float) -> Iterator[Figure]:
    """Yield a server's first run over time."""

    def first_run(rows: Sequence[Report]) -> list[Report]:
        return [row for row in rows if row.get("run", 1) == 1]

    of = f" (run 1 of {server['runs']})" if server["runs"] > 1 else ""
    spans = {
        app["app"]: [_span(event) for event in first_run(app["events"])] for app in server["apps"]
    }
    latest = max((span.end for row in spans.values() for span in row), default=0.0)
    samples = first_run(server["samples"])
    seconds = max([seconds, latest, *(number(each["at_s"]) or 0.0 for each in samples)])
    title = f"Requests{of}: thin ones met their goals, thick ones missed them or failed"
    yield timeline(title, spans, seconds=seconds)

    def over(*path: str) -> list[tuple[float, object]]:
        found = []
        for sample in samples:
            value: object = sample
            for name in path:
                value = value.get(name) if isinstance(value, Mapping) else None
            found.append((number(sample["at_s"]) or 0.0, value))
        return found

    owners = dict.fromkeys(name for each in samples for name in each["owners"] or ())
    plots: list[tuple[str, dict[str, list[tuple[float, object]]], Callable[[float], str]]] = [
        ("Processors", {"CPU": over("cpu"), "GPU": over("gpu", "busy")}, percent),
        ("Memory by owner", {name: over("owners", name) for name in owners}, format_bytes),
        ("Free memory", {"free": over("free_bytes")}, format_bytes),
        (
            "Disk, per second",
            {"read": over("disk_read_bytes_s"), "written": over("disk_write_bytes_s")},
            format_bytes,
        ),
        ("Power", {"watts": over("watts")}, "{:.0f} W".format),
        ("Temperature", {"hottest": over("celsius")}, "{:.0f} °C".format),
    ]
    for title, series, show in plots:
        known = {
            name: values
            for name, values in series.items()
            if any(number(value) is not None for _, value in values)
        }
        if known:
            stacked = title == "Memory by owner"
            yield lines(title + of, known, seconds=seconds, show=show, stacked=stacked)


def _span(event: Report) -> Span:
    start, end = number(event["at_s"]) or 0.0, number(event["end_s"])
    told = "met" if event["met"] else "not judged" if event["met"] is None else "missed"
    text = (
        f"at {start:.1f} s: first token {shown(event['ttft_s'], format_seconds)}, "
        f"{event['tokens']} tokens, goals {told} {event['error'] or ''}"
    )
    return Span(start, start if end is None else end, event["met"] is not False, text)


def _sweep(report: Report) -> Page:
    sweep = cast(SweepReport, report)
    varied = [name for name, values in report["vary"].items() if len(values) > 1]
    across = [name for name in WORK[:2] if name in varied] or varied[-1:]
    down = [name for name in varied if name not in across]
    points = {(label(each, down), label(each, across)): each for each in report["points"]}
    rows = list(dict.fromkeys(row for row, _ in points))
    combinations = itertools.product(*(report["vary"][name] for name in across))
    columns = [label(dict(zip(across, each, strict=True)), across) for each in combinations]
    by = f"{' / '.join(down) or 'all'} by {' / '.join(across) or 'nothing'}"
    figures = [
        heat_map(
            f"{title}: {by}",
            columns,
            rows,
            [[points.get((row, column), {}).get(name) for column in columns] for row in rows],
            show,
        )
        for title, name, show in _SWEPT
        if name not in SOMETIMES or any(each.get(name) for each in points.values())
    ]
    where = " / ".join(loading_settings(sweep))
    sections: list[Section] = [
        (f"Best, {where}" if where else "Best", [Table(*best_rows(sweep))]),
        ("Every point", figures),
    ]
    if failed := failures(sweep):
        sections.append(("Not run", [Table(["point", "reason"], failed)]))
    notes = [*machine_notes(report), f"{_runs(report)}; auto: localrt chooses"]
    return Page(f"{report['model']}: {len(report['points'])} points", notes, sections)


_SWEPT: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("Decoding, tok/s of all answers", "decode_tok_s", format_rate),
    ("Prefill, tok/s", "prefill_tok_s", format_rate),
    ("First token (less is better)", "ttft_s", format_seconds),
    ("Peak RAM (less is better)", "peak_ram_bytes", format_bytes),
    ("Peak VRAM (less is better)", "peak_vram_bytes", format_bytes),
    ("Experts that were where they are computed", "expert_hit_rate", percent),
)


def card_rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return headers and a row for each model of a card; one that did not run has its reason."""
    length = report["prompt_tokens"]
    headers = ["model", "size", "bits per weight", "decode tok/s", "prompt tok/s"]
    headers += [f"first token of {length}", "RAM", "VRAM", "power", "perplexity against f32"]
    rows = []
    for model in report["models"]:
        if model["reason"]:
            rows.append([model["model"], model["reason"]])
            continue
        change, error = (number(model[f"perplexity_change{of}"]) for of in ("", "_error"))
        told = NOT_MEASURED
        if change is not None:
            told = f"{100 * change:+.2f} % ± {100 * (error or 0.0):.2f} %"
        rows.append(
            [
                model["model"] + (", streamed" if model["streamed"] else ""),
                shown(model["weight_bytes"], format_bytes),
                shown(model["bits_per_weight"], "{:.2f}".format),
                shown(model["decode_tok_s"], format_rate),
                shown(model["prefill_tok_s"], format_rate),
                shown(model["ttft_s"], format_seconds),
                *(shown(model.get(f"peak_{kind}_bytes"), format_bytes) for kind in ("ram", "vram")),
                shown(model["joules_per_token"], "{:.2f} J per token".format),
                told,
            ]
        )
    return headers, rows


def _card(report: Report) -> Page:
    ran = [model for model in report["models"] if not model["reason"]]
    figures = [
        bars(title, [(one["model"], one[name], shown(one[name], show)) for one in ran])
        for title, name, show in _RATES
    ]
    notes = machine_notes(report)
    notes.append(
        f"{report['prompt_tokens']} prompt and {report['tokens']} answer tokens, {_runs(report)}; "
        "power is the whole machine's while it decodes"
    )
    headers, rows = card_rows(report)
    notes += meanings(" ".join([*headers, *(row[0] for row in rows)]))
    machine = report["machine"]
    names = [each["name"] for each in (*machine["gpus"], machine["cpu"])]
    return Page(
        f"What runs on {' and '.join(names)}", notes, [("", [Table(headers, rows), *figures])]
    )


_RATES = (
    ("Decoding, tok/s", "decode_tok_s", format_rate),
    ("Reading a prompt, tok/s", "prefill_tok_s", format_rate),
)


KINDS: Mapping[str, Callable[[Report], Page]] = {"mix": _mix, "sweep": _sweep, "card": _card}
"""The kinds of reports."""
