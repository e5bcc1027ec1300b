"""Compares two mixes, or two sweeps: ``localrt bench --compare A.json B.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

from localrt.bench.page import Page, Report, Section, page_of, percent, readable
from localrt.bench.plots import Table, number
from localrt.bench.sweep import MEASURES, SETTINGS, describe
from localrt.common.errors import OptionError
from localrt.common.formatting import format_bytes, format_rate, format_seconds

Figures = dict[tuple[str, str], Any]
"""Values by subject (an application, a point) and name."""

_HEADERS = ("of", "figure", "A", "B", "B against A")


def compare(a: Report, b: Report) -> tuple[Page, Table]:
    """Return a page with both reports and their differences, and the table of differences.

    Raises:
        OptionError: they are not two mixes or two sweeps.
    """
    kinds = (a["kind"], b["kind"])
    if kinds not in (("mix", "mix"), ("sweep", "sweep")):
        raise OptionError(
            f"two mixes or two sweeps can be compared, not a {kinds[0]} and a {kinds[1]}"
        )
    pages = page_of(a), page_of(b)
    with readable(kinds[0]):
        alone = kinds[0] == "mix" and len(a["servers"]) == len(b["servers"]) == 1
        figures = partial(_applications, alone=alone) if kinds[0] == "mix" else _points
        table = Table(_HEADERS, list(_differences(dict(figures(a)), dict(figures(b)))))
    title = f"Two {'mixes' if kinds[0] == 'mix' else 'sweeps'}"
    notes = [
        f"{letter}: {note}"
        for letter, page in zip("AB", pages, strict=True)
        for note in (page.title, *page.notes)
    ]
    sections: list[Section] = [("Differences", [table])]
    for pair in zip_longest(*(page.sections for page in pages), fillvalue=("", ())):
        sections += [
            (f"{letter}: {heading}", blocks)
            for letter, (heading, blocks) in zip("AB", pair, strict=True)
        ]
    return Page(title, notes, sections, pairs=True), table


def _differences(a: Figures, b: Figures) -> Iterator[list[str]]:
    """Yield a row for each figure that at least one report has."""
    for of, name in dict.fromkeys((*a, *b)):
        before, after = (number(figures.get((of, name))) for figures in (a, b))
        if before is None and after is None:
            continue
        show = _shown_as(name)
        change = "-"
        if before is not None and after is not None:
            if name == "goals met":
                change = f"{100 * (after - before):+.0f} points"
            elif before:
                ratio = after / before
                change = f"{ratio:.0f}x" if ratio >= 10 else f"{100 * (ratio - 1):+.1f} %"
        yield [of, name, *("-" if each is None else show(each) for each in (before, after)), change]


def _applications(mix: Report, alone: bool) -> Iterator[tuple[tuple[str, str], object]]:
    """Yield the figures of a mix. If each report has a single server, their names may differ."""
    for server in mix["servers"]:
        for app in server["apps"]:
            of = app["app"] if alone else f"{server['server']}, {app['app']}"
            yield (of, "goals met"), app["goals_met"]
            for name in ("ttft_s", "tpot_s"):
                for at in ("p50", "p95", "p99"):
                    yield (of, f"{name} {at}"), (app[name] or {}).get(at)
            for name in ("stalls", "failed", "tokens_s"):
                yield (of, name), app[name]


def _points(sweep: Report) -> Iterator[tuple[tuple[str, str], object]]:
    names = [name for name in SETTINGS if name in sweep["vary"]]
    for point in sweep["points"]:
        for name in MEASURES:
            yield (describe(point, names), name), point.get(name)


def _shown_as(name: str) -> Callable[[float], str]:
    for part, show in _SHOWN.items():
        if part in name:
            return show
    return "{:g}".format


_SHOWN: Mapping[str, Callable[[float], str]] = {
    "goals met": percent,
    "rate": percent,
    "bytes": format_bytes,
    "tok_s": format_rate,
    "tokens_s": format_rate,
    "_s": format_seconds,
}
