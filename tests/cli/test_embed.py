"""``localrt embed``, and what other commands say of a model that embeds."""

from __future__ import annotations

import json
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest

import localrt
from localrt.cli import main
from tests.models.tiny_encoders import ENCODERS, RANKERS, save_encoder, word_pieces


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
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


def test_texts_that_cannot_be_embedded(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", str(encoder), "x", ""]) == 2
    assert "text 1 (counting from 0) is empty" in capsys.readouterr().err
    folder = tmp_path / "ranker"
    save_encoder(RANKERS["bert"], folder)
    word_pieces(folder)
    assert main(["embed", str(folder), "x"]) == 2
    assert "scores pairs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status"),
    [(["run", "hello"], 2), (["chat", "-p", "hello"], 2), (["plan"], 1)],
)
def test_commands_that_need_a_model_that_writes(
    words: list[str],
    status: int,
    encoder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b""), encoding="utf-8"))
    command, *rest = words
    assert main([command, str(encoder), *rest]) == status
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "an encoder embeds or ranks texts and writes none" in captured.err
    assert captured.out == ""


def test_show(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(encoder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["family"].startswith("BertModel, ")
    assert lines["template"] == "none: the model embeds or ranks texts and writes none"
    assert lines["context"] == "90 tokens"
