"""Perplexity and distance between models, against naive computations and llama.cpp."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localrt
from localrt.cli import main
from localrt.common.errors import OptionError
from localrt.evaluate import evaluate
from tests.conftest import needs_torch, write_tiny_model
from tests.inside import core_of

TEXT = "The quick brown fox jumps over the lazy dog, again and again; naïvely. " * 6


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localrt.Model]:
    """Another random model of the same vocabulary, and a shorter context."""
    folder = write_tiny_model(tmp_path_factory.mktemp("other"), context=96)
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    noisy = {name: w + 0.05 * torch.randn_like(w) for name, w in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    with localrt.load(folder, format="f32") as model:
        yield model


def log_probabilities(model: localrt.Model, window: list[int]) -> np.ndarray:
    """Token by token, in float64: row i is the distribution of token i + 1."""
    session = core_of(model).new_session()
    rows = []
    for token in window[:-1]:
        logits = session.extend([token]).astype(np.float64)
        logits -= logits.max()
        rows.append(logits - np.log(np.exp(logits).sum()))
    session.close()
    return np.array(rows)


def naive_windows(tokens: list[int], ctx: int, stride: int) -> list[list[int]]:
    starts = range(0, len(tokens) - ctx + 1, stride)
    return [tokens[start : start + ctx] for start in starts]


@pytest.mark.parametrize(("ctx", "stride"), [(32, 32), (17, 7)])
def test_perplexity(tiny: localrt.Model, ctx: int, stride: int) -> None:
    text = TEXT[: 3 * ctx]
    windows = naive_windows(tiny.tokenize(text), ctx, stride)
    first = max(ctx // 2, ctx - 1 - stride)
    nll, scored = [], []
    for window in windows:
        log_p = log_probabilities(tiny, window)
        for row in range(first, ctx - 1):
            nll.append(-log_p[row, window[row + 1]])
            scored.append(window[row + 1])
    found = evaluate(tiny, text, ctx=ctx, stride=stride)
    assert found.windows == len(windows)
    assert found.scored_tokens == len(nll)
    assert found.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=1e-4)
    assert found.scored_bytes == len(nll)  # a byte tokenizer
    assert found.bits_per_byte == pytest.approx(np.mean(nll) / math.log(2), rel=1e-4)
    spread = np.std(nll) / math.sqrt(len(nll) - 1)
    assert found.perplexity_error == pytest.approx(found.perplexity * spread, rel=1e-3)
    assert found.tok_s > 0


def test_against_itself(tiny: localrt.Model) -> None:
    found = evaluate(tiny, TEXT, ctx=64, against=tiny)
    assert found.against is not None
    assert found.against.kl_divergence == 0
    assert found.against.top1_agreement == 1
    assert found.against.perplexity == found.perplexity


def test_distance(tiny: localrt.Model, other: localrt.Model) -> None:
    found = evaluate(tiny, TEXT, ctx=48, limit_tokens=100, against=other).against
    assert found is not None
    kl, same = [], []
    for window in naive_windows(tiny.tokenize(TEXT)[:100], 48, 48):
        p, q = (log_probabilities(model, window)[24:] for model in (other, tiny))
        kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
        same += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
    assert found.kl_divergence == pytest.approx(np.mean(kl), rel=1e-3)
    assert found.top1_agreement == pytest.approx(np.mean(same))
    assert 0 < found.top1_agreement < 1


def test_window_sizes(tiny: localrt.Model, other: localrt.Model) -> None:
    assert evaluate(other, TEXT).ctx == 96
    assert evaluate(tiny, TEXT, against=other).ctx == 96
    assert evaluate(tiny, TEXT[:300], limit_tokens=40, ctx=20).tokens == 40


def test_bad_sizes(tiny: localrt.Model, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="5 tokens of the text are fewer than one window of 64"):
        evaluate(tiny, "hello", ctx=64)
    with pytest.raises(OptionError, match="ctx must be from 4 to the model's 512, is 513"):
        evaluate(tiny, TEXT, ctx=513)
    with pytest.raises(OptionError, match="stride must be from 1 to the window's 64, is 0"):
        evaluate(tiny, TEXT, ctx=64, stride=0)


def test_other_vocabulary(tiny: localrt.Model, tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with (
        localrt.load(folder, format="f32") as model,
        pytest.raises(OptionError, match="have different vocabularies"),
    ):
        evaluate(tiny, TEXT, ctx=64, against=model)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """``TEXT`` as a file."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return str(tmp_path / "text.txt")


@needs_torch
def test_command(tiny_folder: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(tiny_folder), "--text", file, "--ctx", "64", "--format", "f32"]
    assert main(["eval", *common, "--against", str(tiny_folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["against"]["top1_agreement"] == 1
    assert record["ctx"] == record["stride"] == 64
    assert main(["eval", *common, "--stride", "32", "--limit-tokens", "128"]) == 0
    shown = capsys.readouterr().out
    assert "3 windows of 64 tokens, one every 32" in shown
    assert "perplexity" in shown


@needs_torch
def test_against_format(tiny_folder: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = [str(tiny_folder), "--text", file, "--ctx", "64", "--format", "bf16"]
    assert main(["eval", *common, "--against-format", "f32", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    other = record["against"]
    assert (record["format"], other["format"], other["engine"]) == ("bf16", "f32", "native")
    assert 0 < other["kl_divergence"] < 0.01
    ratio = record["perplexity"] / other["perplexity"]
    assert other["perplexity_change"] == pytest.approx(ratio - 1, abs=1e-6)
    assert other["perplexity_change_error"] < record["perplexity_error"] / record["perplexity"]
