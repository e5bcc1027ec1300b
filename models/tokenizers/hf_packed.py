"""The byte-level BPE of a ``tokenizer.json``, with its vocabulary and merges in packed tables.

What remains for the ``tokenizers`` package is a tokenizer whose vocabulary is the 256 bytes and
the added tokens: it normalizes and cuts words as the file says. Whatever is out of the ordinary is
left to the package as a whole, errors included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.bytelevel import BYTE_TO_CHAR
from localrt.models.tokenizers.pieces import PieceTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from localrt.models.tokenizers.bpe import ByteLevelEncoder

__all__ = ["PackedTokenizer", "read_packed"]

_LARGEST_ID = 1 << 22
_EXTRAS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
)
_STEPS = {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "ByteLevel"}


@dataclass(frozen=True, slots=True)
class PackedTokenizer:
    """``encoder`` encodes; ``backend`` has everything of the file but its vocabulary and merges.

    ``pieces`` are those of the vocabulary and the added tokens.
    """

    backend: Backend
    pieces: PieceTable
    encoder: ByteLevelEncoder


def read_packed(path: Path, *, declared: Mapping[int, Any]) -> PackedTokenizer | None:
    """The tokenizer.json at ``path``, or None where it is not plain byte-level BPE.

    None also where it lacks added tokens that are ``declared`` elsewhere, by id.
    """
    from tokenizers import Tokenizer as Backend

    from localrt.models.tokenizers.bpe import ByteLevelEncoder, WordMerger
    from localrt.models.tokenizers.merges import MergeTable

    try:
        spec = json.loads(path.read_bytes())
        model, added = spec["model"], spec["added_tokens"]
        vocab = model["vocab"]
        if not (_is_plain(spec) and _are_ids(vocab) and _is_numbered(added, vocab)):
            return None
        names = {entry["content"]: entry["id"] for entry in added}
        if not declared.keys() <= set(names.values()):
            return None
        sides = _sides(model.pop("merges"))
        words, pieces = _tables(vocab, names)
        merger = WordMerger(
            words, MergeTable(words, sides), whole_words=bool(model.get("ignore_merges"))
        )
        known = {char: vocab[char] for char in BYTE_TO_CHAR} | names
        spec["model"] = {"type": "BPE", "vocab": known, "merges": []}
        del model, vocab
        backend = Backend.from_str(json.dumps(spec))
    except Exception:  # noqa: BLE001 - broken in one of many ways; the package says in which
        return None
    encoder = ByteLevelEncoder(
        merger,
        added=names,
        special={entry["id"] for entry in added if entry["special"]},
        normalizer=backend.normalizer,
        pre_tokenizer=backend.pre_tokenizer,
        special_hides=True,  # as the package has it
    )
    return PackedTokenizer(backend, pieces, encoder)


def _is_plain(spec: Mapping[str, Any]) -> bool:
    """Whether it is BPE without extras, of words that are spelled in the byte alphabet.

    And whether added tokens are found in the text as it is, all in one go.
    """
    model, cut = spec["model"], spec["pre_tokenizer"]
    if model["type"] != "BPE" or any(model.get(key) for key in _EXTRAS):
        return False
    steps = cut["pretokenizers"] if cut["type"] == "Sequence" else [cut]
    kinds = [step["type"] for step in steps]
    if kinds[-1] != "ByteLevel" or not set(kinds) <= _STEPS:
        return False
    added = spec["added_tokens"]
    if any(entry["lstrip"] or entry["rstrip"] or entry["single_word"] for entry in added):
        return False
    late = {bool(entry["normalized"]) for entry in added}
    return late <= {False} or (late == {True} and spec["normalizer"] is None)


def _are_ids(vocab: Mapping[str, Any]) -> bool:
    """Whether each piece has an id of its own, and each byte is a piece."""
    ids = vocab.values()
    return (
        all(type(token) is int and 0 <= token < _LARGEST_ID for token in ids)
        and len(set(ids)) == len(vocab)
        and all(char in vocab for char in BYTE_TO_CHAR)
    )


def _is_numbered(added: list[Mapping[str, Any]], vocab: Mapping[str, int]) -> bool:
    """Whether added tokens have the ids that the package would give them, not others."""
    numbered: dict[str, int] = {}
    following = len(vocab)
    for entry in added:
        name = entry["content"]
        if name not in numbered:
            numbered[name] = vocab.get(name, following)
            following += name not in vocab
        # Behind gaps in the vocabulary, versions of the package count differently
        gaps = name in vocab and vocab[name] >= len(vocab)
        if not name or gaps or entry["id"] != numbered[name]:
            return False
    return True


def _tables(vocab: dict[str, int], names: dict[str, int]) -> tuple[PieceTable, PieceTable]:
    """Pieces that words may become, and those with the added tokens."""
    pieces = [""] * (max(*vocab.values(), *names.values()) + 1)
    in_words, known = np.zeros(len(pieces), np.bool_), np.zeros(len(pieces), np.bool_)
    for piece, token in (vocab | names).items():
        pieces[token] = piece
    in_words[list(vocab.values())] = True
    known[[*vocab.values(), *names.values()]] = True
    table = PieceTable(PackedStrings.of(pieces))
    return table.only(in_words), table.only(known)


def _sides(merges: list[str] | list[list[str]]) -> PackedStrings:
    """Both sides of each merge in turn.

    Raises:
        ValueError: a merge is not two pieces.
    """
    sides: list[str] = []
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left.startswith("#version") or not isinstance(right, str):
            raise ValueError(merge)
        sides += (left, right)
    return PackedStrings.of(sides)
