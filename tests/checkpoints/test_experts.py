"""Experts out of stacked tensors: the bytes they had, and nothing else read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import GgufCheckpoint, SafetensorsCheckpoint
from localrt.models.tensor_source import RangedFile
from localrt.quant.formats import unpack
from tests.checkpoints.make_gguf import Array, packed_rows, write_gguf

EXPERTS, ROWS, COLUMNS = 3, 10, 64
LAYER = "model.layers.2."


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def gguf(path: Path, tensors: Mapping[str, tuple[Array, str]], **keys: Any) -> GgufCheckpoint:
    metadata = {"llama.expert_count": EXPERTS, **keys}
    (file,) = write_gguf(path / "m.gguf", "llama", metadata, tensors)
    return GgufCheckpoint(file)


def hugging_face(
    path: Path, architecture: str, tensors: Mapping[str, torch.Tensor], **config: Any
) -> SafetensorsCheckpoint:
    save_file({f"{LAYER}{name}": tensor for name, tensor in tensors.items()},
              path / "model.safetensors")  # fmt: skip
    whole = {"architectures": [architecture], "num_local_experts": EXPERTS, **config}
    (path / "config.json").write_text(json.dumps(whole))
    return SafetensorsCheckpoint(path)


def own(name: str, expert: int, kind: str = "weight") -> str:
    return f"{LAYER}mlp.experts.{expert}.{name}_proj.{kind}"


def test_gguf_stacks(tmp_path: Path) -> None:
    packed = packed_rows("q4_k", EXPERTS * ROWS, 256).reshape(EXPERTS, ROWS, -1)
    both = packed_rows("q8_0", EXPERTS * 2 * ROWS, 64, seed=1).reshape(EXPERTS, 2 * ROWS, -1)
    bias = values(EXPERTS, ROWS)
    model = gguf(
        tmp_path,
        {
            "blk.2.ffn_down_exps.weight": (packed, "q4_k"),
            "blk.2.ffn_gate_up_exps.weight": (both, "q8_0"),
            "blk.2.ffn_down_exps.bias": (bias, "f32"),
            "blk.2.ffn_gate_inp.weight": (values(EXPERTS, 8), "f32"),
            "blk.2.ffn_gate_inp_shexp.weight": (values(8), "f32"),
            "blk.2.exp_probs_b.bias": (values(EXPERTS), "f32"),
        },
    )
    for expert in range(EXPERTS):
        down = model.read(own("down", expert))
        assert down.shape == (ROWS, 256)
        np.testing.assert_array_equal(down.data, packed[expert])
        np.testing.assert_array_equal(model.read(own("down", expert), 3, 7).data, down.data[3:7])
        np.testing.assert_array_equal(model.read(own("gate", expert)).data, both[expert, :ROWS])
        np.testing.assert_array_equal(model.read(own("up", expert)).data, both[expert, ROWS:])
        blocks = list(model.blocks(own("up", expert), 3 * down.data.shape[1]))
        np.testing.assert_array_equal(np.concatenate([b.data for b in blocks]), both[expert, ROWS:])
        np.testing.assert_array_equal(unpack(model.read(own("down", expert, "bias"))), bias[expert])
    assert len(model.tensors) == 4 * EXPERTS + 3
    assert model.tensors[f"{LAYER}mlp.shared_expert_gate.weight"].shape == (1, 8)
    assert model.tensors[f"{LAYER}mlp.gate.e_score_correction_bias"].shape == (EXPERTS,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_unpacked(tmp_path: Path, dtype: torch.dtype) -> None:
    both = torch.randn(EXPERTS, COLUMNS, 2 * ROWS).to(dtype)
    down = torch.randn(EXPERTS, ROWS, COLUMNS).to(dtype)
    bias = torch.randn(EXPERTS, 2 * ROWS).to(dtype)
    model = hugging_face(
        tmp_path,
        "GptOssForCausalLM",
        {
            "mlp.experts.gate_up_proj": both,
            "mlp.experts.gate_up_proj_bias": bias,
            "mlp.experts.down_proj": down,
            "mlp.experts.down_proj_bias": torch.randn(EXPERTS, COLUMNS),
            "mlp.router.weight": torch.randn(EXPERTS, COLUMNS),
            "mlp.router.bias": torch.randn(EXPERTS),
        },
    )
    for first, name in enumerate(("gate", "up")):
        expected = both[1].T[first::2].float().numpy()
        np.testing.assert_array_equal(unpack(model.read(own(name, 1))), expected)
        np.testing.assert_array_equal(unpack(model.read(own(name, 1), 3, 5)), expected[3:5])
        blocks = model.blocks(own(name, 1), 3 * COLUMNS * dtype.itemsize)
        pieces = [unpack(block) for block in blocks]
        assert [len(piece) for piece in pieces] == [3, 3, 3, 1]
        np.testing.assert_array_equal(np.concatenate(pieces), expected)
        vector = unpack(model.read(own(name, 1, "bias"))).reshape(-1)
        np.testing.assert_array_equal(vector, bias[1, first::2].float().numpy())
    np.testing.assert_array_equal(unpack(model.read(own("down", 2))), down[2].T.float().numpy())
    assert model.tensors[f"{LAYER}mlp.gate.bias"].shape == (EXPERTS,)


MXFP4_CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}


def mxfp4(rows: int, groups: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (EXPERTS, rows, groups, 16), np.uint8)
    scales = rng.integers(0, 255, (EXPERTS, rows, groups), np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[SafetensorsCheckpoint, np.ndarray]:
    """A checkpoint in MXFP4, and transformers' values of gate and up: (experts, 2 ROWS, 64)."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = mxfp4(2 * ROWS, 2)
    down_blocks, down_scales = mxfp4(COLUMNS, 1, seed=1)
    tensors = {
        "mlp.experts.gate_up_proj_blocks": blocks,
        "mlp.experts.gate_up_proj_scales": scales,
        "mlp.experts.down_proj_blocks": down_blocks,
        "mlp.experts.down_proj_scales": down_scales,
    }
    folder = tmp_path_factory.mktemp("gpt-oss")
    model = hugging_face(folder, "GptOssForCausalLM", tensors, **MXFP4_CONFIG)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    down = convert_moe_packed_tensors(down_blocks, down_scales, dtype=torch.float32)
    for expert in range(EXPERTS):
        np.testing.assert_array_equal(unpack(model.read(own("down", expert))), down[expert].T)
    return model, theirs.transpose(1, 2).numpy()


