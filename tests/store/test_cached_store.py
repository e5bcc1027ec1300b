"""The packed form that streaming reads: made once, shared, and never of a model that changed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from localrt.common.errors import CancelledError, StorageError
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.store.pack import cached_store, store_folder
from localrt.quant.formats.tiled import tile_tensor
from localrt.quantize.quantize import Recipe, quantize_model
from tests.models.tiny import save_tiny
from tests.store.synthetic import SyntheticCheckpoint
from tests.store.test_writer import contents, fail_at


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


def test_two_at_once_make_one(tmp_path: Path) -> None:
    """A file's lock: of two threads, as of two processes, one waits for what the other makes."""

    def one(_: int) -> tuple[Path, list[str]]:
        return make(SyntheticCheckpoint(tmp_path / "m", vocab=2000, layers=6), tmp_path / "stores")

    with ThreadPoolExecutor(2) as pool:
        (first, written), (second, also) = pool.map(one, range(2))
    assert first == second
    assert bool(written) != bool(also)
    fresh, _ = make(SyntheticCheckpoint(tmp_path / "m", vocab=2000, layers=6), tmp_path / "fresh")
    assert contents(first) == contents(fresh)


KIND = "qwen3-moe"
Weights = dict[str, Any]


def _bad_block(weights: Weights) -> None:
    rows = weights["model.layers.1.self_attn.q_proj.weight"].reshape(-1)
    rows[-1024:] = 0.125


def _all_rows_but_first(weights: Weights) -> None:
    for value in weights.values():
        if value.ndim == 2:
            value[1:] = value[1:][::-1].copy()


def _another_expert(weights: Weights) -> None:
    for name, value in weights.items():
        if ".experts." in name:
            others = value[1:] if value.ndim == 3 else value[: None if ".0." not in name else 0]
            others *= -1


def _vectors(weights: Weights) -> None:
    weights["model.norm.weight"][...] *= 2


CHANGES: dict[str, Callable[[Weights], None]] = {
    "a bad block": _bad_block,
    "all rows but the first": _all_rows_but_first,
    "other experts": _another_expert,
    "vectors": _vectors,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    save_tiny(KIND, folder, layers=2)
    return folder


def change(folder: Path, edit: Callable[[Weights], None]) -> None:
    """Write other weights of the same size and times into the folder."""
    file = folder / "model.safetensors"
    before, size = file.stat(), file.stat().st_size
    weights = {name: value.copy() for name, value in load_file(file).items()}
    edit(weights)
    aside = folder / "aside"
    save_file(weights, aside, metadata={"format": "pt"})
    file.write_bytes(aside.read_bytes())
    aside.unlink()
    assert file.stat().st_size == size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def model(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "published"))


def packed(path: Path, stores: Path, **options: Any) -> tuple[dict[str, bytes], list[str]]:
    """What is packed of the model, and what was reported."""
    said: list[str] = []
    with closing(open_checkpoint(path)) as source:
        store = cached_store(
            source,
            stores,
            tiler=tile_tensor,
            announce=lambda: said.append("announced"),
            progress=lambda _done, _all, file: said.append(file),
            **options,
        )
        with closing(store):
            return contents(store.path), said


@pytest.mark.parametrize("edit", CHANGES)
def test_packed_copy(model: Path, tmp_path: Path, edit: str) -> None:
    stores = tmp_path / "data" / "stores"
    old, said = packed(model, stores)
    assert said[0] == "announced"
    assert packed(model, stores) == (old, [])
    change(model, CHANGES[edit])
    new, said = packed(model, stores)
    assert "announced" in said
    assert new != old
    assert new == packed(model, tmp_path / "fresh" / "stores")[0]
    assert packed(model, stores) == (new, [])
    assert len([path for path in stores.iterdir() if path.is_dir()]) == 1, "the old copy is gone"


@pytest.mark.skipif(os.name == "nt", reason="refuses a lock of POSIX")
def test_a_file_system_without_locks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is packed there is used."""
    stores = tmp_path / "data" / "stores"
    old, _ = packed(model, stores)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert packed(model, stores) == (old, [])


def test_resumed_packing(model: Path, tmp_path: Path) -> None:
    stores = tmp_path / "data" / "stores"

    with closing(open_checkpoint(model)) as source:
        stop = _Stop(after="layer-0000.safetensors")
        with pytest.raises(CancelledError):
            cached_store(source, stores, tiler=tile_tensor, progress=stop, cancel=stop.cancel)
    change(model, _bad_block)
    new, _ = packed(model, stores)
    assert new == packed(model, tmp_path / "fresh" / "stores")[0]
    assert len([path for path in stores.iterdir() if path.is_dir()]) == 1


def test_quantizing_that_goes_on(model: Path, tmp_path: Path) -> None:
    said = list[str]()
    recipe, out = Recipe("int8-g32", method="rtn"), tmp_path / "out"
    stop = _Stop(after="layer-0000.safetensors")
    with pytest.raises(CancelledError):
        quantize_model(
            model,
            out,
            recipe,
            progress=lambda step: stop(step.done, step.total, step.detail),
            cancel=stop.cancel,
        )
    change(model, _another_expert)
    quantize_model(model, out, recipe, progress=lambda step: said.append(step.detail))
    quantize_model(model, tmp_path / "fresh", recipe)
    assert contents(out) == contents(tmp_path / "fresh")
    assert said.count("published has changed since out was begun: starting anew") == 1


class _Stop:
    """Cancels once a file is finished."""

    def __init__(self, after: str) -> None:
        self.cancel = threading.Event()
        self._after, self._seen = after, False

    def __call__(self, done: int, total: int, file: str) -> None:
        if self._seen and file != self._after:
            self.cancel.set()
        self._seen = self._seen or file == self._after


def _touch(path: Path) -> Path:
    os.utime(path / "model.safetensors")
    return path


def _move(path: Path) -> Path:
    """As by ``cp -a`` to another disk."""
    moved = Path(shutil.copytree(path, path.parent / "elsewhere" / path.name))
    shutil.rmtree(path)
    return moved


def _links(path: Path) -> Path:
    """As the hub's cache has it, moved: links to blobs."""
    blob = path.parent / "blobs" / "abc"
    blob.parent.mkdir()
    (path / "model.safetensors").replace(blob)
    (path / "model.safetensors").symlink_to("../blobs/abc")
    return path


@pytest.mark.parametrize("same", [_touch, _move, _links])
def test_the_same_contents_are_not_packed_again(
    model: Path, tmp_path: Path, same: Callable[[Path], Path]
) -> None:
    stores = tmp_path / "data" / "stores"
    packed(model, stores)
    path = same(model)
    _, said = packed(path, stores)
    assert said
    assert all(line.startswith("comparing ") for line in said)
    assert packed(path, stores)[1] == [], "compared once"
