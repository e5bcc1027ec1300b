"""``localrt quantize`` as a user meets it: where the store lies, what is said, exit statuses."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrt.cli import main
from tests.conftest import needs_torch


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The data folder; all folders are empty, nothing is fetched or on stdin."""
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "LOCALRT_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("LOCALRT_OFFLINE", "1")
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield tmp_path / "XDG_DATA_HOME" / "localrt"


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "tiny")


def quantize(*args: str | Path) -> int:
    return main(["quantize", *map(str, args)])


def refused(capsys: pytest.CaptureFixture[str], status: int, *args: str | Path) -> str:
    assert quantize(*args) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("localrt: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_store_is_listed_runs_and_can_be_removed(
    model: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(model, "--format", "int8-g32") == 0
    out = capsys.readouterr().out
    folder = home / "stores/tiny-int8-g32"
    assert str(folder) in out
    assert "int8-g32 (rtn)" in out
    assert "8.50 bits per weight in the layers" in out

    assert main(["list", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    (store,) = [entry for entry in models if entry["kind"] == "store"]
    assert (store["name"], store["place"]) == ("tiny-int8-g32", "localrt")
    assert store["quantization"] == "int8-g32"
    assert store["bytes"] == sum(path.stat().st_size for path in folder.rglob("*"))

    asked = ("--max-tokens", "5", "--temperature", "0", "--json")
    assert main(["run", store["name"], "hello", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["completion_tokens"] > 0

    assert main(["rm", "--yes", store["name"]]) == 0
    assert not folder.exists()
    capsys.readouterr()
    assert main(["rm", "--yes", str(model)]) == 2
    assert model.exists()


@needs_torch
def test_without_a_text_it_calibrates_on_what_python_brings(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(model, "--format", "mxfp4", "--calibration-tokens", "1024") == 0
    captured = capsys.readouterr()
    assert "mxfp4 (mr-gptq)" in captured.out
    assert "calibrated on Python's language reference" in captured.err
    text = tmp_path / "own.txt"
    text.write_text("Tides rise and fall. " * 100)
    out = tmp_path / "own"
    assert quantize(model, "--format", "mxfp4", "--calibration", text, "--out", out) == 0
    assert capsys.readouterr().err == ""
    assert quantize(model, "--format", "int8-g32", "--calibration", text) == 0
    assert f"int8-g32 is rounded to nearest: {text} is not used" in capsys.readouterr().err


@needs_torch
def test_bad_usage_is_status_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        quantize(model)
    assert stopped.value.code == 2
    capsys.readouterr()
    line = refused(capsys, 2, model, "--format", "int3")
    assert "nvfp4, q2_k, q3_k, iq4_nl, f16, bf16, is 'int3'" in line
    line = refused(capsys, 2, model, "--format", "nf4", "--method", "awq")
    assert "method must be one of rtn, gptq, mr-gptq, is 'awq'" in line
    wrong = ("--format", "nf4", "--head-format", "q4_k")
    refused(capsys, 2, "org/not-here", *wrong)  # before anything is downloaded
    line = refused(capsys, 2, model, "--format", "nf4", "--calibration", tmp_path / "no.txt")
    assert "no.txt does not exist" in line
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    line = refused(capsys, 2, model, "--format", "nf4", "--calibration", short)
    assert "the calibration text has 10 tokens: at least 512 are needed" in line
    line = refused(capsys, 2, model, "--format", "nf4", "--out", model)
    assert "exists already" in line


def test_failures_are_status_1(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such file" in refused(capsys, 1, "./nothing", "--format", "nf4")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    line = refused(capsys, 1, model, "--format", "nf4", "--out", tmp_path / "s")
    assert "is truncated" in line
    assert not list(tmp_path.glob("s*"))
