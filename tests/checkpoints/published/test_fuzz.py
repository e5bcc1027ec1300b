"""Whatever bytes a quantized folder has, opening and reading it ends quickly and plainly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

pytest.importorskip("compressed_tensors")

from tests.checkpoints.published.schemes import SCHEMES, Published
from tests.checkpoints.test_fuzz import bounded, exercise, mutations

FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = [
    "W4A16 g32", "W4A16 asymmetric", "W4A16 g16", "W8A8", "compressed FP8 blocks", "NVFP4",
    "MXFP4A16", "GPTQ g32", "GPTQ asymmetric", "GPTQ ordered", "AWQ g64", "NF4", "NF4 twice",
    "W3A16 asymmetric", "GPTQ 3 bits asymmetric", "GPTQ 2 bits",
    "FP8 blocks of 64", "FP8 rows", "ModelOpt NVFP4", "ModelOpt FP8",
]  # fmt: skip
STEMS = ("model.layers.0.mlp.experts.0.up_proj", "model.layers.0.self_attn.q_proj")
NUMBERS = [0, 1, -1, 3, 7, 31, 1 << 20, 1 << 31, 1 << 62, -(1 << 40)]
VALUES = st.sampled_from([*NUMBERS, 0.5, "", None, True, [], {}, [[]], {"a": {}}, {"a": 1}])
TYPES = ["F32", "I32", "U32", "F16", "BF16", "U8", "I8", "F8_E4M3", "F8_E5M2", "I64"]
# Infinite, and what is no number, in BF16, F16, F32 and F8.
ODD = [part * 16 for part in (b"\x80\x7f", b"\x81\x7f", b"\x01\x7c", b"\x01\0\x80\x7f", b"\x7f")]
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.sampled_from(["turn", "flat", "split", "type", "empty", "swap"]),
        st.sampled_from(TYPES),
        st.integers(0, 99),
    ),
    min_size=1,
    max_size=3,
)


class Valid(NamedTuple):
    """A folder that can be read. What hypothesis says of it is short."""

    folder: Path
    scheme: Published
    data: bytes

    def __repr__(self) -> str:
        return f"<{self.folder.name}>"


def config_of(scheme: Published) -> dict[str, Any]:
    return {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 1, **scheme.config}


def file_of(scheme: Published) -> bytes:
    tensors = {"model.norm.weight": torch.ones(4)}
    for seed, stem in enumerate(STEMS):
        weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed)) * 0.1
        parts, _ = scheme.write(weight)
        tensors |= {f"{stem}.{name}": part.contiguous() for name, part in parts.items()}
    return save(tensors)


@pytest.fixture(scope="module", params=KINDS)
def valid(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    scheme = SCHEMES[request.param]
    data = file_of(scheme)
    (folder / "config.json").write_text(json.dumps(config_of(scheme)))
    (folder / "model.safetensors").write_bytes(data)
    exercise(folder)
    return Valid(folder, scheme, data)


def written(folder: Path, config: bytes, data: bytes) -> None:
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(data)
    bounded(folder, max_bytes=4096)


@FUZZ
@given(draw=st.data())
def test_headers(valid: Any, draw: st.DataObject) -> None:
    folder, scheme, data = valid
    start = 8 + int.from_bytes(data[:8], "little")
    config = json.dumps(config_of(scheme)).encode()
    written(folder, config, draw.draw(mutations(data[:start])) + data[start:])


@FUZZ
@given(changes=CHANGES)
def test_shapes_and_types(valid: Any, changes: list[tuple[int, str, str, int]]) -> None:
    """Headers that are well formed, and say something else."""
    folder, scheme, data = valid
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    names = [name for name in sorted(header) if name != "__metadata__"]
    for which, change, kind, other in changes:
        name = names[which % len(names)]
        entry, swapped = header[name], names[other % len(names)]
        if change == "turn":
            entry["shape"] = entry["shape"][::-1]
        elif change == "flat":
            entry["shape"] = [math.prod(entry["shape"])]
        elif change == "split":
            entry["shape"] = [other % 3, *entry["shape"]]
        elif change == "type":
            entry["dtype"] = kind
        elif change == "empty":
            entry["shape"] = [*entry["shape"][:-1], 0]
            entry["data_offsets"] = [entry["data_offsets"][0]] * 2
        else:
            header[name], header[swapped] = header[swapped], header[name]
    text = json.dumps(header).encode()
    config = json.dumps(config_of(scheme)).encode()
    written(folder, config, len(text).to_bytes(8, "little") + text + data[start:])


@FUZZ
@given(share=st.floats(0, 1), piece=st.binary(min_size=1, max_size=64) | st.sampled_from(ODD))
def test_data(valid: Any, share: float, piece: bytes) -> None:
    """Shapes, levels and orders that are data: any bytes in their place."""
    folder, scheme, data = valid
    start = 8 + int.from_bytes(data[:8], "little")
    at = start + int(share * (len(data) - start - len(piece)))
    config = json.dumps(config_of(scheme)).encode()
    written(folder, config, data[:at] + piece + data[at + len(piece) :])


@FUZZ
@given(draw=st.data())
def test_configs(valid: Any, draw: st.DataObject) -> None:
    folder, scheme, data = valid
    written(folder, draw.draw(mutations(json.dumps(config_of(scheme)).encode())), data)


@FUZZ
@given(which=st.integers(0, 99), value=VALUES)
def test_keys(valid: Any, which: int, value: Any) -> None:
    """Configs that are well formed, and say something else."""
    folder, scheme, data = valid
    config = config_of(scheme)
    (target,) = scheme.config
    inner = dict(config[target])
    inner[sorted(inner)[which % len(inner)]] = value
    written(folder, json.dumps({**config, target: inner}).encode(), data)


@FUZZ
@given(draw=st.data())
def test_modelopts_own_file(draw: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    scheme, folder = SCHEMES["ModelOpt NVFP4"], tmp_path_factory.mktemp("modelopt")
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    data = draw.draw(mutations(json.dumps(described).encode()))
    (folder / "hf_quant_config.json").write_bytes(data)
    written(folder, b'{"architectures": ["Qwen3MoeForCausalLM"]}', file_of(scheme))
