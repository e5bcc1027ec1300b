"""Latent attention in the compiled kernels: against torch, and the same bits however it is run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import OptionError
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.models.decoder import Decoder
from localrt.models.registry import read_config
from localrt.offload.kv.cache import KvTier
from localrt.quant.choose import make_ops
from localrt.quant.cpu.kv import move_rows
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.kv_formats import CacheFormat, block_nbytes
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


_TIERS: list[KvTier] = []


@pytest.fixture(autouse=True)
def tiers_end() -> Iterator[None]:
    """Their threads would outlive the test."""
    yield
    while _TIERS:
        _TIERS.pop().close()


def native(
    path: Path,
    *,
    threads: int = 2,
    isa: str = "",
    kv: CacheFormat = "bf16",
    on_ssd: Path | None = None,
) -> Decoder:
    decoder = load_ours(path, NativeOps(threads=threads, isa=isa, kv_format=kv))
    if on_ssd is not None:
        layers = decoder.config.attention
        places: Any = ["ssd", "ram", "ssd"]
        assert isinstance(decoder.ops, NativeOps)
        _TIERS.append(KvTier(layers, places, on_ssd, capacity=800, kv_format=kv))
        decoder.ops.kv_maker = _TIERS[-1]
    return decoder


@pytest.mark.parametrize("format_", ["int4-g32m", "mxfp4"])
def test_packed(folder: Path, format_: str, tmp_path: Path) -> None:
    store = quantize_model(folder, tmp_path / "store", Recipe(format_, method="rtn")).path
    ids = tokens(40)
    expected = load_ours(store)
    ours = native(store)
    theirs = expected.forward(Batch.extend([(expected.cache(40), ids)]))
    cache = ours.cache(41)
    whole = ours.forward(Batch.extend([(cache, ids)]))
    assert relative_error(whole, theirs) < 0.05
    cache.trim(0)
    parts = [ours.forward(Batch.extend([(cache, ids[a:b])])) for a, b in ((0, 1), (1, 4), (4, 40))]
    assert np.array_equal(np.concatenate(parts), whole)


def test_rotated(folder: Path, tmp_path: Path) -> None:
    """What mr-gptq leaves to the kernels: whole projections, before and behind the heads' own."""
    recipe = Recipe("mxfp4", "mr-gptq", calibration=tokens(64 * 40), calibration_tokens=1024)
    store = quantize_model(folder, tmp_path / "store", recipe, threads=1).path
    with closing(open_checkpoint(store)) as checkpoint:
        assert isinstance(checkpoint, StoreCheckpoint)
        attention = next(u for u in checkpoint.manifest.units if u.name == "layers.1.attention")
    rotated = {t.name.split(".")[-2] for t in attention.tensors if t.hadamard}
    assert rotated == {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"}
    ids = tokens(40)
    expected, ours = load_ours(store), native(store)
    theirs = expected.forward(Batch.extend([(expected.cache(40), ids)]))
    whole = ours.forward(Batch.extend([(ours.cache(40), ids)]))
    assert relative_error(whole, theirs) < 0.05


TREE = np.eye(5, dtype=bool)
TREE[1:, 0] = TREE[3, 2] = TREE[4, 1] = True
PATHS = ([0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4])


@pytest.mark.parametrize("held", [254, 300])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_tree(folder: Path, kv: CacheFormat, held: int, tmp_path: Path) -> None:
    """On either side of a block's border, in RAM and with layers on the SSD."""
    prompt, nodes = tokens(held), [5, 6, 7, 8, 9]
    for on_ssd in (None, tmp_path):
        decoder = native(folder, kv=kv, on_ssd=on_ssd)

        def after(ids: list[int], decoder: Decoder = decoder) -> np.ndarray:
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


@given(st.data(), st.sampled_from(["latent-bf16", "latent-int8"]))
def test_move_rows(data: st.DataObject, kv: CacheFormat) -> None:
    size, width = block_nbytes(1, 48, kv), 48
    memory = np.random.default_rng(1).integers(0, 256, (2, 1, size), np.uint8)
    before = memory.copy()
    first = data.draw(st.integers(0, 300))
    rows = sorted(data.draw(st.sets(st.integers(0, 511 - first), min_size=1, max_size=9)))
    move_rows(memory, 1, width, kv, first, rows)
    number = 1 if kv == "latent-int8" else 2

    def token(blocks: np.ndarray, index: int) -> bytes:
        block = blocks[index // 256, 0]
        row = block[: 256 * width * number].reshape(256, -1)[index % 256]
        scale = block[256 * width * number :].reshape(256, -1)[index % 256]
        return bytes(row) + bytes(scale)

    for index in range(512):
        at = index - first
        source = first + rows[at] if 0 <= at < len(rows) else index
        assert token(memory, index) == token(before, source)


def test_int4_is_refused(folder: Path) -> None:
    with closing(open_checkpoint(folder)) as checkpoint:
        attention = read_config(checkpoint).attention
    with pytest.raises(OptionError, match="kv_format int4 is not for latent attention") as caught:
        make_ops(attention, device="cpu", kv_format="int4")
    assert "\n" not in str(caught.value)
