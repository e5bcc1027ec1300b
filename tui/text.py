"""Text for people: names of options, short names, counts and times, made safe.

Knows no widget and no model. Text from a model, a file or the clipboard passes through ``clean``
before it reaches the terminal: control sequences must be shown, never obeyed.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from localrt.common.errors import LocalrtError
from localrt.common.formatting import CONTROL, format_count
from localrt.common.option_names import flag_value, on_command_line
from localrt.engine.option_help import OPTION_HELP

if TYPE_CHECKING:
    from localrt import Metrics


def in_app(name: str, value: object) -> str:
    """An option as the app spells it: ``/set max_tokens 100``, or ``max_tokens``.

    Options that only the command line sets are spelled as there.
    """
    if name not in OPTION_HELP:
        return on_command_line(name, value)
    return name if value is None else f"/set {name} {flag_value(value)}"


# Control keys as tmux and other terminals send them if a program requests extended keys; tmux also
# sends the line ends of pastes this way. The modifier 5 is Ctrl.
_EXTENDED = re.compile(r"\x1b\[27;5;(\d{2,3})~|\x1b\[(\d{2,3});5u")


def pasted(text: str) -> str:
    """The text with line feeds as line ends, whatever the terminal sent."""
    text = _EXTENDED.sub(lambda m: chr(int(m.group(1) or m.group(2)) & 0x1F), text)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def clean(text: str) -> str:
    """The text with every control and direction character but newline and tab made harmless."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type when it has none."""
    text = error.told(in_app) if isinstance(error, LocalrtError) else str(error)
    lines = clean(text).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def explained(error: Exception) -> str:
    """An error as one line for the user; errors other than localrt's are reported as bugs."""
    if isinstance(error, LocalrtError):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)} (a bug in localrt: please report it)"


def short_name(model: str) -> str:
    """The last part of a path or hub id, at most 40 characters."""
    name = clean(model).replace("\\", "/").replace("\n", " ")
    last = name.rstrip("/").rpartition("/")[2] or name
    return last if len(last) <= 40 else f"{last[:39]}…"


def human_count(count: int) -> str:
    """A count of tokens or parameters: ``"312"``, ``"8.2k"``, ``"135M"``."""
    return format_count(count).replace(" ", "")


def guess_texts(metrics: Metrics | None) -> tuple[str, str] | tuple[()]:
    """``("58 %", "2.4 tokens per pass")``: the share of accepted draft tokens in the answer, and
    the tokens per pass; empty without draft tokens.
    """
    guessed = 0.0 if metrics is None else sum((metrics.accepted_by_source or {}).values())
    if metrics is None or metrics.accepted_per_pass is None or guessed < 0.005:
        return ()
    return f"{100 * guessed:.0f} %", f"{metrics.accepted_per_pass:.1f} tokens per pass"


def human_when(then: float, now: float) -> str:
    """How long ago a time was: ``"now"``, ``"5 min ago"``, ``"3 h ago"``, ``"2 days ago"``, then
    the date. Both times are in seconds since the epoch.
    """
    ago = max(now - then, 0)
    if ago < 60:
        return "now"
    if ago < 3600:
        return f"{ago / 60:.0f} min ago"
    if ago < 86_400:
        return f"{ago / 3600:.0f} h ago"
    if ago < 7 * 86_400:
        days = round(ago / 86_400)
        return "1 day ago" if days == 1 else f"{days} days ago"
    return f"{datetime.fromtimestamp(then):%Y-%m-%d}"
