"""Rows of hashed n-grams: those that transformers computes, also in pieces and in trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.models.layers.ngrams import NgramHash, NgramSpec, ngrams_of

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
from transformers import Qwen4ExpTextConfig  # noqa: E402

VOCAB, END = 61, 7


def make(table: int = 0, **changes: int) -> NgramHash:
    return NgramHash(NgramSpec(vocab=VOCAB, separator=END, rows_from=90, table=table, **changes))


def reference(hashed: NgramHash) -> torch.nn.Module:
    spec = hashed.spec
    config = Qwen4ExpTextConfig(
        vocab_size=spec.vocab,
        eos_token_id=spec.separator,
        ngram_size=spec.orders,
        heads_per_ngram=spec.heads,
        ngram_vocab_size_base=spec.rows_from,
        make_ngram_vocab_size_divisible_by=spec.rows_multiple,
        seed=spec.seed,
    )
    module = modeling.Qwen4ExpTextNGramEmbedding(config, spec.rows_per_token, 0, spec.table)
    # A row's only value is its number.
    module.ngram_embedding.weight.data = torch.arange(hashed.rows, dtype=torch.float32)[:, None]
    return module


def rows(hashed: NgramHash, tokens: list[int], before: list[int]) -> np.ndarray:
    ids = np.array(tokens, np.int64)
    return hashed.rows_of(ngrams_of(hashed.spec, ids, np.array(before, np.int64)))


@pytest.mark.parametrize(
    ("table", "orders", "heads", "multiple"), [(0, 3, 8, 128), (1, 2, 3, 5), (2, 5, 1, 1)]
)
def test_rows(table: int, orders: int, heads: int, multiple: int) -> None:
    hashed = make(table, orders=orders, heads=heads, rows_multiple=multiple)
    module = reference(hashed)
    assert module.ngram_embedding.num_embeddings == hashed.rows
    assert np.array_equal(module.layer_multipliers.numpy(), hashed.multipliers)
    tokens = np.random.default_rng(0).integers(VOCAB, size=200).tolist()
    tokens[50:53] = [END, 3, END]
    with torch.no_grad():
        expected = module(torch.tensor([tokens]), None)[0].numpy()
    assert np.array_equal(rows(hashed, tokens, []), expected)


def test_the_published_table() -> None:
    hashed = NgramHash(NgramSpec(vocab=248_320, separator=248_046))
    assert (hashed.rows, hashed.spec.rows_per_token) == (320_001_536, 16)


@given(
    tokens=st.lists(st.sampled_from([1, 2, END, 40]), min_size=1, max_size=20), cut=st.integers(0)
)
def test_two_pieces(tokens: list[int], cut: int) -> None:
    hashed, cut = make(), cut % len(tokens)
    whole = rows(hashed, tokens, [])
    assert np.array_equal(whole[:cut], rows(hashed, tokens[:cut], []))
    assert np.array_equal(whole[cut:], rows(hashed, tokens[cut:], tokens[:cut]))


def test_tree() -> None:
    hashed = make(orders=4)
    before, tokens, parents = [5, 6], [1, 2, END, 3, 4, 8], [-1, 0, 0, 1, 2, -1]
    ids = np.array(tokens, np.int64)
    ngrams = ngrams_of(hashed.spec, ids, np.array(before, np.int64), parents)
    for row, found in enumerate(hashed.rows_of(ngrams)):
        path, node = [], row
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        assert np.array_equal(found, rows(hashed, path[::-1], before)[-1])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("ngram_size must be from 2 to 16, is 1", {"orders": 1}),
        ("heads_per_ngram must be at least 1, is 0", {"heads": 0}),
        ("eos_token_id must be below 61, is 61", {"separator": VOCAB}),
    ],
)
def test_bad_values(field: str, change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=field):
        NgramSpec(**{"vocab": VOCAB, "separator": END, **change})
