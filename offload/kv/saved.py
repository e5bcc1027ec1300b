"""One sequence's keys and values saved in blocks: in a folder, or in RAM.

In a folder, ``blocks.bin`` holds blocks of 256 tokens one after another, ``tokens.json`` their
tokens, each block's CRC-32 and its own. Continuing a sequence rewrites only blocks that changed.
Meanwhile there is no description, so what a crash leaves is not taken for what was there before.
States of recurrent layers are in one file for each number of tokens, ``state-N.bin``. In RAM the
same blocks are kept without sums. This module knows bytes, not their meaning.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from localrt.common.errors import StorageError, reason_of
from localrt.common.files import json_sum, parse_json, private_file, private_folder, write_text
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.kv import BlockCache, FillBlocks, Tokens, common_prefix, held_blocks
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.states import SavedState, reachable

_VERSION = 2
_PIECE = 16 << 20  # bytes taken or written at once: they are in RAM twice for a moment
_CHECKED = 4 << 20  # bytes read and checked at once
_READERS = 2  # states per read: fresh memory costs more than reading
_DATA, _ABOUT, _STATE = "blocks.bin", "tokens.json", "state-{}.bin"
_SUM = "crc32"
_NO_TOKENS: Tokens = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _StateFile:
    """Description of a state's file: ``SavedState``'s numbers, its bytes and their CRC-32."""

    position: int
    length: int
    nbytes: int
    sum: int


class BlockFile:
    """The files in one folder, which need not exist. ``tokens`` are the saved ones; ``marks`` are
    saved with them, to find the file again. Not thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens: Tokens = _NO_TOKENS
        self.layout = ""
        self.marks: frozenset[str] = frozenset()
        self._block_bytes = 0
        self._sums: list[int] = []
        self._states: list[_StateFile] = []
        about = _read_about(folder / _ABOUT)
        if about is not None:
            self.tokens, self._sums = about["tokens"], about["sums"]
            self.layout, self._block_bytes = about["layout"], about["block_bytes"]
            self._states, self.marks = about["states"], about["marks"]

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        states = sum(state.nbytes for state in self._states)
        return len(self._sums) * self._block_bytes + states

    def reach(self, length: int) -> int:
        """How many of the first ``length`` tokens can be restored: fewer if a needed state was not
        saved.
        """
        return reachable(self._states, length)

    def touch(self, marks: frozenset[str] = frozenset()) -> None:
        """Set the time of use to now, and add ``marks`` to others: without, some are not known."""
        with contextlib.suppress(OSError):
            if self.marks and not marks <= self.marks:
                self.marks |= marks
                facts = self.layout, self._block_bytes, self._sums, self._states
                self._replace_about(self.tokens, *facts)
            os.utime(self.folder / _ABOUT)

    def write(
        self,
        tokens: Sequence[int] | Tokens,
        layout: str,
        block_bytes: int,
        take: Callable[[int, int], Bytes],
        states: Sequence[SavedState] = (),
    ) -> None:
        """Save ``tokens``; ``take(first, count)`` gives blocks, (count, block_bytes).

        Blocks and states of tokens that are saved already do not change.

        Raises:
            StorageError: the disk is full or fails; the folder is then removed.
        """
        tokens = np.array(tokens, np.int64)
        count = -(-len(tokens) // BLOCK_TOKENS)
        kept, same = 0, 0
        if (layout, block_bytes) == (self.layout, self._block_bytes):
            same = common_prefix(self.tokens, tokens)
            kept = min(same // BLOCK_TOKENS, len(self._sums), count)
        sums = self._sums[:kept]
        try:
            private_folder(self.folder)
            (self.folder / _ABOUT).unlink(missing_ok=True)
            private_file(self.folder / _DATA)
            with (self.folder / _DATA).open("r+b", buffering=0) as file:
                file.truncate(kept * block_bytes)
                file.seek(kept * block_bytes)
                step = max(1, _PIECE // block_bytes)
                for first in range(kept, count, step):
                    blocks = take(first, min(step, count - first))
                    sums += [zlib.crc32(block) for block in blocks]
                    _write_all(file, blocks)
            written = self._write_states(states, same)
            self._replace_about(tokens, layout, block_bytes, sums, written)
        except OSError as error:
            self.delete()
            raise StorageError(
                f"cannot keep the KV cache in {self.folder}: {reason_of(error)}"
            ) from error

    def read(self, length: int, fill: FillBlocks) -> int:
        """Have ``fill`` read the blocks of the first ``length`` tokens, checked.

        Returns the number of tokens read: fewer if the file is damaged.
        """
        count = -(-min(length, len(self.tokens)) // BLOCK_TOKENS)
        good = 0
        try:
            with (self.folder / _DATA).open("rb", buffering=0) as file:

                def read(first: int, room: Bytes) -> int:
                    nonlocal good
                    whole = self._read_whole(file, first, room)
                    good = first + whole
                    return whole

                fill(0, count, read)
        except (OSError, ValueError):
            pass  # as far as reading went
        return min(length, len(self.tokens), good * BLOCK_TOKENS)

    def states(self, length: int) -> list[SavedState]:
        """The undamaged saved states within the first ``length`` tokens."""
        within = [each for each in self._states if each.position <= length]
        with ThreadPoolExecutor(_READERS) as readers:
            return [state for state in readers.map(self._read_state, within) if state is not None]

    def delete(self) -> bool:
        """Remove the folder, if it exists; return whether it is gone."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.tokens, self._sums, self._block_bytes, self._states = _NO_TOKENS, [], 0, []
        return not os.path.lexists(self.folder)

    def _read_state(self, state: _StateFile) -> SavedState | None:
        """Read a state; None if it is damaged or gone."""
        try:
            with (self.folder / _STATE.format(state.length)).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size < state.nbytes:
                    return None
                data = aligned_buffer(state.nbytes)
                whole = _read_into(file, data.data)
        except OSError:
            return None
        if zlib.crc32(whole) != state.sum:
            return None
        return SavedState(state.position, state.length, data)

    def _write_states(self, states: Sequence[SavedState], same: int) -> list[_StateFile]:
        """Write missing files of states; the first ``same`` tokens are unchanged."""
        there = {(old.position, old.length): old for old in self._states if old.length <= same}
        written = []
        for state in states:
            old = there.get((state.position, state.length))
            if old is None:
                path = self.folder / _STATE.format(state.length)
                private_file(path)
                with path.open("wb", buffering=0) as file:
                    _write_all(file, state.data)
                sum_ = zlib.crc32(state.data.data)
                old = _StateFile(state.position, state.length, state.data.nbytes, sum_)
            written.append(old)
        for gone in {old.length for old in self._states} - {new.length for new in written}:
            (self.folder / _STATE.format(gone)).unlink(missing_ok=True)
        return written

    def _read_whole(self, file: FileIO, first: int, room: Bytes) -> int:
        """Fill ``room``; returns the number of blocks before the first damaged one."""
        starts = range(0, self._block_bytes, _CHECKED)
        pieces = [block[start : start + _CHECKED].data for block in room for start in starts]
        with ThreadPoolExecutor(1) as ahead:  # reading continues while arrived blocks are checked
            read = ahead.map(partial(_read_into, file), pieces)
            for index in range(len(room)):
                checksum = 0
                for _ in starts:
                    checksum = zlib.crc32(next(read), checksum)
                if checksum != self._sums[first + index]:
                    return index
        return len(room)

    def _replace_about(
        self,
        tokens: Tokens,
        layout: str,
        block_bytes: int,
        sums: list[int],
        states: list[_StateFile],
    ) -> None:
        about: dict[str, Any] = {
            "version": _VERSION,
            "layout": layout,
            "block_bytes": block_bytes,
            "tokens": tokens.tolist(),
            "sums": sums,
            "states": [list(astuple(state)) for state in states],
            "marks": sorted(self.marks),
        }
        about[_SUM] = json_sum(about)
        write_text(self.folder / _ABOUT, json.dumps(about), private=True, sync=False)
        self.tokens, self.layout, self._block_bytes, self._sums = tokens, layout, block_bytes, sums
        self._states = states


def _read_about(path: Path) -> dict[str, Any] | None:
    """The description, or None if there is no usable one."""
    try:
        about = parse_json(path.read_text(encoding="utf-8"))
        sum_ = about.pop(_SUM, None)  # earlier versions wrote none
        whole = (
            sum_ in (None, json_sum(about))
            and about["version"] == _VERSION
            and isinstance(about["layout"], str)
            and all(isinstance(about[name], list) for name in ("tokens", "sums"))
            and len(about["sums"]) == -(-len(about["tokens"]) // BLOCK_TOKENS)
            and all(isinstance(n, int) for n in (about["block_bytes"], *about["tokens"]))
            and about["block_bytes"] > 0
            and all(min(state) >= 0 for state in about["states"])
        )
        about["states"] = [_StateFile(*map(int, state)) for state in about["states"]]
        about["marks"] = frozenset(map(str, about.get("marks", ())))
        if whole:
            about["tokens"] = np.array(about["tokens"], np.int64)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    return about if whole else None


def _write_all(file: FileIO, blocks: Bytes) -> None:
    view = np.ascontiguousarray(blocks).data.cast("B")
    while view:
        view = view[file.write(view) :]


def _read_into(file: FileIO, room: memoryview) -> memoryview:
    left = room
    while left:
        got = file.readinto(left)
        if not got:
            raise OSError("the file ends early")
        left = left[got:]
    return room


@dataclass(frozen=True, slots=True, eq=False)
class RamCopy:
    """``tokens`` with their ``blocks`` (count, block_bytes), and the states of recurrent layers."""

    tokens: Tokens
    layout: str
    blocks: Bytes
    saved: Sequence[SavedState]

    @classmethod
    def of(cls, tokens: Tokens, layout: str, cache: BlockCache) -> RamCopy:
        """Copy ``cache``, which holds ``tokens``."""
        blocks = np.empty((-(-len(tokens) // BLOCK_TOKENS), cache.block_bytes), np.uint8)
        step = max(1, _PIECE // max(1, cache.block_bytes))
        for first in range(0, len(blocks), step):
            piece = blocks[first : first + step]
            piece[:] = cache.take_blocks(first, len(piece))
        return cls(tokens, layout, blocks, cache.saved_states())

    @property
    def nbytes(self) -> int:
        """Bytes of RAM."""
        return int(self.blocks.nbytes) + sum(state.data.nbytes for state in self.saved)

    def reach(self, length: int) -> int:
        """How many of the first ``length`` tokens can be restored."""
        return reachable(self.saved, length)

    def states(self, length: int) -> list[SavedState]:
        """The states of the first ``length`` tokens."""
        return [state for state in self.saved if state.position <= length]

    def take(self, first: int, count: int) -> Bytes:
        """Blocks ``first`` to ``first + count``."""
        return self.blocks[first : first + count]

    def read(self, length: int, fill: FillBlocks) -> int:
        """Fill a cache with the blocks of ``length`` tokens."""
        fill(0, -(-length // BLOCK_TOKENS), held_blocks(self.blocks))
        return length
