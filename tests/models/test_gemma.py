"""Gemma 3n and 4: what is stored, and where."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from localrt.models.checkpoints import open_checkpoint
from localrt.models.layers.inputs import LAYER_EMBEDDING
from localrt.models.registry import read_config
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import save_tiny


def test_shared_keys_and_values(tmp_path: Path) -> None:
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


def test_input_rows(tmp_path: Path) -> None:
    """A row for each layer, in the order of the published table."""
    theirs = save_tiny("gemma4", tmp_path)
    table = theirs.model.embed_tokens_per_layer.weight.detach().numpy()
    with closing(open_checkpoint(tmp_path)) as checkpoint:
        assert checkpoint.tensors[LAYER_EMBEDDING].shape == (211 * 6, 24)
        rows = checkpoint.read(LAYER_EMBEDDING, 6 * 17, 6 * 18).data.view(np.float32)
    np.testing.assert_array_equal(rows.reshape(-1), table[17])
