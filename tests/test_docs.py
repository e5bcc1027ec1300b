"""The docs name files that are there, and the map of rooms has every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")))
# Of a code span, what is a file of ours: a path with a known ending, or a folder.
_PATH = re.compile(r"`([\w./-]+(?:\.(?:py|h|cpp|md|json|toml|tcss)|/))`")
_ROOMS = ("localrt", "models", "offload", "quant", "speculative", "tui")


def exists(name: str) -> bool:
    """From the root, or from one of the rooms, as the docs shorten them."""
    places = (
        ROOT,
        *(ROOT / room for room in _ROOMS),
        ROOT / "quant/cpu/csrc",
        ROOT / "offload/planner",
    )
    return any((place / name).exists() for place in places)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_pages_that_are_named_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    ours = [
        name for name in _PATH.findall(text) if "/" in name.rstrip("/") and name[0] not in "/~."
    ]
    assert [name for name in ours if not exists(name)] == []
    links = re.findall(r"\]\(([\w./-]+?)(?:#[\w-]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_files_that_comments_name_are_there() -> None:
    places = [ROOT / room for room in (*_ROOMS, "benchmarks", "docs", "scripts", "tests")]
    known = {path.relative_to(ROOT).as_posix() for place in places for path in place.rglob("*.*")}
    stale = [
        f"{path.relative_to(ROOT)}: {name}"
        for room in (*_ROOMS, "benchmarks")
        for path in (ROOT / room).rglob("*.py")
        for name in re.findall(r"`([\w./-]+\.(?:py|h|cpp|md))`", path.read_text(encoding="utf-8"))
        if not any(file == name or file.endswith(f"/{name}") for file in known)
    ]
    assert stale == []


def test_the_map_has_every_room() -> None:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    packages = [
        path.parent.relative_to(ROOT)
        for room in _ROOMS
        for path in (ROOT / room).rglob("__init__.py")
        if "__pycache__" not in path.parts
    ]
    rooms = {str(package) for package in packages if package.parts not in {(r,) for r in _ROOMS}}
    assert [room for room in sorted(rooms) if f"`{room}" not in text] == []
