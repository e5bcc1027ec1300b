"""What a native session records: hidden states, the same bits however they came to be; the RAM it
takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localrt
from localrt.engine.native import session as sessions
from localrt.engine.native.engine import NativeEngine
from localrt.quant.ops.arrays import AFTER_LAST
from localrt.speculative.tree import TokenTree
from tests.conftest import needs_kernels
from tests.inside import engine_of

TOKENS = [70, 101, 80, 33, 90, 120, 64, 77, 71, 102, 81, 99]


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[NativeEngine]:
    with localrt.load(tiny_folder, draft="off") as model:
        assert isinstance(engine_of(model), NativeEngine)
        yield engine_of(model)


def plain(engine: NativeEngine, tokens: list[int]) -> np.ndarray:
    """Computed in one go."""
    session = engine.session(64)
    features = session.record_features()
    session.extend(tokens)
    return features.get(0, len(tokens)).copy()


@needs_kernels
def test_trees_trims_and_batches(engine: NativeEngine) -> None:
    expected = plain(engine, TOKENS)
    session = engine.session(64)
    features = session.record_features()
    assert session.record_features() is features
    session.extend(TOKENS[:4])
    tree = TokenTree.of([TOKENS[5], 9, TOKENS[6], 8], [-1, -1, 0, 1], [-1.0, -2.0, -3.0, -4.0], "x")
    session.extend_tree(TOKENS[4], tree)
    assert features.length == 4
    session.keep([0, 1, 3])
    session.extend(TOKENS[7:10])
    np.testing.assert_array_equal(features.get(0, 10), expected[:10])
    session.trim(5)
    assert features.length == 5
    other = engine.session(64)
    engine.extend_batch([(other, TOKENS[:3]), (session, TOKENS[5:])], wanted=[1])
    np.testing.assert_array_equal(features.get(2, 12), expected[2:12])
    with pytest.raises(IndexError):
        features.get(0, 13)


def test_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest rows make room for the newest."""
    monkeypatch.setattr(sessions, "FEATURE_NBYTES", 100 * 4 * 8)
    features = sessions.FeatureRows((AFTER_LAST,), 0, 8)
    for number in range(150):
        features.room(2)[:] = number
        features.advance(2)
        assert features.length - features.first <= 100
    assert features.length == 300
    kept = features.get(features.first, 300)
    assert len(kept) >= 50
    np.testing.assert_array_equal(kept[:, 0], np.arange(features.first, 300) // 2)


@needs_kernels
def test_tokens_from_elsewhere(engine: NativeEngine) -> None:
    """Rows go on behind tokens that another session has computed."""
    other, session = engine.session(64), engine.session(64)
    features = session.record_features()
    session.extend(TOKENS[:3])
    other.extend(TOKENS[:8])
    assert session.copy_prefix(other, 8) == 8
    assert (features.first, features.length) == (8, 8)
    session.extend(TOKENS[8:])
    assert session.record_features() is features
    np.testing.assert_array_equal(features.get(8, 12), plain(engine, TOKENS)[8:])
