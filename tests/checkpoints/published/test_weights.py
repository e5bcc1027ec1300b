"""Quantized folders as published: every value is what others read there, or one line says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import SafetensorsCheckpoint
from localrt.quant.formats import unpack
from tests.checkpoints.published.schemes import SCHEMES, Published, Tensors
from tests.models.test_model import some

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
    whole = {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}
    whole["model.norm.weight"] = torch.ones(8, dtype=torch.bfloat16)
    save_file(whole, path / "model.safetensors")
    return path


COMPRESSED = ["W4A16", "W8A16 asymmetric", "W8A8", "NVFP4A16", "MXFP4A16"]
COMPRESSED += ["compressed FP8 blocks", "compressed FP8 blocks of 64"]


@pytest.mark.parametrize("target", ["re:.*layers.{}.*", "Linear"], ids=["apart", "overlapping"])
def test_mixed_precision(tmp_path: Path, target: str) -> None:
    """Each module by its own tensors, whatever other groups of the config say."""
    whole: dict[str, torch.Tensor] = {}
    wanted, groups = {}, {}
    for layer, name in enumerate(COMPRESSED):
        module = f"model.layers.{layer}.mlp.up_proj"
        scheme = SCHEMES[name]()
        tensors, values = scheme.write(random_weight(seed=layer))
        whole |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
        wanted[f"{module}.weight"] = (values, scheme)
        given = scheme.config["quantization_config"]
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


@some(SCHEMES, ("AWQ", "AutoRound", "FP8 blocks", "GPTQ ordered", "NVFP4A16", "W4A16 asymmetric"))
def test_values(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]()
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


WEIGHT = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 0.1


def opened(path: Path, config: Any, tensors: Tensors) -> SafetensorsCheckpoint:
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    whole = {f"{NAME}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file({**whole, "model.norm.weight": torch.ones(4)}, path / "model.safetensors")
    return SafetensorsCheckpoint(path)


def read_all(path: Path, config: Any, tensors: Tensors) -> None:
    model = opened(path, config, tensors)
    for name in model.tensors:
        model.read(name)


def refused(path: Path, config: Any, tensors: Tensors, message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        read_all(path, config, tensors)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def without(ending: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: part for name, part in tensors.items() if name != ending}


def cut(ending: str, rows: int, columns: int | None = None) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, ending: tensors[ending][:rows, :columns]}


def replaced(ending: str, part: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, ending: part}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("W4A16 g32", without("weight_scale"), r"up_proj.weight_scale' of .* is missing"),
        ("W4A16 g32", cut("weight_scale", 64, 3), r"weight_scale' .* not divide 64 rows of 128"),
        ("NVFP4A16", replaced("weight_global_scale", torch.zeros(1)), "makes every value inf"),
        ("MXFP4A16", cut("weight_scale", 64, 3), r"weight_scale' .* should be \(64, 4\) in U8"),
        ("GPTQ g32", cut("qweight", 15), r"qweight' \(15, 64\) .* groups of 32 do not divide"),
        (
            "GPTQ g32",
            replaced("g_idx", torch.full((128,), 4, dtype=torch.int32)),
            "names groups that are not among the 4 there are",
        ),
        (
            "GPTQ g32",
            replaced("qzeros", torch.zeros(4, 8, dtype=torch.int32)),
            "has zero points, though the config says sym",
        ),
        ("AWQ g64", cut("qweight", 100), r"qweight' .* groups of 64 do not divide"),
        ("NF4 twice", replaced("weight.quant_map", torch.zeros(16)), "other levels than NF4 and"),
        (
            "LLM.int8()",
            replaced("weight_format", torch.tensor(1, dtype=torch.uint8)),
            "is not 0: only bytes in the order of rows",
        ),
        ("FP8 blocks of 64", cut("weight_scale_inv", 1), r"scale_inv' .* equal blocks of 32 x 64"),
    ],
)
def test_bad_tensors(
    kind: str, change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    scheme = SCHEMES[kind]()
    tensors, _ = scheme.write(WEIGHT)
    refused(tmp_path, scheme.config, change(tensors), message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "hqq"},
            r"quantized with hqq, .* \(it reads auto-round, awq, bitsandbytes, .*GGUF",
        ),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type asks for mx_fp, which"),
        ({"quant_method": "gptq", "bits": 5}, "bits is 5, .* localrt reads 2, 3, 4, 8; use the"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv', of which .* reads gemm"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 6, "type": "int"}}},
            },
            "num_bits is 6, of which localrt reads 2, 3, 4, 8",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}},
            "transform_config asks for rotated inputs",
        ),
        ("gptq", "quantization_config should be an object"),
    ],
)
def test_bad_configs(config: Any, message: str, tmp_path: Path) -> None:
    refused(tmp_path, {"quantization_config": config}, {}, message)


def test_quantized_for_mlx(tmp_path: Path) -> None:
    config = {"quantization": {"bits": 4, "group_size": 64}}
    refused(tmp_path, config, {}, "is quantized for MLX: take a GGUF file of it or")


def test_modelopts_own_file(tmp_path: Path) -> None:
    scheme = SCHEMES["ModelOpt NVFP4"]()
    tensors, _ = scheme.write(WEIGHT)
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    model = opened(tmp_path, {}, tensors)
    assert model.tensors[f"{NAME}.weight"].format.name == "nvfp4"
    described["quantization"] = {"quant_algo": "INT2"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    refused(tmp_path, {}, tensors, "hf_quant_config.json: quantization: quant_algo is 'INT2'")


def test_gptq_module_bits(tmp_path: Path) -> None:
    config = SCHEMES["GPTQ"]().config
    tensors, values = SCHEMES["GPTQ 8 bits asymmetric"]().write(WEIGHT)
    config = {"quantization_config": {**config["quantization_config"], "sym": False}}
    model = opened(tmp_path, config, tensors)
    assert model.tensors[f"{NAME}.weight"].format.name == "int8-g32z"
    np.testing.assert_array_equal(unpack(model.read(f"{NAME}.weight")), values)


def test_cache_scales(tmp_path: Path) -> None:
    scheme = SCHEMES["FP8 rows"]()
    tensors, _ = scheme.write(WEIGHT)
    model = opened(tmp_path, scheme.config, {**tensors, "input_scale": torch.ones(1)})
    assert set(model.tensors) == {f"{NAME}.weight", "model.norm.weight"}
