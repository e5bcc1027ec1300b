from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import (
    CancelledError,
    CheckpointError,
    ContextOverflowError,
    LocalrtError,
    MemoryBudgetError,
    OptionError,
    UnsupportedModelError,
)
from tests.real_models import real_model

pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")

from localrt.engine.llamacpp.engine import LlamaCppEngine, LlamaCppTokenizer
from localrt.engine.llamacpp.model import LlamaCppModel

pytestmark = pytest.mark.llamacpp

PROMPT = list(range(100, 130))


def load(path: Path, **options: Any) -> LlamaCppEngine:
    return LlamaCppEngine(LlamaCppModel.load(path, **options))


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaCppEngine]:
    engine = load(real_model("smollm2"), threads=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer(engine: LlamaCppEngine) -> LlamaCppTokenizer:
    return engine.tokenizer()


@pytest.mark.real
def test_logits(engine: LlamaCppEngine) -> None:
    prompt = [*PROMPT, *range(200, 270)]
    every, single = engine.session(256), engine.session(256)
    single.extend(PROMPT)  # a context that keeps one row is exchanged for one that keeps more
    single.trim(0)
    pieces = list(every.logits(prompt, first=20))
    assert [piece.shape for piece in pieces] == [(64, 49152), (16, 49152)]
    assert list(every.tokens) == prompt
    one_by_one = np.stack([single.extend([token]).copy() for token in prompt[:24]])[20:]
    whole = np.concatenate(list(engine.session(100).logits(prompt)))[20:]
    got = probabilities(np.concatenate(pieces))
    # llama.cpp rounds differently in passes of other sizes
    assert np.abs(probabilities(one_by_one) - got[:4]).sum(1).max() < 0.2
    assert np.abs(probabilities(whole) - got).sum(1).max() < 0.2

    with pytest.raises(LocalrtError, match="a session that holds none"):
        next(every.logits(prompt))
    with pytest.raises(ContextOverflowError, match="100 tokens"):
        next(engine.session(64).logits(prompt))


def probabilities(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    found: np.ndarray = exponents / exponents.sum(1, keepdims=True)
    return found


@pytest.mark.real
def test_cancel(engine: LlamaCppEngine) -> None:
    session = engine.session(2048)
    session.extend([9] * 512)
    asked = 0

    def check_in_the_middle() -> None:
        nonlocal asked
        asked += 1
        if asked > 20:
            raise CancelledError("cancelled")

    with pytest.raises(CancelledError):
        session.extend([9] * 100, check=check_in_the_middle)
    assert len(session.tokens) == 512
    # The half-done pass left nothing behind: the session goes on as if it had not been.
    after = session.extend([3, 4]).copy()
    fresh = engine.session(2048)
    fresh.extend([9] * 512)
    np.testing.assert_allclose(fresh.extend([3, 4]), after, atol=0.5)


@pytest.mark.real
def test_bad_tokens(engine: LlamaCppEngine) -> None:
    session = engine.session(4)
    with pytest.raises(ContextOverflowError, match="5 tokens"):
        session.extend([1] * 5)
    for bad in ([], [-1], [49152]):
        with pytest.raises(OptionError):
            session.extend(bad)
    with pytest.raises(MemoryBudgetError, match="ctx="):
        engine.session(10**9)


def test_bad_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "missing.gguf")
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GGUF", b"NOPE" * 100):
        broken.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cannot load broken\.gguf") as caught:
            load(broken)
        assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.real
@pytest.mark.parametrize("text", ["Hello, world!", "日本語 and emoji 👩‍🚀🎉"])
def test_tokenizer(tokenizer: LlamaCppTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(tokens) == text
    stream = tokenizer.detokenizer()
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
