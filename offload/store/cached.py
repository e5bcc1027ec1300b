"""Makes and keeps a model's packed form, which streaming reads instead of a GGUF file.

Stores are in one folder, each named after its model and the model's fingerprint, so that another
file of the same name gets another store. Two processes that need the same store make it once. If
the model's files have changed since (or were moved or copied), each unit is compared with them, and
if one differs, the store is made anew. A damaged unit is made again from the model and must have
the manifest's SHA-256.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from localrt.common.errors import (
    CancelledError,
    CheckpointError,
    LocalrtError,
    StorageError,
    UnsupportedModelError,
    disk_errors,
    reason_of,
)
from localrt.common.files import make_folder, private_folder, remove_folder, write_text
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit, read_manifest
from localrt.models.tensor_source import Checkpoint
from localrt.models.weight_files import MANIFEST_NAME, PARTIAL_NAME
from localrt.offload.store.pack import Tiler, fingerprint, pack_store, stored_pieces
from localrt.offload.store.writer import ProgressFunction, partial_folder
from localrt.quant.cpu.ops import fast_tiler
from localrt.quant.formats.packed import Bytes
from localrt.system import return_free_memory

_POLL_S = 0.1


def store_folder(source: Checkpoint, stores: Path) -> Path:
    """The folder for the packed form of ``source``, whether it exists or not."""
    stem = source.path.stem if source.path.is_file() else source.path.name
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:80] or "model"
    return stores / f"{slug}-{fingerprint(source)[:12]}"


@disk_errors("the packed copy")
def cached_store(
    source: Checkpoint,
    stores: Path,
    *,
    tiler: Tiler | None = None,
    announce: Callable[[], None] = lambda: None,
    progress: ProgressFunction | None = None,
    cancel: threading.Event | None = None,
) -> StoreCheckpoint:
    """``source`` itself if it is a store, else its packed form in ``stores``, made if necessary,
    after ``announce``. Stores of earlier versions of ``source`` are deleted.

    Raises:
        StorageError: ``stores`` cannot be written, or its disk is full.
        CheckpointError, UnsupportedModelError: ``source`` cannot be packed.
        CancelledError: ``cancel`` was set; the next call continues where this one stopped.
    """
    if isinstance(source, StoreCheckpoint):
        return source
    folder = store_folder(source, stores)
    try:
        private_folder(stores.parent)  # conversations lie beside the stores
        make_folder(stores)
    except OSError as error:
        raise StorageError(f"{stores} cannot be made: {reason_of(error)}") from error
    with _alone(folder.with_name(folder.name + ".lock"), cancel):
        store = _opened(folder)
        if store is not None and store.manifest.source.stamp != source.stamp:
            store = _renewed(store, source, progress, cancel)
        if store is None:
            announce()
            for old in (folder, *_superseded(source, folder)):
                with suppress(OSError):
                    remove_folder(old, last=(MANIFEST_NAME, PARTIAL_NAME))
            pack_store(source, folder, tiler=tiler, progress=progress, cancel=cancel)
            store = StoreCheckpoint(folder, verify=False)  # the sums were just made
            gc.collect()  # packing's garbage
    return_free_memory()  # free the memory that packing or the manifest took, for the weights
    return store


def _opened(folder: Path) -> StoreCheckpoint | None:
    """Open the store there; None if it was discarded, is damaged or of another version."""
    if not (folder / MANIFEST_NAME).is_file():
        return None
    try:
        return StoreCheckpoint(folder)
    except (CheckpointError, UnsupportedModelError):
        return None


def _renewed(
    store: StoreCheckpoint,
    source: Checkpoint,
    progress: ProgressFunction | None,
    cancel: threading.Event | None,
) -> StoreCheckpoint | None:
    """The store, newly stamped, if its units still equal those of ``source``; else None."""
    manifest, done = store.manifest, 0
    total = sum(unit.nbytes for unit in manifest.units)
    store.close()
    for unit in manifest.units:
        if cancel is not None and cancel.is_set():
            raise CancelledError("comparing the packed copy with the model was cancelled")
        if progress is not None:
            progress(done, total, f"comparing {unit.file} with the model")
        data = np.empty(unit.nbytes, np.uint8)
        if not _fill(source, unit, data):
            return None
        done += unit.nbytes
    path = str(source.path.absolute())
    manifest = replace(manifest, source=replace(manifest.source, path=path, stamp=source.stamp))
    with suppress(StorageError):  # then it is compared again the next time
        write_text(store.path / MANIFEST_NAME, manifest.to_json())
    return StoreCheckpoint(store.path)


def _superseded(source: Checkpoint, folder: Path) -> Iterator[Path]:
    """Stores of earlier versions of the same file or folder, finished or not."""
    others = {found.parent for found in folder.parent.glob("*/manifest*.json")}
    for other in others - {folder, partial_folder(folder)}:
        for name in (MANIFEST_NAME, PARTIAL_NAME):
            with suppress(LocalrtError):
                if read_manifest(other / name).source.path == str(source.path.absolute()):
                    yield other


def discard_store(folder: Path) -> None:
    """Have the packed form in ``folder`` made again when it is next needed."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)


