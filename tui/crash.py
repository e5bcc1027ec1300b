"""Saves the unsent message and an error report in private files when the app crashes.

A report names only code: values and error messages may contain the user's text.
"""

from __future__ import annotations

import platform
import traceback
from contextlib import suppress
from pathlib import Path

from localrt.common.errors import StorageError
from localrt.common.files import write_text
from localrt.common.settings import CRASH_REPORT
from localrt.common.version import __version__

_DRAFT = "draft.txt"


def write_report(error: BaseException, folder: Path | None) -> str:
    """Write a report of where ``error`` came from; returns the line for the user."""
    cause: BaseException | None = getattr(error, "error", error)  # a worker's error wraps another
    line = (
        f"the app ended because of an error in it ({type(cause).__name__}); localrt chat -c opens "
        "the conversation again, with the message that was being written"
    )
    text = f"localrt {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    while cause is not None:
        text += f"\n{''.join(traceback.format_tb(cause.__traceback__))}{type(cause).__name__}\n"
        cause = cause.__cause__ or cause.__context__
    path = _keep(folder, CRASH_REPORT, text)
    return line if path is None else f"{line}. To report it, send {path}"


def keep_draft(folder: Path | None, text: str) -> None:
    """Keep an unsent message for the next start."""
    if text.strip():
        _keep(folder, _DRAFT, text)


def take_draft(folder: Path | None) -> str:
    """Return the saved message and delete it; empty for none."""
    text = ""
    with suppress(OSError):
        if folder is not None:
            text = (folder / _DRAFT).read_text("utf-8", "replace")
            (folder / _DRAFT).unlink()
    return text


def _keep(folder: Path | None, name: str, text: str) -> Path | None:
    if folder is not None:
        with suppress(StorageError):
            write_text(folder / name, text, private=True, folder=True)
            return folder / name
    return None
