"""Recording which experts a model sends its tokens to, while it answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import localrt
from benchmarks.moe.record_trace import RoutingRecorder
from benchmarks.moe.routing_trace import RoutingTrace
from localrt.errors import OptionError
from tests.inside import engine_of
from tests.models.tiny import save_tiny, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture."""
    path = tmp_path_factory.mktemp("moe")
    save_tiny("qwen3-moe", path)
    return path


def record(folder: Path, out: Path) -> RoutingTrace:
    """The routing of a prompt of 9 tokens and an answer of 5."""
    with localrt.load(folder, threads=1, draft="off") as model:
        recorder = RoutingRecorder(engine_of(model), folder)
        model.generate(token_ids=tokens(9), max_tokens=5, temperature=0, ignore_eos=True)
        recorder.trace().save(out)
    return RoutingTrace.load(out)


def test_every_token_and_layer_is_recorded(folder: Path, tmp_path: Path) -> None:
    trace = record(folder, tmp_path / "trace.npz")
    header = trace.header
    assert trace.tokens == 9 + 4  # the last token of an answer is not computed
    assert (header.layers, header.count, header.used) == (3, 8, 3)
    assert [part.stop - part.start for part in trace.passes()] == [9, 1, 1, 1, 1]
    assert (np.diff(trace.scores.astype(np.float32), axis=-1) <= 0).all()  # best first


def test_a_dense_model_has_no_routing(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with (
        localrt.load(tmp_path, threads=1, draft="off") as model,
        pytest.raises(OptionError, match="no mixture of experts"),
    ):
        RoutingRecorder(engine_of(model), tmp_path)
