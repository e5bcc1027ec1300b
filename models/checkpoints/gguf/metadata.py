"""GGUF's key-value pairs: located when the file is opened, decoded when accessed.

A vocabulary has hundreds of thousands of strings: opening a file skips them. ``GgufCursor`` moves
through a header with every step checked against the file, and reads through a buffer of bounded
size, so that a huge or damaged header costs no memory. Knows the types of the GGUF specification,
not the meaning of any key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.packed_strings import PackedStrings, prefixed_offsets
from localrt.models.tensor_source import RangedFile

_U64 = struct.Struct("<Q")
_WINDOW = 1 << 20


class GgufCursor:
    """Reads a file's header from its beginning; ``position`` is the next byte."""

    def __init__(self, file: RangedFile) -> None:
        self.file = file
        self.position = 0
        self._window = b""
        self._window_start = 0

    def error(self, text: str) -> CheckpointError:
        """Return an error about this file, for the caller to raise."""
        return CheckpointError(f"{self.file.path}: {text}")

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes."""
        at = self._reach(count, what)
        self.position += count
        return self._window[at : at + count]

    def u32(self, what: str) -> int:
        """The next four bytes as a number."""
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        """The next eight bytes as a number."""
        return int.from_bytes(self.take(8, what), "little")

    def text(self, longest: int, what: str) -> str:
        """A length-prefixed UTF-8 string of at most ``longest`` bytes."""
        length = self.u64(what)
        if length > longest:
            raise self.error(f"{what} is {length} bytes long, more than {longest}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def skip(self, count: int, what: str) -> None:
        """Skip ``count`` bytes, which the file must have."""
        if count > self.file.size - self.position:
            raise self.error(
                f"truncated: {what} ends at byte {self.position + count}, "
                f"the file has {self.file.size}"
            )
        self.position += count

    def skip_strings(self, count: int, what: str) -> None:
        """Skip ``count`` length-prefixed strings."""
        while count:
            at = self._reach(8, what)
            ends = prefixed_offsets(np.frombuffer(self._window, np.uint8)[at:], count)
            count -= len(ends) - 1
            self.skip(int(ends[-1]), what)

    def check_count(self, count: int, smallest: int, most: int, what: str) -> None:
        """Raise if the file cannot hold ``count`` items of at least ``smallest`` bytes."""
        room = self.file.size - self.position
        if count > most or count * smallest > room:
            raise self.error(f"claims {count} {what}, which {room} bytes cannot hold")

    def _reach(self, count: int, what: str) -> int:
        """The current position's index in the buffer, which has ``count`` bytes from there on."""
        at = self.position - self._window_start
        if not 0 <= at <= len(self._window) - count:
            size = min(max(count, _WINDOW), self.file.size - self.position)
            if size < count:
                raise self.error(f"truncated: the file ends within {what}")
            self._window = self.file.read(self.position, size).tobytes()
            self._window_start = self.position
            at = 0
        return at


_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, str] = MappingProxyType(
    {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        _BOOL: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }
)
_SIZES: Mapping[int, int] = MappingProxyType(
    {kind: np.dtype(code).itemsize for kind, code in _NUMBERS.items()}
)
_U32 = struct.Struct("<I")
_FIRST_PAIR = 24  # offset after magic, version, and the counts of tensors and pairs
_MOST_PAIRS = 1 << 16
_MOST_STRINGS = 1 << 24  # per array; the largest vocabularies have about 2^19 merges
_LONGEST_KEY = (1 << 16) - 1
_DEEPEST_ARRAY = 4


@dataclass(frozen=True, slots=True)
class _Value:
    """The location of a value; ``count`` and ``element`` are an array's length and type."""

    kind: int
    start: int
    stop: int
    count: int
    element: int = -1


