"""Retrieval: a search index of documents in one SQLite file, and what of them goes into a prompt.

The index has full text, and vectors where a model embeds. A file is read again if its size or time,
and its hash, have changed. Passages of at most a page are ranked by words (BM25) and by meaning;
reciprocal rank fusion (Cormack and others, 2009) joins both. A prompt gets whole documents, or the
passages that match its question best.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localrt.common.closing import Closing
from localrt.common.errors import (
    ContextOverflowError,
    MemoryBudgetError,
    OptionError,
    StorageError,
    disk_errors,
    reason_of,
)
from localrt.common.files import is_file, private_file, private_folder, several, user_path
from localrt.common.forks import finalize
from localrt.common.formatting import one_line
from localrt.common.progress import ProgressCallback
from localrt.common.settings import Settings
from localrt.documents.confined import DocumentReader
from localrt.documents.folders import files_below
from localrt.documents.reading import Document, Step, fenced, pages_of, step_in

_PIECE = 1200  # characters: some 300 tokens
_RRF = 5  # with the paper's 60, the best of one ranking comes after all that are in both
_CANDIDATES = 50  # of each ranking
_BATCH = 64  # texts embedded or stored at a time
_ROWS = 4096  # vectors compared at a time
_BUSY_SECONDS = 30.0  # the longest wait for another process
_SCHEMA = """
    PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON;
    CREATE TABLE IF NOT EXISTS file (
        id INTEGER PRIMARY KEY, path TEXT UNIQUE, size INTEGER, time INTEGER, digest TEXT
    );
    CREATE TABLE IF NOT EXISTS piece (
        id INTEGER PRIMARY KEY, file INTEGER REFERENCES file (id) ON DELETE CASCADE,
        page INTEGER, text TEXT, model TEXT NOT NULL DEFAULT '', vector BLOB
    );
    CREATE INDEX IF NOT EXISTS piece_file ON piece (file);
    CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (
        text, content='', tokenize='porter unicode61 remove_diacritics 2'
    );
    CREATE TRIGGER IF NOT EXISTS piece_added AFTER INSERT ON piece BEGIN
        INSERT INTO words (rowid, text) VALUES (new.id, spaced(new.text)); END;
    CREATE TRIGGER IF NOT EXISTS piece_gone AFTER DELETE ON piece BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.id, spaced(old.text)); END;
"""
_INSIDE = "(path = :path OR substr(path, 1, length(:folder)) = :folder)"
_BY_WORDS = f"""
    SELECT piece.id FROM words JOIN piece ON piece.id = words.rowid WHERE words MATCH :match
        AND piece.file IN (SELECT id FROM file WHERE {_INSIDE}) ORDER BY rank LIMIT {_CANDIDATES}
"""
_VECTORS = f"""
    SELECT id, vector FROM piece WHERE model = :model AND id > :last
        AND file IN (SELECT id FROM file WHERE {_INSIDE}) ORDER BY id LIMIT {_ROWS}
"""
_MISSING = f"""
    FROM piece WHERE model != :model AND id > :last
        AND file IN (SELECT id FROM file WHERE {_INSIDE})
"""
# Scripts without spaces between words: each character is a word.
_WORDLESS = re.compile("([\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af])")


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of the file ``path``, on ``page`` from 1 (0: no pages). A high ``score`` is better."""

    path: Path
    page: int
    text: str
    score: float


