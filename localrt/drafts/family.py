"""Finds a small model of the target's family on this machine, to draft with: from headers alone.

Two models are of a family when their files list the same tokens, byte by byte. What is looked at is
what ``localrt list`` shows, and GGUF files beside the target's own. It downloads and loads nothing,
and does not know what memory is left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.errors import LocalrtError
from localrt.hub.files import gguf_variants
from localrt.hub.listing import list_models
from localrt.models.checkpoints.gguf_header import read_header
from localrt.models.checkpoints.ranged_file import RangedFile
from localrt.models.checkpoints.store_checkpoint import GGUF_TEXT_NAME
from localrt.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    from localrt.settings import Settings

__all__ = ["MOST_SHARE", "FamilyDraft", "find_family_draft"]

MOST_SHARE = 0.5
"""A draft has at most this share of its target's bytes: a larger one seldom pays."""


@dataclass(frozen=True, slots=True)
class FamilyDraft:
    """A model that may draft. ``name`` is what ``resolve`` takes, ``nbytes`` its files' size."""

    name: str
    path: Path
    nbytes: int


def find_family_draft(target: Path, settings: Settings) -> FamilyDraft | None:
    """The smallest model of the target's vocabulary, of its own architecture where there is one.

    ``target`` is a GGUF file or a folder. Files that cannot be read are passed over.
    """
    ours = _vocabulary(target)
    if ours is None:
        return None
    found = []
    for draft in _small_models(target, settings, MOST_SHARE * _nbytes(target)):
        theirs = _vocabulary(draft.path)
        if theirs is not None and theirs[0] in ARCHITECTURES and theirs[1] == ours[1]:
            found.append((theirs[0] != ours[0], draft.nbytes, draft))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _small_models(target: Path, settings: Settings, most: float) -> Iterator[FamilyDraft]:
    """Other models on this machine of at most ``most`` bytes, each once."""
    seen = {target.resolve()}
    try:
        listed = [FamilyDraft(m.name, m.path, m.bytes) for m in list_models(settings)]
    except OSError:  # a folder that may not be read, or a file that goes away meanwhile
        listed = []
    for draft in [*listed, *_beside(target)]:
        if draft.nbytes <= most and draft.path.resolve() not in seen:
            seen.add(draft.path.resolve())
            yield draft


def _beside(target: Path) -> Iterator[FamilyDraft]:
    """GGUF models in the target's folder, where it is such a file itself."""
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


def _vocabulary(model: Path) -> tuple[str, bytes] | None:
    """A model's architecture, and a digest of its list of tokens; None where it cannot be read."""
    try:
        text = model if model.is_file() else model / GGUF_TEXT_NAME
        if text.is_file():
            with closing(RangedFile(text)) as file:
                metadata = read_header(file).metadata
                architecture = metadata["general.architecture"]
                words = metadata.packed("tokenizer.ggml.tokens")
        else:
            config = json.loads((model / "config.json").read_text(encoding="utf-8"))
            architecture = config["architectures"][0]
            words = (model / "tokenizer.json").read_bytes()
        return str(architecture), hashlib.sha256(words).digest()
    except (LocalrtError, OSError, ValueError, LookupError, TypeError):
        return None
