"""Gemma 3n and 4: GGUF files against transformers and llama.cpp; what is stored, and where."""

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
from tests.models.gguf_gemma import ARCHITECTURES, write_gemma
from tests.models.test_architectures import oracle
from tests.models.test_mixtures import edited, logits_of
from tests.models.tiny import relative_error, save_tiny, tokens

LENGTH = 40
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(GGUF file, transformers' model)."""
    path = tmp_path_factory.mktemp(request.param)
    theirs = save_tiny(request.param, path)
    return write_gemma(path, path / "m.gguf", ARCHITECTURES[request.param]), theirs


def test_a_gguf_file_gives_the_same_logits(gguf: Any) -> None:
    path, theirs = gguf
    ids = tokens(LENGTH, seed=7)
    assert relative_error(logits_of(path, ids), oracle(theirs, ids)) < TOLERANCE


@pytest.mark.llamacpp
def test_llama_cpp_computes_the_same(gguf: Any) -> None:
    """Nearly: its cache and its GELU are half precision."""
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    from localrt.engine.llamacpp.engine import LlamaCppEngine
    from localrt.engine.llamacpp.model import LlamaCppModel

    path, _ = gguf
    ids = tokens(LENGTH, seed=8)
    engine = LlamaCppEngine(LlamaCppModel.load(path, threads=1))
    try:
        theirs = np.concatenate(list(engine.logits(ids)))
    finally:
        engine.close()
    assert relative_error(logits_of(path, ids), theirs) < 0.002


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
