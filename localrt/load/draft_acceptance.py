"""How often the guesses of a draft have come true, kept from one run to the next.

A plan for a target and its draft stands and falls with it, and only running both tells. A few
numbers in the cache folder, by the names of the two; losing them costs a worse first guess.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from localrt.common.files import write_text
from localrt.common.settings import Settings

_FILE = "acceptance.json"
_BLEND = 0.5  # of a new measurement
_MOST = 200  # pairs


def known_acceptance(settings: Settings, target: str, draft: str) -> float | None:
    """The share of first choices that came true; None where nothing was measured."""
    value = _read(settings).get(f"{target} | {draft}")
    return float(value) if isinstance(value, (int, float)) and 0.0 <= value <= 1.0 else None


def known_drafts(settings: Settings, target: str) -> dict[str, float]:
    """What was measured with this target, by the drafts' names."""
    drafts = [key.partition(" | ")[2] for key in _read(settings) if key.startswith(f"{target} | ")]
    found = ((draft, known_acceptance(settings, target, draft)) for draft in drafts)
    return {draft: share for draft, share in found if share is not None}


def remember_acceptance(settings: Settings, target: str, draft: str, share: float) -> None:
    """Blend a new measurement with what is known. A cache that cannot be written is left."""
    before = known_acceptance(settings, target, draft)
    value = share if before is None else before + _BLEND * (share - before)
    known = _read(settings)
    known.pop(key := f"{target} | {draft}", None)
    known[key] = round(value, 4)
    kept = dict(list(known.items())[-_MOST:])
    with suppress(OSError):
        write_text(
            settings.cache_dir / _FILE, json.dumps(kept), private=True, sync=False, folder=True
        )


def _read(settings: Settings) -> dict[str, Any]:
    try:
        values = json.loads((settings.cache_dir / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
