"""Rows from pictures, bit for bit the same whether weights are streamed or in memory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.quant.ops.protocol import Batch, PictureRows, Span
from tests.offload.placed import Model, assert_same, needs_kernels, pack_tiny, passing, tokens

pytestmark = needs_kernels

BEGIN, END, LENGTH = 5, 14, 24


def seen(decoder: Decoder, *, both_ways: bool) -> list[np.ndarray]:
    """Logits of a text with a picture, whose rows are given anew behind the first layer."""
    config, rows = decoder.config, END - BEGIN
    given = np.random.default_rng(1).standard_normal((rows, config.hidden_size), np.float32)
    axes = np.repeat(np.arange(LENGTH)[None], 3, 0)
    axes[1, BEGIN:END], axes[2, BEGIN:END] = BEGIN + 1, BEGIN + np.arange(rows)
    ahead = np.zeros(LENGTH, np.int32)
    ahead[BEGIN:END] = END - 1 - np.arange(BEGIN, END)
    cache = decoder.cache(LENGTH + 1)
    batch = Batch(
        np.asarray(tokens(LENGTH), np.int64),
        np.arange(LENGTH),
        (Span(cache, LENGTH, None, ahead if both_ways else None),),
        PictureRows(np.arange(BEGIN, END), given, (given[::-1].copy(),)),
        axes,
    )
    return [decoder.forward(batch), decoder.forward(Batch.extend([(cache, [7])]))]


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "gemma3", "glm-ocr", "paddleocr-vl"])
def test_streamed(name: str, tmp_path: Path) -> None:
    both_ways = name == "gemma3"
    with closing(Model(pack_tiny(name, tmp_path))) as model:
        expected = seen(model.resident, both_ways=both_ways)
        streamed = passing(model.store)
        for names in (streamed, streamed[1::2]):
            with model.placed(names) as placed:
                assert_same(seen(placed, both_ways=both_ways), expected)
