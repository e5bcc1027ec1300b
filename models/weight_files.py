"""Finds the safetensors files of a Hugging Face folder that hold its weights, and GGUF files beside
a model's that only draft for it or see for it; tells whether a model's files have changed.

The index decides if there is one, since exporters number shards in many ways. Works on names and
opens only the index, so that the same code serves hub, cache and folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from glob import escape
from pathlib import Path

from localrt.common.files import MOST_WORDS, parse_json

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
ADAPTER_NAME = "adapter_config.json"  # of PEFT
POOLING_NAME = "1_Pooling/config.json"  # of sentence-transformers
DENSE = {"2_Dense", "3_Dense"}  # folders of its matrices behind the pooling
MANIFEST_NAME = "manifest.json"
"""What a store is, in its folder."""

PARTIAL_NAME = "manifest.partial.json"
"""The manifest of a store that is still being written: it lists the files that are finished."""

STORED_ENCODER = "vision"
"""A store's folder of its encoder: a model's folder without a decoder, or an ``mmproj`` file."""

_MOST_WORDS = 8 * MOST_WORDS  # of an index: models with a trillion weights have 300,000 tensors
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors")
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)
_DRAFTS = re.compile(
    r"(^|/)mtp[-_.]|((^|/)mtp/[^/]*-mtp|"
    r"(^|[-._/])(eagle-?3|dflash2?|dspark|it-assistant|gemma-?4[^/]*-assistant))(?=[-._/]|$)",
    re.IGNORECASE,
)
_PROJECTOR = re.compile(r"(^|[-._/])mmproj\b[^/]*\.gguf$", re.IGNORECASE)
_WORD = re.compile(r"[a-z0-9]+(?:\.[0-9]+)*")  # v1.0 is one word
_FORMATS = ("bf16", "f16", "fp16", "f32", "fp32", "q8")
_NO_WORDS = frozenset((*_FORMATS, "mmproj", "model", "gguf", "0"))
_OTHERS = ("adapter", "consolidated")  # LoRA, and copies of the weights under other tensor names


def split_part(path: Path) -> tuple[str, int, int] | None:
    """``(stem, part, parts)`` of a name such as ``big-00002-of-00005.gguf``, else None."""
    match = _PART_NAME.fullmatch(path.name)
    return (match["stem"], int(match["part"]), int(match["parts"])) if match else None


def model_stamp(path: Path) -> str:
    """A digest of the sizes, times and identities of the files of the model at ``path``, which
    changes whenever a file does: unlike a modification time, a change time cannot be set back.
    """
    about = []
    for file in filter(Path.is_file, model_files(path)):
        with suppress(OSError):
            now = file.stat()
            about.append((file.name, now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino))
    return hashlib.sha256(repr(about).encode()).hexdigest()


def model_files(path: Path) -> list[Path]:
    """What is in the folder of a model, or the parts of its file."""
    if path.is_dir():
        return sorted(path.rglob("*"))
    split = split_part(path)
    return sorted(path.parent.glob(f"{escape(split[0])}-*.gguf")) if split else [path]


def weight_files(names: Collection[str], shards: Collection[str] | None) -> list[str]:
    """Those among ``names`` that hold the weights; empty where some are missing.

    ``shards`` are the files that the index lists, None without one. They are used if all are there,
    otherwise a whole file. Without either, all files are used, unless one's number is missing.
    """
    if shards and all(shard in names for shard in shards):
        return sorted(shards)
    if WEIGHTS_NAME in names:
        return [WEIGHTS_NAME]
    if shards is not None:
        return []
    files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    files = sorted(name for name in files if not name.startswith(_OTHERS))
    matches = [match for match in map(_NUMBERED.fullmatch, files) if match]
    sets = {(match["stem"], int(match["parts"])) for match in matches}
    parts = {int(match["part"]) for match in matches}
    whole = all(parts == {*range(1, count + 1)} for _, count in sets)
    return files if whole and len(sets) <= 1 else []


def is_draft_file(path: str) -> bool:
    """Whether a GGUF file's name, or a repository's, is that of a draft head: ``mtp-`` before the
    model's name, ``MTP/X-MTP``, ``eagle3``, ``dflash``, ``dspark``, or Gemma 4's ``assistant``.
    ``X-MTP`` elsewhere is a model with a block.
    """
    return _DRAFTS.search(path) is not None


def is_projector_file(path: str) -> bool:
    """Whether a GGUF file's name is that of a vision encoder beside a model: ``mmproj``."""
    return _PROJECTOR.search(path) is not None


def projector_files(paths: Iterable[str], model: str) -> list[str]:
    """The vision encoders among files beside a ``model``'s, best first.

    First come those that are named after it, those with most words of its name before others; of
    equal ones those of 16 bits, which are the published values, then those of 32 and of 8.
    """

    def rank(path: str) -> tuple[int, int, str]:
        formats = [_FORMATS.index(word) for word in _words(path) if word in _FORMATS]
        return -words_in_common(path, model), min(formats, default=len(_FORMATS)), path

    return sorted(filter(is_projector_file, paths), key=rank)


def rivals(path: str, paths: Iterable[str], model: str) -> list[str]:
    """The encoders among ``paths`` that are named as much after the model as that at ``path``, and
    otherwise than it.
    """
    own, common = _own_words(path), words_in_common(path, model)
    equal = (each for each in paths if words_in_common(each, model) == common)
    return [each for each in equal if _own_words(each) != own]


def projectors_beside(path: Path) -> list[Path]:
    """The ``mmproj`` files in the folder of the GGUF file at ``path``, or at the top of the
    snapshot of a hub's repository; best first, whether or not they are for this model.
    """
    top = path.parent.parent
    folders = (path.parent, top) if top.parent.name == "snapshots" else (path.parent,)
    found: list[Path] = []
    for folder in folders:
        with suppress(OSError):  # it cannot be listed, though a file in it can be read
            names = [each.name for each in folder.iterdir()]
            found += [folder / name for name in projector_files(names, path.name)]
    return found


def words_in_common(path: str, model: str) -> int:
    """How many words of a vision encoder's name the model's has; -1 if it lacks one, since the
    encoder is then not named after it. ``mmproj-F16.gguf`` has none.
    """
    own = _own_words(path)
    return len(own) if own <= set(_words(model)) else -1


def _own_words(path: str) -> set[str]:
    return set(_words(path)) - _NO_WORDS


def _words(path: str) -> list[str]:
    return _WORD.findall(path.rpartition("/")[2].lower())


def index_shards(folder: Path) -> frozenset[str] | None:
    """The files that the folder's index lists; None without a readable index."""
    try:
        index = parse_json((folder / INDEX_NAME).read_text(encoding="utf-8"), _MOST_WORDS)
        return frozenset(map(str, index["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def files_nbytes(path: Path) -> int:
    """Bytes of a model's file, or of the files in its folder and in a store's of its encoder."""
    if path.is_file():
        return path.stat().st_size
    files = (*path.iterdir(), *(path / STORED_ENCODER).glob("*"))
    return sum(each.stat().st_size for each in files if each.is_file())
