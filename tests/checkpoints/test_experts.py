"""Experts out of stacked tensors: the bytes they had, and nothing else read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import GgufCheckpoint, SafetensorsCheckpoint
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


MXFP4_CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}


def mxfp4(rows: int, groups: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (EXPERTS, rows, groups, 16), np.uint8)
    scales = rng.integers(0, 255, (EXPERTS, rows, groups), np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales)


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


def test_mxfp4_of_others(tmp_path: Path) -> None:
    tensors = {"mlp.gate_proj.weight": torch.zeros(4, 8)}
    with pytest.raises(UnsupportedModelError, match="quantized with mxfp4"):
        hugging_face(tmp_path, "LlamaForCausalLM", tensors, **MXFP4_CONFIG)
