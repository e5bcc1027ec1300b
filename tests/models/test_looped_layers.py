"""Layers that run several times (Nanbeige's) are held once, however often they run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localrt.loading.load import load_model
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import open_checkpoint
from localrt.models.tensor_source import WeightBlock
from localrt.offload.account import weight_nbytes
from localrt.offload.shapes import shape_from_checkpoint
from localrt.quant.reference.ops import TorchOps
from tests.models.make_gguf import write_tiny_gguf
from tests.models.tiny import load_ours, save_tiny


class Counting(TorchOps):
    """Counts the matrices that are loaded."""

    loaded = 0

    def weight(self, shape: tuple[int, int], blocks: Iterable[WeightBlock]) -> Any:
        """See ``Ops``."""
        self.loaded += 1
        return super().weight(shape, blocks)


@pytest.mark.parametrize("form", ["folder", "gguf"])
@pytest.mark.parametrize("name", ["nanbeige", "nanbeige-plain"])
def test_they_are_held_once(name: str, form: str, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path)
    path = tmp_path if form == "folder" else write_tiny_gguf(tmp_path, tmp_path / "m.gguf", name)
    own = theirs.config
    parameters = list(theirs.parameters())
    ops = Counting(compute_format="f32", device="cpu")
    load_ours(path, ops)
    heads = 1 if own.tie_word_embeddings else 2
    assert ops.loaded == 4 * own.num_hidden_layers + heads
    count = sum(each.numel() for each in parameters)
    with closing(open_checkpoint(path)) as checkpoint:
        matrices = sum(each.numel() for each in parameters if each.ndim == 2)
        assert weight_nbytes(checkpoint, ops) == 4 * matrices
        assert shape_from_checkpoint(checkpoint).parameters == count
    with closing(
        load_model(path, LoadOptions(ctx=64, format="f32", device="cpu")).engine
    ) as engine:
        assert engine.info.parameters == count
