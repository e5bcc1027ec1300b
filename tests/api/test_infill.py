"""Filling in the middle with a model: ``suffix``, in Python and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.cli import main
from localrt.common.errors import ContextOverflowError, OptionError
from tests.inside import core_of
from tests.real_models import real_model

MARKS = {"pre": 10, "suf": 11, "mid": 12}
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


@pytest.fixture
def filling(tiny: localrt.Model, monkeypatch: pytest.MonkeyPatch) -> localrt.Model:
    """The tiny model, with three of its tokens for marks, which never ends."""
    monkeypatch.setattr(tiny.tokenizer, "infill_ids", MARKS)
    monkeypatch.setitem(core_of(tiny).requests.__dict__, "_infill", None)
    del core_of(tiny).requests.__dict__["_infill"]
    monkeypatch.setitem(tiny.defaults, "ignore_eos", True)
    return tiny


def test_fill_in(filling: localrt.Model) -> None:
    before, behind = filling.tokenize("def f(", add_special=False), filling.tokenize("):\n")
    ids = [MARKS["pre"], *before, MARKS["suf"], *behind, MARKS["mid"]]
    expected = filling.generate(token_ids=ids, **SHORT)
    assert filling.generate("def f(", suffix="):\n", **SHORT).token_ids == expected.token_ids
    with filling.live() as live:
        assert live.generate("def f(", suffix="):\n", **SHORT).token_ids == expected.token_ids
    assert filling.generate("", suffix="", **SHORT).metrics.prompt_tokens == 3


def test_fill_in_overflow(filling: localrt.Model) -> None:
    ctx = filling.info.ctx
    with pytest.raises(ContextOverflowError):
        filling.generate("a" * ctx, suffix="b", **SHORT)
    with pytest.raises(ContextOverflowError):
        filling.generate("a", suffix="b", files=[("x", "c" * ctx)], **SHORT)
    answer = filling.generate("a" * ctx, suffix="b" * ctx, overflow="drop_oldest", **SHORT)
    assert answer.metrics.prompt_tokens == ctx - SHORT["max_tokens"]
    few = filling.generate(
        "a", suffix="b", files=[("x", "c" * ctx)], overflow="drop_oldest", **SHORT
    )
    assert few.metrics.prompt_tokens == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": [{"role": "user", "content": "a"}], "suffix": "b"}, "as a string"),
        ({"token_ids": [1], "suffix": "b"}, "as a string"),
        ({"prompt": "a", "suffix": 5}, "suffix must be a string"),
        ({"prompt": "a", "files": [("x", "y")]}, "suffix must be a string"),
        ({"prompt": "a", "suffix": "b", "files": [("x", 1)]}, "a name and a text"),
        ({"prompt": "a", "suffix": "b", "tool_choice": "required"}, "needs messages"),
    ],
)
def test_refused(filling: localrt.Model, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        filling.generate(**given)


@pytest.mark.usefixtures("nothing_on_stdin")
def test_infill_unsupported(
    tiny: localrt.Model, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError, match="no tokens to fill in the middle"):
        tiny.generate("a", suffix="b")
    assert main(["run", str(tiny_folder), "def f(", "--suffix", "):"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["run", str(tiny_folder), "a", "--suffix", "b", "--continue"]) == 2
    assert "--suffix completes a text" in capsys.readouterr().err


@pytest.mark.slow
def test_fill_in_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "def mean(values):\n    total = 0\n    for v in values:\n        {}\n    return total / n\n"
    )
    before, behind = code.split("{}")
    path = str(real_model("qwen1.5b"))
    run = ["run", path, "--raw", before, "--suffix", behind, "--temperature", "0", "--ctx", "512"]
    assert main([*run, "--max-tokens", "40"]) == 0
    assert capsys.readouterr().out == "total += v\n"
