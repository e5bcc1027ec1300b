"""Gemma 3n and 4: what is stored, and where; configs that make no sense."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.layers.inputs import LAYER_EMBEDDING
from localrt.models.registry import read_config
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import edited, save_tiny


def test_layers_that_share_keys_and_values_take_no_memory(tmp_path: Path) -> None:
    save_tiny("gemma4", tmp_path)
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        specs = read_config(checkpoint).attention
        shared = [n for n, spec in enumerate(specs) if spec.reads is not None]
        assert shared == [3, 4, 5]
        assert [specs[n].reads for n in shared] == [1, 2, 2]  # sliding, full, full
        assert not any(
            f"layers.{n}.self_attn.{name}_proj" in tensor
            for tensor in checkpoint.tensors
            for n in shared
            for name in "kv"
        )
    ops = TorchOps(compute_format="f32")
    assert ops.kv_nbytes(specs, 256) == ops.kv_nbytes(specs[:3], 256)


def test_a_tokens_inputs_lie_together(tmp_path: Path) -> None:
    """A row for each layer, in the order of the published table."""
    theirs = save_tiny("gemma4", tmp_path)
    table = theirs.model.embed_tokens_per_layer.weight.detach().numpy()
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        assert checkpoint.tensors[LAYER_EMBEDDING].shape == (211 * 6, 24)
        rows = checkpoint.read(LAYER_EMBEDDING, 6 * 17, 6 * 18).data.view(np.float32)
    np.testing.assert_array_equal(rows.reshape(-1), table[17])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers 5"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "later tokens"),
        ("gemma3n", {"altup_active_idx": 4}, "active stream must be below 4"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0, 0, 0, 0, 0]}, "below 1"),
    ],
)
def test_configs_that_make_no_sense(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(name, tmp_path)
    edited(tmp_path, **change)
    with (
        closing(open_checkpoint(tmp_path)) as checkpoint,
        pytest.raises(UnsupportedModelError, match=message),
    ):
        read_config(checkpoint)
