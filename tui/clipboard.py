"""Copies text with a tool of the desktop or tmux, which reports whether it worked."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

# (environment variable that must be set, or empty; command that copies its input). Pillow reads
# pictures with the same tools of Wayland and X11.
_TOOLS = (
    ("TMUX", "tmux load-buffer -w -"),
    ("WAYLAND_DISPLAY", "wl-copy"),
    ("DISPLAY", "xclip -selection clipboard"),
    ("DISPLAY", "xsel --clipboard --input"),
    ("", "pbcopy"),
    ("", "clip.exe"),
)
_SECONDS = 3.0


def copied_by_tool(text: str) -> bool:
    """Give the text to the first tool that accepts it; may take a few seconds."""
    for variable, command in _TOOLS:
        arguments = command.split()
        remote = "SSH_CONNECTION" in os.environ and variable != "TMUX"
        if remote or not os.environ.get(variable, not variable):
            continue
        # clip.exe reads UTF-16. Output must not be a pipe: xclip's child would keep it open.
        encoding = "utf-16" if command == "clip.exe" else "utf-8"
        none = subprocess.DEVNULL
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                arguments,
                input=text.encode(encoding, "replace"),
                stdout=none,
                stderr=none,
                check=True,
                timeout=_SECONDS,
            )
            return True
    return False