def test_gpt_oss_mxfp4(gpt_oss: Any) -> None:
    model, theirs = gpt_oss
    for expert in range(EXPERTS):
        for first, name in enumerate(("gate", "up")):
            info = model.tensors[own(name, expert)]
            assert (info.shape, info.format.name) == ((ROWS, COLUMNS), "mxfp4")
            read = unpack(model.read(info.name))
            np.testing.assert_array_equal(read, theirs[expert, first::2])


@given(st.data())
def test_row_ranges(gpt_oss: Any, data: st.DataObject) -> None:
    model, theirs = gpt_oss
    expert = data.draw(st.integers(0, EXPERTS - 1))
    start = data.draw(st.integers(0, ROWS))
    stop = data.draw(st.integers(start, ROWS))
    rows = model.read(own("up", expert), start, stop)
    assert rows.shape == (stop - start, COLUMNS)
    np.testing.assert_array_equal(unpack(rows), theirs[expert, 1::2][start:stop])
    size = data.draw(st.integers(1, 400))
    pieces = [unpack(block) for block in model.blocks(own("up", expert), size)]
    np.testing.assert_array_equal(np.concatenate(pieces), theirs[expert, 1::2])


def test_reads_only_rows_asked(gpt_oss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = gpt_oss
    counts: list[int] = []
    read = RangedFile.read
    monkeypatch.setattr(
        RangedFile, "read", lambda file, at, n: counts.append(n) or read(file, at, n)
    )
    model.read(own("gate", 2), 4, 7)
    assert sorted(counts) == [5 * 2, 5 * 32]  # rows 8 to 12: two groups of a scale and 16 bytes


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {
                "mlp.experts.down_proj_blocks": mxfp4(8, 2)[0],
                "mlp.experts.down_proj_scales": mxfp4(8, 1)[1],
            },
            "are not MXFP4 weights in groups of 32",
        ),
        ({"mlp.experts.down_proj": torch.zeros(4, 8, 8)}, "holds 4 experts, the config says 3"),
        ({"mlp.experts.gate_up_proj": torch.zeros(3, 8, 5)}, "not 2 equal matrices"),
        (
            {
                "mlp.router.weight": torch.zeros(3, 8),
                "mlp.gate.weight": torch.zeros(3, 8),
            },
            "appears twice",
        ),
    ],
)
def test_bad_stacks(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        hugging_face(tmp_path, "GptOssForCausalLM", tensors, **MXFP4_CONFIG)
    assert "\n" not in str(caught.value)


def test_bad_gguf_stack(tmp_path: Path) -> None:
    tensors = {"blk.2.ffn_up_exps.weight": (values(EXPERTS + 1, 4, 8), "f32")}
    message = r"'blk.2.ffn_up_exps.weight' holds 4 experts, the config says 3"
    with pytest.raises(CheckpointError, match=message):
        gguf(tmp_path, tensors)


def test_stray_bytes(tmp_path: Path) -> None:
    tensors = {"mlp.gate_proj.weight": torch.zeros(4, 8, dtype=torch.uint8)}
    name = re.escape(f"{LAYER}mlp.gate_proj.weight")
    with pytest.raises(UnsupportedModelError, match=f"tensor '{name}' is U8"):
        hugging_face(tmp_path, "LlamaForCausalLM", tensors)


def test_mxfp4_of_others(tmp_path: Path) -> None:
    tensors = {"mlp.gate_proj.weight": torch.zeros(4, 8)}
    with pytest.raises(UnsupportedModelError, match="quantized with mxfp4"):
        hugging_face(tmp_path, "LlamaForCausalLM", tensors, **MXFP4_CONFIG)
