"""Perplexity and distance between models, against naive computations and llama.cpp."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localrt
from localrt.cli import main
from localrt.errors import OptionError, TokenizerError
from localrt.evaluate import evaluate
from tests.conftest import write_tiny_model
from tests.real_models import real_model

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
    session = model.new_session()
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


@pytest.mark.parametrize(("ctx", "stride"), [(64, 64), (64, 32), (150, 150), (33, 7)])
def test_perplexity_is_that_of_a_token_by_token_computation(
    tiny: localrt.Model, ctx: int, stride: int
) -> None:
    tokens = tiny.tokenize(TEXT)
    windows = naive_windows(tokens, ctx, stride)
    first = max(ctx // 2, ctx - 1 - stride)
    nll, scored = [], []
    for window in windows:
        log_p = log_probabilities(tiny, window)
        for row in range(first, ctx - 1):
            nll.append(-log_p[row, window[row + 1]])
            scored.append(window[row + 1])
    found = evaluate(tiny, TEXT, ctx=ctx, stride=stride)
    assert found.windows == len(windows)
    assert found.scored_tokens == len(nll)
    assert found.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=1e-4)
    assert found.scored_bytes == len(nll)  # a byte tokenizer
    assert found.bits_per_byte == pytest.approx(np.mean(nll) / math.log(2), rel=1e-4)
    spread = np.std(nll) / math.sqrt(len(nll) - 1)
    assert found.perplexity_error == pytest.approx(found.perplexity * spread, rel=1e-3)
    assert found.tok_s > 0


def test_a_model_against_itself_is_no_distance(tiny: localrt.Model) -> None:
    found = evaluate(tiny, TEXT, ctx=64, against=tiny)
    assert found.against is not None
    assert found.against.kl_divergence == 0
    assert found.against.top1_agreement == 1
    assert found.against.perplexity == found.perplexity


def test_distance_is_that_of_the_distributions(tiny: localrt.Model, other: localrt.Model) -> None:
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


def test_the_window_follows_the_smaller_context(tiny: localrt.Model, other: localrt.Model) -> None:
    assert evaluate(other, TEXT).ctx == 96
    assert evaluate(tiny, TEXT, against=other).ctx == 96
    assert evaluate(tiny, TEXT[:300], limit_tokens=40, ctx=20).tokens == 40


def test_impossible_wishes_are_refused(tiny: localrt.Model, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the text has 5 tokens, fewer than one window of 64"):
        evaluate(tiny, "hello", ctx=64)
    with pytest.raises(OptionError, match="ctx must be from 4 to the model's 512, is 513"):
        evaluate(tiny, TEXT, ctx=513)
    with pytest.raises(OptionError, match="stride must be from 1 to the window's 64, is 0"):
        evaluate(tiny, TEXT, ctx=64, stride=0)
    with pytest.raises(OptionError, match="limit_tokens must be at least 1, is 0"):
        evaluate(tiny, TEXT, limit_tokens=0)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    with localrt.load(folder, format="f32") as model, pytest.raises(TokenizerError):
        evaluate(model, TEXT, ctx=64)


def test_other_vocabularies_cannot_be_compared(tiny: localrt.Model, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with (
        localrt.load(folder, format="f32") as model,
        pytest.raises(OptionError, match="have different vocabularies"),
    ):
        evaluate(tiny, TEXT, ctx=64, against=model)


def test_pieces_of_logits_are_small_and_checked(tiny: localrt.Model) -> None:
    tokens = tiny.tokenize(TEXT)[:200]
    pieces = list(tiny.logits(tokens, first=50))
    assert [len(piece) for piece in pieces] == [64, 64, 22]
    session = tiny.new_session()
    np.testing.assert_allclose(pieces[-1][-1], session.extend(tokens), rtol=1e-3, atol=1e-3)
    session.close()
    with pytest.raises(OptionError, match="token ids must be"):
        tiny.logits([10**6])
    with pytest.raises(localrt.ContextOverflowError):
        tiny.logits([5] * 513)


def test_the_command_prints_json_and_lines(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    common = [str(tiny_folder), "--text", str(text), "--ctx", "64", "--format", "f32"]
    assert main(["eval", *common, "--against", str(tiny_folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["against"]["top1_agreement"] == 1
    assert record["ctx"] == record["stride"] == 64
    assert main(["eval", *common, "--stride", "32", "--limit-tokens", "128"]) == 0
    shown = capsys.readouterr().out
    assert "3 windows of 64 tokens, one every 32" in shown
    assert "perplexity" in shown


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"short", 2, "fewer than one window"),
        (b"\xff\xfe not text", 2, "is not UTF-8 text: byte 0xff at 0"),
        (None, 1, "No such file"),
    ],
)
def test_the_command_fails_with_one_line(
    content: bytes | None, status: int, words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    command = [sys.executable, "-m", "localrt", "eval", str(tiny_folder), "--text", str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.real
@pytest.mark.llamacpp
@pytest.mark.parametrize("name", ["smollm2", "gemma270m"])  # without and with BOS
def test_perplexity_of_a_gguf_file_is_that_of_llamacpp(name: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    path, ctx = real_model(name), 512
    text = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
    model = localrt.load(path, ctx=ctx, engine="native", threads=1)
    tokens = model.tokenize(text)[: 4 * ctx]
    assert len(tokens) == 4 * ctx
    found = evaluate(model, text, ctx=ctx, limit_tokens=4 * ctx)
    bos = model.tokenizer.bos_id if name == "gemma270m" else None
    model.close()

    # One thread each: on a busy machine two that wait for each other take minutes.
    options = {"n_threads": 1, "n_threads_batch": 1, "logits_all": True, "verbose": False}
    theirs = llama_cpp.Llama(str(path), n_ctx=ctx, n_batch=ctx, **options)
    nll = []
    for window in naive_windows(tokens, ctx, ctx):
        theirs.reset()
        theirs.eval([bos, *window[1:]] if bos is not None else window)
        logits = np.array(theirs.scores[ctx // 2 : ctx - 1], np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        nll += (-log_p[np.arange(len(log_p)), window[ctx // 2 + 1 :]]).tolist()
    theirs.close()
    assert found.scored_tokens == len(nll)
    assert found.perplexity == pytest.approx(math.exp(np.mean(nll)), rel=0.005)
