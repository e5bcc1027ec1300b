"""The packed form that streaming reads: made once, whole or not at all, shared by processes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from contextlib import closing
from pathlib import Path

import pytest

from localrt.common.errors import CancelledError, StorageError
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.store.pack import cached_store, store_folder
from localrt.quant.formats.tiled import tile_tensor
from tests.conftest import needs_kernels
from tests.store.synthetic import SyntheticCheckpoint
from tests.store.test_writer import contents, fail_at

ROOT = Path(__file__).parent.parent.parent


def make(source: SyntheticCheckpoint, stores: Path, **options: object) -> tuple[Path, list[str]]:
    """Make or find the store; also the files that were written for it."""
    written: list[str] = []
    store = cached_store(
        source,
        stores,
        tiler=tile_tensor,
        progress=lambda _done, _all, name: written.append(name),
        **options,  # type: ignore[arg-type]
    )
    with closing(store):
        return store.path, written


def test_made_once(tmp_path: Path) -> None:
    source = SyntheticCheckpoint(tmp_path / "My model, 2 (best)")
    stores = tmp_path / "not there yet" / "stores"
    path, written = make(source, stores)
    assert written
    assert path == store_folder(source, stores)
    assert path.parent == stores
    assert path.name.startswith("My-model-2-best-")
    assert make(source, stores) == (path, [])


def test_another_model_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "model"
    folders = {
        make(SyntheticCheckpoint(path, **options), tmp_path / "stores")[0]  # type: ignore[arg-type]
        for options in ({}, {"seed": 1}, {"layers": 3}, {"formats": {"o_proj": "q4_0"}})
    }
    assert len(folders) == 4


@pytest.mark.parametrize("name", ["", "...", "a/../b", "ü" * 100, "x" * 200])
def test_any_name(tmp_path: Path, name: str) -> None:
    folder = store_folder(SyntheticCheckpoint(tmp_path / name), tmp_path / "stores")
    assert folder.parent == tmp_path / "stores"
    assert 0 < len(folder.name.encode()) < 200
    assert not folder.name.startswith(".")


def test_file_name(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4_K_M.gguf").touch()
    folder = store_folder(SyntheticCheckpoint(tmp_path / "tiny.Q4_K_M.gguf"), tmp_path)
    assert folder.name.startswith("tiny.Q4_K_M-")


def test_store_of_a_store(tmp_path: Path) -> None:
    path, _ = make(SyntheticCheckpoint(tmp_path / "m"), tmp_path / "stores")
    with closing(open_checkpoint(path)) as store:
        assert cached_store(store, tmp_path / "other") is store
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("damage", ["manifest", "truncated", "missing", "newer"])
def test_damaged_store(tmp_path: Path, damage: str) -> None:
    source = SyntheticCheckpoint(tmp_path / "m")
    path, _ = make(source, tmp_path / "stores")
    whole = contents(path)
    manifest, layer = path / "manifest.json", path / "layer-0001.safetensors"
    if damage == "manifest":
        manifest.write_text("{")
    elif damage == "newer":
        manifest.write_text(
            manifest.read_text("utf-8").replace('"localrt_store": 1', '"localrt_store": 9')
        )
    elif damage == "truncated":
        os.truncate(layer, 4096)
    else:
        layer.unlink()
    again, written = make(source, tmp_path / "stores")
    assert written
    assert contents(again) == whole


def test_unwritable_folder(tmp_path: Path) -> None:
    source = SyntheticCheckpoint(tmp_path / "m")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file[/\\]stores cannot be made"):
        make(source, tmp_path / "file" / "stores")
    folder = store_folder(source, tmp_path)
    folder.with_name(folder.name + ".lock").mkdir()
    with pytest.raises(StorageError, match=r"\.lock cannot be written"):
        make(source, tmp_path)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, stores = SyntheticCheckpoint(tmp_path / "m"), tmp_path / "stores"
    for step in (2, 5, 9):
        with monkeypatch.context() as patch:
            fail_at(patch, step, OSError(errno.ENOSPC, "No space left on device"))
            with pytest.raises(StorageError, match="is full: make room"):
                make(source, stores)
        assert not store_folder(source, stores).exists()
        assert not list(stores.rglob("*.writing"))
    path, written = make(source, stores)
    assert "layer-0000.safetensors" not in written, "what was whole is kept"
    fresh, _ = make(source, tmp_path / "fresh")
    assert contents(path) == contents(fresh)
    lock = path.name + ".lock"  # which some systems keep
    assert {each.name for each in stores.iterdir()} - {lock} == {path.name}


def test_cancelled_while_waiting(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    source, cancel = SyntheticCheckpoint(tmp_path / "m"), threading.Event()
    folder = store_folder(source, tmp_path)
    with folder.with_name(folder.name + ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        threading.Timer(0.1, cancel.set).start()
        with pytest.raises(CancelledError):
            cached_store(source, tmp_path, tiler=tile_tensor, cancel=cancel)
    make(source, tmp_path)


CHILD = """
    import hashlib, sys
    from contextlib import closing
    from pathlib import Path
    from localrt.offload.store.pack import cached_store
    from tests.offload.placed import Model, extend, passing
    from tests.store.synthetic import SyntheticCheckpoint

    packed = []
    source = SyntheticCheckpoint(Path("m"), vocab=2000, layers=6)
    store = cached_store(source, Path(sys.argv[1]), progress=lambda *_: packed.append(1))
    with closing(store), closing(Model(store.path)) as model:
        with model.placed(passing(model.store)) as decoder:
            cache = decoder.cache(100)
            digest = hashlib.sha256()
            for token in range(30):
                digest.update(extend(decoder, cache, [token]).tobytes())
        print(digest.hexdigest(), bool(packed))
"""


@needs_kernels
def test_processes_share_a_store(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path / "stores")],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
            stdout=subprocess.PIPE,
            text=True,
        )

    answers = []
    children = [start(), start()]
    for child in children:
        out, _ = child.communicate(timeout=120)
        assert child.returncode == 0
        answers.append(out.split())
    digests = {digest for digest, _ in answers}
    assert len(digests) == 1
    assert sorted(packed for _, packed in answers) == ["False", "True"]
    shutil.rmtree(tmp_path / "stores")
