"""Models with recurrent layers from GGUF files: transformers and llama.cpp compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.gguf_hybrid import HYBRID_FILES, write_hybrid
from tests.models.test_architectures import oracle
from tests.models.test_families import llama_cpp_logits
from tests.models.test_mixtures import logits_of
from tests.models.tiny import relative_error, save_tiny, tokens

LENGTH = 40


@pytest.fixture(scope="module", params=sorted(HYBRID_FILES))
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(GGUF file, transformers' model)."""
    path = tmp_path_factory.mktemp(request.param)
    theirs = save_tiny(request.param, path)
    return write_hybrid(theirs, path / "m.gguf", request.param), theirs


def test_a_gguf_file_is_the_same_model(gguf: Any) -> None:
    path, theirs = gguf
    ids = tokens(LENGTH, seed=7)
    assert relative_error(logits_of(path, ids), oracle(theirs, ids)) < 1e-4


@pytest.mark.llamacpp
def test_llama_cpp_computes_the_same(gguf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path = gguf[0]
    ids = tokens(LENGTH, seed=8)
    assert relative_error(logits_of(path, ids), llama_cpp_logits(path, ids, monkeypatch)) < 1e-3
