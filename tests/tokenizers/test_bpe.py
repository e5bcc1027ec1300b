"""Byte-level BPE and its packed tables yield what the ``tokenizers`` package yields."""

import json
import random
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from localrt.common.errors import TokenizerError
from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers import bpe, tables
from localrt.models.tokenizers.base import Detokenizer, Tokenizer, TokenMatcher
from localrt.models.tokenizers.gguf import gguf_tokenizer
from localrt.models.tokenizers.pretokenizers import KNOWN_PRE_TYPES, pre_type
from localrt.models.tokenizers.tables import MergeTable, PieceTable
from tests.tokenizers.varied_text import varied_strings

PRE_TYPES = ["qwen2", "llama-bpe", "smollm", "falcon", "deepseek-v3"]
NORMAL, CONTROL, USER = 1, 3, 4
RUNS = [*"aBé漢あῼ1² \n\r\t\xa0'-/_!👋", "e\u0301", "\u0301", "'s", "'RE", "\u200d"]
RUNS += ["\u0e31", "\u1100", "\u1161"]


def as_a_whole(metadata: dict[str, Any], pre_name: str) -> Backend:
    """The package's own tokenizer of normal pieces; it knows no added tokens."""
    pre = pre_type(pre_name)
    typed = zip(metadata["tokens"], metadata["token_type"], strict=True)
    words = {piece: t for t, (piece, kind) in enumerate(typed) if kind in (NORMAL, USER)}
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    backend = Backend(models.BPE(words, merges, ignore_merges=pre.whole_words))
    backend.pre_tokenizer = pre.pre_tokenizer()
    if (normalizer := pre.normalizer()) is not None:
        backend.normalizer = normalizer
    return backend


@cache
def trained() -> dict[str, Any]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, show_progress=False, max_token_length=10
    )
    backend.train_from_iterator(varied_strings(500, seed=3), trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens, "token_type": [NORMAL] * len(tokens), "merges": merges}


@cache
def made(pre_name: str) -> tuple[Tokenizer, Backend]:
    named = {f"tokenizer.ggml.{key}": value for key, value in trained().items()}
    named |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre_name}
    return gguf_tokenizer(named), as_a_whole(trained(), pre_name)


def agree(pair: tuple[Tokenizer, Backend], text: str) -> None:
    ours, theirs = pair
    expected = theirs.encode(text, add_special_tokens=False).ids
    ids = ours.encode(text, add_special=False)
    assert ids == expected, text


@pytest.mark.parametrize("pre_name", PRE_TYPES)
def test_agrees_on_varied_strings(pre_name: str) -> None:
    long = ("x" * 3000, "=-" * 2000, " " * 3000, "漢é" * 1000, "the" * 500 + "\n" * 700)
    for text in (*varied_strings(600, seed=4), *long):
        agree(made(pre_name), text)


@pytest.mark.parametrize("pre_name", ["llama-bpe", "deepseek-v3"])
@given(text=st.text(max_size=60))
def test_agrees_on_any_text(pre_name: str, text: str) -> None:
    agree(made(pre_name), text)


@pytest.mark.parametrize("pre_name", {pre_type(name): name for name in KNOWN_PRE_TYPES}.values())
def test_long_text_is_read_in_stretches_that_change_nothing(
    pre_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpe, "_LONG_TEXT", 1)
    for text in varied_strings(100, seed=6):
        agree(made(pre_name), text)
    rng = random.Random(7)
    for _ in range(100):  # what patterns treat apart, in long and short runs
        runs = (rng.choice(RUNS) * rng.choice([1, 1, 2, 7]) for _ in range(rng.randrange(12)))
        agree(made(pre_name), "".join(runs))


