"""Recurrent layers placed: streamed, on a GPU, beside keys and values on the SSD."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.kv.cache import KvTier
from localrt.offload.placement import Where
from localrt.offload.shapes import shape_from_checkpoint
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.hybrid_cache import split_layers
from localrt.quant.ops.protocol import Batch
from tests.offload.gpu.placed_on_gpu import on_gpu
from tests.offload.placed import Model, cancel_after, extend, needs_kernels, pack_tiny, tokens

pytestmark = needs_kernels

NAMES = [
    "qwen3.5",
    "qwen3.5-moe",
    "nemotron-h-latent",
    "falcon-h1",
    "kimi-linear",
    "lfm3",
    "qwen4-exp",
]
COSTS = ExpertCosts(cpu=1e-5, gpu=1e-5, fetch=1e-5)


@pytest.fixture(scope="module", params=NAMES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    folder = pack_tiny(request.param, tmp_path_factory.mktemp("recurrent"))
    with closing(Model(folder)) as opened:
        yield opened


def test_cancelled_pass(model: Model) -> None:
    cache, twin = model.resident.cache(64), model.resident.cache(64)
    for part in (tokens(10), tokens(1)):
        extend(model.resident, cache, part)
        extend(model.resident, twin, part)
    for calls, count in ((2, 1), (4, 1), (3, 12)):
        with pytest.raises(CancelledError):
            model.resident.forward(
                Batch.extend([(cache, tokens(count, seed=calls))]), check=cancel_after(calls)
            )
        assert cache.length == 11
    want = extend(model.resident, twin, tokens(3, seed=1))
    np.testing.assert_array_equal(extend(model.resident, cache, tokens(3, seed=1)), want)


@pytest.mark.parametrize("model", [n for n in NAMES if n != "qwen4-exp"], indirect=True)
def test_on_gpu(model: Model) -> None:
    """With the first layer's state in RAM, the others on the GPU."""
    names = [unit.name for unit in model.store.manifest.units]
    here = model.resident.cache(64)
    gpu = [name for name in names if name.startswith(("layers.1", "layers.2"))]
    where = {name: Where.VRAM for name in gpu if "expert" not in name}
    with on_gpu(model, where, expert_costs=COSTS) as placed:
        there = placed.cache(64)
        for part in (tokens(20), [1], tokens(2, seed=3), [5]):
            want = extend(model.resident, here, part)
            np.testing.assert_array_equal(extend(placed, there, part), want)


@pytest.mark.parametrize("model", ["qwen4-exp"], indirect=True)
def test_not_on_gpu(model: Model) -> None:
    """Our kernels there lack its index and n-grams: it is planned for the CPU alone."""
    assert shape_from_checkpoint(model.store).off_gpu


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
