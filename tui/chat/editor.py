"""Text edited in the person's own editor, while the app gives it the terminal.

Knows ``$VISUAL``, ``$EDITOR`` and temporary files.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from localrt.errors import LocalrtError, OptionError
from localrt.files import write_text

__all__ = ["edited", "editor_command"]

_USUAL = ("nano", "vi", "notepad")


def editor_command() -> list[str]:
    """The editor's command line.

    Raises:
        OptionError: there is none, or it cannot be found.
    """
    wanted = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if wanted:
        command = shlex.split(wanted, posix=os.name == "posix")
        if not command or shutil.which(command[0]) is None:
            raise OptionError(f"the editor {wanted!r} is not there: set VISUAL or EDITOR")
        return command
    for name in _USUAL:
        if shutil.which(name) is not None:
            return [name]
    raise OptionError("no editor was found: set VISUAL or EDITOR")


def edited(text: str) -> str:
    """The text as the editor leaves it; the terminal must be free.

    Raises:
        LocalrtError: the editor failed; the text is as it was then.
    """
    command = editor_command()
    with tempfile.TemporaryDirectory(prefix="localrt-") as folder:
        path = Path(folder) / "message.md"
        write_text(path, text, private=True, sync=False)
        try:
            status = subprocess.run([*command, str(path)], check=False).returncode
        except OSError as error:
            raise LocalrtError(f"cannot run {command[0]}: {error.strerror or error}") from error
        if status != 0:
            raise LocalrtError(f"{command[0]} ended with status {status}: the text is unchanged")
        return path.read_text(encoding="utf-8", errors="replace").rstrip("\n")