class DocumentIndex(Closing):
    """Pieces of files, in the SQLite file ``path``, which several processes may share, or with None
    in memory. Thread-safe.

    An ``embedder`` adds a search by meaning: a ``localrt.Model``, or another object with ``name``
    and ``embed``, which returns float32 vectors of length 1.

    Raises:
        StorageError: the file cannot be used.
    """

    def __init__(self, path: str | Path | None, embedder: Any = None) -> None:
        self._path = None if path is None else user_path(path)
        self._embedder = embedder
        self._lock = threading.RLock()
        with self._in_words():
            if self._path is not None:
                private_folder(self._path.parent)
                private_file(self._path)
            self._connection = sqlite3.connect(
                self._path or ":memory:", timeout=_BUSY_SECONDS, check_same_thread=False
            )
            finalize(self, self._connection.close)
            self._connection.create_function("spaced", 1, _spaced, deterministic=True)
            self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            if "user-defined function" in str(error):  # SQLite hides what its functions raise,
                raise KeyboardInterrupt from error  # and _spaced raises nothing but this
            usable = isinstance(error, sqlite3.OperationalError | OSError)  # locked, say, or full
            hint = "" if usable else "; it is made again if you delete it"
            raise StorageError(f"cannot use {self._path}: {reason_of(error)}{hint}") from error

    def update(
        self, paths: str | Path | Iterable[str | Path], *, progress: ProgressCallback | None = None
    ) -> dict[Path, str]:
        """Index files and folders, or a single one, that have changed, and forget deleted files.
        Return the files
        that were left out, and why. Raises ``StorageError``.

        ``progress`` is called for pages, pieces or files, and may raise an error of its own to
        cancel. Each file is indexed whole or not at all; the next update goes on.
        """
        left_out: dict[Path, str] = {}
        for path in (user_path(path).absolute() for path in several(paths)):
            with disk_errors(path):
                files = list(files_below(path)) if path.is_dir() else [path]
            with DocumentReader(path) as reader:
                for place, file in enumerate(files, 1):
                    step = step_in(progress, "index", file.name, place, len(files))
                    try:
                        with disk_errors(file):
                            self._update(file, reader, step)
                    except (OptionError, StorageError) as error:
                        if isinstance(error.__cause__, sqlite3.Error):
                            raise
                        left_out[file] = str(error)
            if path in left_out and os.path.exists(path):  # noqa: PTH110 - Path's may raise
                continue
            known = self._rows(f"SELECT path FROM file WHERE {_INSIDE}", _inside(path))
            gone = set(known) - {(str(file),) for file in files if is_file(file)}
            with self._in_words(), self._connection:
                self._connection.executemany("DELETE FROM file WHERE path = ?", gone)
            if self._embedder is not None:
                self._embed(self._embedder, path, step_in(progress, "embed", path.name))
        return left_out

    def _update(self, path: Path, reader: DocumentReader, step: Step) -> None:
        key, status = (_text(path),), path.stat()
        row = self._rows("SELECT size, time, digest FROM file WHERE path = ?", key)
        if row and row[0][:2] == (status.st_size, status.st_mtime_ns):
            return
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        same = bool(row) and row[0][2] == digest
        # Not in the transaction, since other processes wait for it.
        found = list[tuple[int, str]]()
        for page in () if same else pages_of(path, path.name, reader):
            step(page.number, page.of, "pages")
            found += ((page.number, text) for text in pieces(page.text))
        with self._in_words(), self._connection as connection:
            if same:
                touched = "UPDATE file SET time = ? WHERE path = ?"
                connection.execute(touched, (status.st_mtime_ns, *key))
                return
            connection.execute("DELETE FROM file WHERE path = ?", key)
            values = (*key, status.st_size, status.st_mtime_ns, digest)
            added = connection.execute("INSERT INTO file VALUES (NULL, ?, ?, ?, ?)", values)
            insert = "INSERT INTO piece (file, page, text) VALUES (?, ?, ?)"
            for place in range(0, len(found), _BATCH):
                step(place, len(found), "pieces")
                some = found[place : place + _BATCH]
                connection.executemany(insert, ((added.lastrowid, *piece) for piece in some))

    def _embed(self, embedder: Any, path: Path, step: Step) -> None:
        """Embed the pieces of a file or folder that have no vector of this model yet."""
        stored = "UPDATE piece SET model = ?, vector = ? WHERE id = ?"
        which, done = {**_inside(path), "model": embedder.name}, 0
        total = self._rows(f"SELECT count(*) {_MISSING}", {**which, "last": -1})[0][0]
        missing, last = f"SELECT id, text {_MISSING} ORDER BY id LIMIT {_BATCH}", -1
        while rows := self._rows(missing, {**which, "last": last}):
            step(done, total, "pieces")
            done, last = done + len(rows), rows[-1][0]
            numbers, texts = zip(*rows, strict=True)
            data = [vector.tobytes() for vector in _vectors(embedder, texts).astype("float16")]
            named = [(embedder.name, *each) for each in zip(data, numbers, strict=True)]
            with self._in_words(), self._connection:
                self._connection.executemany(stored, named)

    def search(
        self, query: str, limit: int = 8, *, within: str | Path | None = None
    ) -> list[Passage]:
        """Return the pieces that match a question best, the best first, of the file or folder
        ``within`` or of all. Raises ``StorageError``.
        """
        inside = _inside(within)
        scores: defaultdict[int, float] = defaultdict(float)
        for ranking in (self._by_words(query, inside), self._by_meaning(query, inside)):
            for rank, number in enumerate(ranking, 1):
                scores[number] += 1 / (_RRF + rank)
        best = sorted(scores, key=lambda number: (-scores[number], number))[:limit]
        found = "SELECT path, page, text FROM piece JOIN file ON file.id = file WHERE piece.id = ?"
        rows = [(scores[number], row) for number in best for row in self._rows(found, (number,))]
        return [Passage(Path(path), page, text, score) for score, (path, page, text) in rows]

    def first(self, limit: int, *, within: str | Path) -> list[Passage]:
        """Return the first pieces of a file or folder."""
        found = f"SELECT path, page, text FROM piece JOIN file ON file.id = file WHERE {_INSIDE}"
        values = {**_inside(within), "limit": limit}
        rows = self._rows(f"{found} ORDER BY path, piece.id LIMIT :limit", values)
        return [Passage(Path(path), page, text, 0.0) for path, page, text in rows]

    def _by_words(self, query: str, inside: Mapping[str, str]) -> list[int]:
        words = list(dict.fromkeys(re.findall(r"\w+", _spaced(query.lower()))))[:64]
        match = " OR ".join(f'"{word}"' for word in words)
        return (
            [row[0] for row in self._rows(_BY_WORDS, {**inside, "match": match})] if words else []
        )

    def _by_meaning(self, query: str, inside: Mapping[str, str]) -> list[int]:
        if self._embedder is None or not query.strip():
            return []
        import numpy as np

        wanted = _vectors(self._embedder, [query])[0].astype("float32")
        best: list[tuple[float, int]] = []
        which = {**inside, "model": self._embedder.name, "last": -1}
        while rows := self._rows(_VECTORS, which):
            which["last"] = rows[-1][0]
            data = np.frombuffer(b"".join(row[1] for row in rows), np.float16)
            near = data.reshape(len(rows), -1).astype("float32") @ wanted
            best += zip((-near).tolist(), (row[0] for row in rows), strict=True)
            best = sorted(best)[:_CANDIDATES]
        return [number for _, number in best]

    def _rows(self, query: str, values: Mapping[str, object] | Sequence[object]) -> list[Any]:
        with self._in_words():
            return self._connection.execute(query, values).fetchall()


