"""KV caches that are saved and found again by their tokens (prefix caching in RAM and on the disk).

No card has run caches that leave a GPU for RAM yet.

``PromptCache`` saves caches: a GPU's in RAM if there is room, all on the disk. A saved sequence
serves every prompt with the same beginning. Saving a longer version writes only the new blocks
(FastSwitch, Shen et al. 2024). When the folder is full, the oldest are deleted.

``forget`` deletes what may hold deleted messages, but a cache in memory, in any process, outlives
it. So it writes a log. A session knows the log of when its request began (``known``), and is saved
only if the log still begins with that and no later deletion is of its messages, before writing and
after it. Words that are said again belong to a later request, and are saved. No clock decides.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from localrt.common.errors import LocalrtError, MemoryBudgetError, StorageError, reason_of
from localrt.common.files import private_file, write_text
from localrt.engine.protocol import EngineSession
from localrt.offload.kv.saved import BlockFile, RamCopy
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.kv import Tokens, common_prefix
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.states import SavedState

Tier: TypeAlias = Literal["ram", "disk"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose cache it is: the ``marks`` of all its messages so far (``marks_of``), whether the
    conversation ``exists``, which another process may have deleted, and ``EngineSession.known``.
    """

    marks: frozenset[str] = frozenset()
    exists: Callable[[], bool] = lambda: True
    known: str = field(default="", compare=False)

    def said(self, marks: Iterable[str]) -> bool:
        """Whether a message may have one of ``marks``: where they are not known, any."""
        return not self.marks or not self.marks.isdisjoint(marks)


NOBODY = Owner()

_LEAST_TOKENS = 32
"""Fewer are computed again nearly as quickly."""


