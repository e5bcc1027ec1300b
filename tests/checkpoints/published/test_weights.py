"""Quantized folders as published: every value is what others read there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from localrt.models.checkpoints import SafetensorsCheckpoint
from localrt.models.checkpoints.schemes.rows import symmetric_scales
from localrt.quant.formats import BrainCodec, unpack

pytest.importorskip("compressed_tensors")

from tests.checkpoints.published.schemes import SCHEMES, Published

ROWS, COLUMNS = 256, 512
NAME = "model.layers.0.mlp.up_proj"


def random_weight(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator) + 0.1
    return torch.randn(rows, columns, generator=generator) * spread * 0.1


def folder_of(path: Path, scheme: Published, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **scheme.config}
    (path / "config.json").write_text(json.dumps(config))
    for name, content in scheme.files.items():
        (path / name).write_text(json.dumps(content))
    whole = {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}
    whole["model.norm.weight"] = torch.ones(8, dtype=torch.bfloat16)
    save_file(whole, path / "model.safetensors")
    return path


COMPRESSED = ["W4A16", "W8A16 asymmetric", "W8A8", "NVFP4A16", "MXFP4A16"]
COMPRESSED += ["compressed FP8 rows", "compressed FP8 blocks", "compressed FP8 blocks of 64"]


@pytest.mark.parametrize("names", [COMPRESSED, COMPRESSED[::-1]], ids=["in-order", "reversed"])
@pytest.mark.parametrize("target", ["re:.*layers.{}.*", "Linear"], ids=["apart", "overlapping"])
def test_mixed_precision(tmp_path: Path, names: list[str], target: str) -> None:
    """Each module by its own tensors, whatever other groups of the config say."""
    whole: dict[str, torch.Tensor] = {}
    wanted, groups = {}, {}
    for layer, name in enumerate(names):
        module = f"model.layers.{layer}.mlp.up_proj"
        tensors, values = SCHEMES[name].write(random_weight(seed=layer))
        whole |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
        wanted[f"{module}.weight"] = (values, SCHEMES[name])
        given = SCHEMES[name].config["quantization_config"]
        group = {**given["config_groups"]["group_0"], "targets": [target.format(layer)]}
        groups[f"group_{layer}"] = {**group, "format": given["format"]}
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    config |= {"quantization_config": {**quantization, "config_groups": groups}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(whole, tmp_path / "model.safetensors")
    model = SafetensorsCheckpoint(tmp_path)
    for name, (values, scheme) in wanted.items():
        assert model.tensors[name].format.name == scheme.format
        found = unpack(model.read(name))
        np.testing.assert_allclose(found, values, rtol=scheme.rtol, atol=0)


@pytest.mark.parametrize("name", SCHEMES)
def test_values(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    tensors, values = scheme.write(random_weight())
    model = SafetensorsCheckpoint(folder_of(tmp_path, scheme, tensors))
    assert set(model.tensors) == {f"{NAME}.weight", "model.norm.weight"}
    info = model.tensors[f"{NAME}.weight"]
    assert (info.shape, info.format.name) == ((ROWS, COLUMNS), scheme.format)
    assert model.tensors["model.norm.weight"].format.name == "bf16"
    found = unpack(model.read(info.name))
    np.testing.assert_allclose(found, values, rtol=scheme.rtol, atol=0)
    assert np.abs(values - random_weight().numpy()).max() < scheme.error * np.abs(values).max()
    for start, stop in ((0, 1), (3, 21), (100, 256), (7, 7)):
        rows = unpack(model.read(info.name, start, stop))
        np.testing.assert_array_equal(rows, found[start:stop])
    for size in (1, 5000, 1 << 20):
        pieces = [unpack(block) for block in model.blocks(info.name, size)]
        np.testing.assert_array_equal(np.concatenate(pieces), found)
    assert any(scheme.format in note for note in model.notes)
    assert scheme.note in " ".join(model.notes)


def test_scale_of_a_damaged_file() -> None:
    """It may overflow, and nobody is warned."""
    scale = np.float32(3e38)
    found = symmetric_scales(BrainCodec(4, 32), np.array([scale]), 4)
    assert found.tolist() == [[scale, -np.inf]]
