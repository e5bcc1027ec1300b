"""The parts that a model is cut into."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import TensorInfo
from localrt.models.registry import read_config
from localrt.models.units import Unit, list_units, packed_nbytes
from localrt.quant.formats import F32, FORMATS
from tests.offload.placed import Model, needs_kernels, pack_tiny
from tests.store.synthetic import SyntheticCheckpoint


def units_of(checkpoint: SyntheticCheckpoint) -> tuple[Unit, ...]:
    return list_units(checkpoint.tensors, read_config(checkpoint))


def test_units_of_a_layer() -> None:
    checkpoint = SyntheticCheckpoint(Path("m"))
    units = {unit.name: unit for unit in units_of(checkpoint)}
    assert list(units)[:5] == [
        "embedding",
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
        "layers.1.mlp",
    ]
    assert [name.split(".", 3)[3] for name in units["layers.1.attention"].tensors] == [
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
    ]
    assert units["layers.0.mlp"].layer == 0
    listed = [name for unit in units.values() for name in unit.tensors]
    assert set(listed) == set(checkpoint.tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_slices_of_the_head(tied: bool) -> None:
    checkpoint = SyntheticCheckpoint(Path("m"), vocab=50_001, hidden=256, inner=1024, tied=tied)
    units = units_of(checkpoint)
    mlp = max(
        sum(packed_nbytes(checkpoint.tensors[name]) for name in unit.tensors)
        for unit in units
        if unit.name.endswith("mlp")
    )
    slices = [unit for unit in units if unit.name.startswith("head.")]
    assert len(slices) > 3
    row = FORMATS["q8_0"].row_bytes(256)
    end = 0
    for unit in slices:
        assert unit.tensors == (("model.embed_tokens" if tied else "lm_head") + ".weight",)
        assert unit.rows is not None
        start, stop = unit.rows
        assert start == end
        assert start * row % 4096 == 0
        assert start % 16 == 0
        assert (stop - start) * row <= mlp
        end = stop
    assert end == 50_001
    assert ("embedding" in {unit.name for unit in units}) is not tied


def test_stray_and_missing_tensors() -> None:
    checkpoint = SyntheticCheckpoint(Path("m"))
    stray = TensorInfo("model.layers.0.mlp.extra.weight", (3, 4), F32, 48)
    checkpoint.tensors[stray.name] = stray
    with pytest.raises(UnsupportedModelError, match=r"mlp\.extra\.weight is not part"):
        units_of(checkpoint)
    del checkpoint.tensors[stray.name]
    del checkpoint.tensors["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.weight is missing"):
        units_of(checkpoint)


def test_ignored_tensors() -> None:
    checkpoint = SyntheticCheckpoint(Path("m"))
    for name in ("rope_freqs.weight", "vision_tower.a.weight"):
        checkpoint.tensors[name] = TensorInfo(name, (8,), F32, 32)
    listed = {name for unit in units_of(checkpoint) for name in unit.tensors}
    assert "rope_freqs.weight" in listed
    assert "vision_tower.a.weight" not in listed


@needs_kernels
def test_tensors_of_latent_attention(tmp_path: Path) -> None:
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