class PromptCache:
    """Saved sequences of one model in ``folder``, which need not exist. Thread-safe.

    ``limit`` is the most bytes in the folder's parent, all models together; 0: the disk is not
    used. Other processes may use the same folder and delete its files. ``room`` returns the bytes
    of RAM left for copies, ``take`` takes some of the budget; a negative number gives them back.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: int,
        room: Callable[[], int] = lambda: 1 << 62,
        take: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.folder = folder
        self.limit = limit
        self._room, self._take = room, take
        self._lock = threading.Lock()
        self._files: dict[Path, BlockFile] = {}
        self._in_ram: dict[RamCopy, Owner] = {}  # the oldest first
        IDLE.add(self)

    @property
    def log(self) -> str:
        """The deletions of all models' caches. They have hashes of what somebody said, so a day
        later it is begun anew; what sessions then hold is not saved.
        """
        path, now, log = self.folder.parent / _LOG, time.time_ns(), ""
        with suppress(OSError):
            log = path.read_text("utf-8", "replace") if path.exists() else "\n"
            if len(words := log.split()) > 1 and words[0] < str(now - _KEPT_NS):
                write_text(path, str(now), private=True, sync=False)
                log = str(now)
        return log

    @property
    def ram_nbytes(self) -> int:
        """Bytes of the copies in RAM."""
        return sum(copy.nbytes for copy in list(self._in_ram))

    def save(self, session: EngineSession, owner: Owner = NOBODY) -> int:
        """Save what ``session`` holds; return the bytes on the disk, 0 if nothing was saved.

        Raises:
            StorageError: the disk is full or fails; the session has not changed.
        """
        blocks, owner = session.blocks, replace(owner, known=session.known)
        if blocks is None or session.private:
            return 0
        with self._lock:
            take, states = blocks.take_blocks, blocks.saved_states()
            return self._write(
                session.tokens, session.kv_layout, blocks.block_bytes, take, states, owner
            )

    def hold(self, session: EngineSession, owner: Owner = NOBODY) -> int:
        """Copy the session's cache to RAM; return the copy's bytes, 0 if it cannot be copied.

        It stays until it is restored, ``settle``, or another needs the room: what left its device
        first, since it was expected back last, leaves RAM first.
        """
        tokens, cache = np.array(session.tokens, np.int64), session.blocks
        if cache is None or len(tokens) < _LEAST_TOKENS or session.private:
            return 0
        with self._lock:
            if session.nbytes > self._room() + self.ram_nbytes or not self._fit(session.nbytes):
                return 0
            copy = RamCopy.of(tokens, session.kv_layout, cache)
            try:
                self._take(copy.nbytes)
            except MemoryBudgetError:
                return 0
            self._in_ram[copy] = replace(owner, known=session.known)
        return copy.nbytes

    def settle(self, owner: Owner = NOBODY) -> int:
        """Move an owner's copies in RAM to the disk, or all; return the bytes of RAM freed.

        Raises:
            StorageError: the disk is full or fails; what was not moved stays.
        """
        with self._lock:
            copies = [copy for copy, whose in self._in_ram.items() if owner in (NOBODY, whose)]
            return sum(map(self._move, copies))

    def restore(self, session: EngineSession, prompt: Sequence[int]) -> int:
        """Restore the beginning of ``prompt`` if more of it is saved than ``session`` holds.

        Returns the number of tokens restored; 0 if the session has not changed.
        """
        wanted = np.asarray(prompt, np.int64)
        held = common_prefix(session.tokens, wanted)
        if session.blocks is None or len(wanted) < held + _LEAST_TOKENS:
            return 0
        with self._lock:
            self._fit(0)  # other programs may need the RAM
            self._look()
            known: list[BlockFile | RamCopy] = [*self._in_ram, *self._files.values()]
            shared = [
                (kept.reach(min(session.capacity, common_prefix(kept.tokens, wanted))), kept)
                for kept in known
                if kept.layout == session.kv_layout
            ]
            length, kept = max(shared, key=lambda pair: pair[0], default=(0, None))
            if kept is None or length < held + _LEAST_TOKENS:
                return 0
            states = kept.states(length)
            got = session.put_tokens(prompt[:length], partial(kept.read, length), states)
            if isinstance(kept, RamCopy):
                if 2 * length > len(kept.tokens):  # not another conversation's beginning
                    self._forget(kept)
            elif got < length:  # damaged
                kept.delete()
                self._files.pop(kept.folder, None)
            else:
                kept.touch()
        return got

    def drop(self, marks: frozenset[str]) -> None:
        """Drop the copies in RAM of messages with one of ``marks``."""
        with self._lock:
            for copy, owner in list(self._in_ram.items()):
                if owner.said(marks):
                    self._forget(copy)

    # -- parts -----------------------------------------------------------------------------------

    def _fit(self, nbytes: int) -> bool:
        """Move copies to the disk, the oldest first, until ``nbytes`` more fit RAM, if possible."""
        while self._in_ram and self._room() < nbytes:
            oldest = next(iter(self._in_ram))
            try:
                self._move(oldest)
            except StorageError:  # it is computed again
                self._forget(oldest)
        return self._room() >= nbytes

    def _move(self, copy: RamCopy) -> int:
        width, owner = copy.blocks.shape[1], self._in_ram[copy]
        self._write(copy.tokens, copy.layout, width, copy.take, copy.saved, owner)
        return self._forget(copy)

    def _forget(self, copy: RamCopy) -> int:
        del self._in_ram[copy]
        with suppress(LocalrtError):  # the model may be closed
            self._take(-copy.nbytes)
        return copy.nbytes

    def _write(
        self,
        tokens: Sequence[int] | Tokens,
        layout: str,
        block_bytes: int,
        take: Callable[[int, int], Bytes],
        states: Sequence[SavedState],
        owner: Owner,
    ) -> int:
        nbytes = -(-len(tokens) // BLOCK_TOKENS) * block_bytes
        nbytes += sum(state.data.nbytes for state in states)
        if len(tokens) < _LEAST_TOKENS or nbytes > self.limit or self._deleted(owner):
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
            file.touch(owner.marks)  # it contains these tokens already
            return file.nbytes
        if file is None:
            file = BlockFile(self.folder / uuid.uuid4().hex)
        self._make_room(max(0, nbytes - file.nbytes), spare=file)
        file.marks = owner.marks
        file.write(tokens, layout, block_bytes, take, states)
        if self._deleted(owner):  # meanwhile
            file.delete()
            return 0
        self._files[file.folder] = file
        return file.nbytes

    def _deleted(self, owner: Owner) -> bool:
        """Whether the conversation, or what may be a message of it, was deleted."""
        if not owner.exists() or not (log := self.log).startswith(owner.known):
            return True
        later = log.removeprefix(owner.known).split()
        return bool(later) and owner.said(later)

    def _look(self) -> None:
        """Read the descriptions of new files, forget deleted ones."""
        found = set(_folders(self.folder) if self.limit else ())
        for path in self._files.keys() - found:
            del self._files[path]
        for path in found - self._files.keys():
            file = BlockFile(path)
            if len(file.tokens):
                self._files[path] = file
            elif 0 < _time_and_size(path)[0] < time.time() - _KEPT_NS / 1e9:  # a killed writer's
                file.delete()

    def _make_room(self, nbytes: int, *, spare: BlockFile) -> None:
        """Delete the least recently used, of any model, until ``nbytes`` more fit the limit."""
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


IDLE: weakref.WeakSet[Any] = weakref.WeakSet()
"""What holds caches in this process; ``drop(marks)`` frees idle ones of messages with ``marks``."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=IDLE.clear)

