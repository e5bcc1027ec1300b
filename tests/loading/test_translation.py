"""Drafts of another vocabulary: other tokens, and the same answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import localrt
from localrt.loading.draft_translation import TranslatedSource
from localrt.models.tokenizers import Tokenizer
from localrt.speculative.source import Check, DraftSource, TreeSize
from localrt.speculative.tree import TokenTree
from tests.offload.placed import needs_kernels
from tests.real_models import real_model

TEXT = (
    "The house on the hill was old. 数学 in a café 🙂 is what we did there, and then we went home."
)


class Scripted(DraftSource):
    """Goes on with ``text``, and beside its first token drafts another."""

    name = "model"

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.ids = tokenizer.encode(text, parse_special=True)
        self.told: list[int] = []

    def propose(
        self, history: Sequence[int], size: TreeSize, *, check: Check | None = None
    ) -> TokenTree:
        self.told = list(history)
        path = self.ids[len(history) :][: min(size.budget - 1, size.depth)]
        tokens, parents = [*path, 5], [*range(-1, len(path) - 1), -1]
        return TokenTree.of(tokens, parents, [-0.1 * n for n in range(len(path))] + [-3.0], "model")


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """Byte-level BPE and SentencePiece."""
    with localrt.load("smollm2") as ours, localrt.load(real_model("gemma270m")) as theirs:
        assert ours.tokenizer is not None
        assert theirs.tokenizer is not None
        return ours.tokenizer, theirs.tokenizer


@pytest.mark.real
@pytest.mark.parametrize("turned", [False, True])
def test_tokens_of_the_target(tokenizers: tuple[Tokenizer, Tokenizer], turned: bool) -> None:
    ours, theirs = tokenizers[::-1] if turned else tokenizers
    ids = ours.encode(TEXT, add_special=False)
    draft = Scripted(theirs, TEXT)
    source = TranslatedSource(draft, ours, theirs)
    told = 0
    for length in range(1, len(ids)):
        tree = source.propose(ids[:length], TreeSize(16, 8))
        written = b"".join(map(ours.token_bytes, ids[:length]))
        try:
            written.decode()
        except UnicodeDecodeError:
            assert not len(tree.tokens), "in the middle of a character"
            continue
        if draft.told == draft.ids[: len(draft.told)]:
            told += 1
            first = ours.token_bytes(int(tree.tokens[0]))
            assert TEXT.encode()[len(written) :].startswith(first)
    assert told > 5, "texts are often cut alike"


@needs_kernels
@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_same_answers(temperature: float) -> None:
    path = real_model("qwen0.5b")
    options = {"max_tokens": 16, "temperature": temperature, "seed": 3}
    prompt = "def fibonacci(n):\n"
    with localrt.load(path, ctx=128) as model:
        plain = model.generate(prompt, raw=True, draft="off", **options)
        drafted = model.generate(prompt, raw=True, draft="smollm2", tree_budget=8, **options)
    assert drafted.token_ids == plain.token_ids
    assert (drafted.metrics.accepted_by_source or {}).get("model", 0) > 0.5