@contextmanager
def _alone(path: Path, cancel: threading.Event | None) -> Iterator[None]:
    """Hold a lock between processes, where the file system has locks: packing may take minutes."""
    from filelock import FileLock, Timeout  # it imports asyncio, and most runs pack nothing

    lock = FileLock(path, timeout=0)
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            if cancel is not None and cancel.is_set():
                raise CancelledError("packing was cancelled") from None
            time.sleep(_POLL_S)
        except (OSError, NotImplementedError) as error:
            if getattr(error, "filename", None) is None:  # a file system without locks:
                break  # the writer's own lock must do
            raise StorageError(f"{path} cannot be written: {reason_of(error)}") from error
    try:
        yield
    finally:
        lock.release()


def mend_unit(model: Path, store: Path, unit: StoredUnit, data: Bytes) -> None:
    """Fill ``data`` (bytes of the unit,) from the model at ``model``, and write it to ``store``.

    Raises:
        CheckpointError: the model has changed or is damaged, or the store cannot be written;
            if it can be removed, it is packed again when next needed.
    """
    damaged = f"{store}: unit {unit.name} in {unit.file} is damaged"
    try:
        with closing(open_checkpoint(model)) as source:
            if not _fill(source, unit, data):
                raise CheckpointError("it is not the model that was packed")
        _write(store / unit.file, unit.offset, data)
    except (LocalrtError, OSError) as error:
        with suppress(OSError):
            discard_store(store)
        raise CheckpointError(
            f"{damaged}, and cannot be made again from {model} ({reason_of(error)}): load the "
            "model again, which packs it anew"
        ) from error


def _write(path: Path, offset: int, data: Bytes) -> None:
    with path.open("r+b") as stream:
        status = os.fstat(stream.fileno())
        stream.seek(offset)
        stream.write(data.data)
        stream.flush()
        # Keep the modification time: the bytes are what they were.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(stream.fileno())


def _fill(source: Checkpoint, unit: StoredUnit, data: Bytes) -> bool:
    """Fill ``data`` (bytes of the unit,) from the model; return whether it is what was packed."""
    data[:] = 0  # padding between tensors and after the last
    tiler = fast_tiler()
    for tensor in unit.tensors:
        out = data[tensor.offset : tensor.offset + tensor.nbytes]
        at = -tensor.row * tensor.format.row_bytes(tensor.shape[-1]) if tensor.row else 0
        for piece in stored_pieces(source, tensor.name, tiler):
            if piece.scale != tensor.scale:
                return False
            rows = piece.data.reshape(-1).view(np.uint8)
            part = rows[max(0, -at) : max(0, len(out) - at)]
            out[max(0, at) : max(0, at) + len(part)] = part
            at += len(rows)
            if at >= len(out):
                break
    return unit.is_whole(data)
