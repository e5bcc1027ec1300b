"""The command: its mistakes, and a tiny mix on a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localrt.cli import main
from tests.real_models import real_model

MIX = """
seconds = 2
[[app]]
name = "chat"
class = "interactive"
kind = "chat"
model = "small"
every_s = 10
prompt_words = 8
answer_tokens = 4
turns = 1
goals = { ttft_s = 600 }
[[app]]
name = "typing"
class = "interactive"
kind = "completion"
model = "small"
every_s = 10
prompt_words = 8
answer_tokens = 4
[[app]]
name = "index"
class = "background"
kind = "embeddings"
model = "small"
every_s = 10
prompt_words = 8
texts = 2
"""


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["--mix", "stud"], 1, "no mix 'stud': give a .toml file, or student"),
        (["--mix", "student"], 1, "student: [[app]] 1: model 'small' is not in [models]"),
        (["--mix", "student", "--model", "small"], 2, "--model takes NAME=PATH"),
        (["m", "--mix", "student", "--model", "big=x"], 2, "--model big=...: student has no such"),
        (["--mix", "student", "--trace", "t"], 2, "--mix and --trace cannot be combined"),
        (["m", "--mix", "student", "--runs", "0"], 2, "--runs must be at least 1, is 0"),
        (["m", "--mix", "student", "--out", "no/such/file"], 2, "there is no such folder"),
        (["./no.gguf", "--mix", "student"], 1, "no.gguf"),
        (["--seconds", "9"], 2, "--seconds and --out need --mix"),
        (["--peer", "http://x"], 2, "without --mix, give llama-bench=PROGRAM"),
        (["--peer", "native=x"], 2, "without --mix, give llama-bench=PROGRAM"),
        (["--peer", "a=x", "--peer", "a=y"], 2, "without --mix, give llama-bench=PROGRAM"),
        (["m", "--mix", "student", "--html", "p"], 2, "--mix and --html cannot be combined"),
    ],
)
def test_mistakes(
    arguments: list[str], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == status
    printed = capsys.readouterr()
    assert line in printed.err
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


@pytest.mark.real
def test_a_mix_on_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "tiny.toml", tmp_path / "tiny.json"
    file.write_text(MIX)
    model = str(real_model("smollm2"))
    words = [model, "--mix", str(file), "--ctx", "512", "--ram", "2GB", "--out", str(out)]
    assert main(["bench", *words]) == 0
    assert "of the requests met their goals" in capsys.readouterr().out
    (server,) = json.loads(out.read_text("utf-8"))["servers"]
    assert server["server"] == "localrt"
    assert "--ctx 512" in server["settings"]["commands"][0]
    assert "/" not in server["settings"]["commands"][0]
    chat, typing, index = server["apps"]
    assert [app["failed"] for app in server["apps"]] == [0, 0, 0]
    assert (chat["requests"], chat["tokens"], chat["goals_met"]) == (1, 4, 1)
    assert typing["requests"] >= 1
    assert index["events"][0]["prompt_tokens"] > 0
    assert server["peak_bytes"]["localrt"] > 50e6
