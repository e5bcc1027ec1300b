"""Chooses what goes into a prompt: whole documents, or the pieces that match its question best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from localrt.common.errors import ContextOverflowError, MemoryBudgetError, OptionError
from localrt.common.formatting import one_line
from localrt.common.progress import ProgressCallback
from localrt.common.settings import Settings
from localrt.documents.index import DocumentIndex, Passage
from localrt.documents.reading import Document, fenced

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
) -> list[Document]:
    """Return the documents, shortened to fit a context with ``free()`` tokens (0: unknown).

    If not all fit, those that fit half of the room stay whole. Others become the pieces that match
    the question best, by the index in the user's data folder; their ``note`` says so. ``embedder``
    opens a model for the search, which is closed again; without memory for it, words alone count.

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
    model, why, file = None, "", Settings.from_environment().data_dir / "documents.db"
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
