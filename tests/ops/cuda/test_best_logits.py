"""The kernel that finds the best logits of rows, against sorting all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from localrt.quant.cuda.steps import BestLogits
from localrt.quant.formats.packed import Floats
from tests.ops.cuda.target import there
from tests.ops.oracles import best_of


def logits_of(kind: str, seed: int, rows: int, vocab: int) -> Floats:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=4, size=(rows, vocab)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits / 4)  # zeros of both signs among them
    elif kind == "excluded":
        logits[rng.random(logits.shape) < 0.99] = -np.inf
    elif kind == "equal":
        logits[:] = 2.5
    elif kind == "nan":
        logits[rng.random(logits.shape) < 2 / vocab] = np.nan
    return logits


@pytest.mark.parametrize("kind", ["plain", "ties", "excluded", "equal", "nan"])
# Fewer tokens than are wanted, one block of a row, several, and more than all take at once.
@pytest.mark.parametrize(("rows", "vocab"), [(2, 40), (3, 64), (2, 4096), (2, 9001), (1, 270_000)])
def test_order(kind: str, rows: int, vocab: int) -> None:
    best = BestLogits(there(torch.zeros(rows, vocab)))
    for seed in range(2):  # what a pass leaves does not change the next one
        logits = logits_of(kind, seed, rows, vocab)
        best.find(there(torch.from_numpy(logits)))
        assert best.rows(rows).tobytes() == best_of(logits).tobytes()
