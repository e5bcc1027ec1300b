"""How often the guesses of a draft have come true, kept from one run to the next.

A plan for a target and its draft stands and falls with it, and only running both tells. A few
numbers in the cache folder, by the names of the two; losing them costs a worse first guess.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from localrt.files import write_text
from localrt.settings import Settings

__all__ = ["known_acceptance", "remember_acceptance"]

_BLEND = 0.5  # of a new measurement
_MOST = 200  # pairs


def known_acceptance(settings: Settings, target: str, draft: str) -> float | None:
    """The share of first choices that came true; None where nothing was measured."""
    value = _read(_path(settings)).get(_key(target, draft))
    if isinstance(value, (int, float)) and 0.0 <= value <= 1.0:
        return float(value)
    return None


def remember_acceptance(settings: Settings, target: str, draft: str, share: float) -> None:
    """Blend a new measurement with what is known. A cache that cannot be written is left."""
    path, key = _path(settings), _key(target, draft)
    before = known_acceptance(settings, target, draft)
    value = share if before is None else before + _BLEND * (share - before)
    known = _read(path)
    known.pop(key, None)
    known[key] = round(min(1.0, max(0.0, value)), 4)
    kept = dict(list(known.items())[-_MOST:])
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(kept), sync=False)


def _key(target: str, draft: str) -> str:
    return f"{target} | {draft}"


def _path(settings: Settings) -> Path:
    return settings.cache_dir / "acceptance.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