def _inside(path: str | Path | None) -> dict[str, str]:
    """The values of ``_INSIDE``; None is everywhere."""
    if path is None:
        return {"path": "", "folder": ""}
    whole = _text(user_path(path).absolute())
    return {"path": whole, "folder": whole.rstrip(os.sep) + os.sep}


def _text(path: Path) -> str:
    try:
        return str(path).encode().decode()
    except UnicodeEncodeError:
        raise OptionError(f"the name of {str(path)!a} is not UTF-8: rename it") from None


def _spaced(text: str) -> str:
    return _WORDLESS.sub(r" \1 ", text)


def pieces(text: str, most: int = _PIECE) -> Iterator[str]:
    """Cut a text into pieces of at most ``most`` characters, at paragraphs, or else lines,
    sentences or words. In scripts without spaces, pieces have a third of that.
    """
    start = 0
    while start < len(text):
        window = text[start : start + most]
        if len(_WORDLESS.findall(window)) > most // 4:
            window = window[: most // 3]
        cut = len(window)
        if start + cut < len(text):
            ends = (window.rfind(mark, cut // 2) for mark in ("\n\n", "\n", ". ", "。", " "))
            cut = next((place + 1 for place in ends if place > 0), cut)
        if piece := window[:cut].strip():
            yield piece
        start += cut


def _vectors(embedder: Any, texts: Sequence[str]) -> Any:
    """Embed texts; of a text that exceeds the model's context, only the beginning."""
    import numpy as np

    try:
        return embedder.embed(texts)
    except ContextOverflowError:
        if len(texts) == 1:
            return _vectors(embedder, [texts[0][: len(texts[0]) // 2]])
        return np.concatenate([_vectors(embedder, [text]) for text in texts])


_SHARE = 0.75  # of the free context: the rest is for the answer
_MOST_QUOTED = 4096  # tokens of pieces: more confuses small models, and makes every answer later
_CHARACTERS = 12  # of a token; no text has more on average
_PIECES = 24
Count = Callable[[str], int]


def fitted(
    documents: Sequence[Document],
    question: str,
    *,
    free: Callable[[], int],
    count: Count,
    progress: ProgressCallback | None = None,
    embedder: Callable[[], Any] | None = None,
    keep: bool = True,
) -> list[Document]:
    """Return the documents, shortened to fit a context with ``free()`` tokens (0: unknown).

    If not all fit, those that fit half of the room stay whole. Others become the pieces that match
    the question best, by the index in the user's data folder; their ``note`` says so. ``embedder``
    opens a model for the search, which is closed again; without memory for it, words alone count.
    Without ``keep``, the index is made in memory and forgotten.

    Raises:
        ContextOverflowError: a document does not fit, and cannot be searched.
        StorageError: the index cannot be used.
    """
    room = (free() * _SHARE if documents else 0) or math.inf
    lengths = [
        count(each.text) if each.whole and len(each.text) <= room * _CHARACTERS else math.inf
        for each in documents
    ]
    if math.inf not in lengths and sum(lengths) <= room:
        return list(documents)
    kept, searched = list(documents), list[int]()
    for place in sorted(range(len(kept)), key=lengths.__getitem__):
        if lengths[place] < math.inf and lengths[place] <= room / 2:
            room -= lengths[place]
        else:
            searched.append(place)
    share = int(min(room, _MOST_QUOTED)) // len(searched)
    model, why = None, ""
    file = Settings.from_environment().data_dir / "documents.db" if keep else None
    try:
        model = embedder and embedder()
    except MemoryBudgetError as error:
        why = f" It was searched by words alone, without the embedding model: {error}."
    with model or nullcontext(), DocumentIndex(file, model) as index:
        paths = [path.absolute() for place in searched if (path := documents[place].path)]
        left_out = index.update(paths, progress=progress)
        if bad := next(filter(None, map(left_out.get, paths)), ""):
            raise OptionError(bad)
        for place in searched:
            quoted = _quoted(documents[place], question, share, count, index)
            kept[place], why = replace(quoted, note=quoted.note + why), ""
    return kept


def _quoted(
    document: Document, question: str, room: int, count: Count, index: DocumentIndex
) -> Document:
    name, path = document.name, document.path and document.path.absolute()
    overflow = ContextOverflowError(f"{name} does not fit the context: attach the part you need")
    if path is None:
        raise overflow

    def quote(piece: Passage) -> str:
        inner = "" if path == piece.path else one_line(piece.path.relative_to(path).as_posix())
        page = f", page {piece.page}" if piece.page else ""
        return f"[{name}{inner}{page}]\n{piece.text}\n\n"

    room -= count(fenced(name, document.size))
    best, found = index.search(question, _PIECES, within=path), list[Passage]()
    for piece in best or index.first(_PIECES, within=path):
        room -= count(quote(piece))
        if room < 0:
            break
        found.append(piece)
    if not found:
        raise overflow
    found.sort(key=lambda piece: (piece.path, piece.page))
    number = f"{len(found)} piece{'s' * (len(found) != 1)}"
    some = f"{number} matching the message"
    if not best:
        some = f"its first {number}, since none matches the message"
    title = f"{name} ({document.size}) is too long to show. These are {some}:"
    text = fenced(title, "".join(map(quote, found)).rstrip())
    note = f"{name} does not fit the context: the model gets {some}."
    size = f"{number} of {document.size}"
    return replace(document, text=text, size=size, note=note, pictures=(), whole=True)
