"""The heads that come with localrt: whole, small, and of use."""

from __future__ import annotations

from typing import Any

import pytest

import localrt
from localrt.drafts.head import PACKAGED, find_head
from localrt.quant.ops.native.abi import find_library
from localrt.settings import Settings
from localrt.speculative.dgf_file import read_dgf
from tests.real_models import real_model

HEAD = PACKAGED / "smollm2-135m"


def test_they_are_whole_and_small() -> None:
    for folder in PACKAGED.iterdir():
        assert read_dgf(folder).nbytes < 20 << 20
        assert sum(file.stat().st_size for file in folder.iterdir()) < 20 << 20
    assert read_dgf(HEAD).config.target.hidden_size == 576


@pytest.mark.real
@pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")
def test_smollm2s_guesses_come_true() -> None:
    options: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    prompt = 'def is_palindrome(text: str) -> bool:\n    """Whether text reads the same'
    with localrt.load(real_model("smollm2"), ctx=512) as model:
        assert find_head(model._parts, Settings.from_environment()) == HEAD
        plain = model.generate(prompt, raw=True, draft="off", **options)
        ours = model.generate(prompt, raw=True, draft="head", tree_budget=8, **options)
    assert ours.token_ids == plain.token_ids
    assert ours.metrics.accepted_per_pass is not None
    assert ours.metrics.accepted_per_pass > 1.5
