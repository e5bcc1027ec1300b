"""What the target said before, in other answers: the same lookup, over an archive of tokens.

An archive is shared by the sequences of a model, bounded, and may be kept in a file from one run to
the next. It holds token ids, which a user's conversation can be read from: a file is written only
where a caller names one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from localrt.errors import StorageError
from localrt.files import write_bytes
from localrt.speculative.ngram import ORDERS, NgramIndex, continuations
from localrt.speculative.source import Check
from localrt.speculative.tree import TokenTree

__all__ = ["Archive", "SaidSource"]

_MAGIC = b"localrt said 1\n"
_MOST = 1 << 17  # tokens; an index takes about 1 KB for each


class Archive:
    """Answers so far. Thread-safe. ``vocab_size`` guards against a file of another model.

    Raises:
        StorageError: the file cannot be read.
    """

    def __init__(self, vocab_size: int, path: Path | None = None, *, most: int = _MOST) -> None:
        self._vocab = vocab_size
        self._path = path
        self._most = most
        self._lock = threading.Lock()
        self._index = NgramIndex()
        if path is not None and path.is_file():
            self._index.extend(_read(path, vocab_size)[-most:])

    def __len__(self) -> int:
        return len(self._index)

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an answer. Beyond its bound an archive keeps its newer half."""
        with self._lock:
            if len(self._index) + len(tokens) > self._most:
                kept = [*self._index.tokens, *tokens][-self._most // 2 :]
                self._index = NgramIndex()
                self._index.extend(kept)
            else:
                self._index.extend(tokens)

    def tree(self, history: Sequence[int], budget: int, depth: int, source: str) -> TokenTree:
        """Guesses of what follows ``history``."""
        with self._lock:
            return continuations(self._index, history[-max(ORDERS) :], budget, depth, source)

    def save(self) -> None:
        """Write the file, if there is one to write.

        Raises:
            StorageError: it cannot be written; the old one is kept.
        """
        path = self._path
        if path is None:
            return
        with self._lock:
            data = np.asarray(self._index.tokens, "<i4").tobytes()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
        write_bytes(path, _MAGIC + f"{self._vocab}\n".encode() + data)


def _read(path: Path, vocab_size: int) -> list[int]:
    """The tokens of an archive; none where it is another model's or damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    head = _MAGIC + f"{vocab_size}\n".encode()
    if not data.startswith(head) or (len(data) - len(head)) % 4:
        return []
    tokens = np.frombuffer(data, "<i4", offset=len(head))
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        return []
    return [int(token) for token in tokens]


class SaidSource:
    """See ``DraftSource``: guesses from an archive."""

    name = "said"

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def begin(self, history: Sequence[int]) -> None:
        """See ``DraftSource``."""

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """See ``DraftSource``."""
        return self._archive.tree(history, budget, depth, self.name)

    def close(self) -> None:
        """The archive is shared and stays."""
