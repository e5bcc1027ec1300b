"""How far long work is: downloads, packing, loading, reading a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Progress", "ProgressCallback"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of long work: ``done`` of ``total`` (None when unknown) in ``unit``.

    ``stage`` names the work (``"download"``, ``"verify"``, ``"measure"``, ``"load"``,
    ``"compile"``, ``"prefill"``), ``unit`` what is counted (``"bytes"``, ``"tokens"``), ``detail``
    the file.
    """

    stage: str
    done: int
    total: int | None
    unit: str
    detail: str = ""


ProgressCallback = Callable[[Progress], None]