_LOG = "deleted.txt"  # a line for each deletion: its time, its marks
_KEPT_NS = 86_400 * 10**9  # a day


def marks_of(messages: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return by what caches of a conversation with these messages are found: hashes of what the
    user said.
    """
    texts = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "user" and content:
            parts = [{"text": content}] if isinstance(content, str) else content
            texts.append("".join(str(part.get("text") or "") for part in parts))
    coded = (text.encode("utf-8", "surrogatepass") for text in texts)
    return frozenset(hashlib.sha256(text).hexdigest()[:16] for text in coded)


def forget(folder: Path, marks: frozenset[str], since: float) -> None:
    """Delete what is saved in ``folder``, of any model, with one of ``marks``; of what has none,
    such as a server's caches and half-written ones, all that was used after ``since``. Caches in
    memory are not saved any more, and idle ones of this process are dropped.

    Raises:
        StorageError: some of that failed: call it again, which does no harm.
    """
    failed: list[object] = []
    try:
        if folder.is_dir():  # else no process saves any
            private_file(folder / _LOG)
            with (folder / _LOG).open("ab") as log:
                log.write(" ".join([f"\n{time.time_ns()}", *sorted(marks)]).encode())
    except OSError as error:
        failed.append(f"{folder / _LOG} ({reason_of(error)})")
    for holder in list(IDLE):
        holder.drop(marks)
    for model in _folders(folder):
        if not os.access(model, os.R_OK | os.X_OK):
            failed.append(model)
        for path in _folders(model):
            file, used = BlockFile(path), _time_and_size(path)[0]
            recent = used >= since or not used  # it is empty, or cannot be read
            if (file.marks & marks if file.marks else recent) and not file.delete():
                failed.append(path)
    if failed:
        raise StorageError(f"KV caches may keep what was deleted: delete {failed[0]} yourself")


def model_key(*facts: object) -> str:
    """Return a name for what a KV cache depends on: the ``facts`` of a model and its engine."""
    return hashlib.sha256("\n".join(map(repr, facts)).encode()).hexdigest()[:16]


def _goes_on(held: Tokens, tokens: Tokens) -> bool:
    """Whether one nearly begins with the other: their last block may differ."""
    same = common_prefix(held, tokens)
    return same >= min(len(held), len(tokens)) - BLOCK_TOKENS and 2 * same > len(held)


def _folders(path: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return []


def _time_and_size(path: Path) -> tuple[float, int]:
    """Return when it was last used, in seconds since the epoch, and its bytes."""
    used, size = 0.0, 0
    with suppress(OSError):
        for entry in os.scandir(path):
            status = entry.stat()
            used, size = max(used, status.st_mtime), size + status.st_size
    return used, size
