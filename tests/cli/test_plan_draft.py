"""``localrt plan TARGET --draft MODEL`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localrt.cli import main
from tests.planner.models import CONFIGS

TARGET, DRAFT = "phi-3-mini", "qwen2.5-coder-1.5b"
GPU = ("--gpu", "virtual:2GB@12GB/s,256GB/s,20TFLOPS", "--ram", "3GB", "--ctx", "512")


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
    return main(["plan", str(target), "--draft", str(draft), *GPU, *more])


def as_json(
    capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path], *more: str
) -> dict[str, Any]:
    assert plan(folders, *more, "--json") == 0
    pair: dict[str, Any] = json.loads(capsys.readouterr().out)["pair"]
    return pair


def test_table(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(folders) == 0
    text = capsys.readouterr().out
    table = text[text.index(f"With {DRAFT} as its draft") :].splitlines()
    assert table[0].endswith("70 % are right (assumed)")
    assert table[1].split() == ["tok/s", "pass", "drafting", "draft", "tokens", "tokens/pass"]
    assert len(table) == 5
    assert sum(line.endswith("(best)") for line in table) == 1
    assert table[-1].endswith(("no draft", "no draft  (best)"))


def test_json(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(folders, "--acceptance", "0.9", "--json") == 0
    pair: dict[str, Any] = json.loads(capsys.readouterr().out)["pair"]
    assert pair["draft"] == DRAFT
    assert (pair["acceptance"], pair["acceptance_source"]) == (0.9, "given")
    places = {each["place"]: each for each in pair["candidates"]}
    assert set(places) == {"draft on GPU", "draft on CPU", "no draft"}
    best = places[pair["best"]]
    assert best["tok_s"] == pytest.approx(
        best["tokens_per_pass"] / (best["verify_s"] + best["draft_s"])
    )
    assert places["draft on GPU"]["draft_vram_bytes"] > 800_000_000
    assert pair["why"].count("forecast") == 1


def test_without_a_gpu(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = folders
    assert main(["plan", str(target), "--draft", str(draft), "--ram", "4GB", "--ctx", "512"]) == 0
    text = capsys.readouterr().out
    assert "the draft on the CPU, the target on the CPU, too" in text
    assert "GPU" not in text[text.index("as its draft") :]


@pytest.mark.parametrize(
    ("status", "args", "words"),
    [
        (2, ("--acceptance", "1.2"), "--acceptance must be from 0 to 1"),
        (2, ("--batch", "4"), "leave --batch out"),
    ],
)
def test_bad_usage(
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


def test_unknown_draft(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folders[0]), "--acceptance", "0.8"]) == 2
    assert "name one with --draft" in capsys.readouterr().err
    assert main(["plan", str(folders[0]), "--draft", "org/nothing", *GPU]) == 1
    error = capsys.readouterr().err
    assert "org/nothing" in error
    assert error.count("\n") == 1
