"""docs/models.md says of every architecture what it is compared with: here that is looked up."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from localrt.models.registry import ARCHITECTURES, ENCODERS
from tests.models.make_gguf import FILES
from tests.models.tiny import CONFIGS, MIXTURES, auto_class
from tests.models.tiny_encoders import ENCODERS as TINY
from tests.models.tiny_encoders import RANKERS

PAGE = Path(__file__).parents[2] / "docs/models.md"
_CODE = re.compile(r"`([^`]+)`")


@cache
def compared() -> tuple[set[str], set[str]]:
    """Names in ``config.json`` that tests compare with transformers, in GGUF with llama.cpp."""
    folders = set()
    for make in (CONFIGS | MIXTURES).values():
        config = make()
        folders.add(auto_class(config)._model_mapping[type(config)].__name__)
    return folders, set(FILES.values())


def rows() -> dict[str, list[set[str]]]:
    """The page's table: names in each column after the models' own, by the architecture."""
    found: dict[str, list[set[str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and (name := _CODE.fullmatch(cells[0])):
            found[name[1]] = [set(_CODE.findall(cell)) for cell in cells[2:]]
    return found


def test_every_architecture() -> None:
    assert set(rows()) == set(ARCHITECTURES.values())


@pytest.mark.parametrize("module", sorted(set(ARCHITECTURES.values())))
def test_a_row_says_what_is_tested(module: str) -> None:
    folders, files = compared()
    names = {name for name, own in ARCHITECTURES.items() if own == module}
    expected = [names & folders, names & files, names - folders - files]
    assert rows().get(module) == expected


def test_encoders() -> None:
    """A row of their table names each; ``test_encoders.py`` compares all of them."""
    made = {type(make()).__name__ for make in (*TINY.values(), *RANKERS.values())}
    found, compared = {}, set[str]()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and (name := _CODE.fullmatch(cells[0])) and "Model`" in cells[2]:
            folders, files = (set(_CODE.findall(cell)) for cell in cells[2:])
            compared |= folders
            found |= dict.fromkeys(folders | files, name[1])
    assert compared == made
    assert found == ENCODERS
