"""When each model was last loaded: an empty file for each name, whose time is that.

So no two processes meet. A folder that cannot be written keeps nothing, silently.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from localrt.files import private_folder
from localrt.settings import Settings

__all__ = ["forget_use", "last_used", "note_use"]


def note_use(name: str, settings: Settings) -> None:
    """A model of this name is used now."""
    with suppress(OSError):
        file = _use_file(name, settings)
        private_folder(file.parent)
        file.touch(mode=0o600)


def forget_use(name: str, settings: Settings) -> None:
    """There is no such model any more."""
    with suppress(OSError):
        _use_file(name, settings).unlink(missing_ok=True)


def last_used(settings: Settings) -> dict[str, float]:
    """Seconds since the epoch, by name."""
    try:
        files = (settings.data_dir / "used").iterdir()
        return {unquote(file.name): file.stat().st_mtime for file in files}
    except OSError:
        return {}


def _use_file(name: str, settings: Settings) -> Path:
    return settings.data_dir / "used" / quote(name, safe="")[:250]
