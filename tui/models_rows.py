"""The rows of the models screen: a model here, one of the hub, or the way to ask it.

Knows what the library says of models, and no widget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.content import Content

from localrt.tui.text import clean, human_bytes, human_count, human_when, short_name

if TYPE_CHECKING:
    from localrt import FoundModel, LocalModel, Preview

__all__ = ["Row", "asking_row", "found_row", "here_row", "title_of"]

_FAINT = "$foreground 60%"


@dataclass(frozen=True, slots=True)
class Row:
    """One of the list: a model here, one of the hub, or neither (the row that asks)."""

    here: LocalModel | None = None
    found: FoundModel | None = None


def title_of(model: LocalModel) -> str:
    """A store's name is its path: the last part says enough."""
    return clean(short_name(model.name) if model.kind == "store" else model.name)


def here_row(
    model: LocalModel,
    used: float | None,
    known: Preview | str | None,
    now: float,
    *,
    current: bool,
) -> Content:
    """A model on this machine: size, format, when it was ``used``, and where it would run.

    ``known`` is its preview, or why there is none. Times in seconds since the epoch.
    """
    facts = [human_bytes(model.bytes), f"{model.kind} {model.quantization or ''}".strip()]
    facts.append(f"used {human_when(used, now)}" if used else "not used yet")
    if known is not None:
        facts.append(_where(known))
    return _row("● " if current else "  ", title_of(model), " · ".join(facts))


def found_row(found: FoundModel) -> Content:
    """A model of the hub."""
    facts = [f"{human_count(found.downloads)} downloads", *found.kinds]
    facts += ["licence to be accepted"] if found.gated else []
    facts += [found.updated] if found.updated else []
    return _row("↓ ", clean(found.name), clean(" · ".join(facts)))


def asking_row(words: str) -> Content:
    """What asks the hub for ``words``."""
    return _row("? ", f"Search the hub for “{clean(words)}”", "Asks the network")


def _where(known: Preview | str) -> str:
    if isinstance(known, str):
        return "cannot be read"
    if known.problem:
        return "does not fit"
    if known.fits:
        return "on the card" if known.place == "card" else "in RAM"
    return "streamed"


def _row(mark: str, title: str, facts: str) -> Content:
    return Content.assemble((mark, "$text-accent"), (title, "bold"), (f"\n  {facts}", _FAINT))
