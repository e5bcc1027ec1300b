"""The quality benchmark: its texts are disjoint, its tables complete, its runs go on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import localrt
from benchmarks.quality import __main__ as quality
from benchmarks.quality import rows as quality_rows
from benchmarks.quality.__main__ import jobs
from benchmarks.quality.rows import interleaved, prose, python_source
from localrt.common.errors import OptionError

WORDS = ["stone", "river", "light", "seven", "walks", "under", "great", "paper", "answer"]


def passages(count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    return "\n\n".join(" ".join(rng.choice(WORDS, 40)) + f" {i}." for i in range(count))


def test_prose(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text(passages(40))
    corpus = prose(path)
    sides = [set(side.split("\n\n")) for side in (corpus.evaluation, corpus.calibration)]
    assert [len(side) for side in sides] == [30, 10]
    assert not sides[0] & sides[1]
    assert "passages 1-30 of 40" in corpus.source
    path.write_text("one\n\ntwo\n\nthree")
    with pytest.raises(OptionError, match="3 passages"):
        prose(path)


def test_python_source(tmp_path: Path) -> None:
    for number in range(20):
        lines = "".join(f"x_{number}_{line} = {line}\n" for line in range(1000))
        (tmp_path / f"module{number}.py").write_text(lines)
    corpus = python_source(tmp_path)
    assert corpus == python_source(tmp_path)
    lines = [set(side.splitlines()) for side in (corpus.evaluation, corpus.calibration)]
    assert min(map(len, lines)) > 1000
    assert len(lines[0] & lines[1]) <= 1  # the blank lines between pieces
    assert len(python_source().evaluation) > 100_000
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="too few Python files"):
        python_source(tmp_path / "empty")


def test_interleaved() -> None:
    parts = [list(range(100, 110)), list(range(200, 207))]
    taken = interleaved(parts, total=10, length=3)
    assert taken == [100, 101, 102, 200, 201, 202, 103, 104, 105, 203]
    with pytest.raises(OptionError, match="fewer than 3 tokens"):
        interleaved([[1, 2], [3, 4, 5]], total=6, length=3)


def test_jobs() -> None:
    names = [job.weights for job in jobs(["mxfp4", "int6-g32"], ["rtn", "gptq"])]
    assert names == ["mxfp4 rtn", "mxfp4 gptq", "int6-g32 rtn"]


def test_resume_run(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    elsewhere = SimpleNamespace(gettempdir=lambda: "/elsewhere")  # the tests' own folder is kept
    monkeypatch.setattr("localrt.hub.cache.tempfile", elsewhere)
    text = tmp_path / "prose.txt"
    text.write_text(passages(60))
    out = tmp_path / "quality.json"
    common = [
        *("--models", str(tiny_folder), "--text", str(text), "--no-python-source"),
        *("--tokens", "512", "--ctx", "128", "--calibration-tokens", "1024"),
        *("--cache", str(tmp_path / "cache"), "--json", str(out)),
    ]
    assert quality.main([*common, "--formats", "int8-g32", "--methods", "rtn"]) == 0
    first = json.loads(out.read_text("utf-8"))
    (made,) = first["rows"]
    (score,) = made["scores"]
    assert (made["weights"], score["text"]) == ("int8-g32 rtn", "prose")
    assert score["kl"] < 0.05
    assert score["top1"] > 0.8
    assert made["bits_per_weight"] == pytest.approx(8.5)
    assert first["references"][tiny_folder.name].keys() == {"prose"}
    assert str(tmp_path) not in first["command"]

    assert quality.main([*common, "--formats", "int8-g32,mxfp4", "--methods", "rtn,gptq"]) == 0
    second = json.loads(out.read_text("utf-8"))
    assert second["rows"][:1] == first["rows"]
    assert [r["weights"] for r in second["rows"][1:]] == ["mxfp4 rtn", "mxfp4 gptq"]
    shown = capsys.readouterr().out
    assert shown.count("int8-g32 rtn is done") == 1

    again = ["--formats", "int8-g32", "--methods", "rtn", "--again", "int8"]
    assert quality.main([*common, *again]) == 0
    assert capsys.readouterr().out.count(" is done") == 1
    second = json.loads(out.read_text("utf-8"))
    assert second["rows"][0]["weights"] == "int8-g32 rtn"
    assert len(second["rows"]) == 3

    assert quality.main([*common, "--formats", "mxfp4", "--tokens", "256"]) == 2
    assert "made with other tokens: choose another --json" in capsys.readouterr().err
    assert json.loads(out.read_text("utf-8")) == second
    assert [Path(name) for name in localrt.uses()] == [tiny_folder]  # none that is gone by now


def test_reference_is_cached(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text(passages(40))
    made = [
        quality_rows.make_reference(tiny_folder, prose(path), tmp_path, ctx=64, tokens=256)
        for _ in range(2)
    ]
    assert len(list(tmp_path.glob("*.npy"))) == 1
    assert made[0].perplexity == made[1].perplexity
    score = quality_rows.scores(tiny_folder, made[:1], 64)[0]
    assert score["kl"] == pytest.approx(0, abs=1e-5)
    assert score["change"] == pytest.approx(0, abs=5e-4)  # half precision on disk
