"""Many strings in one block of bytes: a vocabulary without one object per token.

A Python string takes about 55 bytes besides its text, and a vocabulary with its merges has 300,000.
Knows UTF-8 and offsets, not what the strings mean.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
import numpy.typing as npt

_U64 = struct.Struct("<Q")
_AT_ONCE = 1 << 14  # strings at a time, to bound numpy's temporary arrays


class PackedStrings:
    """An immutable sequence of strings, each decoded when accessed.

    ``data`` holds them one after another in UTF-8 (a lone surrogate as three bytes); string ``i``
    is at ``offsets[i]`` to ``offsets[i + 1]``. Malformed bytes are read as U+FFFD.
    """

    def __init__(self, data: bytes, offsets: npt.NDArray[np.integer]) -> None:
        kind = np.uint32 if len(data) < 1 << 32 else np.uint64
        self.data = data
        self.offsets: npt.NDArray[np.unsignedinteger] = np.ascontiguousarray(offsets, kind)
        self._offsets = self.offsets.data  # returns Python integers, in half the time

    @classmethod
    def of(cls, strings: Iterable[str]) -> PackedStrings:
        """Pack ``strings``."""
        encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
        ends = accumulate(map(len, encoded), initial=0)
        return cls(b"".join(encoded), np.fromiter(ends, np.int64, len(encoded) + 1))

    @classmethod
    def from_prefixed(cls, data: npt.NDArray[np.uint8], count: int) -> PackedStrings:
        """Pack ``count`` strings that fill ``data``, each preceded by its length in eight bytes."""
        ends = array("Q", [0])
        at, view, length_at = 0, data.data, _U64.unpack_from
        for _ in range(count):
            at += 8 + length_at(view, at)[0]
            ends.append(at)
        offsets = np.frombuffer(ends, np.uint64)
        parts = []
        for start in range(0, count, _AT_ONCE):
            stop = min(start + _AT_ONCE, count)
            base = offsets[start]
            text = np.ones(int(offsets[stop] - base), np.bool_)
            for byte in range(8):
                text[offsets[start:stop] - base + np.uint64(byte)] = False
            parts.append(data[int(base) : int(offsets[stop])][text].tobytes())
        return cls(b"".join(parts), offsets - 8 * np.arange(count + 1, dtype=np.uint64))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self.encoded(index).decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def encoded(self, index: int) -> bytes:
        """String ``index``, from 0 on, in UTF-8."""
        return self.data[self._offsets[index] : self._offsets[index + 1]]
