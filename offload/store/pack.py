"""Packs a published model into a store, and keeps the packed copies that streaming reads.

Every tensor keeps its bit width and its values. Work is done tile by tile, so that a model larger
than memory can be packed. Tokenizer and chat template are kept as published: a folder's files are
copied, a GGUF file's key-value pairs become a GGUF file without tensors.
``localrt/quantize/quantize.py`` quantizes while packing.

Packed copies are in one folder, each named after its model and the model's fingerprint, so that
another file of the same name gets another store. Two processes that need the same store make it
once. If the model's files have changed since (or were moved or copied), each unit is compared with
them, and if one differs, the store is made anew. A damaged unit is made again from the model and
must have the manifest's SHA-256.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

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
from localrt.common.files import locked, make_folder, private_folder, remove_folder, write_text
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.gguf.metadata import GgufMetadata
from localrt.models.checkpoints.store.checkpoint import GGUF_TEXT_NAME, StoreCheckpoint
from localrt.models.checkpoints.store.manifest import (
    Manifest,
    Origin,
    Quantization,
    StoredUnit,
    read_manifest,
)
from localrt.models.registry import read_config, require_readable
from localrt.models.tensor_source import Checkpoint, RangedFile, TensorInfo, WeightBlock
from localrt.models.units import Unit, list_units, packed_nbytes
from localrt.models.weight_files import MANIFEST_NAME, PARTIAL_NAME, POOLING_NAME
from localrt.offload.store.writer import ProgressFunction, StoreWriter, partial_folder, plan_files
from localrt.quant.cpu.ops import fast_tiler
from localrt.quant.formats import F32, Exactness, Format, PackedTensor, unpack
from localrt.quant.formats.packed import Bytes
from localrt.quant.formats.tiled import TiledTensor, whole_tiles
from localrt.system import return_free_memory

_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
    "chat_templates/*.jinja",
    POOLING_NAME,
)


def text_files(checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files that go into a store of ``checkpoint``.

    Raises:
        CheckpointError: a file cannot be read.
    """
    metadata = checkpoint.metadata
    if isinstance(metadata, GgufMetadata):
        yield GGUF_TEXT_NAME, metadata.alone()
        return
    for pattern in _TEXT_FILES:
        for path in sorted(checkpoint.path.glob(pattern)):
            yield path.relative_to(checkpoint.path).as_posix(), _contents(path)


def _contents(path: Path) -> bytes:
    with closing(RangedFile(path)) as file:
        return file.read(0, file.size).tobytes()


Tiler: TypeAlias = Callable[[PackedTensor], TiledTensor]
"""Rows of a matrix to tiles. Only the last rows of a matrix may be no whole tile."""


def pack_store(
    source: Checkpoint,
    out: Path,
    *,
    tiler: Tiler | None = None,
    progress: ProgressFunction | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Write ``source`` to the folder ``out`` in its present formats; returns ``out``.

    The next call continues an interrupted one. ``tiler`` defaults to the fastest here, and
    ``progress`` gets bytes done, all bytes, and the current file.

    Raises:
        OptionError: ``out`` exists already.
        CheckpointError: ``source`` is damaged.
        UnsupportedModelError: localrt does not know the architecture or the weights.
        StorageError: the disk is full or fails.
        CancelledError: ``cancel`` was set.
    """
    require_readable(source)
    config = read_config(source)
    tiler = tiler or fast_tiler()
    infos = stored_infos(source.tensors)
    units = list_units(infos, config)
    manifest = describe_source(
        source, name=None, revision=None, format=main_format(units, infos), exactness="exact"
    )
    origin = replace(manifest.source, path=str(source.path.absolute()))
    manifest = replace(manifest, source=origin)
    files = plan_files(units, infos)
    with StoreWriter(out, manifest, files, progress=progress, cancel=cancel) as writer:
        for text_name, data in text_files(source):
            writer.write_bytes(text_name, data)
        for file in writer.pending:
            writer.write(file, lambda tensor: stored_pieces(source, tensor, tiler))
        return writer.finish()


def describe_source(
    source: Checkpoint,
    *,
    name: str | None,
    revision: str | None,
    format: str,
    exactness: Exactness,
    quantization: Quantization | None = None,
) -> Manifest:
    """The manifest of a store of ``source``, without units yet."""
    return Manifest(
        kind="gguf" if source.kind == "gguf" else "safetensors",
        architecture=source.architecture,
        config=source.config,
        generation_config=source.generation_config,
        format=format,
        exactness=exactness,
        source=Origin(name or source.path.name, fingerprint(source), revision, stamp=source.stamp),
        quantization=quantization,
    )


def stored_infos(
    tensors: Mapping[str, TensorInfo], formats: Mapping[str, Format] | None = None
) -> dict[str, TensorInfo]:
    """``tensors`` as in a store: matrices in new or unchanged formats, vectors in f32."""
    infos: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        format_ = F32 if len(info.shape) == 1 else (formats or {}).get(name, info.format)
        packed = replace(info, format=format_)
        infos[name] = replace(packed, nbytes=packed_nbytes(packed))
    return infos


def main_format(units: Iterable[Unit], infos: Mapping[str, TensorInfo]) -> str:
    """The format of most bytes of the layers' matrices."""
    bytes_of: Counter[str] = Counter()
    for unit in units:
        for name in unit.tensors if unit.layer is not None else ():
            if len(infos[name].shape) == 2:
                bytes_of[infos[name].format.name] += infos[name].nbytes
    return bytes_of.most_common(1)[0][0]


def fingerprint(source: Checkpoint) -> str:
    """A hash of one row of each tensor, of a layer's first expert only, to tell models apart."""
    digest = hashlib.sha256()
    if isinstance(source, StoreCheckpoint):
        digest.update("".join(unit.sha256 for unit in source.manifest.units).encode())
        return digest.hexdigest()
    digest.update(json.dumps([source.config, source.generation_config]).encode())
    for name, info in source.tensors.items():
        digest.update(f"{name} {info.format.name} {info.shape}".encode())
        if ".experts." not in name or ".experts.0." in name:
            digest.update(source.read(name, 0, 1).data.tobytes())
    return digest.hexdigest()


def stored_pieces(checkpoint: Checkpoint, name: str, tiler: Tiler) -> Iterator[WeightBlock]:
    """A tensor in its own format: a vector as float32 values, a matrix as tiles."""
    if len(checkpoint.tensors[name].shape) == 1:
        values = unpack(checkpoint.read(name)).reshape(-1)
        yield PackedTensor(name, F32, values.shape, values.view(np.uint8).reshape(1, -1))
    else:
        yield from tiled_pieces(checkpoint.blocks(name), tiler)


def tiled_pieces(blocks: Iterable[WeightBlock], tiler: Tiler) -> Iterator[TiledTensor]:
    """The blocks of one matrix in order, as tiles."""
    for piece in whole_tiles(blocks):
        yield piece if isinstance(piece, TiledTensor) else tiler(piece)


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
    with locked(folder, math.inf, cancel):  # packing may take minutes
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
