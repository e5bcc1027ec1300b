"""Models by their path in the models screen: what a half-typed path may mean on this disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeGuard

__all__ = ["is_mere_folder", "is_path", "paths_of", "shown_path"]

_MOST = 50


def is_path(words: str) -> bool:
    """Whether this can only be meant as one."""
    return words.startswith(("~", ".")) or Path(words).is_absolute()


def paths_of(words: str) -> list[Path]:
    """Folders and GGUF files whose path begins so."""
    if not is_path(words):
        return []
    start = Path(os.path.expanduser(words)).absolute()  # noqa: PTH111  Path's own fails on "~nobody"
    inside = words.endswith(("/", os.sep)) or words in ("~", ".", "..")
    folder, first = (start, "") if inside else (start.parent, start.name)
    try:
        entries = sorted(each for each in folder.iterdir() if each.name.startswith(first))
        shown = [each for each in entries if first.startswith(".") or each.name[0] != "."]
        found = [each for each in shown if each.suffix.lower() == ".gguf" or each.is_dir()]
    except OSError:
        return []
    return found[:_MOST]


def is_mere_folder(item: object) -> TypeGuard[Path]:
    """Whether it is a folder with no model in it."""
    if not isinstance(item, Path) or not item.is_dir():
        return False
    return not any((item / name).is_file() for name in ("config.json", "manifest.json"))


def shown_path(path: Path) -> str:
    """Below ``~`` where it lies there."""
    home = Path.home()
    return str(Path("~") / path.relative_to(home) if path.is_relative_to(home) else path)
