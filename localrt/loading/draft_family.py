"""Finds what drafts for a target on this machine, from names and file headers alone.

A head carries its target's name in its own. Two models are of one family if their files list the
same tokens, byte by byte. Nothing is downloaded or loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.common.errors import LocalrtError
from localrt.common.settings import Settings
from localrt.hub.files import gguf_variants, name_words
from localrt.hub.listing import list_models
from localrt.models.checkpoints.base import RangedFile
from localrt.models.checkpoints.gguf.metadata import GgufCursor
from localrt.models.checkpoints.store.checkpoint import GGUF_TEXT_NAME
from localrt.models.heads import is_head
from localrt.models.registry import ARCHITECTURES
from localrt.models.weight_files import is_draft_file

if TYPE_CHECKING:
    from localrt.loading.parts import LoadedModel

MTP = "mtp"
"""The draft's name that stands for the MTP block in the model's files."""
MOST_SHARE = 0.5
"""A draft has at most this share of its target's bytes: a larger one seldom pays."""
_LEAST_NAME = 4  # characters of a model's name that a head's must have
_MOST_PAIRS = 1 << 12
_MOST_TOKENS = 1 << 24
_LONGEST_TEXT = 1 << 16
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True)
class FamilyDraft:
    """A possible draft model. ``name`` is for ``resolve``; ``nbytes`` is the size of its files."""

    name: str
    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Where a file lists its tokens: ``count`` tokens from byte ``start`` on.

    For a ``tokenizer.json`` it is the whole file: ``start`` is 0, and ``count`` is its bytes.
    """

    architecture: str
    file: Path
    start: int
    count: int

    def nbytes(self) -> int:
        """Return the size of the list in bytes."""
        if self.start == 0:
            return self.count
        with closing(RangedFile(self.file)) as file:
            cursor = GgufCursor(file)
            cursor.skip(self.start, "the header")
            cursor.skip_strings(self.count, _TOKENS)
            return cursor.position - self.start

    def read(self, nbytes: int) -> bytes:
        """Read the list's first ``nbytes``; fewer if the file ends before."""
        with closing(RangedFile(self.file)) as file:
            return file.read(self.start, min(nbytes, file.size - self.start)).tobytes()


def find_family_draft(target: Path, settings: Settings) -> FamilyDraft | None:
    """Find the smallest model with the target's vocabulary, preferably of its architecture.

    ``target`` is a GGUF file or a folder. Files that cannot be read are skipped.
    """
    ours = _vocabulary(target)
    if ours is None:
        return None
    most = MOST_SHARE * _nbytes(target)
    found = []
    for draft in _small_models(target, settings, most):
        theirs = _vocabulary(draft.path)
        if theirs is None or theirs.architecture not in ARCHITECTURES:
            continue
        if (theirs.start == 0, theirs.count) != (ours.start == 0, ours.count):
            continue
        found.append((theirs.architecture != ours.architecture, draft, theirs))
    if not found:
        return None
    size = ours.nbytes()
    words = ours.read(size)
    for _, draft, theirs in sorted(found, key=lambda each: (each[0], each[1].nbytes)):
        if theirs.read(size) == words:
            return draft
    return None


def find_head(target: Path, settings: Settings) -> str | None:
    """Find a draft head whose name has the target's: beside the target, or in any folder of models.

    Returns its name for ``resolve``. Whether it fits the target shows when it is loaded.
    """
    listed = _listed(settings)
    names = [target.name, *(m.name for m in listed if m.path == target)]
    own = {letters for name in names if len(letters := _letters(name)) >= _LEAST_NAME}
    beside = target.parent.iterdir() if target.parent.is_dir() else ()
    heads = [FamilyDraft(str(path), path, 0) for path in sorted(beside)] + listed
    for head in heads:
        name = _letters(Path(head.name).name)
        if any(each in name and each != name for each in own) and is_head(head.path):
            return head.name
    return None


def _letters(name: str) -> str:
    return "".join(name_words(name))


