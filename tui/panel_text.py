"""The live panel as lines of text: memory, flows, the last pass, and why it is not faster.

Pure functions of a ``View`` and a size. Beside the conversation there is room for all of it; above
it, on a narrow terminal, for the most important.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from textual.content import Content

from localrt.tui.panel_parts import (
    FAINT,
    View,
    bar,
    ends,
    lane,
    milliseconds,
    of,
    percent,
    row,
    spark,
)
from localrt.tui.text import human_bytes, human_rate

if TYPE_CHECKING:
    from localrt import Status
    from localrt.answering.status import LaneUse, MemoryUse, PassTrace

__all__ = ["side_lines", "strip_lines"]

_HEADING = "$text-primary bold"
_COLORS = {"ssd": "$warning", "link": "$secondary", "cpu": "$primary", "gpu": "$success"}
_NAMES = {"ssd": "SSD", "link": "Link", "cpu": "CPU", "gpu": "Card"}
_NO_NUMBERS = "The model is loading, or runs elsewhere"
_FULL = 0.9  # of a budget: said in another colour


# -- beside the conversation ---------------------------------------------------------------------


def side_lines(view: View, width: int, height: int) -> list[Content]:
    """The panel as a column of at most ``height`` lines."""
    status = view.status
    sections = [[_title(view, width)]]
    if status is None:
        sections.append([Content.styled(_NO_NUMBERS, FAINT)])
    else:
        sections += [
            _rate(view, width),
            list(_memory(status, width)),
            list(_flows(view, width)),
            list(_pass(status.last_pass, width)),
            list(_why(view, width)),
            list(_help(view, width)),
        ]
    sections = [section for section in sections if section]
    while len(sections) > 2 and sum(map(len, sections)) > height:
        sections.pop()
    gap = sum(map(len, sections)) + len(sections) - 1 <= height
    lines: list[Content] = []
    for section in sections:
        if lines and gap:
            lines.append(Content(""))
        lines += section
    return [line.truncate(width, ellipsis=True) for line in lines[:height]]


def _title(view: View, width: int) -> Content:
    status = view.status
    text = "Live" if status is None or status.generating else "Idle"
    if status is not None and not status.generating and status.metrics is not None:
        text = "Last answer"
    if status is not None and status.simulated:
        text += ", simulated"
    return ends(Content.styled(text, _HEADING), f"{view.hide} hides" if view.hide else "", width)


def _rate(view: View, width: int) -> list[Content]:
    status, tok_s = view.status, view.tok_s
    assert status is not None
    if tok_s is None:
        ceiling = status.ceiling_tok_s
        text = "Nothing generated yet" if not status.generating else "Reading the prompt"
        more = f"At most {human_rate(ceiling)} tok/s here" if ceiling else ""
        return [Content(text), *([Content.styled(more, FAINT)] if more else [])]
    text = f"{human_rate(tok_s)} tok/s"
    line = Content.assemble(
        (text, "bold"), "  ", (spark(view.rates, width - len(text) - 2), "$success")
    )
    share = status.share_of_ceiling(tok_s)
    lines = [line]
    if share is not None and status.ceiling_tok_s:
        most = human_rate(status.ceiling_tok_s * status.per_pass)
        lines.append(Content.styled(f"{percent(share)} of the {most} possible here", FAINT))
    return lines


def _memory(status: Status, width: int) -> Iterator[Content]:
    for name, memory in (("VRAM", status.vram), ("RAM", status.ram), ("KV", status.kv)):
        if memory is not None:
            yield _labelled(name, memory, width)


def _labelled(name: str, memory: MemoryUse, width: int) -> Content:
    text, share = of(memory), memory.share
    room = width - 5 - 14
    drawn = Content("")
    if share is not None and room > 0:
        color = "$warning" if share > _FULL and name != "KV" else "$accent"
        drawn = bar(share, room, color)
    return Content.assemble((f"{name:<5}", FAINT), drawn, f"{text:>14}")


def _flows(view: View, width: int) -> Iterator[Content]:
    status, flow = view.status, view.flow
    assert status is not None
    if status.streamed and flow is not None:
        for name, rate in (("SSD", flow.ssd_bytes_s), ("Link", flow.link_bytes_s)):
            if rate is None or (name == "Link" and status.vram is None):
                continue
            more = ""
            if name == "SSD" and flow.pass_bytes:
                more = f"{human_bytes(round(flow.pass_bytes))} a pass"
            yield row(name, f"{rate / 1e9:.1f} GB/s", more, width)
    hits = _hits(view)
    if hits is not None:
        yield row("Experts", f"{percent(hits)} in memory", "", width)
    guesses, sources = _guesses(status)
    if guesses:
        yield row("Guesses", guesses, sources, width)


def _hits(view: View) -> float | None:
    status, flow = view.status, view.flow
    now = None if flow is None else flow.expert_hit_rate
    if now is None and status is not None and status.metrics is not None:
        return status.metrics.expert_hit_rate
    return now


def _guesses(status: Status) -> tuple[str, str]:
    """``1.8 a pass``, and ``ngram 41 %`` by source."""
    metrics = status.metrics
    if metrics is None or metrics.accepted_per_pass is None:
        return "", ""
    shares = metrics.accepted_by_source or {}
    said = (f"{name} {percent(share)}" for name, share in shares.items() if share >= 0.005)
    return f"{metrics.accepted_per_pass:.2f} tokens a pass", ", ".join(said)


def _pass(last: PassTrace | None, width: int) -> Iterator[Content]:
    if last is None or last.seconds <= 0:
        return
    waited = last.waited_s / last.seconds
    yield ends(
        Content.assemble("Last pass ", (milliseconds(last.seconds), "bold")),
        f"waited {milliseconds(last.waited_s)}, {percent(waited)}",
        width,
    )
    for use in last.lanes:
        yield _lane_line(use, last.seconds, width)


def _lane_line(use: LaneUse, seconds: float, width: int) -> Content:
    share = f"{percent(use.busy_s / seconds):>5}"
    room = max(width - 5 - len(share) - 1, 4)
    return Content.assemble(
        (f"{_NAMES.get(use.resource, use.resource):<5}", FAINT),
        (lane(use, seconds, room), _COLORS.get(use.resource, "$foreground")),
        " ",
        share,
    )


def _why(view: View, width: int) -> Iterator[Content]:
    if view.flow is None or not view.flow.why or view.tok_s is None:
        return
    yield Content.styled("Why not faster", _HEADING)
    yield from map(Content, textwrap.wrap(view.flow.why, max(width, 8)))


def _help(view: View, width: int) -> Iterator[Content]:
    changes = view.changes
    if not changes:
        return
    yield Content.styled("What would help", _HEADING)
    for change in changes:
        yield row(change.what, "", f"{change.gain:.1f}x", width)


# -- above the conversation ----------------------------------------------------------------------


def strip_lines(view: View, width: int) -> list[Content]:
    """The panel as three to five lines over the whole width."""
    status = view.status
    if status is None:
        return [ends(Content.styled(_NO_NUMBERS, FAINT), "", width)]
    tok_s, share = view.tok_s, status.share_of_ceiling(view.tok_s)
    possible = ""
    if share is not None and status.ceiling_tok_s:
        ceiling = human_rate(status.ceiling_tok_s * status.per_pass)
        possible = f"{percent(share)} of {ceiling} possible"
    text = "No tokens yet" if tok_s is None else f"{human_rate(tok_s)} tok/s"
    room = width - len(text) - len(possible) - 4
    lines = [
        ends(
            Content.assemble((text, "bold"), "  ", (spark(view.rates, room), "$success")),
            possible,
            width,
        ),
        _memory_strip(status, width),
    ]
    lines += _lanes_strip(view, width)
    guesses, sources = _guesses(status)
    if sources:
        lines.append(row("Guesses", guesses, sources, width))
    lines.append(_why_strip(view, width))
    return [line.truncate(width, ellipsis=True) for line in lines]


def _memory_strip(status: Status, width: int) -> Content:
    found = [("VRAM", status.vram), ("RAM", status.ram), ("KV", status.kv)]
    shown = [(name, memory) for name, memory in found if memory is not None]
    each = (width - 2 * (len(shown) - 1)) // max(len(shown), 1)
    pieces: list[Content | str] = []
    for name, memory in shown:
        text, share = of(memory), memory.share
        room = each - len(name) - len(text) - 2
        drawn = bar(share, room) if share is not None and room >= 3 else Content("")
        gap = " " if drawn.plain else ""
        pieces += ["  " if pieces else "", Content.assemble((f"{name} ", FAINT), drawn, gap, text)]
    return Content.assemble(*pieces)


def _lanes_strip(view: View, width: int) -> list[Content]:
    status, flow = view.status, view.flow
    last = status.last_pass if status is not None else None
    if last is None or last.seconds <= 0:
        return []
    rates = {"ssd": flow.ssd_bytes_s, "link": flow.link_bytes_s} if flow is not None else {}
    lines = []
    for use in last.lanes:
        rate = rates.get(use.resource)
        tail = f"  {rate / 1e9:.1f} GB/s" if rate is not None else ""
        if use.resource in ("cpu", "gpu") and not tail:
            tail = f"  waited {percent(last.waited_s / last.seconds)}"
        drawn = _lane_line(use, last.seconds, width - 13)
        lines.append(Content.assemble(drawn, (f"{tail:<13}", FAINT)))
    return lines


def _why_strip(view: View, width: int) -> Content:
    why = view.flow.why if view.flow is not None and view.tok_s is not None else ""
    best = view.changes[:1]
    tail = f"{best[0].what}: {best[0].gain:.1f}x" if best else ""
    short = why.partition(",")[0].partition(":")[0].rstrip(".")
    if not why:
        return ends(Content.styled(tail and f"Would help: {tail}", FAINT), "", width)
    if tail and len(short) + len(tail) + 3 > width:
        return Content(short)
    return ends(Content(short), tail, width)
