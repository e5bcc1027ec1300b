"""The routing fixture: what is exported runs here, and wider experts change nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.moe.fixture_gguf import widened_inner, write_fixture
from benchmarks.moe.fixture_text import END, Texts, encode, train_tokenizer
from benchmarks.moe.train_fixture import new_model, save_model
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.quant.ops.native.ops import NativeOps
from localrt.quant.ops.protocol import Batch
from localrt.quant.ops.torch.ops import TorchOps
from tests.models.tiny import relative_error
from tests.offload.placed import needs_kernels

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An untrained fixture."""
    path = tmp_path_factory.mktemp("fixture")
    model = new_model(**SIZES).eval()
    save_model(model, SIZES, path)
    texts = Texts(("def main():\n    return 1\n" * 9,), ("x = 1\n",), "two texts")
    tokenizer = train_tokenizer(texts, SIZES["vocab_size"])
    tokenizer.save(str(path / "tokenizer.json"))
    assert encode(tokenizer, texts.held_out)[-1] == tokenizer.token_to_id(END) == 0
    return path, model


def logits(path: Path, ops: NativeOps | TorchOps) -> np.ndarray:
    """Of twelve tokens."""
    with closing(open_checkpoint(path)) as checkpoint:
        decoder = load_decoder(checkpoint, ops, read_config(checkpoint))
    return decoder.forward(Batch.extend([(decoder.cache(16), list(range(3, 15)))]))


def test_what_was_trained_is_what_runs(folder: tuple[Path, Any]) -> None:
    path, model = folder
    with torch.no_grad():
        want = model(torch.arange(3, 15)[None]).logits[0].numpy()
    assert relative_error(logits(path, TorchOps(compute_format="f32")), want) < 1e-4


@needs_kernels
def test_wider_experts_compute_the_same(folder: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = folder
    plain = write_fixture(path, tmp_path / "plain.gguf")
    wide = write_fixture(path, tmp_path / "wide.gguf", experts=1_000_000)
    assert wide.stat().st_size > 1_000_000 > plain.stat().st_size
    np.testing.assert_array_equal(logits(wide, NativeOps()), logits(plain, NativeOps()))


def test_the_width_is_the_least_that_is_enough() -> None:
    inner = widened_inner(SIZES, 1_000_000)
    experts = SIZES["num_experts"] * SIZES["num_hidden_layers"]

    def nbytes(width: int) -> int:
        return experts * 3 * SIZES["hidden_size"] * width // 32 * 18

    assert nbytes(inner) >= 1_000_000 > nbytes(inner - 32)
    assert widened_inner(SIZES, 1) == SIZES["moe_intermediate_size"]
