"""The header of a safetensors file: the location of each tensor.

Follows the format's specification: 8 bytes of length, that much JSON, then the data without gaps.
Everything is checked against the file's size before it is used. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.tensor_source import RangedFile, StoredTensor, TensorInfo, describe_start
from localrt.quant.formats import BF16, F8_E4M3, F16, F32, Format

RAW_BYTES = Format("u8", 1, 1)
INT8 = Format("i8", 1, 1)
INT32 = Format("i32", 1, 4)
INT64 = Format("i64", 1, 8)
E5M2 = Format("f8_e5m2", 1, 1)
EXPONENTS = Format("f8_e8m0", 1, 1)

_RAW = (RAW_BYTES, INT8, INT32, INT64, E5M2, EXPONENTS)
_FORMATS: Mapping[str, Format] = MappingProxyType(
    {format_.name.upper(): format_ for format_ in (F32, F16, BF16, F8_E4M3, *_RAW)}
)
_LONGEST_HEADER = 100_000_000  # the specification's limit
_LONGEST_JSON = 64 << 20
_MOST_DIMENSIONS = 8


def is_raw(format_: Format) -> bool:
    """Whether a type holds parts of packed weights, which need other tensors to be decoded."""
    return format_ in _RAW


def read_header(file: RangedFile) -> dict[str, StoredTensor | str]:
    """Every tensor of ``file`` by name, in file order.

    A tensor of an unsupported type is returned as the type's name; the caller decides whether that
    is an error (see ``unread_type_error``).

    Raises:
        CheckpointError: not a safetensors file, truncated or malformed.
    """
    room = file.size - 8
    length = int.from_bytes(file.read(0, 8).tobytes(), "little") if room >= 0 else -1
    if not 2 <= length <= min(room, _LONGEST_HEADER):
        raise CheckpointError(f"{file.path} is not a safetensors file: {describe_start(file)}")
    header = _parse(file.read(8, length).tobytes(), file.path)
    header.pop("__metadata__", None)
    data_start = 8 + length
    tensors: dict[str, StoredTensor | str] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        kind, shape, begin, end = _entry(file, name, entry)
        ranges.append((begin, end, name))
        if kind not in _FORMATS:
            tensors[name] = kind
            continue
        info = TensorInfo(name, shape, _FORMATS[kind], end - begin)
        if math.prod(shape) * info.format.block_bytes != info.nbytes:
            raise CheckpointError(
                f"{file.path}: tensor {name!r:.80} is {shape} in {kind}, "
                f"but has {info.nbytes} bytes"
            )
        tensors[name] = StoredTensor(info, file, data_start + begin)
    _check_ranges(file, ranges, file.size - data_start)
    return tensors


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file.

    Raises:
        CheckpointError: missing, larger than any config, or not a JSON object.
    """
    file = RangedFile(path)
    try:
        if file.size > _LONGEST_JSON:
            raise CheckpointError(f"{path} has {file.size} bytes, too many for a config")
        return _parse(file.read(0, file.size).tobytes(), path)
    finally:
        file.close()


def _parse(data: bytes, path: Path) -> dict[str, object]:
    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CheckpointError(f"{path} is malformed: a name appears twice in its JSON")
        return found

    try:
        value = json.loads(data, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} is malformed: {reason[:120]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is malformed: its JSON is not an object")
    return value


def _entry(file: RangedFile, name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """Return the type, shape and byte range of a header's entry."""
    wrong = CheckpointError(f"{file.path}: the header's entry for {name[:80]!r} is malformed")
    if not isinstance(entry, dict):
        raise wrong
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(kind, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise wrong
    if len(shape) > _MOST_DIMENSIONS or len(offsets) != 2:
        raise wrong
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in (*shape, *offsets)):
        raise wrong
    return kind, tuple(shape), offsets[0], offsets[1]


def _check_ranges(file: RangedFile, ranges: list[tuple[int, int, str]], room: int) -> None:
    """Check that tensors cover the data exactly, without gaps or overlaps."""
    position = 0
    for begin, end, name in sorted(ranges):
        if end < begin or begin != position:
            raise CheckpointError(
                f"{file.path}: tensor {name[:80]!r} has bytes {begin} to {end}, "
                f"which should begin at {position}"
            )
        position = end
    if position > room:
        raise CheckpointError(
            f"{file.path} is truncated: it has {room} bytes of data and should have {position}; "
            "download it again"
        )
    if position < room:
        raise CheckpointError(f"{file.path} is malformed: {room - position} bytes after the data")


def unread_type_error(path: Path, name: str, kind: str) -> UnsupportedModelError:
    """The error for a tensor of an unsupported type."""
    return UnsupportedModelError(
        f"{path}: tensor {name[:80]!r} is {kind[:20]}, which localrt cannot read in safetensors; "
        "use a model in F32, F16 or BF16, or a GGUF file"
    )
