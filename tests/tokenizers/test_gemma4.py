"""GGUF files of Gemma 4 list merges of characters: against the tokenizers package and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers.base import Tokenizer
from localrt.models.tokenizers.gguf import gguf_tokenizer
from tests.checkpoints.make_gguf import write_gguf
from tests.real_models import real_model
from tests.tokenizers.varied_text import varied_strings

pytestmark = pytest.mark.real

_NORMAL, _USER = 1, 4


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """Gemma 3's vocabulary as Gemma 4's files have it: merges as its scores order them."""
    path = real_model("gemma270m")
    checkpoint = open_checkpoint(path)
    found = dict(checkpoint.metadata)
    checkpoint.close()
    tokens, scores = list(found["tokenizer.ggml.tokens"]), found["tokenizer.ggml.scores"]
    kinds = [  # runs of spaces are words there
        _NORMAL if kind == _USER and not text.startswith("<") else int(kind)
        for text, kind in zip(tokens, found["tokenizer.ggml.token_type"], strict=True)
    ]
    known = {text for text, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    ranked = sorted(
        (-score, at)
        for at, (text, kind, score) in enumerate(zip(tokens, kinds, scores, strict=True))
        if kind == _NORMAL and 1 < len(text) < 12
    )
    merges = [
        f"{text[:cut]} {text[cut:]}"
        for _, at in ranked[:120_000]
        for text in (tokens[at],)
        for cut in range(1, len(text))
        if " " not in text and text[:cut] in known and text[cut:] in known
    ]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": list(map(float, scores)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": int(found["tokenizer.ggml.bos_token_id"]),
        "tokenizer.ggml.eos_token_id": int(found["tokenizer.ggml.eos_token_id"]),
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture(scope="module")
def ours(metadata: dict[str, Any]) -> Tokenizer:
    return gguf_tokenizer(metadata)


def test_agrees_with_the_tokenizers_package(metadata: dict[str, Any], ours: Tokenizer) -> None:
    from tokenizers import Regex
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from tokenizers.normalizers import Replace
    from tokenizers.pre_tokenizers import Split

    vocab = {text: token for token, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    pairs = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Backend(BPE(vocab=vocab, merges=pairs, byte_fallback=True, unk_token="<unk>"))
    theirs.normalizer = Replace(" ", "▁")
    theirs.pre_tokenizer = Split(Regex("\n+"), "isolated")
    for text in varied_strings(1500):
        if "<" in text or "\n\n" in text or "\t" in text:  # added tokens; whole pieces of line ends
            continue
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == expected, text
        assert ours.decode(expected) == text.replace("▁", " ")


@pytest.mark.llamacpp
@pytest.mark.parametrize("parse_special", [True, False])
def test_agrees_with_llama_cpp(
    metadata: dict[str, Any], ours: Tokenizer, parse_special: bool, tmp_path: Path
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    (file,) = write_gguf(tmp_path / "m.gguf", "gemma4", metadata, {})
    theirs = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    for text in [*varied_strings(1500), "a\n\n\nb", "\n\n\n\n\n\n\n\n\n\n", "x \n \n\n y"]:
        if "▁" in text or "</s>" in text:  # HTML, which llama.cpp takes for the end of a text
            continue
        expected = theirs.tokenize(text.encode(), add_bos=True, special=parse_special)
        assert ours.encode(text, parse_special=parse_special) == expected, text
    theirs.close()
