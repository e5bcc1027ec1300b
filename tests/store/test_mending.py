"""Damaged units are made again from the model, byte for byte; another model is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.offload.store import pack, pack_store
from localrt.offload.store.pack import mend_unit
from tests.models.tiny import save_tiny
from tests.real_models import real_model


def packed(model: Path, out: Path) -> StoreCheckpoint:
    with closing(open_checkpoint(model)) as source:
        store = open_checkpoint(pack_store(source, out))
    assert isinstance(store, StoreCheckpoint)
    return store


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", pytest.param("", marks=pytest.mark.real)])
def test_mend(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    if name:
        model.mkdir()
        save_tiny(name, model)
    else:  # its head is cut into several units
        model = real_model("smollm2")
    out = tmp_path / "store"
    with closing(packed(model, out)) as store:
        units = store.manifest.units
    for unit in {unit.name.split(".")[-1]: unit for unit in units}.values():
        path = out / unit.file
        whole, time = path.read_bytes(), path.stat().st_mtime_ns
        broken = bytearray(whole)
        broken[unit.offset : unit.offset + unit.nbytes] = bytes(unit.nbytes)
        path.write_bytes(broken)
        data = np.full(unit.nbytes, 255, np.uint8)
        mend_unit(model, out, unit, data)
        assert unit.is_whole(data)
        assert path.read_bytes() == whole
        assert path.stat().st_mtime_ns >= time


def test_another_model(tmp_path: Path) -> None:
    models = [tmp_path / "one", tmp_path / "other"]
    for seed, folder in enumerate(models):
        folder.mkdir()
        save_tiny("llama", folder, seed)
    out = tmp_path / "store"
    with closing(packed(models[0], out)) as store:
        unit = store.manifest.units[1]
    whole = (out / unit.file).read_bytes()
    with pytest.raises(CheckpointError, match=r"not the model that was packed.*load the model"):
        mend_unit(models[1], out, unit, np.zeros(unit.nbytes, np.uint8))
    assert (out / unit.file).read_bytes() == whole
    with pytest.raises(CheckpointError):
        open_checkpoint(out)


def test_unwritable_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are read again by the next pass, and are not looked at then."""
    model, out = tmp_path / "model", tmp_path / "store"
    model.mkdir()
    save_tiny("llama", model)
    with closing(packed(model, out)) as store:
        unit = store.manifest.units[1]

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack.os, "fsync", full)
    monkeypatch.setattr(pack, "discard_store", full)
    with pytest.raises(CheckpointError, match=r"damaged, and cannot .*No space left"):
        mend_unit(model, out, unit, np.zeros(unit.nbytes, np.uint8))
