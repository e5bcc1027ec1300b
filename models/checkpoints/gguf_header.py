"""The header of a GGUF file (versions 2 and 3, little endian): key-value pairs and tensor ranges.

Follows the GGUF specification of the ggml project. Every count and length is checked against the
file's size before anything is allocated for it, so a damaged or hostile file costs no more memory
than it has bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from localrt.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.gguf_cursor import GgufCursor
from localrt.models.checkpoints.gguf_metadata import GgufMetadata, read_pairs
from localrt.models.checkpoints.ranged_file import RangedFile, describe_start
from localrt.models.checkpoints.stored_tensor import StoredTensor
from localrt.quant.formats import GGML_FORMATS, GGML_UNREAD, Format

__all__ = ["GgufHeader", "read_header"]

_MAGIC = b"GGUF"

_MOST_TENSORS = 1 << 20
_LONGEST_NAME = 256
_LARGEST_ALIGNMENT = 1 << 16


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself. ``tensors`` has ggml's names, in file order."""

    version: int
    alignment: int
    metadata: GgufMetadata
    tensors: Mapping[str, StoredTensor]


def read_header(file: RangedFile) -> GgufHeader:
    """Parse and check the header of ``file``.

    Raises:
        CheckpointError: not a GGUF file, truncated or malformed.
        UnsupportedModelError: an older version, big endian, or a tensor type not read here.
    """
    cursor = GgufCursor(file)
    version = _read_version(cursor)
    tensor_count = cursor.u64("the number of tensors")
    pair_count = cursor.u64("the number of metadata keys")
    metadata = read_pairs(cursor, pair_count)
    cursor.check_count(tensor_count, 32, _MOST_TENSORS, "tensors")
    alignment = _read_alignment(cursor, metadata)
    entries = [_read_tensor(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    return GgufHeader(version, alignment, metadata, _place(cursor, entries, data_start, alignment))


def _read_version(cursor: GgufCursor) -> int:
    path = cursor.file.path
    if cursor.file.size < 4 or cursor.take(4, "the magic") != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: {describe_start(cursor.file)}")
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version & 0xFFFF == 0 and version >> 24 in (2, 3):
        raise UnsupportedModelError(
            f"{path} is a big-endian GGUF file; use the ordinary (little-endian) one"
        )
    raise UnsupportedModelError(
        f"{path} is GGUF version {version}; localrt reads versions 2 and 3: "
        "convert the model again with a current llama.cpp"
    )


def _read_alignment(cursor: GgufCursor, metadata: GgufMetadata) -> int:
    alignment = metadata.integer("general.alignment")
    if alignment is None:
        return 32
    if not 1 <= alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(
            f"general.alignment is {alignment}, not a power of two up to {_LARGEST_ALIGNMENT}"
        )
    return alignment


def _read_tensor(cursor: GgufCursor) -> tuple[TensorInfo, int]:
    """One entry of the tensor table, and its offset in the data section."""
    name = cursor.text(_LONGEST_NAME, "a tensor's name")
    what = f"tensor {name!r}"
    dims = cursor.u32(what)
    if not 1 <= dims <= 4:
        raise cursor.error(f"{what} has {dims} dimensions; 1 to 4 are possible")
    # ggml lists the fastest axis first
    shape = tuple(reversed([cursor.u64(what) for _ in range(dims)]))
    format_ = _format(cursor, cursor.u32(what), what)
    offset = cursor.u64(what)
    if 0 in shape:
        raise cursor.error(f"{what} has no elements: its shape is {shape}")
    if shape[-1] % format_.block:
        raise cursor.error(
            f"{what}: rows of {shape[-1]} do not divide into {format_.name} "
            f"blocks of {format_.block}"
        )
    nbytes = format_.row_bytes(shape[-1])
    for axis in shape[:-1]:
        nbytes *= axis
    return TensorInfo(name, shape, format_, nbytes), offset


def _format(cursor: GgufCursor, number: int, what: str) -> Format:
    # A type that is only placed, not read: another engine may know it.
    found = GGML_FORMATS.get(number) or GGML_UNREAD.get(number)
    if found is None:
        raise UnsupportedModelError(
            f"{cursor.file.path}: {what} is of ggml type {number}, which localrt does not know: "
            "the file is newer than this version, or damaged"
        )
    return found


def _place(
    cursor: GgufCursor, entries: list[tuple[TensorInfo, int]], data_start: int, alignment: int
) -> dict[str, StoredTensor]:
    """Check that the tensors lie in the file, aligned and apart."""
    tensors: dict[str, StoredTensor] = {}
    for info, offset in entries:
        what = f"tensor {info.name!r}"
        if info.name in tensors:
            raise cursor.error(f"{what} appears twice")
        if offset % alignment:
            raise cursor.error(f"{what} begins at {offset}, not a multiple of {alignment}")
        end = data_start + offset + info.nbytes
        if end > cursor.file.size:
            raise cursor.error(
                f"truncated or damaged: {what} ends at byte {end}, the file has "
                f"{cursor.file.size}; download it again"
            )
        tensors[info.name] = StoredTensor(info, cursor.file, data_start + offset)
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.info.nbytes > after.offset:
            raise cursor.error(
                f"tensors {before.info.name!r} and {after.info.name!r} overlap in the file"
            )
    return tensors
