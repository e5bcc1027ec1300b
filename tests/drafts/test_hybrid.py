"""A small trained model and the MTP block in its files: what drafts bring with real weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers

import localrt
from tests.conftest import needs_kernels
from tests.models.tiny import logits_of, oracle, relative_error, tokens

FOLDER = Path(__file__).parents[1] / "data/hybrid"
ROWS = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
PROMPTS = [json.loads(row)["prompt"] for row in ROWS]


@pytest.fixture(scope="module")
def model() -> Iterator[localrt.Model]:
    with localrt.load(FOLDER, device="cpu", ctx=512, draft="mtp", threads=1) as loaded:
        yield loaded


def test_logits_are_those_of_transformers() -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32")
    ids = [each % 1024 for each in tokens(60)]
    assert relative_error(logits_of(FOLDER, ids), oracle(theirs.eval(), ids)) < 1e-4


@needs_kernels
def test_drafts_are_accepted(model: localrt.Model) -> None:
    """Chains of three: plain decoding's tokens, about two of them a pass."""
    brought = []
    for prompt in PROMPTS[:4]:
        options = {"raw": True, "max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
        plain = model.generate(prompt, draft="off", **options)
        ours = model.generate(prompt, draft="mtp", tree_budget=3, tree_depth=3, **options)
        assert ours.token_ids == plain.token_ids
        brought.append(ours.metrics.accepted_per_pass or 1.0)
    assert np.mean(brought) > 1.7


@needs_kernels
@pytest.mark.parametrize("size", [{}, {"tree_budget": 12}])
def test_sampled_answers_are_the_same(model: localrt.Model, size: dict[str, int]) -> None:
    options = {"raw": True, "max_tokens": 60, "temperature": 0.8, "seed": 5}
    plain = model.generate(PROMPTS[0], draft="off", **options)
    ours = model.generate(PROMPTS[0], draft="mtp", **size, **options)
    assert ours.token_ids == plain.token_ids
    assert ours.text == plain.text


@needs_kernels
def test_it_continues_code(model: localrt.Model) -> None:
    chunk = model.generate(
        "class Reader:\n    def __init__(", raw=True, max_tokens=4, temperature=0.0
    )
    assert chunk.text.startswith("self")