def _listed(settings: Settings) -> list[FamilyDraft]:
    try:
        return [FamilyDraft(m.name, m.path, m.bytes) for m in list_models(settings)]
    except OSError:  # an unreadable folder, or a file deleted in the meantime
        return []


def _small_models(target: Path, settings: Settings, most: float) -> Iterator[FamilyDraft]:
    """Yield other models on this machine of at most ``most`` bytes, each once."""
    seen = {target.resolve()}
    for draft in [*_listed(settings), *_beside(target)]:
        if is_draft_file(draft.path.name):
            continue  # it is no model
        if draft.nbytes <= most and draft.path.resolve() not in seen:
            seen.add(draft.path.resolve())
            yield draft


def _beside(target: Path) -> Iterator[FamilyDraft]:
    """Yield the GGUF models in the target's folder if the target is a file."""
    if not target.is_file():
        return
    try:
        names = [entry.name for entry in target.parent.iterdir()]
    except OSError:
        return
    for variant in gguf_variants(names):
        files = [target.parent / name for name in variant.files]
        if variant.complete:
            yield FamilyDraft(str(files[0]), files[0], sum(_size(file) for file in files))


def _nbytes(model: Path) -> int:
    if model.is_dir():
        return sum(_size(file) for file in model.iterdir())
    whole = next((v for v in _beside(model) if v.path == model), None)
    return _size(model) if whole is None else whole.nbytes


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # a broken link
        return 0


def _vocabulary(model: Path) -> _Vocabulary | None:
    """Find where a model lists its tokens; None if it is not found."""
    try:
        if model.is_file():
            return _gguf_vocabulary(model)
        if (text := model / GGUF_TEXT_NAME).is_file():
            return _gguf_vocabulary(text)
        words = model / "tokenizer.json"
        names = json.loads((model / "config.json").read_text(encoding="utf-8"))["architectures"]
        return _Vocabulary(str(names[0]), words, 0, words.stat().st_size)
    except (LocalrtError, OSError, ValueError, LookupError, TypeError):
        return None


def _gguf_vocabulary(path: Path) -> _Vocabulary | None:
    """Read a GGUF header up to its tokens, which usually follow a few short pairs."""
    with closing(RangedFile(path)) as file:
        cursor = GgufCursor(file)
        if cursor.take(4, "the magic") != b"GGUF" or cursor.u32("the version") not in (2, 3):
            return None
        cursor.u64("the number of tensors")
        architecture = ""
        for _ in range(min(cursor.u64("the number of metadata keys"), _MOST_PAIRS)):
            key = cursor.text(_LONGEST_TEXT, "a metadata key")
            kind = cursor.u32(key)
            if kind == _STRING and key == "general.architecture":
                architecture = cursor.text(_LONGEST_TEXT, key)
            elif kind == _ARRAY and key == _TOKENS:
                if cursor.u32(key) != _STRING:
                    return None
                count = cursor.u64(key)
                cursor.check_count(count, 8, _MOST_TOKENS, "tokens")
                return _Vocabulary(architecture, path, cursor.position, count)
            elif not _skip(cursor, kind, key):
                return None
    return None


def _skip(cursor: GgufCursor, kind: int, what: str) -> bool:
    """Skip a value; return False if its type is unknown."""
    count = 1
    if kind == _ARRAY:
        kind, count = cursor.u32(what), cursor.u64(what)
    if kind == _STRING:
        cursor.skip_strings(count, what)
    elif kind in _SIZES:
        cursor.skip(count * _SIZES[kind], what)
    else:
        return False
    return True


def family_draft(target: LoadedModel) -> str | None:
    """Return the name of a small local model of the target's family, to draft with by default.

    None unless weights are streamed: beside a resident model, a second model in memory would be a
    surprise, and on a CPU its drafts cost about what they save.
    """
    if not target.engine.info.streamed:
        return None
    found = find_family_draft(target.path, Settings.from_environment())
    return None if found is None else found.name
