"""``localrt show``: of models that are here, and of short names that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrt.cli import main


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


def test_a_short_name_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    assert main(["show", "gpt-oss"]) == 0
    out = capsys.readouterr().out
    assert "20.9 B parameters" in out
    assert "`localrt pull gpt-oss:20b`" in out


def test_a_name_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpt-os"]) == 1
    assert "did you mean gpt-oss" in capsys.readouterr().err
