"""Quantizing mixtures: experts are rounded, the rest is calibrated, routers stay as they are."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.quant.methods import restore
from localrt.quantize.quantize import QuantizeReport, Recipe, quantize_model
from tests.models.tiny import save_tiny
from tests.quantize.test_quantize import (
    TEXT,
    distance,
    logits,
)

EXPERT = "model.layers.1.mlp.experts.3.{}_proj.weight"


@pytest.fixture(scope="module", params=["qwen2-moe", "granite-moe", "gpt-oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, path)
    return path


def run(source: Path, out: Path, format: str, method: str) -> QuantizeReport:
    options: dict[str, Any] = {}
    if method != "rtn":
        options = {"calibration": TEXT, "calibration_tokens": 64 * 16}
    return quantize_model(source, out, Recipe(format, method=method, **options), threads=1)


def values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return np.concatenate([restore(block) for block in checkpoint.blocks(name)])


@pytest.mark.parametrize("format", ["int8-g32", "nvfp4"])
def test_rounding(folder: Path, tmp_path: Path, format: str) -> None:
    report = run(folder, tmp_path / "store", format, "rtn")
    assert report.fallbacks == {}
    assert distance(logits(report.path), logits(folder)) < (0.05 if format == "int8-g32" else 1.0)
    with closing(open_checkpoint(report.path)) as store, closing(open_checkpoint(folder)) as source:
        router = "model.layers.1.mlp.gate.weight"
        np.testing.assert_array_equal(values(store, router), values(source, router))
        for part in ("gate", "up", "down"):
            assert store.tensors[EXPERT.format(part)].format.name == format
        blocks = [next(iter(store.blocks(EXPERT.format(part)))) for part in ("gate", "up")]
        assert blocks[0].scale == blocks[1].scale  # they share their input


HYBRIDS = ["nemotron-h-moe", "falcon-h1", "kimi-linear", "lfm3", "olmo-hybrid"]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("method", ["rtn", "mr-gptq"])
def test_recurrent_layers(name: str, method: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "model")
    report = run(tmp_path / "model", tmp_path / "store", "int8-g32", method)
    ours, theirs = logits(report.path), logits(tmp_path / "model")
    # Of most rows: where two experts are close, rounding decides between them.
    assert np.median([distance(*rows) for rows in zip(ours, theirs, strict=True)]) < 0.05


@pytest.fixture(scope="module")
def rounded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with every matrix rounded."""
    return run(folder, tmp_path_factory.mktemp("rounded") / "s", "int4-g32", "rtn").path


@pytest.fixture(scope="module")
def lost(folder: Path, rounded: Path) -> float:
    """How far rounding takes its logits."""
    return distance(logits(rounded), logits(folder))


@pytest.mark.parametrize("method", ["gptq", "mr-gptq"])
def test_calibrating_all_but_the_experts(
    folder: Path, rounded: Path, lost: float, tmp_path: Path, method: str
) -> None:
    report = run(folder, tmp_path / "store", "int4-g32", method)
    assert distance(logits(report.path), logits(folder)) < 1.2 * lost
    query = "model.layers.1.self_attn.q_proj.weight"
    shared = "model.layers.1.mlp.shared_experts.down_proj.weight"
    with closing(open_checkpoint(report.path)) as one, closing(open_checkpoint(rounded)) as two:
        for part in ("gate", "up", "down"):
            name = EXPERT.format(part)
            np.testing.assert_array_equal(values(one, name), values(two, name))
        assert not np.array_equal(values(one, query), values(two, query))
        assert (shared in one.tensors) == folder.name.startswith("qwen2-moe")
        if shared in one.tensors:  # every token sees them
            assert not np.array_equal(values(one, shared), values(two, shared))
