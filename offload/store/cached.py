"""A model's packed form, made once and kept: what streaming reads in the place of a GGUF file.

Stores lie in one folder, each named after its model and a fingerprint of it, so that another file
of the same name gets another store. Two processes that want the same one make it once.
"""

from __future__ import annotations

import gc
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localrt.common.errors import (
    CancelledError,
    CheckpointError,
    StorageError,
    UnsupportedModelError,
)
from localrt.common.files import private_folder
from localrt.models.checkpoints.base import Checkpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import MANIFEST_NAME
from localrt.models.tokenizers.free_memory import return_free_memory
from localrt.offload.store.pack import Tiler, fingerprint, pack_store
from localrt.offload.store.writer import ProgressFunction

_POLL_S = 0.1


def store_folder(source: Checkpoint, stores: Path) -> Path:
    """Where the packed form of ``source`` lies, made or not."""
    stem = source.path.stem if source.path.is_file() else source.path.name
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:80] or "model"
    return stores / f"{slug}-{fingerprint(source)[:12]}"


def cached_store(
    source: Checkpoint,
    stores: Path,
    *,
    tiler: Tiler | None = None,
    progress: ProgressFunction | None = None,
    cancel: threading.Event | None = None,
) -> StoreCheckpoint:
    """``source`` itself if it is a store, else its packed form in ``stores``, made if need be.

    Raises:
        StorageError: ``stores`` cannot be written, or its disk is full.
        CheckpointError, UnsupportedModelError: ``source`` cannot be packed.
        CancelledError: ``cancel`` was set; the next call goes on where this one stopped.
    """
    if isinstance(source, StoreCheckpoint):
        return source
    folder = store_folder(source, stores)
    try:
        private_folder(stores.parent)  # conversations lie beside the stores
        stores.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{stores} cannot be made: {error.strerror}") from error
    with _alone(folder.with_name(folder.name + ".lock"), cancel):
        store = _opened(folder)
        if store is None:
            shutil.rmtree(folder, ignore_errors=True)
            pack_store(source, folder, tiler=tiler, progress=progress, cancel=cancel)
            store = StoreCheckpoint(folder, verify=False)  # the bytes were summed a moment ago
            gc.collect()  # what packing made
    return_free_memory()  # what that or reading the manifest took is wanted for the weights
    return store


def _opened(folder: Path) -> StoreCheckpoint | None:
    """What lies there; None where that was discarded, is damaged or of another version."""
    if not (folder / MANIFEST_NAME).is_file():
        return None
    try:
        return StoreCheckpoint(folder)
    except (CheckpointError, UnsupportedModelError):
        return None


def discard_store(folder: Path) -> None:
    """Make the packed form in ``folder`` again when it is next asked for."""
    (folder / MANIFEST_NAME).unlink(missing_ok=True)


@contextmanager
def _alone(path: Path, cancel: threading.Event | None) -> Iterator[None]:
    """Hold a lock among processes, where the system has one; another's packing may take minutes."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        file = path.open("w")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancel is not None and cancel.is_set():
                    raise CancelledError("packing was cancelled") from None
                time.sleep(_POLL_S)
            except OSError:  # a network file system without locks: the writer has its own
                break
        yield
