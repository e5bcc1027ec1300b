"""Choices of routers and rows of hashed n-grams: those of transformers' own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import localrt
from localrt.common.errors import CheckpointError
from localrt.evaluate import evaluate
from localrt.models.layers.moe import Routed
from localrt.models.layers.ngrams import NgramHash, NgramSpec, ngrams_of
from localrt.quant.ops.experts import Routing
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.models.test_model import some
from tests.models.tiny import (
    load_ours,
    oracle,
    relative_error,
    save_tiny,
    tiny_model,
    tokens,
)
from tests.models.tiny_configs import DEEPSEEK_SPARSE, MIXTURES

TRAINED = Path(__file__).parents[1] / "data" / "mixture"
PERPLEXITY = 5.2752  # of transformers in float32, of the weights as they were trained
LENGTH = 40


@some(MIXTURES | DEEPSEEK_SPARSE, ("deepseek-v3", "deepseek-v4", "gemma4-moe", "qwen3-moe"))
def test_routing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, ids = tiny_model(name), tokens(LENGTH, seed=5)
    ours, theirs = load_ours(tiny.folder, context=LENGTH), tiny.module
    found: list[Routing] = []
    monkeypatch.setattr(Routed, "read", lambda routed: found.append(routed.routing))
    expected: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def listen(module: Any, _inputs: Any, output: Any) -> None:
        first, *rest = (part.detach().float() for part in output)
        first = first.log() if type(module).__name__.startswith("Gemma4") else first
        expected.append(tuple(part.numpy() for part in (first, *rest)))

    names = ("TopKRouter", "TopkRouter", "HashRouter", "Gemma4TextRouter")
    routers = [m for m in theirs.modules() if type(m).__name__.endswith(names)]
    handles = [router.register_forward_hook(listen) for router in routers]
    ours.forward(Batch.extend([(ours.cache(LENGTH), ids)]), rows=[])
    oracle(theirs, ids)
    for handle in handles:
        handle.remove()
    assert len(found) == len(expected) == len(routers) > 0
    # Where a bias or groups count too, ranks are by other numbers than logits.
    mixtures = [spec for spec in ours.config.mixtures if spec is not None]
    by_logits = all(not spec.choice_bias and spec.router.groups == 1 for spec in mixtures)
    for routing, (logits, weights, experts) in zip(found, expected, strict=True):
        # Some of theirs give them in no order.
        got, wanted = (
            [np.take_along_axis(part, np.argsort(pair[0], axis=1), 1) for part in pair]
            for pair in ((routing.chosen, routing.weights), (experts, weights))
        )
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_allclose(got[1], wanted[1], atol=1e-5)
        assert routing.loads(logits.shape[1]).sum() == experts.size
        if not by_logits:
            continue
        ranked = np.argsort(-logits, axis=1, kind="stable")[:, : routing.experts.shape[1]]
        np.testing.assert_array_equal(routing.experts, ranked)
        shares = torch.tensor(logits).softmax(-1).numpy()
        expected_scores = np.take_along_axis(shares, ranked, 1)
        np.testing.assert_allclose(routing.scores, expected_scores, atol=1e-5)


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


def test_bf16() -> None:
    """Roughly: rounding moves some choices, not the text's sense."""
    tiny, ids = tiny_model("gpt-oss"), tokens(12)
    ours = load_ours(tiny.folder, TorchOps(compute_format="bf16"))
    logits = ours.forward(Batch.extend([(ours.cache(16), ids)]))
    assert relative_error(logits, tiny.logits(ids)) < 0.2


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


@given(
    tokens=st.lists(st.sampled_from([1, 2, END, 40]), min_size=1, max_size=20), cut=st.integers(0)
)
def test_ngrams_in_two_pieces(tokens: list[int], cut: int) -> None:
    hashed, cut = hashed_by(), cut % len(tokens)
    whole = rows_of(hashed, tokens, [])
    assert np.array_equal(whole[:cut], rows_of(hashed, tokens[:cut], []))
    assert np.array_equal(whole[cut:], rows_of(hashed, tokens[cut:], tokens[:cut]))


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


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("ngram_size must be from 2 to 16, is 1", {"orders": 1}),
        ("heads_per_ngram must be at least 1, is 0", {"heads": 0}),
        ("eos_token_id must be below 61, is 61", {"separator": VOCAB}),
    ],
)
def test_bad_ngrams(field: str, change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=field):
        NgramSpec(**{"vocab": VOCAB, "separator": END, **change})
