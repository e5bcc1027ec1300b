"""One GGUF file (versions 2 and 3, little endian), or the parts of a split one.

Follows the GGUF specification of the ggml project. Opening reads only the header: key-value pairs
and tensors' locations, under ggml's names. Every count and length is checked against the file's
size before anything is allocated for it, so a damaged or hostile file costs no more memory than its
size. ``checkpoint.py`` adds Hugging Face's names and row order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints.gguf.metadata import GgufCursor, GgufMetadata, read_pairs
from localrt.models.tensor_source import RangedFile, StoredTensor, TensorInfo, describe_start
from localrt.models.weight_files import split_part
from localrt.quant.formats import GGML_FORMATS, GGML_UNREAD, Format

_MAGIC = b"GGUF"

_MOST_TENSORS = 1 << 20
_LONGEST_NAME = 256
_LARGEST_ALIGNMENT = 1 << 16
_IK_NUMBERS = range(133, 400)
_IK_NAMES = {
    **{137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K"},
    **{144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS", 156: "IQ3_KS"},
    **{157: "IQ2_KL", 158: "IQ1_KT", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT"},
}


def is_gguf(path: Path) -> bool:
    """Whether this is a file with GGUF's magic number."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


class GgufFile:
    """An open GGUF file; ``tensors`` have ggml's names, in file order.

    Raises:
        CheckpointError: not a GGUF file, truncated or malformed.
        UnsupportedModelError: an older version, big endian, or an unsupported tensor type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = RangedFile(path)
        try:
            cursor = GgufCursor(self._file)
            _check_version(cursor)
            tensor_count = cursor.u64("the number of tensors")
            pair_count = cursor.u64("the number of metadata keys")
            self.metadata: GgufMetadata = read_pairs(cursor, pair_count)
            cursor.check_count(tensor_count, 32, _MOST_TENSORS, "tensors")
            alignment = _read_alignment(cursor, self.metadata)
            entries = [_read_tensor(cursor) for _ in range(tensor_count)]
            self.tensors: Mapping[str, StoredTensor] = _place(cursor, entries, alignment)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_gguf_parts(path: Path) -> tuple[GgufFile, ...]:
    """The file at ``path``, or all parts, first to last, of the split file it belongs to.

    Raises:
        CheckpointError: a part is missing or of another model; or see ``GgufFile``.
    """
    opened = GgufFile(path)
    parts = [opened]
    try:
        count = _split_value(opened, "split.count", 1)
        if count <= 1:
            return (opened,)
        named = split_part(path)
        if named is None or named[2] != count:
            raise CheckpointError(
                f"{path} is one of {count} parts, but is not named like one: restore its name, "
                f"which ends in -00001-of-{count:05d}.gguf or so"
            )
        opened.close()
        parts = []
        for number in range(1, count + 1):
            part = path.with_name(f"{named[0]}-{number:05d}-of-{count:05d}.gguf")
            if not part.exists():
                raise CheckpointError(f"{part} is missing: the model is split into {count} parts")
            parts.append(GgufFile(part))
            if (
                _split_value(parts[-1], "split.no", -1) != number - 1
                or _split_value(parts[-1], "split.count", -1) != count
            ):
                raise CheckpointError(f"{part} is not part {number} of {count}, despite its name")
        expected = _split_value(parts[0], "split.tensors.count", -1)
        found = sum(len(part.tensors) for part in parts)
        if expected not in (-1, found):
            raise CheckpointError(
                f"the parts of {path} hold {found} tensors, {expected} are expected"
            )
    except BaseException:
        for part_file in (opened, *parts):
            part_file.close()
        raise
    return tuple(parts)


def _split_value(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.integer(key)
    return default if value is None else value


def _check_version(cursor: GgufCursor) -> None:
    path = cursor.file.path
    if cursor.file.size < 4 or cursor.take(4, "the magic") != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: {describe_start(cursor.file)}")
    version = cursor.u32("the version")
    if version in (2, 3):
        return
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


def _read_tensor(cursor: GgufCursor) -> StoredTensor:
    """One entry of the tensor table; its offset is in the data section."""
    name = cursor.text(_LONGEST_NAME, "a tensor's name")
    what = f"tensor {name!r:.80}"
    dims = cursor.u32(what)
    if not 1 <= dims <= 4:
        raise cursor.error(f"{what} has {dims} dimensions; 1 to 4 are possible")
    # ggml lists the fastest axis first
    shape = tuple(reversed([cursor.u64(what) for _ in range(dims)]))
    number = cursor.u32(what)
    format_ = _format(cursor, number, what)
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
    return StoredTensor(TensorInfo(name, shape, format_, nbytes), cursor.file, offset)


def _format(cursor: GgufCursor, number: int, what: str) -> Format:
    # A type that localrt cannot read; another engine may support it.
    found = GGML_FORMATS.get(number) or GGML_UNREAD.get(number)
    if found is None and number in _IK_NUMBERS:
        plain = _IK_NAMES.get(number - 200)  # four rows are interleaved
        name = f"{plain}_R4" if plain else _IK_NAMES.get(number, f"of type {number}")
        raise UnsupportedModelError(
            f"{cursor.file.path}: {what} is {name}, which is a type of ik_llama.cpp that localrt "
            "cannot read: take a file in llama.cpp's types, such as Q4_K_M"
        )
    if found is None:
        raise UnsupportedModelError(
            f"{cursor.file.path}: {what} is of ggml type {number}, which localrt does not know: "
            "the file is newer than this version, or damaged"
        )
    return found


def _place(
    cursor: GgufCursor, entries: list[StoredTensor], alignment: int
) -> dict[str, StoredTensor]:
    """Check that tensors are after the header, aligned, within the file, and do not overlap."""
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
        info, offset = entry.info, entry.offset
        what = f"tensor {info.name!r:.80}"
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
        tensors[info.name] = replace(entry, offset=data_start + offset)
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.info.nbytes > after.offset:
            raise cursor.error(
                f"tensors {before.info.name!r:.80} and {after.info.name!r:.80} overlap in the file"
            )
    return tensors
