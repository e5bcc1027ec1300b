"""A draft head's folder: what was written comes back, and damage is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localrt.errors import LocalrtError
from localrt.quant.ops.native.abi import find_library
from localrt.speculative.draft_head_file import (
    HeadConfig,
    head_loader,
    is_head_folder,
    read_head,
    write_head,
)
from tests.speculative.tiny_head import head_values, random_weights, write_random_head

VALUES = head_values("mine", 300, guessed=40)
DATA = "model.safetensors"


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "head"
    assert not is_head_folder(folder)
    config = HeadConfig.of(folder, VALUES)
    nbytes = write_head(folder, VALUES, random_weights(config))
    assert nbytes == sum(file.stat().st_size for file in folder.iterdir())
    assert is_head_folder(folder)
    assert not is_head_folder(tmp_path)
    head = read_head(folder)
    assert (head.decoder, head.target, head.window) == (config.decoder, "mine", 64)
    assert head.draft_tokens.tolist() == VALUES["draft_tokens"]
    weights = sum(array.size for array in random_weights(config).values())
    assert head.nbytes == weights * 34 // 32  # int8 with a scale for 32
    written = load_file(folder / DATA)
    for name, values in random_weights(config).items():
        np.testing.assert_array_equal(
            written[name], values.astype(np.float16) if values.ndim == 2 else values
        )
    write_head(folder, VALUES, random_weights(config))  # over the one that was there
    assert read_head(folder).decoder == config.decoder


def edit(**changes: Any) -> Callable[[Path], None]:
    """Rewrite the config; None takes a value out."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        values = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(num_attention_heads=None), "num_attention_heads is missing"),
        (edit(num_attention_heads="4"), "must be an integer"),
        (edit(sliding_window=None), "sliding_window is missing"),
        (edit(num_key_value_heads=3), "multiple of kv_heads"),
        (edit(num_hidden_layers=6), "at most 5 blocks, not 6"),
        (edit(head_dim=24), "head_dim must be a multiple of 16"),
        (edit(head_dim=1024), "to 512, is 1024"),
        (edit(draft_tokens=None), "its draft vocabulary"),
        (edit(draft_tokens=[3]), "its draft vocabulary"),
        (edit(draft_tokens=[3, 2]), "its draft vocabulary"),
        (edit(draft_tokens=[3, 300]), "its draft vocabulary"),
        (edit(draft_tokens=[3, "4"]), "its draft vocabulary"),
        (edit(draft_tokens=[[3], [4, 5]]), "its draft vocabulary"),
        (edit(draft_tokens=[3, 1 << 70]), "its draft vocabulary"),
        (edit(draft_tokens=3), "draft_tokens must be a list"),
        (edit(architectures=["LlamaForCausalLM"]), "there is no draft head"),
        (lambda folder: (folder / "config.json").unlink(), "there is no draft head"),
    ],
)
def test_a_damaged_config_is_said(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_random_head(tmp_path, VALUES)
    damage(tmp_path)
    with pytest.raises(LocalrtError, match=message):
        read_head(tmp_path)


def cut(folder: Path) -> None:
    path = folder / DATA
    path.write_bytes(path.read_bytes()[:-9])


def without_token_norm(folder: Path) -> None:
    tensors = load_file(folder / DATA)
    del tensors["fusion.token_norm.weight"]
    save_file(tensors, folder / DATA)


@pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "truncated|ends"),
        (without_token_norm, "fusion.token_norm.weight is missing"),
        (edit(hidden_size=32), "wrong shape"),
        (lambda folder: (folder / DATA).write_text("{"), DATA),
        (lambda folder: (folder / DATA).unlink(), DATA),
    ],
)
def test_damaged_weights_are_said(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    from localrt.quant.ops.native.ops import NativeOps

    write_random_head(tmp_path, VALUES)
    damage(tmp_path)
    head = read_head(tmp_path)

    def load() -> None:
        with head_loader(head, NativeOps(threads=1)) as loader:
            loader.vector(head.decoder.hidden_size, "fusion.token_norm.weight")

    with pytest.raises(LocalrtError, match=message):
        load()


def test_values_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    bad = random_weights(HeadConfig.of(tmp_path, VALUES))
    bad["fusion.token.weight"][0, 0] = np.nan
    with pytest.raises(LocalrtError, match="NaN"):
        write_head(tmp_path / "head", VALUES, bad)
    assert not (tmp_path / "head").exists()
