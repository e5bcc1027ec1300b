"""Rotary positions on three axes (M-RoPE): transformers' logits, and what is left as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import read_config
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.attention import Rope
from localrt.quant.ops.protocol import Batch, Span
from tests.conftest import needs_kernels
from tests.models.tiny import load_ours, relative_error, tokens
from tests.models.vision.tiny_qwen import TINY

TEXT, GRIDS = 5, [(3, 4), (2, 7)]


def places() -> npt.NDArray[np.int64]:
    """The positions (3, R) of two pictures with text around them."""
    parts, start = [], 0
    for rows, columns in GRIDS:
        parts.append(np.tile(start + np.arange(TEXT), (3, 1)))
        start += TEXT
        row, column = np.indices((rows, columns)).reshape(2, -1)
        parts.append(start + np.stack([0 * row, row, column]))
        start += max(rows, columns)
    parts.append(np.tile(start + np.arange(TEXT), (3, 1)))
    return np.concatenate(parts, 1)


AXES = places()
COUNT = AXES.shape[1]
IDS = [token % 100 for token in tokens(COUNT, seed=3)]


def run(decoder: Decoder, cuts: tuple[int, ...] = ()) -> npt.NDArray[np.float32]:
    """The logits of all tokens, in passes that end at ``cuts``; text behind has no axes."""
    cache, logits, start = decoder.cache(COUNT), [], 0
    for stop in (*cuts, COUNT):
        axes: Any = AXES[:, start:stop]
        plain = bool((axes == axes[0]).all())
        ids, span = np.array(IDS[start:stop]), Span(cache, stop - start)
        logits.append(decoder.forward(Batch(ids, axes[0], (span,), axes=None if plain else axes)))
        start = stop
    return np.concatenate(logits)


def wanted(model: Any) -> npt.NDArray[np.float32]:
    """Transformers' logits."""
    positions = torch.tensor(AXES)[:, None]
    with torch.no_grad():
        logits = model(torch.tensor([IDS]), position_ids=positions).logits[0]
    return np.asarray(logits.numpy())


def usual_error(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> float:
    """Of half of the rows: rounding may change a choice of experts, or a state, of some."""
    return float(np.median(np.abs(ours - theirs).max(1)) / np.abs(theirs).max())


@pytest.mark.parametrize("kind", TINY)
def test_logits(kind: str, tiny_vl: Callable[[str], tuple[Path, Any]]) -> None:
    folder, model = tiny_vl(kind)
    decoder, theirs = load_ours(folder, context=256), wanted(model)
    assert relative_error(run(decoder), theirs) < 1e-4
    assert relative_error(run(decoder, (9, 11, 23, 37, 38)), theirs) < 1e-4


@needs_kernels
@pytest.mark.parametrize("kind", TINY)
def test_native(kind: str, tiny_vl: Callable[[str], tuple[Path, Any]]) -> None:
    folder, model = tiny_vl(kind)
    decoder = load_ours(folder, NativeOps(threads=2), context=256)
    whole = run(decoder)
    assert usual_error(whole, wanted(model)) < 0.01
    np.testing.assert_array_equal(whole, run(decoder, (9, 11, 23, 37, 38)))


def test_saved_caches_keep_their_name() -> None:
    """It is made of the rope's text."""
    assert repr(Rope((1.0, 0.5), 2.0)) == "Rope(inv_freq=(1.0, 0.5), scale=2.0)"
    assert repr(Rope((1.0, 0.5), sections=(0, 1))) == repr(Rope((1.0, 0.5)))


def test_wrong_number_of_sections() -> None:
    with pytest.raises(ValueError, match="2 sections for 1 frequencies"):
        Rope((1.0,), sections=(0, 1))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([3, 2], "must be three integers"),
        ([3, 2, "3"], "must be three integers"),
        ([3, 2, 4], r"must add up to 8, is \[3, 2, 4\]"),
        ([9, -2, 1], "must add up to 8"),
    ],
)
def test_bad_sections(
    section: list[Any],
    message: str,
    tmp_path: Path,
    tiny_vl: Callable[[str], tuple[Path, Any]],
) -> None:
    folder = shutil.copytree(tiny_vl("qwen2_vl")[0], tmp_path / "folder")
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config["text_config"]["rope_parameters"]["mrope_section"] = section
    path.write_text(json.dumps(config))
    with (
        closing(open_checkpoint(folder)) as checkpoint,
        pytest.raises(CheckpointError, match=message),
    ):
        read_config(checkpoint)
