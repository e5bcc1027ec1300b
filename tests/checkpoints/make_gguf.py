"""Small GGUF files for tests: sound ones through gguf's own writer, damaged ones byte by byte."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize

Array = npt.NDArray[Any]

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)


def packed_rows(type_name: str, rows: int, columns: int, seed: int = 0) -> Array:
    """Random packed bytes (rows, row_bytes) of a ggml type: any bytes are some weight."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name.upper()]]
    shape = (rows, columns // block * size)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[Array, str]],
    *,
    tensors_per_part: int = 0,
) -> list[Path]:
    """Write a GGUF file, or its parts, and return their paths.

    A tensor is ``(array, type name)``: float values to be converted, integers, or ``uint8`` bytes
    that are packed already. Metadata values are plain: int, float, bool, str, bytes or lists of
    them, or arrays of integers.
    """
    writer = gguf.GGUFWriter(str(path), arch, split_max_tensors=tensors_per_part)
    for key, value in metadata.items():
        if isinstance(value, np.ndarray):
            kind = gguf.GGUFValueType[value.dtype.name.upper()]
            pairs = gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, value.tolist(), pairs, sub_type=kind)
        elif isinstance(value, (list, tuple)):
            writer.add_array(key, value)
        elif isinstance(value, bytes):
            writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
        elif type(value) is int and value >= 0:  # as llama.cpp's converter writes counts
            writer.add_key_value(key, value, gguf.GGUFValueType.UINT32)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (array, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name.upper()]
        if array.dtype.kind == "f":
            array = quantize(np.ascontiguousarray(array, np.float32), kind)
        writer.add_tensor(name, array, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    if path.exists():
        return [path]
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def in_pairs(rows: Array, heads: int) -> Array:
    """Query or key rows of a llama-like file: llama.cpp's converter makes pairs of halves."""
    head_rows = len(rows) // heads
    halves = rows.reshape(heads, 2, head_rows // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def string(text: str | bytes) -> bytes:
    """A GGUF string: length and bytes."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def array(element: int, count: int, body: bytes) -> bytes:
    """A GGUF array's value."""
    return struct.pack("<IQ", element, count) + body


def tensor_entry(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """A line of the tensor table; ``dims`` fastest first, as in the file."""
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return string(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def raw_gguf(
    pairs: Sequence[tuple[str, int, bytes]] = (("general.architecture", STRING, string("llama")),),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF file put together by hand, nothing checked."""
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    body = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count)
    for key, kind, value in pairs:
        body += string(key) + struct.pack("<I", kind) + value
    body += b"".join(tensors)
    return body + bytes(-len(body) % alignment) + data
