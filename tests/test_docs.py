"""Files, commands, options and keys that the docs name are there; the map has every room."""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import localrt
from localrt.cli import build_parser
from localrt.common.settings import Settings
from localrt.engine.options import OPTION_NAMES
from localrt.engine.sampling import Sampling
from localrt.mcp.config import ServerConfig
from localrt.planning.measure import Hardware
from localrt.planning.recommend import what_runs
from localrt.tui.keys import KEYS
from localrt.tui.preferences import _NAMES as CONFIG_NAMES

ROOT = Path(__file__).parent.parent
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
# Of a code span, what is a file of ours: a path with a known ending, or a folder.
_PATH = re.compile(r"`([\w./-]+(?:\.(?:py|h|cpp|md|json|toml|tcss)|/))`")
_ROOMS = ("localrt", "models", "offload", "quant", "speculative", "tui")


def exists(name: str) -> bool:
    """From the root, or from one of the rooms, as the docs shorten them."""
    places = (
        ROOT,
        *(ROOT / room for room in _ROOMS),
        ROOT / "quant/cpu/csrc",
        ROOT / "localrt/planning",
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


def test_sampling_defaults_are_those_of_the_code() -> None:
    text = " ".join((ROOT / "docs/usage.md").read_text(encoding="utf-8").split())
    names = "temperature {0.temperature}, top-k {0.top_k}, top-p {0.top_p} and min-p {0.min_p}"
    assert names.format(Sampling()) in text


@pytest.mark.slow
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """As ``scripts/docs`` makes it: a link to a page or a heading that is not there fails."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("pdoc")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert {f"{page.stem}.html" for page in PAGES} - {"README.html"} < set(pages)
    for name, page in pages.items():
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?([^\" >]+)", page)
        assert [url for url in loaded if re.match("(https?:)?//", url)] == [], name
    reference = pages["localrt.html"]
    assert "A conversation" in reference  # the guide
    for name in set(localrt.__all__) - {"__version__"}:
        described = (inspect.getdoc(getattr(localrt, name)) or "").split("\n")[0]
        words = re.findall(r"[\w ]{9,}", described)
        assert f'id="{name}"' in reference
        assert words[0].strip() in reference, name
    assert {path.name for path in (tmp_path / "api/localrt").iterdir()} == {"common"}


# -- commands, options and keys --------------------------------------------------------------------

COMMANDS = next(
    dict(action.choices)
    for action in build_parser(complete=True)._actions
    if isinstance(action, argparse._SubParsersAction)
)


def marked(page: str, name: str) -> str:
    """What stands between ``<!-- name -->`` and ``<!-- end -->``."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0]


def rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split(" | ")] for row in table.splitlines()[2:]]


def named_commands(text: str) -> Iterator[list[str]]:
    """The words of each ``localrt COMMAND ...`` in a code span or an indented block."""
    spans = re.findall(r"`localrt ([^`\n]+)`", text)
    lines = re.findall(r"^ {4}localrt (.+?)(?:\s+#.*)?$", text, re.MULTILINE)
    for line in (*spans, *lines):
        if line[0].islower():
            words = shlex.split(line)
            # What comes after -- are another program's.
            yield words[: words.index("--")] if "--" in words else words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_named_have_these_options(page: Path) -> None:
    unknown = [
        (command, word)
        for command, *words in named_commands(page.read_text(encoding="utf-8"))
        for word in words
        if re.match("--?[a-z]", word)
        and word.partition("=")[0] not in COMMANDS[command]._option_string_actions
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("config", CONFIG_NAMES),
        ("mcp", [each.name for each in fields(ServerConfig) if each.name != "name"]),
        ("options", set(OPTION_NAMES) - {"logprobs"}),
        ("keys", {*(key.id for key in KEYS), "suspend"}),
    ],
)
def test_the_page_of_files_has_every_key(name: str, known: Iterable[str]) -> None:
    text = marked("files.md", name)
    cells = [row[0] for row in rows(text)] if text.startswith("|") else [text]
    assert sorted(re.findall(r"`\[?([\w-]+)[^`]*`", "\n".join(cells))) == sorted(known)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if "office" in row[0] else pytest.mark.slow, id=row[0][:16])
        for row in rows(marked("faq.md", "recommended"))
    ],
)
def test_recommended_models_are_the_first_of_plans(row: list[str]) -> None:
    pc, *models = re.findall(r"`([^`]+)`", " ".join(row))
    best = what_runs(Hardware(pc=pc), Settings.from_environment()).best
    assert {each.level for each in best if each.model.name in models} == {"good"}
    names = [each.model.name for each in best]
    code = [name for name in names if "cod" in name or "devstral" in name]
    assert models == [*[name for name in names if name not in code][:2], code[0]]
