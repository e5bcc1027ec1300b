"""When each model was last loaded, for whoever wants to make room: a file's time for each name.

Files are empty, so that nothing can be half-written and no two processes meet. A folder that cannot
be written keeps nothing, silently: it is a convenience.
"""

from __future__ import annotations

import os
from urllib.parse import quote, unquote

from localrt.settings import Settings

__all__ = ["forget_use", "last_used", "note_use"]


def note_use(name: str, settings: Settings) -> None:
    """A model of this name is used now."""
    folder = settings.data_dir / "used"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / quote(name, safe="")[:250]).touch()
    except OSError:
        pass


def forget_use(name: str, settings: Settings) -> None:
    """There is no such model any more."""
    try:
        (settings.data_dir / "used" / quote(name, safe="")[:250]).unlink(missing_ok=True)
    except OSError:
        pass


def last_used(settings: Settings) -> dict[str, float]:
    """Seconds since the epoch, by name."""
    try:
        with os.scandir(settings.data_dir / "used") as entries:
            return {unquote(entry.name): entry.stat().st_mtime for entry in entries}
    except OSError:
        return {}