def test_merges_of_characters() -> None:
    """As Gemma 4's files list them."""
    given = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    theirs = Backend(models.BPE(unk_token="<unk>", byte_fallback=True))
    theirs.normalizer = normalizers.Replace(" ", "▁")
    theirs.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=given, show_progress=False)
    theirs.train_from_iterator(varied_strings(500, seed=3), trainer)
    model = json.loads(theirs.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    named: dict[str, Any] = {"model": "gemma4", "tokens": tokens, "scores": [0.0] * len(tokens)}
    named["token_type"] = [2] + [6] * 256 + [NORMAL] * (len(tokens) - 257)
    named["merges"] = [" ".join(pair) for pair in model["merges"]]
    ours = gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in named.items()})
    for text in varied_strings(600, seed=4):
        if "<" not in text:
            agree((ours, theirs), text)
            assert ours.decode(ours.encode(text)) == text.replace("▁", " ")


# -- added tokens: leftmost and longest ------------------------------------------------------------

NAMES = st.text("ab<|]^\\-", max_size=4)


def naive_split(tokens: dict[str, int], text: str) -> list[str | int]:
    parts: list[str | int] = []
    plain = ""
    while text:
        best = max((name for name in tokens if name and text.startswith(name)), key=len, default="")
        if best:
            parts += [plain, tokens[best]] if plain else [tokens[best]]
            plain = ""
        else:
            plain += text[0]
        text = text[len(best) or 1 :]
    return [*parts, plain] if plain else parts


@given(st.dictionaries(NAMES, st.integers(0, 99)), st.text("ab<|]^\\-", max_size=12))
@example({}, "text")
def test_matcher(tokens: dict[str, int], text: str) -> None:
    assert list(TokenMatcher(tokens).split(text)) == naive_split(tokens, text)


# -- pieces ----------------------------------------------------------------------------------------

any_text = st.text(st.characters(codec=None), max_size=4) | st.sampled_from(["", "a", "\0", "\0\0"])


def packed(texts: list[str]) -> PieceTable:
    return PieceTable(PackedStrings.of(texts))


def check_finds(table: PieceTable, among: dict[str, int], asked: list[str]) -> None:
    assert [table.find(text) for text in asked] == [among.get(text) for text in asked]
    strings = PackedStrings.of(asked)
    offsets = strings.offsets.astype(np.int64)
    data = np.frombuffer(strings.data, np.uint8)
    wanted = np.array([among.get(text, -1) for text in asked], np.int64)
    for likely in (None, wanted, wanted + 1, np.arange(len(asked)) % max(len(table), 1)):
        likely = None if likely is None or not len(table) else np.maximum(likely, 0)
        found = table.find_many(data, offsets[:-1], np.diff(offsets), likely)
        assert found.tolist() == wanted.tolist(), "whatever is likely"


@given(st.lists(any_text, max_size=30), st.lists(any_text, max_size=10), st.randoms())
@example(["a", "a"], ["a"], random.Random(0))
@example([], [""], random.Random(0))
def test_pieces(pieces: list[str], others: list[str], rng: random.Random) -> None:
    table = packed(pieces)
    members = np.array([rng.random() < 0.7 for _ in pieces], np.bool_)
    chosen = {piece: token for token, piece in enumerate(pieces) if members[token]}
    check_finds(table, {piece: token for token, piece in enumerate(pieces)}, pieces + others)
    check_finds(table.only(members), chosen, pieces + others)
    texts = [piece.encode("utf-8", "surrogatepass").decode(errors="replace") for piece in pieces]
    assert [table.text(token) for token in range(-1, len(pieces) + 1)] == ["", *texts, ""]


def test_many_long_pieces_that_begin_alike() -> None:
    rng = random.Random(3)
    pieces = ["".join(rng.choices("abĠ漢", k=rng.randint(1, 12))) for _ in range(40_000)]
    pieces += ["Ġ" * length for length in range(1, 200)] + ["=" * 200 + end for end in "abc"]
    among = {piece: token for token, piece in enumerate(pieces)}
    check_finds(packed(pieces), among, [*among, "Ġ" * 300, "=" * 200, "=" * 200 + "d"])


def test_pieces_around_eight_bytes() -> None:
    """Which are compared at a time."""
    pieces = [end * length + other for length in range(36) for end in "aĠ" for other in "ab"]
    check_finds(packed(pieces), {piece: token for token, piece in enumerate(pieces)}, pieces)


# -- merges ----------------------------------------------------------------------------------------

LETTERS = "abc漢"


