"""``localrt plan``, ``show`` and ``embed`` as a user meets them."""

from __future__ import annotations

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.cli import main
from localrt.cli.chat import welcome
from localrt.common.settings import Settings
from localrt.hub.names import KNOWN_MODELS
from localrt.hub.resolving import FileChoice
from localrt.planning import plan as planning
from localrt.planning.measure import Hardware
from localrt.planning.recommend import best_here, what_runs
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
    monkeypatch.setattr("localrt.planning.measure.share_for_models", lambda: 16 << 30)
    # What is free changes from one moment to the next, and makes no difference.
    monkeypatch.setattr("localrt.planning.recommend.ram_budget", lambda given: 1 << 30)
    best = best_here(Settings.from_environment())
    assert best is not None
    assert best.level != "slow"
    assert f" {best.model.name} (" in (line := welcome())
    assert "runs on this PC" in line
    assert "F1" in line
    found = what_runs(Hardware(), Settings.from_environment(), measure=False)
    assert found.best[0] == best
    assert "16 GB of the RAM are in use by other programs now" in found.report()


# -- show and embed --------------------------------------------------------------------------------


def test_a_folder(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tiny_folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["family"].startswith("LlamaForCausalLM, ")
    assert lines["template"] == "its own"
    assert lines["where"].startswith("your files: ")
    assert main(["show", str(tiny_folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["path"] == str(tiny_folder)
    assert record["weights"] > 0


@pytest.mark.slow
def test_vision_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.models.make_gguf import write_tiny_gguf
    from tests.models.make_mmproj import write_mmproj
    from tests.models.tiny import random_model
    from tests.models.vision.test_mmproj import MODELS

    random_model(MODELS["gemma3"]()).save_pretrained(tmp_path / "folder")
    model = write_tiny_gguf(tmp_path / "folder", tmp_path / "tiny.gguf", "gemma3")
    assert main(["show", str(model)]) == 0
    assert "pictures" not in capsys.readouterr().out
    write_mmproj(tmp_path / "folder", tmp_path / "mmproj-F32.gguf")
    for path in (model, tmp_path / "folder"):
        assert main(["show", str(path)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "pictures some 16 tokens for 896 x 896 pixels" in out
    assert main(["plan", str(model), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["picture"]
    assert planned["tokens"] == 16
    assert planned["seconds"] > 0
    write_mmproj(
        tmp_path / "folder", tmp_path / "mmproj-F32.gguf", changes={"clip.projector_type": "other"}
    )
    assert main(["show", str(model)]) == 0
    assert "pictures are refused: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("llama3.2:3b", "llama3.2:3b (unsloth/Llama-3.2-3B-Instruct-GGUF)"),
        ("org/nothing:Q4_K_M", "org/nothing:Q4_K_M"),
    ],
)
def test_not_on_this_machine(
    name: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offline, nobody is sent to ``pull``, which then fails."""
    monkeypatch.setenv("LOCALRT_OFFLINE", "1")
    assert main(["show", name]) == 1
    told = "".join(capsys.readouterr())
    assert f"{shown} is not on this machine" in told
    assert "offline mode is on" in told
    assert "localrt pull" not in told


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    from tests.models.tiny_encoders import ENCODERS, save_encoder, word_pieces

    save_encoder(ENCODERS["bert"], tmp_path)
    word_pieces(tmp_path)
    return tmp_path


def test_vectors(
    encoder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with localrt.load(encoder) as model:
        wanted = model.embed(["a fox", "x"])
    assert main(["embed", str(encoder), "a fox", "x"]) == 0
    printed = capsys.readouterr().out
    found = [json.loads(line) for line in printed.splitlines()]
    assert np.allclose(found, wanted, atol=1e-6)
    pipe = TextIOWrapper(BytesIO(b"a fox\r\nx\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", pipe)
    assert main(["embed", str(encoder)]) == 0
    assert capsys.readouterr().out == printed
