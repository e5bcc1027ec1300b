"""Recurrent layers and pictures, placed: bit for bit as in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.offload.kv.cache import KvTier
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.protocol import Batch, PictureRows, Span
from tests.offload.placed import (
    Model,
    assert_same,
    extend,
    needs_kernels,
    pack_tiny,
    passing,
    tokens,
)

pytestmark = needs_kernels

OTHERS = (pytest.param(n, marks=pytest.mark.slow) for n in ("kimi-linear", "lfm3", "qwen4-exp"))


@pytest.fixture(scope="module", params=["qwen3.5-moe", "falcon-h1", *OTHERS])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = pack_tiny(request.param, tmp_path_factory.mktemp("recurrent"))
    with closing(Model(folder)) as opened:
        yield opened


def test_kv_on_ssd(model: Model, tmp_path: Path) -> None:
    ops = NativeOps(threads=1)
    specs, _ = split_layers(model.config.memory)
    tier = KvTier(specs, ["ssd"] * len(specs), tmp_path, capacity=600, kv_format="bf16")
    ops.kv_maker = tier
    here = model.ops.kv_cache(model.config.memory, 600)
    there = ops.kv_cache(model.config.memory, 600)
    assert there.kv_layout == "", "what is on the SSD is not taken out"
    for part in (tokens(400), tokens(120, seed=2), [7]):
        want = extend(model.resident, here, part)
        np.testing.assert_array_equal(extend(model.resident, there, part), want)
    tier.close()


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


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "glm-ocr"])
def test_streamed(name: str, tmp_path: Path) -> None:
    both_ways = name == "gemma3"
    with closing(Model(pack_tiny(name, tmp_path))) as model:
        expected = seen(model.resident, both_ways=both_ways)
        streamed = passing(model.store)
        for names in (streamed, streamed[1::2]):
            with model.placed(names) as placed:
                assert_same(seen(placed, both_ways=both_ways), expected)
