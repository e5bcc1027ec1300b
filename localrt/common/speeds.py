"""The speed of each model's last answer, in a file, for later plans of it."""

from __future__ import annotations

from pathlib import Path

from localrt.common.files import read_cached, write_cached

_NAME = "speeds.json"


def known_speed(folder: Path, model: str) -> float | None:
    """Return the tokens per second that ``folder`` has kept of ``model``."""
    value = read_cached(folder / _NAME).get(model)
    return value if isinstance(value, float) and value > 0 else None


def keep_speed(folder: Path, model: str, tok_s: float) -> None:
    """Keep ``tok_s`` of ``model``, if ``folder`` can be written to."""
    write_cached(folder / _NAME, {**read_cached(folder / _NAME), model: tok_s})
