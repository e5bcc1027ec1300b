"""A position moving forward through a GGUF header, with every step checked against the file.

Reads through a window of a bounded size, so that a header costs no memory, however long it is or
claims to be. Knows GGUF's strings and integers, not what they are for.
"""

from __future__ import annotations

import struct

from localrt.errors import CheckpointError
from localrt.models.checkpoints.ranged_file import RangedFile

__all__ = ["GgufCursor"]

_U64 = struct.Struct("<Q")
_WINDOW = 1 << 20


class GgufCursor:
    """Steps over a file from its beginning; ``position`` is the next byte."""

    def __init__(self, file: RangedFile) -> None:
        self.file = file
        self.position = 0
        self._window = b""
        self._window_start = 0

    def error(self, text: str) -> CheckpointError:
        """An error about this file, to be raised."""
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
        """Step over ``count`` bytes, which the file must have."""
        if count > self.file.size - self.position:
            raise self.error(
                f"truncated: {what} ends at byte {self.position + count}, "
                f"the file has {self.file.size}"
            )
        self.position += count

    def skip_strings(self, count: int, what: str) -> None:
        """Step over ``count`` length-prefixed strings: a vocabulary, in tens of milliseconds."""
        length_at = _U64.unpack_from
        while count:
            at = self._reach(8, what)
            window = self._window
            done = 0
            try:
                for done in range(count):  # noqa: B007 - read after the loop
                    at += 8 + length_at(window, at)[0]
                done = count
            except (struct.error, OverflowError):
                pass  # the next length lies outside the window, or outside the file
            count -= done
            self.position = self._window_start
            self.skip(at, what)

    def check_count(self, count: int, smallest: int, most: int, what: str) -> None:
        """Refuse ``count`` things of at least ``smallest`` bytes that the file cannot hold."""
        room = self.file.size - self.position
        if count > most or count * smallest > room:
            raise self.error(f"claims {count} {what}, which {room} bytes cannot hold")

    def _reach(self, count: int, what: str) -> int:
        """Index in the window of the current position, with ``count`` bytes from there."""
        at = self.position - self._window_start
        if not 0 <= at <= len(self._window) - count:
            size = min(max(count, _WINDOW), self.file.size - self.position)
            if size < count:
                raise self.error(f"truncated: the file ends within {what}")
            self._window = self.file.read(self.position, size).tobytes()
            self._window_start = self.position
            at = 0
        return at
