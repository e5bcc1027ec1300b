"""Packs a published model into a store: every tensor keeps its bit width and its values.

It works tile by tile, so that a model larger than memory can be packed. Tokenizer and chat template
are kept as published: a folder's files are copied, a GGUF file's key-value pairs become a GGUF file
without tensors. ``localrt/quantize/quantize.py`` quantizes while packing.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from localrt.models.checkpoints.gguf.metadata import GgufMetadata
from localrt.models.checkpoints.store.checkpoint import GGUF_TEXT_NAME, StoreCheckpoint
from localrt.models.checkpoints.store.manifest import Manifest, Origin, Quantization
from localrt.models.registry import read_config, require_readable
from localrt.models.tensor_source import Checkpoint, RangedFile, TensorInfo, WeightBlock
from localrt.models.units import Unit, list_units, packed_nbytes
from localrt.models.weight_files import POOLING_NAME
from localrt.offload.store.writer import ProgressFunction, StoreWriter, plan_files
from localrt.quant.cpu.ops import fast_tiler
from localrt.quant.formats import F32, Exactness, Format, PackedTensor, unpack
from localrt.quant.formats.tiled import TiledTensor, whole_tiles

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
