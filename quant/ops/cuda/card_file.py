"""What was measured of a card, kept in the cache folder: ``cards.json``, an entry for each card.

Figures belong to a key of all that they depend on; with another key they are measured again. This
module imports nothing heavy, and does not know what the figures mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrt.files import write_text

_NAME = "cards.json"


def kept_of(folder: Path, name: str) -> dict[str, Any]:
    """What is kept in ``folder`` of the card ``name``, whatever it was measured with: ``key``, and
    parts by their names. Nothing, if the file is damaged.
    """
    values = _read(folder / _NAME).get(name)
    return values if isinstance(values, dict) else {}


@dataclass(frozen=True, slots=True)
class CardFile:
    """The entry of the card ``name`` in ``folder``, as far as it was measured with ``key``."""

    folder: Path
    name: str
    key: Sequence[str]

    def read(self, part: str) -> dict[str, Any]:
        """A part; nothing if it is not there, or was measured with another key."""
        kept = kept_of(self.folder, self.name)
        values = kept.get(part) if kept.get("key") == list(self.key) else None
        return values if isinstance(values, dict) else {}

    def write(self, part: str, values: Mapping[str, Any]) -> None:
        """Replace a part. What cannot be written is measured again by the next process."""
        path = self.folder / _NAME
        cards, kept = _read(path), kept_of(self.folder, self.name)
        if kept.get("key") != list(self.key):
            kept = {"key": list(self.key)}
        cards[self.name] = {**kept, part: dict(values)}
        with suppress(OSError):
            write_text(path, json.dumps(cards, indent=1), private=True, sync=False, folder=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
