"""KV caches that wait: a card's in RAM for a while, all on the disk, found again by their tokens.

A saved sequence serves every prompt that begins like it, whoever asks; losing it costs only time.
Saving one that went on writes its new blocks only (FastSwitch, Shen et al. 2024, keeps copies the
same way). The oldest go when the folder is full. It does not know text or chats.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path

import numpy as np

from localrt.engine.protocol import EngineSession
from localrt.models.checkpoints.gguf_file import split_part
from localrt.models.prefix import Tokens, common_prefix
from localrt.offload.kv.block_file import BlockFile
from localrt.quant.ops.kv import BLOCK_TOKENS, Bytes, FillBlocks, held_blocks
from localrt.quant.ops.states import SavedState, reachable

__all__ = ["PromptCache", "model_key"]

_LEAST_TOKENS = 32
"""Fewer are computed again nearly as quickly."""


class PromptCache:
    """Sequences of one model in ``folder``, which need not exist. Thread-safe.

    ``limit`` is what the folder's parent may hold in bytes, all models together. Other processes
    may use the same folder: what one deletes the others no longer find.
    """

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._lock = threading.Lock()
        self._files: dict[Path, BlockFile] = {}
        self._in_ram: list[_RamCopy] = []

    def save(self, session: EngineSession) -> int:
        """Keep what ``session`` holds; the bytes on the disk, 0 where nothing was kept.

        Raises:
            StorageError: the disk is full or fails; the session is as it was.
        """
        blocks = session.blocks
        if blocks is None:
            return 0
        with self._lock:
            return self._write(
                session.tokens,
                session.kv_layout,
                blocks.block_bytes,
                blocks.take_blocks,
                blocks.saved_states(),
            )

    def hold(self, session: EngineSession) -> int:
        """Keep a copy in RAM of what ``session`` holds elsewhere; its bytes, 0 where it cannot.

        It stays until it is restored, or until ``settle``.
        """
        tokens, cache = np.array(session.tokens, np.int64), session.blocks
        if cache is None or len(tokens) < _LEAST_TOKENS:
            return 0
        blocks = cache.take_blocks(0, -(-len(tokens) // BLOCK_TOKENS)).copy()
        with self._lock:
            kept = _RamCopy(tokens, session.kv_layout, blocks, cache.saved_states())
            self._in_ram.append(kept)
        return kept.nbytes

    def settle(self) -> int:
        """Move the copies in RAM to the disk; the bytes of RAM freed.

        Raises:
            StorageError: the disk is full or fails; what was not moved stays.
        """
        freed = 0
        with self._lock:
            while self._in_ram:
                copy = self._in_ram[-1]
                self._write(copy.tokens, copy.layout, copy.blocks.shape[1], copy.take, copy.saved)
                freed += self._in_ram.pop().nbytes
        return freed

    def restore(self, session: EngineSession, prompt: Sequence[int]) -> int:
        """Give ``session`` the beginning of ``prompt`` where more of it is kept than it holds.

        Returns the tokens that it got; 0 where it stays as it was.
        """
        if session.blocks is None:
            return 0
        wanted = np.asarray(prompt, np.int64)
        held = common_prefix(session.tokens, wanted)
        if len(wanted) < held + _LEAST_TOKENS:
            return 0
        with self._lock:
            self._look()
            known: list[BlockFile | _RamCopy] = [*self._in_ram, *self._files.values()]
            most = session.capacity
            shared = [
                (kept.reach(min(most, common_prefix(kept.tokens, wanted))), kept)
                for kept in known
                if kept.layout == session.kv_layout
            ]
            length, kept = max(shared, key=lambda pair: pair[0], default=(0, None))
            if kept is None or length < held + _LEAST_TOKENS:
                return 0
            states = kept.states(length)
            got = session.put_tokens(prompt[:length], partial(kept.read, length), states)
            if isinstance(kept, _RamCopy):
                self._in_ram.remove(kept)
            elif got < length:  # damaged
                kept.delete()
                self._files.pop(kept.folder, None)
            else:
                kept.touch()
        return got

    def clear(self) -> None:
        """Forget everything of this model."""
        with self._lock:
            self._look()
            for file in self._files.values():
                file.delete()
            self._files.clear()
            self._in_ram.clear()

    # -- parts -----------------------------------------------------------------------------------

    def _write(
        self,
        tokens: Sequence[int] | Tokens,
        layout: str,
        block_bytes: int,
        take: Callable[[int, int], Bytes],
        states: Sequence[SavedState],
    ) -> int:
        nbytes = -(-len(tokens) // BLOCK_TOKENS) * block_bytes
        nbytes += sum(state.data.nbytes for state in states)
        if len(tokens) < _LEAST_TOKENS or nbytes > self.limit:
            return 0
        tokens = np.asarray(tokens, np.int64)
        self._look()
        same = [file for file in self._files.values() if file.layout == layout]
        file = max(
            (file for file in same if _goes_on(file.tokens, tokens)),
            key=lambda file: len(file.tokens),
            default=None,
        )
        if file is not None and len(file.tokens) > len(tokens):
            file.touch()  # it holds all of this already
            return file.nbytes
        if file is None:
            file = BlockFile(self.folder / uuid.uuid4().hex)
        self._make_room(max(0, nbytes - file.nbytes), spare=file)
        file.write(tokens, layout, block_bytes, take, states)
        self._files[file.folder] = file
        return file.nbytes

    def _look(self) -> None:
        """Read the descriptions that came, forget those that went."""
        found = set(_folders(self.folder))
        for path in self._files.keys() - found:
            del self._files[path]
        for path in found - self._files.keys():
            file = BlockFile(path)
            if len(file.tokens):
                self._files[path] = file

    def _make_room(self, nbytes: int, *, spare: BlockFile) -> None:
        """Delete those used longest ago, of any model, until ``nbytes`` more are within limits."""
        kept = [
            (*_time_and_size(path), path)
            for folder in _folders(self.folder.parent)
            for path in _folders(folder)
            if path != spare.folder
        ]
        free = self.limit - spare.nbytes - sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if free >= nbytes:
                return
            BlockFile(path).delete()
            self._files.pop(path, None)
            free += size


@dataclass(frozen=True, slots=True, eq=False)
class _RamCopy:
    """A sequence as ``BlockFile`` gives it, in RAM: blocks (count, block_bytes), and states."""

    tokens: Tokens
    layout: str
    blocks: Bytes
    saved: Sequence[SavedState]

    @property
    def nbytes(self) -> int:
        return int(self.blocks.nbytes) + sum(state.data.nbytes for state in self.saved)

    def reach(self, length: int) -> int:
        return reachable(self.saved, length)

    def states(self, length: int) -> list[SavedState]:
        return [state for state in self.saved if state.position <= length]

    def take(self, first: int, count: int) -> Bytes:
        return self.blocks[first : first + count]

    def read(self, length: int, fill: FillBlocks) -> int:
        fill(0, -(-length // BLOCK_TOKENS), held_blocks(self.blocks))
        return length


def model_key(path: Path, fingerprint: str, *facts: object) -> str:
    """A name for what a KV cache depends on: the model at ``path``, and ``facts`` of the engine.

    ``fingerprint`` tells contents apart by a sample of them. Each file's identity and times find
    the changes that the sample misses: a change time cannot be set back as a file's own time can.
    """
    about = [fingerprint, *map(repr, facts)]
    for file in _files_of(path):
        with suppress(OSError):
            status = file.stat()
            about.append(
                f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} "
                f"{status.st_ino}"
            )
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*"))
    split = split_part(path)
    return sorted(path.parent.glob(f"{escape(split[0])}-*.gguf")) if split else [path]


def _goes_on(held: Tokens, tokens: Tokens) -> bool:
    """Whether one of the two begins with the other, or nearly: a last word may be another."""
    same = common_prefix(held, tokens)
    return same >= min(len(held), len(tokens)) - BLOCK_TOKENS and 2 * same > len(held)


def _folders(path: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return []


def _time_and_size(path: Path) -> tuple[float, int]:
    """When it was used last, in seconds since the epoch, and its bytes."""
    used, size = 0.0, 0
    with suppress(OSError):
        for entry in os.scandir(path):
            status = entry.stat()
            used, size = max(used, status.st_mtime), size + status.st_size
    return used, size
