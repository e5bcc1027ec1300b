"""Tokenizers of encoders, WordPiece and Unigram, against transformers: folders and GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import load_tokenizer
from localrt.models.tokenizers.base import Tokenizer
from tests.models.tiny_encoders import (
    ENCODERS,
    byte_level,
    encoder_gguf,
    save_encoder,
    unigram,
    vocabulary_keys,
    word_pieces,
)
from tests.tokenizers.varied_text import WORDS, varied_strings

KINDS: dict[str, Callable[[Path], Any]] = {
    "word-pieces": lambda folder: word_pieces(folder, vocab_size=600),
    "cased": lambda folder: word_pieces(folder, cased=True, vocab_size=600),
    "unigram": lambda folder: unigram(folder, vocab_size=300),
    "byte-level": byte_level,
}


def tokenizer_of(kind: str, own: Any, folder: Path) -> Tokenizer:
    metadata = vocabulary_keys(own) if kind == "gguf" else {}
    checkpoint: Any = SimpleNamespace(
        kind=kind, path=folder, generation_config={}, metadata=metadata
    )
    return load_tokenizer(checkpoint)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", KINDS)
def test_ids_as_transformers(name: str, kind: str, tmp_path: Path) -> None:
    own = KINDS[name](tmp_path)
    ours = tokenizer_of(kind, own, tmp_path)
    texts = [
        text for text in varied_strings(300, seed=3) if kind == "safetensors" or text.isascii()
    ]
    for text in texts:
        assert ours.encode(text, parse_special=True) == own(text).input_ids, text
    # transformers takes an empty text for none, and reads the names of special tokens
    plain = [text for text in texts if text and not {"<", "["} & set(text)]
    for first, second in zip(plain, reversed(plain), strict=True):
        ids = ours.encode_pair(first, second)
        assert ids == own(first, second).input_ids
    ids = ours.encode_pair("a </s> [SEP]", "b")
    assert own.sep_token_id not in ids[1:-4]
    assert ours.vocab_size == len(own)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_text_of_word_pieces(kind: str, tmp_path: Path) -> None:
    """Words have spaces between them, pieces of a word none; special tokens are left out."""
    own = word_pieces(tmp_path, vocab_size=600)
    ours = tokenizer_of(kind, own, tmp_path)
    ids = ours.encode("The quick  BROWN isn't")
    assert ours.decode(ids) == "the quick brown isn ' t"
    assert ours.decode(ids, skip_special=False) == "[CLS] the quick brown isn ' t[SEP]"


def test_characters_that_a_gguf_file_normalizes(tmp_path: Path) -> None:
    """By SentencePiece's own table, which llama.cpp's converter copies."""
    sentencepiece = pytest.importorskip("sentencepiece")
    protobuf = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in WORDS if text.isascii()]),
        model_writer=model,
        vocab_size=100,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    table = protobuf.ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap
    save_encoder(ENCODERS["xlm-roberta"], tmp_path)
    own = unigram(tmp_path, characters=table)
    path = encoder_gguf(tmp_path, tmp_path / "tiny.gguf", **vocabulary_keys(own))
    with closing(open_checkpoint(path)) as checkpoint:
        ours = load_tokenizer(checkpoint)
    for text in ("ﬁ x² Ａ①", "a\tb\u3000c", *varied_strings(200, seed=4)):
        assert ours.encode(text, parse_special=True) == own(text).input_ids, text
