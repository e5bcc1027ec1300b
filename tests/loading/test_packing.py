"""What loading writes to the disk is said before it is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import localrt
from localrt.common.progress import NOTE, Progress
from localrt.hub.names import shown_path


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "localrt" / "stores"


def test_packing_is_announced(tiny_folder: Path, stores: Path) -> None:
    told: list[tuple[Progress, bool]] = []

    def show(progress: Progress) -> None:
        told.append((progress, any(path.is_file() for path in stores.glob("*/**/*"))))

    localrt.load(tiny_folder, shrinkable=True, progress=show).close()
    note, anything_there = told[0]
    assert note.stage == NOTE
    assert note.detail.startswith(
        f"packing the model for streaming: 406 kB in {shown_path(stores)} ("
    )
    assert "`localrt rm --packed MODEL`" in note.detail
    assert not anything_there
    assert {"pack", "load"} <= {progress.stage for progress, _ in told}

    told.clear()
    localrt.load(tiny_folder, shrinkable=True, progress=show).close()
    assert not any(progress.stage in (NOTE, "pack") for progress, _ in told)


def test_full_disk(tiny_folder: Path, stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(localrt.StorageError, match=r"needs .* more and the disk has 1 kB free"):
        localrt.load(tiny_folder, shrinkable=True)
    left = [path for path in stores.glob("*/**/*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 10_000, left


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("intermediate_size", 32, r"wrong shape: .*mlp.gate_proj.weight"),
        ("vocab_size", 300, "wrong shape: model.embed_tokens.weight"),
        ("num_hidden_layers", 9, "tensor .* is missing"),
    ],
)
def test_wrong_shapes(
    tmp_path: Path, tiny_folder: Path, stores: Path, key: str, value: int, told: str
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "wrong"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    stages: list[str] = []
    with pytest.raises(localrt.CheckpointError, match=told):
        localrt.load(folder, shrinkable=True, progress=lambda step: stages.append(step.stage))
    assert NOTE not in stages
    assert not stores.exists()
