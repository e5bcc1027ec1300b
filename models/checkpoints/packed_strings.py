"""Many strings in one block of bytes: a vocabulary without one object per token.

A Python string takes about 55 bytes besides its text, and a vocabulary with its merges has 300,000.
Knows UTF-8 and offsets, not what the strings mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import accumulate

import numpy as np
import numpy.typing as npt

_U64 = struct.Struct("<Q")
_AT_ONCE = 1 << 14  # strings at a time, to bound numpy's temporary arrays
_WINDOW = 1 << 16  # bytes at a time
_FAR = 1 << 60  # bytes, more than a file can have


def prefixed_offsets(data: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint64]:
    """Return where each of ``count`` strings in ``data`` begins, which its length in eight bytes
    precedes, and the end of the last, which may be outside; fewer if ``data`` ends before.
    """
    parts, at, left, length_at = [np.zeros(1, np.uint64)], 0, count, _U64.unpack_from
    while left and at + 8 <= len(data):
        window = data[at : at + _WINDOW]
        # Most lengths are less than 256, and seven zero bytes are seldom elsewhere. If each place
        # like this is where the one before says, they are the lengths, and all of them.
        zeros = np.flatnonzero(window == 0)
        begins = zeros[:-6][zeros[6:] - zeros[:-6] == 6][:left] - 1
        ends = begins + window[begins] + 8
        if not len(begins) or begins[0] != 0 or np.any(begins[1:] != ends[:-1]):
            here, found = 0, list[int]()
            while len(found) < left and here + 8 <= len(window):
                here += 8 + min(length_at(window.data, here)[0], _FAR)
                found.append(here)
            ends = np.array(found, np.uint64)
        if not len(ends):
            break
        parts.append(ends.astype(np.uint64) + np.uint64(at))
        left -= len(ends)
        at += int(ends[-1])
    return np.concatenate(parts)


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
        offsets = prefixed_offsets(data, count)
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
