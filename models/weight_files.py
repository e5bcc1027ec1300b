"""Finds the safetensors files of a Hugging Face folder that hold its weights, and GGUF files beside
a model's that only draft for it.

The index decides if there is one, since exporters number shards in many ways. Works on names and
opens only the index, so that the same code serves hub, cache and folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<parts>\d+)\.safetensors")
_DRAFTS = re.compile(
    r"(^|/)mtp[-_./]|(^|[-._/])(eagle-?3|dflash2?|dspark|it-assistant|gemma-?4[^/]*-assistant)"
    r"(?=[-._/]|$)",
    re.IGNORECASE,
)
_OTHERS = ("adapter", "consolidated")  # LoRA, and copies of the weights under other tensor names


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
    model's name, ``eagle3``, ``dflash``, ``dspark``, or Gemma 4's ``assistant``. ``X-MTP`` is a
    model with a block.
    """
    return _DRAFTS.search(path) is not None


def index_shards(folder: Path) -> frozenset[str] | None:
    """The files that the folder's index lists; None without a readable index."""
    try:
        index = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
        return frozenset(map(str, index["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