class GgufMetadata(Mapping[str, Any]):
    """Key-value pairs as plain Python values, decoded at each access and not cached.

    Arrays are lists, arrays of strings ``PackedStrings``; ``numbers`` returns an array of numbers.
    Malformed UTF-8 in text becomes U+FFFD. Decoding a vocabulary takes tens of milliseconds: keep
    the result instead of reading it again.
    """

    def __init__(self, file: RangedFile, values: Mapping[str, _Value]) -> None:
        self.path = file.path
        self._file = file
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if value.kind == _ARRAY and value.element == _STRING:
            return PackedStrings.from_prefixed(self._elements(value), value.count)
        data = self._file.read(value.start, value.stop - value.start).tobytes()
        return _decode(data, 0, value.kind)[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def alone(self) -> bytes:
        """The contents of a GGUF file with these pairs and no tensors."""
        end = max((value.stop for value in self._values.values()), default=_FIRST_PAIR)
        data = self._file.read(0, end).tobytes()
        return data[:8] + bytes(8) + data[16:]

    def digest(self, key: str) -> bytes:
        """The SHA-256 of a value's bytes."""
        value = self._values[key]
        return sha256(self._file.read(value.start, value.stop - value.start).tobytes()).digest()

    def numbers(self, key: str) -> npt.NDArray[Any] | None:
        """The elements of the array under ``key`` in the file's own type; None without one.

        Raises:
            CheckpointError: the value is not an array of numbers.
        """
        if key not in self._values:
            return None
        value = self._values[key]
        if value.kind != _ARRAY or value.element not in _NUMBERS:
            raise CheckpointError(f"{self.path}: metadata key {key!r} is not a list of numbers")
        return self._elements(value).view(_NUMBERS[value.element])

    def count(self, key: str) -> int:
        """Elements of an array, without decoding it; 1 for any other value."""
        return self._values[key].count

    def is_array(self, key: str) -> bool:
        """Whether the value is an array."""
        return self._values[key].kind == _ARRAY

    def number(self, key: str) -> int | float | None:
        """The number under ``key``, or None without one.

        Raises:
            CheckpointError: the value is of another type.
        """
        value: int | float | None = self._typed(key, _SIZES.keys() - {_BOOL}, "a number")
        return value

    def integer(self, key: str) -> int | None:
        """Like ``number``, but the value must be an integer."""
        value: int | None = self._typed(key, _SIZES.keys() - {_BOOL}, "a number")
        if isinstance(value, float):
            raise CheckpointError(f"{self.path}: metadata key {key!r} is not a whole number")
        return value

    def text(self, key: str) -> str | None:
        """The string under ``key``, or None without one; raises like ``number``."""
        value: str | None = self._typed(key, {_STRING}, "text")
        return value

    def flag(self, key: str) -> bool | None:
        """The truth value under ``key``, or None without one; raises like ``number``."""
        value: bool | None = self._typed(key, {_BOOL}, "true or false")
        return value

    def _typed(self, key: str, kinds: Set[int], what: str) -> Any:
        if key not in self._values:
            return None
        if self._values[key].kind not in kinds:
            raise CheckpointError(f"{self.path}: metadata key {key!r} is not {what}")
        return self[key]

    def _elements(self, value: _Value) -> npt.NDArray[np.uint8]:
        """The bytes of an array after its type and count."""
        start = value.start + 12
        return self._file.read(start, value.stop - start)


def read_pairs(cursor: GgufCursor, count: int) -> GgufMetadata:
    """Locate ``count`` pairs from the cursor's position.

    Raises:
        CheckpointError: truncated or malformed, or more than the file can hold.
    """
    cursor.check_count(count, 13, _MOST_PAIRS, "metadata keys")
    values: dict[str, _Value] = {}
    for _ in range(count):
        key = cursor.text(_LONGEST_KEY, "a metadata key")
        shown = f"metadata key {key[:80]!r}"
        if key in values:
            raise cursor.error(f"{shown} appears twice")
        values[key] = _locate(cursor, cursor.u32(shown), shown)
    return GgufMetadata(cursor.file, values)


def _locate(cursor: GgufCursor, kind: int, what: str, depth: int = 0) -> _Value:
    """Check and skip one value of the type ``kind``."""
    start = cursor.position
    count, element = 1, -1
    if kind in _SIZES:
        cursor.skip(_SIZES[kind], what)
    elif kind == _STRING:
        cursor.skip_strings(1, what)
    elif kind == _ARRAY:
        element = cursor.u32(what)
        count = cursor.u64(what)
        if element in _SIZES:
            cursor.skip(count * _SIZES[element], what)
        elif element == _STRING:
            cursor.check_count(count, 8, _MOST_STRINGS, f"strings in {what}")
            cursor.skip_strings(count, what)
        elif element == _ARRAY and depth < _DEEPEST_ARRAY:
            cursor.check_count(count, 12, _MOST_PAIRS, f"arrays in {what}")
            for _ in range(count):
                _locate(cursor, _ARRAY, what, depth + 1)
        elif element == _ARRAY:
            raise cursor.error(f"{what} nests arrays deeper than {_DEEPEST_ARRAY}")
        else:
            raise cursor.error(f"{what} is an array of unknown type {element}")
    else:
        raise cursor.error(f"{what} has unknown type {kind}")
    return _Value(kind, start, cursor.position, count, element)


def _decode(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """Decode the value at ``at``, which ``_locate`` has checked; returns it and its end."""
    if kind in _SIZES:
        stop = at + _SIZES[kind]
        return np.frombuffer(data[at:stop], _NUMBERS[kind])[0].item(), stop
    if kind == _STRING:
        stop = at + 8 + _U64.unpack_from(data, at)[0]
        return data[at + 8 : stop].decode(errors="replace"), stop
    element = _U32.unpack_from(data, at)[0]
    count = _U64.unpack_from(data, at + 4)[0]
    at += 12
    if element in _SIZES:
        stop = at + count * _SIZES[element]
        return np.frombuffer(data[at:stop], _NUMBERS[element]).tolist(), stop
    items: list[Any] = []
    for _ in range(count):
        item, at = _decode(data, at, element)
        items.append(item)
    return items, at
