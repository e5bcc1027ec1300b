"""``localrt plan`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localrt.cli import main
from localrt.cli.chat import welcome
from localrt.common.settings import Settings
from localrt.hub.names import KNOWN_MODELS
from localrt.hub.resolving import FileChoice
from localrt.planning import plan as planning
from localrt.planning.recommend import best_here
from tests.planner.models import CONFIGS

WHAT_IF = ("--gpu-memory", "8GB", "--ram", "32GB", "--ssd", "3.5GB/s", "--link", "12GB/s")


pytestmark = pytest.mark.usefixtures("quiet_machine")


def config_folder(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder


def as_json(capsys: pytest.CaptureFixture[str], *args: str | Path) -> Any:
    assert main(["plan", *map(str, args), "--json"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    return json.loads(text)


def test_details(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_folder(tmp_path, "qwen2.5-coder-1.5b")
    options = ("plan", str(folder), "--ram", "600MB")
    assert main([*options, "--ssd", "3GB/s"]) == 0
    assert "\nA hypothetical PC (--ssd)" in capsys.readouterr().out
    assert main(list(options)) == 0
    short = capsys.readouterr().out
    assert short.startswith("Too slow for chat: ")
    assert "hypothetical" not in short  # a smaller budget is not another machine
    assert main([*options, "--details"]) == 0
    long = capsys.readouterr().out
    for title in ("Where the weights are", "RAM: ", "Prediction", "tok/s predicted"):
        assert title in long
        assert title not in short
    assert "disk 1 GB/s (measured)" in short
    assert short.count("\n") <= 25
    assert "localrt chat" not in short  # there is nothing to run but a config
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


def test_command(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ctx", "64", "--kv-format", "int8", "--ram", "1GB")
    assert main(["plan", str(tiny_folder), *options]) == 0
    text = capsys.readouterr().out
    assert f"  localrt chat {tiny_folder} --ctx 64 --kv-format int8 --ram 1GB\n" in text
    assert text.startswith("Good for chat: ")
    assert "all of it in memory" in text


@pytest.fixture
def few_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is planned for."""
    monkeypatch.setattr("localrt.planning.recommend.KNOWN_MODELS", KNOWN_MODELS[:5])


@pytest.mark.usefixtures("few_models")
def test_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--pc", "office-laptop"]) == 0
    title, _, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("What a PC like that runs well")
    assert header.startswith("MODEL ")
    assert rows[0].endswith("  good")
    first = rows[0].split()[0]
    assert f"  localrt chat {first}    downloads it, and chats" in rows
    found = as_json(capsys, "--pc", "office-laptop")
    assert found["simulated"] is True
    assert found["models"][0]["name"] == first
    verdicts = [model["verdict"] for model in found["models"]]
    assert verdicts == sorted(verdicts, key=["good", "usable", "slow"].index)


@pytest.mark.parametrize(
    ("status", "args", "words"),
    [
        (2, ("--gpu", "RTX 4060", "--gpu-memory", "80GB"), "more than"),
        (1, ("--ram", "100MB"), "--ram "),
        (2, ("--acceptance", "0.8"), "name one with --draft"),
    ],
)
def test_bad_usage(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    status: int,
    args: tuple[str, ...],
    words: str,
) -> None:
    folder = config_folder(tmp_path, "qwen2.5-coder-1.5b")
    assert main(["plan", str(folder), *args]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "HF_HOME/hub/models--org--small/snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIGS["qwen2.5-coder-1.5b"]))
    report = as_json(capsys, "org/small", *WHAT_IF)
    assert report["model"]["name"] == "org/small"
    assert set(report["hypothetical"]) >= {"--gpu-memory", "--ssd", "--link"}
    assert 0 < report["predicted_tok_s"] <= report["ceiling_tok_s"]

    # Which files the hub has, where it is asked.
    sizes = {"Q8_0": 1_900_000_000, "Q4_K_M": 1_100_000_000}
    offer = FileChoice("org/small", sizes, CONFIGS["qwen2.5-coder-1.5b"])
    monkeypatch.setattr(planning, "offer_of", lambda repo, settings: offer)
    monkeypatch.setenv("LOCALRT_OFFLINE", "0")
    report = as_json(capsys, "org/small", "--pc", "office-laptop")
    assert report["quantization"] == "Q8_0"
    assert report["model"]["weight_bytes"] == pytest.approx(sizes["Q8_0"], rel=0.01)
    faster = {change["command"]: change["what"] for change in report["changes"]}
    assert faster["localrt chat org/small:Q4_K_M"] == "Q4_K_M instead of Q8_0, 1.1 GB"
    assert as_json(capsys, "org/small", "--offline", *WHAT_IF)["quantization"] is None


@pytest.mark.usefixtures("few_models")
def test_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app's first screen names what ``localrt plan`` names, and measures nothing for it."""

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it measures")

    monkeypatch.setattr("localrt.planning.measure.machine_here", measured)
    # What is free changes from one moment to the next.
    monkeypatch.setattr("localrt.planning.recommend.ram_budget", lambda given: 16 << 30)
    best = best_here(Settings.from_environment())
    assert best is not None
    assert best.level != "slow"
    assert f" {best.model.name} (" in welcome()
    assert "F1" in welcome()
