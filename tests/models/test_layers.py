"""Choices of routers and rows of hashed n-grams: those of transformers' own modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import localrt
from localrt.common.errors import CheckpointError
from localrt.evaluate import evaluate
from localrt.models.layers.ngrams import NgramHash, NgramSpec, ngrams_of
from localrt.quant.ops.protocol import Batch
from tests.models.tiny import (
    load_ours,
    save_tiny,
    tokens,
)

TRAINED = Path(__file__).parents[1] / "data" / "mixture"
PERPLEXITY = 5.2752  # of transformers in float32, of the weights as they were trained
LENGTH = 40


def test_router_of_nan(tmp_path: Path) -> None:
    save_tiny("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.gate.weight"][3, 5] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    ours = load_ours(tmp_path)
    cache = ours.cache(LENGTH)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp: .*not numbers"):
        ours.forward(Batch.extend([(cache, tokens(4))]))
    assert cache.length == 0


def test_a_trained_mixture_in_four_bits() -> None:
    text = (TRAINED / "held_out.txt").read_text("utf-8")
    with localrt.load(TRAINED) as model:
        assert evaluate(model, text, ctx=256).perplexity == pytest.approx(PERPLEXITY, rel=0.01)


VOCAB, END = 61, 7


def hashed_by(table: int = 0, **changes: int) -> NgramHash:
    return NgramHash(NgramSpec(vocab=VOCAB, separator=END, rows_from=90, table=table, **changes))


def reference(hashed: NgramHash) -> torch.nn.Module:
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    spec = hashed.spec
    config = modeling.Qwen4ExpTextConfig(
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


def rows_of(hashed: NgramHash, tokens: list[int], before: list[int]) -> np.ndarray:
    ids = np.array(tokens, np.int64)
    return hashed.rows_of(ngrams_of(hashed.spec, ids, np.array(before, np.int64)))


@pytest.mark.parametrize(
    ("table", "orders", "heads", "multiple"), [(0, 3, 8, 128), (1, 2, 3, 5), (2, 5, 1, 1)]
)
def test_ngrams(table: int, orders: int, heads: int, multiple: int) -> None:
    hashed = hashed_by(table, orders=orders, heads=heads, rows_multiple=multiple)
    module = reference(hashed)
    assert module.ngram_embedding.num_embeddings == hashed.rows
    assert np.array_equal(module.layer_multipliers.numpy(), hashed.multipliers)
    tokens = np.random.default_rng(0).integers(VOCAB, size=200).tolist()
    tokens[50:53] = [END, 3, END]
    with torch.no_grad():
        expected = module(torch.tensor([tokens]), None)[0].numpy()
    assert np.array_equal(rows_of(hashed, tokens, []), expected)


def test_the_published_table_of_ngrams() -> None:
    hashed = NgramHash(NgramSpec(vocab=248_320, separator=248_046))
    assert (hashed.rows, hashed.spec.rows_per_token) == (320_001_536, 16)


def test_ngrams_in_a_tree() -> None:
    hashed = hashed_by(orders=4)
    before, tokens, parents = [5, 6], [1, 2, END, 3, 4, 8], [-1, 0, 0, 1, 2, -1]
    ids = np.array(tokens, np.int64)
    ngrams = ngrams_of(hashed.spec, ids, np.array(before, np.int64), parents)
    for row, found in enumerate(hashed.rows_of(ngrams)):
        path, node = [], row
        while node >= 0:
            path.append(tokens[node])
            node = parents[node]
        assert np.array_equal(found, rows_of(hashed, path[::-1], before)[-1])
