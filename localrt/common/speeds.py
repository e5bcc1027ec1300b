"""The speed of each model's last answer, in a file, for later plans of it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from localrt.common.errors import StorageError
from localrt.common.files import write_text

_NAME = "speeds.json"


def known_speed(folder: Path, model: str) -> float | None:
    """Return the tokens per second that ``folder`` has kept of ``model``."""
    value = _speeds(folder).get(model)
    return value if isinstance(value, float) and value > 0 else None


def keep_speed(folder: Path, model: str, tok_s: float) -> None:
    """Keep ``tok_s`` of ``model``, if ``folder`` can be written to."""
    text = json.dumps({**_speeds(folder), model: tok_s}, indent=1)
    with suppress(StorageError):
        write_text(folder / _NAME, text, private=True, sync=False, folder=True)


def _speeds(folder: Path) -> dict[str, object]:
    try:
        values = json.loads((folder / _NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
