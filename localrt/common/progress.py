"""Progress of long work: downloads, packing, loading, prefill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

NOTE = "note"
"""The stage of a line to be said before work goes on: what is downloaded or written, and why."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of long work: ``done`` of ``total`` (None when unknown) in ``unit``.

    ``stage`` names the work (``"download"``, ``"verify"``, ``"measure"``, ``"pack"``, ``"load"``,
    ``"compile"``, ``"read"``, ``"index"``, ``"embed"``, ``"prefill"``), ``unit`` what is counted
    (``"bytes"``, ``"tokens"``), ``detail`` the file. Of a ``NOTE`` it is a line for the user.
    """

    stage: str
    done: int
    total: int | None
    unit: str
    detail: str = ""


ProgressCallback = Callable[[Progress], None]


def note_to(progress: ProgressCallback | None) -> Callable[[str], None]:
    """A function that shows the user a line through ``progress``."""

    def say(line: str) -> None:
        if progress is not None:
            progress(Progress(NOTE, 0, None, "", line))

    return say
