"""DeepSeek placed: latent attention and experts that stream compute what they do in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.quant.ops.kv import CacheFormat
from tests.offload.placed import Model, extend, needs_kernels, pack_tiny, tokens

pytestmark = needs_kernels


@pytest.fixture(scope="module", params=["bf16", "int8"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    kv_format: CacheFormat = request.param
    folder = pack_tiny("deepseek-v3", tmp_path_factory.mktemp("deepseek"))
    with closing(Model(folder, kv_format=kv_format)) as opened:
        yield opened


@pytest.mark.parametrize("kinds", [("attention",), ("expert",), ("attention", "mlp")])
def test_units_that_stream_change_nothing(model: Model, kinds: tuple[str, ...]) -> None:
    names = [unit.name for unit in model.store.manifest.units]
    streamed = [name for name in names if name.split(".")[-1 - ("expert" in name)] in kinds]
    assert streamed
    here = model.resident.cache(64)
    with model.placed(streamed) as placed:
        there = placed.cache(64)
        for part in (tokens(20), *([token] for token in tokens(6, seed=3))):
            want = extend(model.resident, here, part)
            np.testing.assert_array_equal(extend(placed, there, part), want)


def test_every_tensor_is_in_its_unit(tmp_path: Path) -> None:
    with closing(Model(pack_tiny("deepseek-v3", tmp_path))) as model:
        units = {u.name: {t.name for t in u.tensors} for u in model.store.manifest.units}
    prefix = "model.layers.1."
    assert {name.removeprefix(f"{prefix}self_attn.") for name in units["layers.1.attention"]} == {
        f"{prefix}input_layernorm.weight",
        "q_a_proj.weight",
        "q_a_layernorm.weight",
        "q_b_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "kv_a_layernorm.weight",
        "k_b_proj.weight",
        "v_b_proj.weight",
        "o_proj.weight",
    }
    assert f"{prefix}mlp.gate.e_score_correction_bias" in units["layers.1.mlp"]
    assert f"{prefix}mlp.shared_experts.down_proj.weight" in units["layers.1.mlp"]
    assert len([name for name in units if name.startswith("layers.1.expert.")]) == 8
