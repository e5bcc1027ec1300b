"""Training a draft head: it learns, it goes on where it was ended, and says what is wrong."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.cli import main
from localrt.drafts.head import find_head
from localrt.drafts.training import DraftTraining, TrainingReport, train_draft
from localrt.drafts.training_text import SequenceFile, beginnings, chat_frame, to_bfloat16
from localrt.errors import CancelledError, OptionError
from localrt.progress import Progress
from localrt.quant.ops.native.abi import find_library
from localrt.settings import Settings
from localrt.speculative.draft_head_file import read_head
from tests.inside import core_of

needs_kernels = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")

TEXT = "def f(x):\n    return x\n\nclass A:\n    pass\n" * 12
SMALL = DraftTraining(
    generate=1200, tokens=5_000, length=32, vocab=200, batch=4, depth=2, threads=1
)


@pytest.fixture(scope="module")
def trained(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingReport:
    """A head of ``SMALL``."""
    if find_library() is None:
        pytest.skip("the CPU kernels are not built")
    return train_draft(tiny_folder, tmp_path_factory.mktemp("trained") / "head", SMALL, text=TEXT)


def cancel_at(stage: str, done: int) -> tuple[threading.Event, Callable[[Progress], None]]:
    event = threading.Event()

    def progress(step: Progress) -> None:
        if step.stage == stage and step.done >= done:
            event.set()

    return event, progress


def test_an_interrupted_training_goes_on_to_the_same_head(
    trained: TrainingReport, tiny_folder: Path, tmp_path: Path
) -> None:
    assert not (trained.path / "work").exists()
    out = tmp_path / "cut"
    for stage, done in (("write", 600), ("train", 2500)):
        cancel, progress = cancel_at(stage, done)
        with pytest.raises(CancelledError):
            train_draft(tiny_folder, out, SMALL, text=TEXT, progress=progress, cancel=cancel)
    stages: list[tuple[str, int]] = []
    again = train_draft(
        tiny_folder,
        out,
        SMALL,
        text=TEXT,
        keep=True,
        progress=lambda p: stages.append((p.stage, p.done)),
    )
    assert all(stage != "write" for stage, _ in stages)  # nothing was written twice
    assert min(done for stage, done in stages if stage == "train") > 2500
    assert again.agreed == trained.agreed
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (trained.path / name).read_bytes()
    with pytest.raises(OptionError, match="holds a training with other options"):
        train_draft(tiny_folder, out, DraftTraining(generate=999), text=TEXT)
    with pytest.raises(OptionError, match="holds a draft head already"):
        train_draft(tiny_folder, trained.path, SMALL, text=TEXT)


def test_a_head_learns_and_its_guesses_come_true(
    trained: TrainingReport, tiny_folder: Path
) -> None:
    assert trained.nbytes < 1 << 20
    assert len(trained.agreed) == 3
    # The target is random: its next token follows from the one before, mostly.
    assert trained.agreed[0] > 0.15
    head = read_head(trained.path)
    assert head.decoder.layers == 2
    about = json.loads((trained.path / "config.json").read_text())["about"]
    assert about["tokens"] == trained.tokens
    with localrt.load(tiny_folder) as model:
        chunk = model.generate(
            "def g(",
            draft=str(trained.path),
            tree_budget=16,
            tree_depth=4,
            temperature=0.0,
            max_tokens=40,
            ignore_eos=True,
        )
    assert chunk.metrics.accepted_per_pass is not None
    assert chunk.metrics.accepted_per_pass > 1.1


@needs_kernels
def test_a_given_text_is_enough(tiny_folder: Path, tmp_path: Path) -> None:
    training = DraftTraining(generate=0, tokens=600, length=32, vocab=50, batch=2)
    report = train_draft(tiny_folder, tmp_path / "head", training, text=TEXT)
    assert report.text_tokens == len(TEXT) // 32 * 32
    with pytest.raises(OptionError, match="the text has 5 tokens: at least 64 are needed"):
        train_draft(tiny_folder, tmp_path / "other", training, text="short")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 6}, "depth must be from 1 to 5, is 6"),
        ({"generate": -1}, "generate must be from 0"),
        ({"length": 3}, "length must be from 16"),
        ({"vocab": 1}, "vocab must be from 2"),
    ],
)
def test_options_out_of_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        DraftTraining(**options)


# -- the command ---------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], status: int, *args: str | Path) -> str:
    assert main(["draft", "train", *map(str, args)]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("localrt: ")
    assert captured.err.count("\n") == 1
    return captured.err


@needs_kernels
def test_the_command_trains_and_the_head_is_found(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["draft", "train", str(tiny_folder), "--text", str(text), "--generate", "700"]
    arguments += ["--tokens", "900", "--length", "32", "--vocab", "64", "--threads", "1"]
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    folder = tmp_path / "data/localrt/heads" / tiny_folder.name
    assert record["path"] == str(folder)
    assert len(record["agreed"]) == 3
    assert sum(f.stat().st_size for f in folder.iterdir()) == record["nbytes"] < 1 << 20
    with localrt.load(tiny_folder) as model:
        found = find_head(read_head(folder).target, Settings.from_environment())
        assert found is not None
        assert found.path == folder
        plain = model.generate("ab", max_tokens=20, ignore_eos=True, seed=1, draft="off")
        chunk = model.generate("ab", max_tokens=20, ignore_eos=True, seed=1)
        assert chunk.token_ids == plain.token_ids
        asked = {"draft": "head", "tree_budget": 4}
        head = model.generate("ab", max_tokens=20, ignore_eos=True, seed=1, **asked)
        assert head.token_ids == plain.token_ids
        assert str(head.metrics.speculation).startswith("speculation: head, ")
    shutil.rmtree(folder)
    none = pytest.raises(OptionError, match="no draft head for this model: localrt draft train")
    with localrt.load(tiny_folder, ram="2GB", draft="head") as model, none:
        model.generate("ab", max_tokens=2)
    assert main([*arguments, "--out", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "mine") in out
    assert "of the tokens 1, 2, 3 ahead" in out


def test_the_command_refuses_in_one_line(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "depth must be from 1 to 5" in refused(capsys, 2, tiny_folder, "--depth", "9")
    assert "nothing to learn from" in refused(capsys, 2, tiny_folder, "--generate", "0")
    assert "no calibration text" in refused(capsys, 2, tiny_folder, "--text", tmp_path / "none")
    assert "device must be" in refused(capsys, 2, tiny_folder, "--device", "tpu")
    assert "threads must be" in refused(capsys, 2, tiny_folder, "--threads", "0")
    refused(capsys, 1, tmp_path / "no.gguf", "--offline")


# -- parts ---------------------------------------------------------------------------------------


def test_beginnings_follow_from_number_and_seed() -> None:
    parts = beginnings(range(100, 400), ((1, 2), (9, 3)), seed=4)
    kinds = set()
    for number in range(8):
        one, two = (parts(number) for _ in range(2))
        first = list(next(one))
        assert first == list(next(two))
        kinds.add(first == [1, 2])
    assert kinds == {True, False}
    chat = parts(0)
    # A user's message, from its end to the answer's beginning, another conversation.
    assert [next(chat) for _ in range(3)] == [(1, 2), (9, 3), (1, 2)]
    piece = list(next(parts(1)))
    assert piece == list(range(piece[0], piece[0] + len(piece)))
    with pytest.raises(OptionError, match="give it a --text"):
        beginnings([], None, seed=0)


@needs_kernels
def test_the_frame_of_a_real_template(tiny_folder: Path) -> None:
    with localrt.load(tiny_folder) as model:
        frame = chat_frame(core_of(model).parts)
        assert frame is not None
        before, after = (model.tokenizer.decode(part, skip_special=False) for part in frame)
        assert before == "<|im_start|>user\n"
        assert after == "<|im_end|>\n<|im_start|>assistant\n"


def test_sequences_are_kept_in_a_file(tmp_path: Path) -> None:
    def opened() -> SequenceFile:
        return SequenceFile(tmp_path / "text", 3, 4, 8)

    rows = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    opened().append([0] * 4, rows[0])
    opened().append([1] * 4, rows[1])
    with (tmp_path / "text").open("ab") as stream:
        stream.write(b"cut off")
    assert opened().written == 2
    opened().append([2] * 4, rows[2])
    tokens, halves = opened().read([2, 1])
    assert tokens[:, 0].tolist() == [2, 1]
    assert opened().tokens().shape == (3, 4)
    back = (halves.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(back[1], rows[1], rtol=2**-8)
    assert to_bfloat16(np.array([1.0], np.float32)).tolist() == [0x3F80]
