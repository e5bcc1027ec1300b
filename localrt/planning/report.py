"""A plan as a person reads it first: the verdict, what to type, and what would change it.

``localrt plan`` prints it; tables are in ``offload/planner/explain.py``, behind ``--details``.
Commands name the model as the user did, with the options that it was planned with.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from localrt.common.formatting import (
    format_bytes,
    format_count,
    format_seconds,
    table,
)
from localrt.common.option_names import on_command_line
from localrt.hub.names import looks_like_path
from localrt.offload.planner.explain import explain, figures, hypothetical_line
from localrt.offload.planner.plan import Plan, expected_of
from localrt.offload.planner.search import EVEN_EXPERTS
from localrt.offload.planner.verdict import PROMPT_TOKENS, READING_TOK_S, UNITS, speed
from localrt.planning.published import Published

FILE = "file"
"""The option of a change that takes another of a repository's files."""


def with_commands(plan: Plan, model: str, options: Mapping[str, object], *, weights: bool) -> Plan:
    """``plan`` of ``model``, planned with these ``options`` of ``load``, with what to type.

    Without ``weights`` on this machine there are none to quantize.
    """
    changes = []
    for change in plan.changes:
        name, value = change.option or ("", "")
        command = ""
        if name == "format":
            if plan.sizes or not weights:
                continue  # sizes in bits, or other files, say it better
            command = typed("quantize", model, {name: value})
        elif name == FILE:
            command = typed("chat", value, options)
        elif name:
            command = typed("chat", model, {**options, name: value})
        changes.append(replace(change, command=command))
    contexts = tuple(
        replace(each, command=typed("chat", model, {**options, "ctx": each.tokens}))
        for each in plan.contexts
    )
    return replace(
        plan,
        command=typed("chat", model, options),
        changes=tuple(changes),
        contexts=contexts,
    )


def typed(command: str, model: str, options: Mapping[str, object]) -> str:
    """``"localrt chat model.gguf --ctx 8192"``."""
    words = ["localrt", command, shlex.quote(model)]
    return " ".join(words + [on_command_line(name, value) for name, value in options.items()])


_WIDTH = 100
_MOST_GAINS = 5
_MOST_PUBLISHED = 2  # all are among the details
_MOST_NOTES = 2


@dataclass(frozen=True, slots=True)
class _Gain:
    what: str
    tok_s: float
    gain: float
    command: str


def report(plan: Plan, name: str, published: tuple[Published, ...] = ()) -> str:
    """The plan of the model that the user calls ``name``, in about twenty lines.

    ``published`` are what users measured with this model on this card.
    """
    return "\n".join(_lines(plan, name, published))


def details(plan: Plan, published: tuple[Published, ...] = ()) -> str:
    """All tables; ``published`` are what users measured with this model on any card."""
    text = explain(plan)
    if published:
        text += "\n\nWhat others measured with this model\n"
        text += "\n".join(f"  {each}" for each in published)
    return text


def _lines(plan: Plan, name: str, published: tuple[Published, ...]) -> Iterator[str]:
    shape = plan.request.shape
    yield str(plan.verdict)
    yield ""
    if plan.hypothetical:
        yield from _wrapped(hypothetical_line(plan.hypothetical))
    size = f"{format_bytes(shape.nbytes)} of weights"
    kind = f" in {plan.quantization}" if plan.quantization else ""
    called = shape.name if looks_like_path(name) else name
    yield f"{called}: {format_count(shape.parameters)} parameters, {size}{kind}"
    yield from _wrapped(f"Forecast from {', '.join(figures(plan.request.machine))}, {_room(plan)}")
    yield f"{_prompt(plan)}."
    yield UNITS
    if plan.command:
        yield ""
        yield "To run it there, type" if plan.hypothetical else "To run it, type"
        yield f"  {plan.command}"
    if plan.contexts:
        yield ""
        yield "Longest conversation"
        yield from _indented(_contexts(plan))
    gains = _gains(plan, name)
    if gains:
        yield ""
        yield "What would make it faster"
        yield from _indented(
            [(speed(g.tok_s), f"{g.gain:.1f}x", g.what, g.command) for g in gains], "rr"
        )
    if published:
        yield ""
        yield "What others measured with this model and card"
        yield from (f"  {each}" for each in published[:_MOST_PUBLISHED])
    notes = [note for note in plan.notes if note != EVEN_EXPERTS][:_MOST_NOTES]
    if notes:
        yield ""
        for note in notes:
            yield from _wrapped(f"Note: {note}")
    yield ""
    yield "Where the weights go, and where the time: add --details"


def _room(plan: Plan) -> str:
    budgets = plan.request.budgets
    source = plan.request.machine.sources.get("ram_bytes", "typical")
    text = f"{format_bytes(budgets.ram)} of RAM to use ({source})"
    if plan.request.uses_gpu:
        text += f", {format_bytes(budgets.vram)} of GPU memory"
    return text


def _prompt(plan: Plan) -> str:
    wait = format_seconds(expected_of(plan).wait_s)
    return f"A page of text ({PROMPT_TOKENS} tokens) is read in {wait}"


def _contexts(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, each in enumerate(plan.contexts):
        why = "all that the model has" if each.whole else "the most that fits"
        if number:
            why = "the most at reading speed"
            if plan.tok_s < READING_TOK_S:
                why = "the most that does not slow it down"
        rows.append(
            (
                f"{each.tokens:,} tokens",
                why,
                f"{speed(each.tok_s)} when full",
                _shown(each.command, plan),
            )
        )
    return rows


def _gains(plan: Plan, name: str) -> list[_Gain]:
    """Changes, and smaller weights: the best first."""
    gains = [
        _Gain(each.what, each.tok_s, each.gain, _shown(each.command, plan)) for each in plan.changes
    ]
    for size in plan.sizes[1:]:
        what = f"weights of {size.bits:.1f} bits, {format_bytes(size.nbytes)}"
        bits = typed("quantize", name, {"bits": f"{size.bits:.1f}"}) if plan.command else ""
        gains.append(_Gain(what, size.tok_s, size.tok_s / plan.tok_s, bits))
    gains.sort(key=lambda each: each.gain, reverse=True)
    return gains[:_MOST_GAINS]


def _shown(command: str, plan: Plan) -> str:
    """Of the plan's own command with another option, the option."""
    if plan.command and command.startswith(f"{plan.command} --"):
        return f"add {command.removeprefix(plan.command).strip()}"
    return command


def _indented(rows: list[tuple[str, ...]], align: str = "r") -> Iterator[str]:
    """Columns, without headers."""
    blank = ("",) * len(rows[0])
    for line in table(rows, blank, align).split("\n")[1:]:
        yield f"  {line}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False)
