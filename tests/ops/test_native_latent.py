"""Latent attention in the compiled kernels: against torch, and the same bits however it is run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import OptionError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.quant.choose import make_ops
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import CacheFormat
from localrt.quant.ops.protocol import Batch, Span
from localrt.quantize.quantize import Recipe, quantize_model
from tests.conftest import needs_kernels
from tests.models.tiny import load_ours, relative_error, save_tiny, tokens

pytestmark = needs_kernels

MODEL = "deepseek-v2-dense"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(MODEL)
    save_tiny(MODEL, path)
    return path


@pytest.mark.parametrize("format_", ["int4-g32m", "mxfp4"])
def test_packed(folder: Path, format_: str, tmp_path: Path) -> None:
    store = quantize_model(folder, tmp_path / "store", Recipe(format_, method="rtn")).path
    ids = tokens(40)
    expected = load_ours(store)
    ours = load_ours(store, NativeOps(threads=2))
    theirs = expected.forward(Batch.extend([(expected.cache(40), ids)]))
    cache = ours.cache(41)
    whole = ours.forward(Batch.extend([(cache, ids)]))
    assert relative_error(whole, theirs) < 0.05
    cache.trim(0)
    parts = [ours.forward(Batch.extend([(cache, ids[a:b])])) for a, b in ((0, 1), (1, 4), (4, 40))]
    assert np.array_equal(np.concatenate(parts), whole)


TREE = np.eye(5, dtype=bool)
TREE[1:, 0] = TREE[3, 2] = TREE[4, 1] = True
PATHS = ([0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4])


@pytest.mark.parametrize("held", [254, 300])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_tree(folder: Path, kv: CacheFormat, held: int) -> None:
    """On either side of a block's border."""
    prompt, nodes = tokens(held), [5, 6, 7, 8, 9]
    decoder = load_ours(folder, NativeOps(threads=2, kv_format=kv))

    def after(ids: list[int]) -> np.ndarray:
        batch = Batch.extend([(decoder.cache(400), ids)])
        return decoder.forward(batch, rows=[len(ids) - 1])[0]

    cache = decoder.cache(400)
    decoder.forward(Batch.extend([(cache, prompt)]), rows=[])
    positions = held + TREE.sum(1) - 1
    tree = decoder.forward(Batch(np.array(nodes), positions, (Span(cache, 5, TREE),)))
    for path in PATHS:
        branch = after(prompt + [nodes[i] for i in path])
        assert np.array_equal(tree[path[-1]], branch)
    cache.select(held, [0, 2, 3])
    kept = decoder.forward(Batch.extend([(cache, [11])]))[0]
    assert np.array_equal(kept, after([*prompt, 5, 7, 8, 11]))


def test_int4_is_refused(folder: Path) -> None:
    with closing(open_checkpoint(folder)) as checkpoint:
        attention = read_config(checkpoint).attention
    with pytest.raises(OptionError, match="kv_format int4 is not for latent attention") as caught:
        make_ops(attention, device="cpu", kv_format="int4")
    assert "\n" not in str(caught.value)
