"""``localrt plan TARGET --draft MODEL`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localrt.cli import main
from localrt.cli import plan as plan_command
from localrt.common.settings import Settings
from localrt.load.draft_acceptance import remember_acceptance
from localrt.load.draft_choice import FamilyDraft
from tests.planner.models import CONFIGS

TARGET, DRAFT = "phi-3-mini", "qwen2.5-coder-1.5b"
CARD = ("--gpu", "virtual:2GB@12GB/s,256GB/s,20TFLOPS", "--ram", "3GB", "--ctx", "512")


pytestmark = pytest.mark.usefixtures("quiet_machine")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Configs alone."""
    for name in (TARGET, DRAFT):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIGS[name]))
    return tmp_path / TARGET, tmp_path / DRAFT


def plan(folders: tuple[Path, Path], *more: str) -> int:
    target, draft = folders
    return main(["plan", str(target), "--draft", str(draft), *CARD, *more])


def as_json(
    capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path], *more: str
) -> dict[str, Any]:
    assert plan(folders, *more, "--json") == 0
    pair: dict[str, Any] = json.loads(capsys.readouterr().out)["pair"]
    return pair


def test_a_table_of_the_ways(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folders) == 0
    text = capsys.readouterr().out
    table = text[text.index(f"With {DRAFT} as its draft") :].splitlines()
    assert table[0].endswith("70 % come true (assumed)")
    assert table[1].split() == ["tok/s", "pass", "drafting", "guesses", "tokens/pass"]
    assert len(table) == 6
    assert sum(line.endswith("(best)") for line in table) == 1
    assert table[-1].endswith(("no draft", "no draft  (best)"))


def test_as_json_with_an_acceptance(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = as_json(capsys, folders, "--acceptance", "0.9")
    assert pair["draft"] == DRAFT
    assert (pair["acceptance"], pair["acceptance_source"]) == (0.9, "given")
    ways = {each["way"]: each for each in pair["candidates"]}
    assert set(ways) == {"draft on card", "both on card", "draft on CPU", "no draft"}
    assert pair["best"] in ways
    best = ways[pair["best"]]
    assert best["tok_s"] == pytest.approx(
        best["tokens_per_pass"] / (best["verify_s"] + best["draft_s"])
    )
    assert ways["draft on card"]["draft_vram_bytes"] > 800_000_000
    assert pair["why"].count("forecast") == 1


def test_what_was_measured_is_planned_with(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    remember_acceptance(Settings.from_environment(), TARGET, DRAFT, 0.85)
    pair = as_json(capsys, folders)
    assert (pair["acceptance"], pair["acceptance_source"]) == (0.85, "measured")


def test_guesses_are_listed_only_where_they_were_measured(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = FamilyDraft("small", tiny_folder, 1)
    monkeypatch.setattr(plan_command, "find_family_draft", lambda path, settings: draft)
    assert main(["plan", str(tiny_folder), "--ctx", "64"]) == 0
    assert "guesses" not in capsys.readouterr().out
    name = tiny_folder.name
    remember_acceptance(Settings.from_environment(), name, name, 1.0)
    candidate = SimpleNamespace(tok_s=1e9, way="draft on CPU")
    pair = SimpleNamespace(best=candidate)
    monkeypatch.setattr(plan_command, "plan_pair", lambda request: pair)
    assert main(["plan", str(tiny_folder), "--ctx", "64"]) == 0
    text = capsys.readouterr().out
    assert "guesses by small: 100 % come true (measured)" in text
    assert "add --draft small\n" in text


def test_without_a_card(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = folders
    assert main(["plan", str(target), "--draft", str(draft), "--ram", "4GB", "--ctx", "512"]) == 0
    text = capsys.readouterr().out
    assert "draft and target on the CPU" in text
    assert "the card" not in text[text.index("as its draft") :]


@pytest.mark.parametrize(
    ("status", "args", "words"),
    [
        (2, ("--acceptance", "1.2"), "--acceptance must be from 0 to 1"),
        (2, ("--batch", "4"), "leave --batch out"),
    ],
)
def test_bad_usage_is_one_line(
    folders: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    status: int,
    args: tuple[str, ...],
    words: str,
) -> None:
    assert plan(folders, *args) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_an_acceptance_needs_a_draft_and_a_draft_must_be_there(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folders[0]), "--acceptance", "0.8"]) == 2
    assert "name one with --draft" in capsys.readouterr().err
    assert main(["plan", str(folders[0]), "--draft", "org/nothing", *CARD]) == 1
    error = capsys.readouterr().err
    assert "org/nothing" in error
    assert error.count("\n") == 1
