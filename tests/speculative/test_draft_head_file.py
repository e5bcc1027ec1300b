"""A draft head's files: what was written comes back, and damage is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save, save_file

from localrt.errors import CheckpointError
from localrt.quant.formats import unpack
from localrt.speculative.draft_head_file import (
    HEAD_FILE,
    HeadConfig,
    HeadTarget,
    is_head_folder,
    read_head,
    write_head,
)
from tests.speculative.tiny_head import draft_tokens, tiny_values

TARGET = HeadTarget(
    architecture="llama", layers=2, hidden_size=64, vocab_size=300, vocab_sha256="ab"
)
SIZES: dict[str, Any] = {
    "target": TARGET,
    "blocks": 1,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "draft_vocab": 40,
}
CONFIG = HeadConfig(**SIZES)


def write(folder: Path, **options: Any) -> int:
    return write_head(folder, CONFIG, draft_tokens(CONFIG), tiny_values(CONFIG), **options)


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "head"
    nbytes = write(folder, about={"agreed": [0.5]})
    assert nbytes == sum(file.stat().st_size for file in folder.iterdir())
    assert is_head_folder(folder)
    assert not is_head_folder(tmp_path)
    weights = read_head(folder)
    assert weights.config == CONFIG
    assert weights.about == {"agreed": [0.5]}
    np.testing.assert_array_equal(weights.draft_tokens, draft_tokens(CONFIG))
    for name, values in tiny_values(CONFIG).items():
        back = unpack(weights.read(name)).reshape(values.shape)
        assert np.abs(back - values).max() <= 8e-3 * np.abs(values).max()
    write(folder)  # over the one that was there
    assert read_head(folder).config == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 6}, "blocks must be from 1 to 5, is 6"),
        ({"kv_heads": 3}, "heads .4. must be a multiple of kv_heads .3."),
        ({"head_dim": 24}, "head_dim must be a multiple of 16, at most 512, is 24"),
        ({"head_dim": 1024}, "at most 512, is 1024"),
        ({"draft_vocab": 301}, "draft_vocab must be from 2 to 300, is 301"),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_sizes_out_of_bounds(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadConfig(**{**SIZES, **change})


KEY = "localrt_draft_head"


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Rewrite the record of the head."""

    def damage(folder: Path) -> None:
        path = folder / HEAD_FILE
        with safe_open(path, "np") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata()
        record = json.loads(metadata[KEY])
        change(record)
        path.write_bytes(save(tensors, {KEY: json.dumps(record)}))

    return damage


def cut(folder: Path) -> None:
    path = folder / HEAD_FILE
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(lambda r: r.update(version=2)), "is of version 2, and .* reads 1"),
        (lambda folder: save_file({"a": np.zeros(3)}, folder / HEAD_FILE), "no draft head's"),
        (edit(lambda r: r["head"].pop("heads")), "is damaged: .*'heads'"),
        (edit(lambda r: r["head"].update(heads="4")), "is damaged"),
        (edit(lambda r: r["head"].update(blocks=2)), r"tensor model\.layers\.1"),
        (edit(lambda r: r["head"].update(draft_vocab=41)), "its draft vocabulary"),
        (edit(lambda r: r["head"].update(target=3)), "is damaged"),
        (edit(lambda r: r.update(head=3)), "is damaged"),
        (lambda folder: (folder / HEAD_FILE).write_text("{"), "is damaged"),
        (lambda folder: (folder / HEAD_FILE).unlink(), "there is no draft head"),
        (cut, "is damaged"),
    ],
)
def test_damage_is_said(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_head(tmp_path)


def test_values_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    bad = tiny_values(CONFIG)
    bad["fusion.token.weight"][0, 0] = np.nan
    with pytest.raises(CheckpointError, match="NaN"):
        write_head(tmp_path / "head", CONFIG, draft_tokens(CONFIG), bad)
    assert not (tmp_path / "head").exists()


def test_targets_are_told_apart() -> None:
    assert TARGET.difference(TARGET) == ""
    from dataclasses import replace

    assert "other tokens" in TARGET.difference(replace(TARGET, vocab_sha256="x"))
    assert TARGET.difference(replace(TARGET, layers=3)) == "layers 2, not 3"
    assert "hidden size 64, not 32" in TARGET.difference(replace(TARGET, hidden_size=32))
