"""A draft head's files: what was written comes back, and damage is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.errors import CheckpointError
from localrt.quant.formats import unpack
from localrt.speculative.dgf import DgfConfig, DgfTarget
from localrt.speculative.dgf_file import CONFIG_FILE, is_dgf_folder, read_dgf, write_dgf
from tests.speculative.dgf_tiny import draft_tokens, tiny_values

TARGET = DgfTarget(
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
CONFIG = DgfConfig(**SIZES)


def write(folder: Path, **options: Any) -> int:
    return write_dgf(folder, CONFIG, draft_tokens(CONFIG), tiny_values(CONFIG), **options)


@pytest.mark.parametrize(("format_", "error"), [("int8-g32", 8e-3), ("bf16", 4e-3)])
def test_what_was_written_comes_back(tmp_path: Path, format_: str, error: float) -> None:
    folder = tmp_path / "a" / "head"
    nbytes = write(folder, weight_format=format_, about={"agreed": [0.5]})
    assert nbytes == sum(file.stat().st_size for file in folder.iterdir())
    assert is_dgf_folder(folder)
    assert not is_dgf_folder(tmp_path)
    weights = read_dgf(folder)
    assert weights.config == CONFIG
    assert weights.about == {"agreed": [0.5]}
    np.testing.assert_array_equal(weights.draft_tokens, draft_tokens(CONFIG))
    for name, values in tiny_values(CONFIG).items():
        back = unpack(weights.read(name)).reshape(values.shape)
        assert np.abs(back - values).max() <= error * np.abs(values).max()
    rows = weights.read("fusion.token.weight", 3, 5)
    np.testing.assert_array_equal(unpack(rows), unpack(weights.read("fusion.token.weight"))[3:5])
    write(folder)  # over the one that was there
    assert read_dgf(folder).config == CONFIG


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
        DgfConfig(**{**SIZES, **change})


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / CONFIG_FILE
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return damage


def cut(folder: Path) -> None:
    path = folder / "dgf.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit(lambda r: r.update(version=2)), "is of version 2, and this localrt reads 1"),
        (edit(lambda r: r.update(kind="x")), "no draft head's"),
        (edit(lambda r: r["head"].pop("heads")), "heads is missing"),
        (edit(lambda r: r["head"].update(heads="4")), "heads is '4'"),
        (edit(lambda r: r["head"].update(blocks=2)), r"tensor model\.layers\.1"),
        (edit(lambda r: r["head"].update(draft_vocab=41)), "its draft vocabulary"),
        (edit(lambda r: r["head"].update(target=3)), "no DgfTarget"),
        (edit(lambda r: r.update(head=3)), "is damaged"),
        (edit(lambda r: r.update(weight_format="q9")), "weight_format 'q9' is not known"),
        (lambda folder: (folder / CONFIG_FILE).write_text("{"), "cannot be read"),
        (lambda folder: (folder / CONFIG_FILE).unlink(), "there is no draft head"),
        (lambda folder: (folder / "dgf.safetensors").unlink(), "is missing"),
        (cut, "is damaged"),
    ],
)
def test_damage_is_said(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_dgf(tmp_path)


def test_only_the_configs_weights_are_written(tmp_path: Path) -> None:
    values = tiny_values(CONFIG)
    del values["fusion.token.weight"]
    with pytest.raises(ValueError, match="not those of the config"):
        write_dgf(tmp_path / "head", CONFIG, draft_tokens(CONFIG), values)
    bad = tiny_values(CONFIG)
    bad["fusion.token.weight"][0, 0] = np.nan
    with pytest.raises(CheckpointError, match="NaN"):
        write_dgf(tmp_path / "head", CONFIG, draft_tokens(CONFIG), bad)
    assert not (tmp_path / "head").exists()


def test_targets_are_told_apart() -> None:
    assert TARGET.difference(TARGET) == ""
    from dataclasses import replace

    assert "other tokens" in TARGET.difference(replace(TARGET, vocab_sha256="x"))
    assert TARGET.difference(replace(TARGET, layers=3)) == "a number of layers of 2, not 3"
    assert "hidden size of 64, not 32" in TARGET.difference(replace(TARGET, hidden_size=32))