def random_merges(rng: random.Random, count: int) -> tuple[list[str], MergeTable, models.BPE]:
    """Pieces and merges in which the same piece is built in several ways, and some twice."""
    pieces, pairs = list(LETTERS), []
    for _ in range(count):
        left, right = rng.choice(pieces), rng.choice(pieces)
        if len(left + right) <= 9:
            pairs.append(f"{left} {right}")
            if left + right not in pieces:
                pieces.append(left + right)
    rng.shuffle(pairs)
    vocab = {piece: token for token, piece in enumerate(pieces)}
    theirs = models.BPE(vocab, [tuple(pair.split(" ")) for pair in pairs])
    return pieces, MergeTable(packed(pieces), PackedStrings.of(pairs)), theirs


@given(st.randoms(use_true_random=False), st.integers(0, 60), st.integers(1, 5))
def test_merges(rng: random.Random, count: int, open_: int) -> None:
    """In blocks of any size."""
    pieces, ours, theirs = random_merges(rng, count)
    for size in (0, 1, 2, 5, 20, 64, 65, 100, 300):
        word = "".join(rng.choices(LETTERS, k=size))
        ids, expected = [pieces.index(char) for char in word], theirs.tokenize(word)
        assert ours.merge(ids) == [token.id for token in expected]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "_BLOCK", rng.choice([1, 2, 5, 30]))
            patch.setattr(tables, "_OPEN", open_)
            assert ours.merge(ids) == [token.id for token in expected]


@pytest.mark.parametrize("letters", ["a", LETTERS])
def test_a_long_word_takes_no_quadratic_time(letters: str) -> None:
    rng = random.Random(1)
    pieces, ours, theirs = random_merges(rng, 60)
    word = "".join(rng.choices(letters, k=100_000))
    ids = [pieces.index(char) for char in word]
    begin = time.process_time()
    merged = ours.merge(ids)
    assert time.process_time() - begin < 20  # the square of it would take minutes
    assert merged == [token.id for token in theirs.tokenize(word)]


def test_a_merge_is_split_at_its_first_space() -> None:
    words = packed(["a", " b", "b ", "a b", "ab "])
    table = MergeTable(words, PackedStrings.of(["a  b", "a b "]))
    assert [table.merge([0, 1]), table.merge([0, 2])] == [[3], [4]]


@pytest.mark.parametrize(
    ("merge", "message"),
    [
        *((text, f"merge '{text}' does not name two pieces") for text in ("", "x", "x ")),
        ("x z", "merge of 'x' and 'z' needs"),
        ("y x", "merge of 'y' and 'x' needs"),
    ],
)
def test_a_merge_that_is_none(merge: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        MergeTable(packed(["x", "y", "xy"]), PackedStrings.of(["x y", merge, "x y"]))


# -- text that arrives token by token --------------------------------------------------------------

parts = st.one_of(
    st.binary(max_size=4),
    st.text(max_size=3).map(str.encode),
    st.sampled_from([b" ", b"", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\xed\xa0\x80"]),
)


@given(st.lists(parts, max_size=20), st.booleans(), st.sets(st.integers(0, 5)))
@example([b"<s>", b" a", b" b"], True, {0})
@example([b"<s>", b" a", b" b"], False, {0})
def test_detokenizer(table: list[bytes], strip: bool, skip: set[int]) -> None:
    stream = Detokenizer(table.__getitem__, skip=skip, strip_space=strip)
    streamed = "".join(map(stream.push, range(len(table)))) + stream.flush()
    data = b"".join([table[token] for token in range(len(table)) if token not in skip])
    assert streamed == (data.removeprefix(b" ") if strip else data).decode(errors="replace")


@pytest.mark.parametrize(
    ("data", "pieces", "left"),
    [("a€".encode(), ["a", "", "", "€"], ""), (b"\xe2\x82", ["", ""], "\ufffd")],
)
def test_half_a_character_waits(data: bytes, pieces: list[Any], left: str) -> None:
    stream = Detokenizer(lambda byte: bytes([byte]))
    assert [*map(stream.push, data)] == pieces
    assert stream.flush() == left
