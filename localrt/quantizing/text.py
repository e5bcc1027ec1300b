"""Where calibration text comes from: a file, a folder of files, or what every Python brings.

Without a text of the user's own, Python's language reference serves: English prose and code that
lies in every full installation. It beats rounding by far, and a text like the model's real work
beats it. Knows neither tokens nor models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from localrt.errors import OptionError

__all__ = ["BUILTIN", "builtin_text", "read_file", "read_text"]

BUILTIN = "Python's language reference"

_MOST_BYTES = 8 << 20  # a hundred times what is used; windows come from all over it


def builtin_text() -> str | None:
    """The text that needs no file, or None where Python was installed without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return None
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """The text of a file; of a folder, that of all its UTF-8 files, in order of their paths.

    Hidden files, and what a folder holds beyond 8 MiB, are left out.

    Raises:
        OptionError: no such file, not UTF-8, or no text in the folder.
    """
    if path.is_file():
        return read_file(path)
    if not path.is_dir():
        raise OptionError(f"there is no calibration text at {path}")
    texts = list(_texts(path))
    if not texts:
        raise OptionError(f"{path} holds no UTF-8 text to calibrate with")
    return "\n\n".join(texts)


def read_file(path: Path) -> str:
    """The text of a file.

    Raises:
        OptionError: it is not UTF-8.
    """
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at {error.start}"
        ) from error


def _texts(folder: Path) -> Iterator[str]:
    room = _MOST_BYTES
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or not path.is_file():
            continue
        with path.open("rb") as stream:
            data = stream.read(room)
        try:
            # The last character may have been cut.
            text = data.decode("utf-8", "ignore" if len(data) == room else "strict")
        except UnicodeDecodeError:
            continue
        if "\0" in text or not text.strip():
            continue
        yield text
        room -= len(data)
        if room <= 0:
            return
