"""Trees of a draft head: the same as its guesses one after the other, whatever was known before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.drafts.head import HeadDraft
from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.session import NativeSession
from localrt.engine.options import read_options
from localrt.errors import CancelledError
from localrt.quant.ops.native.abi import find_library
from localrt.speculative.best_first import DECAY, likeliest
from localrt.speculative.tree import TokenTree
from tests.inside import core_of, engine_of
from tests.speculative.test_tree import path_to
from tests.speculative.tiny_head import write_tiny_head

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")

WARMTH = 0.2  # random logits are flat
PROMPT = [70, 101, 80, 33, 90, 120, 64, 77, 70, 101, 80]


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A target's engine and its head."""
    folder = tmp_path_factory.mktemp("head")
    config = write_tiny_head(folder, tiny_folder)
    with localrt.load(tiny_folder, draft="off") as model:
        engine = engine_of(model)
        assert isinstance(engine, NativeEngine)
        head = HeadDraft(str(folder), core_of(model).parts, engine)
        yield engine, head, config
        head.close()


def started(made: Any, tokens: list[int]) -> tuple[NativeSession, Any]:
    """A session that holds all tokens but the last, which was just chosen, and a source."""
    engine, head, _ = made
    session = engine.session(200)
    source = head.source(session, read_options({"temperature": WARMTH}))
    session.extend(tokens[:-1])
    return session, source


def one_by_one(made: Any, session: NativeSession, history: list[int], path: list[int]) -> Any:
    """Log-probabilities of what may follow ``path`` behind ``history``, without any tree."""
    engine, head, config = made
    with engine.alone():
        inner = head._head
        cache = inner.cache(300)
        end = len(history) - 1
        features = session.record_features().get(0, end)
        given, logits = inner.forward(cache, features, history[1:], np.arange(end), wanted=1)
        for step, token in enumerate(path):
            given, logits = inner.forward(
                cache, given[-1:], [token], np.array([end + step]), wanted=1
            )
    found = likeliest(logits[0], -math.inf, temperature=WARMTH, most=len(config.draft_tokens))
    return dict(zip(config.draft_tokens[found.tokens].tolist(), found.logprobs, strict=True))


def check_tree(made: Any, session: NativeSession, history: list[int], tree: TokenTree) -> None:
    for node in range(len(tree)):
        path = [int(tree.tokens[n]) for n in path_to(tree, node)]
        parent = int(tree.parents[node])
        above = 0.0 if parent < 0 else float(tree.scores[parent])
        exact = one_by_one(made, session, history, path[:-1])[path[-1]]
        assert float(tree.scores[node]) - above == pytest.approx(exact + DECAY, abs=1e-5)


def test_a_tree_has_the_scores_of_guesses_one_after_the_other(made: Any) -> None:
    session, source = started(made, PROMPT)
    tree = source.propose(PROMPT, 24, 4)
    assert len(tree) == 24
    assert tree.height > 1
    assert set(tree.tokens.tolist()) <= set(made[2].draft_tokens.tolist())
    check_tree(made, session, PROMPT, tree)


def test_what_was_guessed_before_changes_nothing(made: Any) -> None:
    session, source = started(made, PROMPT)
    history = list(PROMPT)
    source.propose(history, 12, 3)
    same = source.propose(history, 12, 3)  # asked again
    history += [90, 200]  # one token was verified, one chosen
    session.extend(history[len(session.tokens) : -1])
    after = source.propose(history, 12, 3)
    history[-1] = 77  # the generation before was cut, another goes on
    session.trim(9)
    history = [*history[:9], 66, 67, 68]
    session.extend(history[9:-1])
    cut = source.propose(history, 12, 3)
    for tokens, tree in ((PROMPT, same), ([*PROMPT, 90, 200], after), (history, cut)):
        _, fresh = started(made, list(tokens))
        expected = fresh.propose(list(tokens), 12, 3)
        assert tree.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_array_equal(tree.scores, expected.scores)


def test_a_session_that_was_not_recorded_is_guessed_from_where_it_is(made: Any) -> None:
    engine, head, _ = made
    session = engine.session(200)
    session.extend(PROMPT[:6])
    source = head.source(session, read_options({}))
    assert len(source.propose(PROMPT[:7], 4, 2)) == 0  # no hidden state to begin from
    session.extend(PROMPT[6:-1])
    assert len(source.propose(PROMPT, 4, 2)) == 4


def test_long_histories_begin_within_the_window(made: Any) -> None:
    _, source = started(made, (PROMPT * 18)[:190])
    before = source.passes
    tree = source.propose((PROMPT * 18)[:190], 4, 1)
    assert len(tree) == 4
    assert source.passes == before + 1


def test_limits_and_cancelling(made: Any) -> None:
    session, source = started(made, PROMPT)
    assert len(source.propose(PROMPT, 0, 3)) == 0
    assert source.propose(PROMPT, 30, 1).height == 1

    def cancel() -> None:
        raise CancelledError("enough")

    with pytest.raises(CancelledError):
        source.propose(PROMPT, 8, 4, check=cancel)
    tree = source.propose(PROMPT, 8, 4)
    check_tree(made, session, PROMPT, tree)


def test_generations_with_a_head_are_those_without(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("head")
    write_tiny_head(folder, tiny_folder, blocks=1)
    options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    with localrt.load(tiny_folder) as model:
        for sampling in ({"temperature": 0.0}, {"temperature": 1.1, "seed": 3}):
            plain = model.generate("ab ab ab", draft="off", **sampling, **options)
            for draft in (
                {"draft": str(folder), "tree_budget": 12, "tree_depth": 4},
                {"draft": str(folder)},
                {"draft": f"{folder}+ngram", "tree_budget": 8},
            ):
                ours = model.generate("ab ab ab", **draft, **sampling, **options)
                assert ours.token_ids == plain.token_ids
                assert ours.metrics.accepted_per_pass is not None
        chat = model.chat()
        for text in ("hi", "and then?"):
            chat.send(text, max_tokens=12, draft=str(folder), tree_budget=8, ignore_eos=True)


def test_a_head_of_another_model_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    from tests.conftest import write_tiny_model

    other = tmp_path / "other"
    other.mkdir()
    write_tiny_model(other)
    path = other / "tokenizer.json"
    path.write_text(path.read_text().replace('"Ġ":', '"Ġx":'))
    write_tiny_head(tmp_path / "head", tiny_folder)
    with (
        localrt.load(other) as model,
        pytest.raises(localrt.OptionError, match="trained on another model: llama of 2 layers"),
    ):
        model.generate("hi", draft=str(tmp_path / "head"))
