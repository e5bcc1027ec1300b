"""The byte-level BPE of a ``tokenizer.json``, with its vocabulary and merges in packed tables.

What remains for the ``tokenizers`` package is a tokenizer whose vocabulary is the 256 bytes and
the added tokens: it normalizes and cuts words as the file says. Whatever is out of the ordinary is
left to the package as a whole, errors included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.base import is_package_error
from localrt.models.tokenizers.bpe import BYTE_TO_CHAR, ByteLevelTokenizer
from localrt.models.tokenizers.merges import MergeTable
from localrt.models.tokenizers.vocabulary import PieceTable, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_LARGEST_ID = 1 << 22
_EXTRAS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
)
# What a pattern looks at before a match: then words depend on where a text begins.
_LOOKS_BACK = re.compile(r"\(\?<[=!]|(?<![\[\\])\^|\\[bBAGK]")
_STEPS = {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "ByteLevel"}


def read_packed(
    path: Path,
    declared: Mapping[int, Any],
    describe: Callable[[Backend, PieceTable], Vocabulary],
) -> ByteLevelTokenizer | None:
    """The tokenizer.json at ``path``, or None where it is not plain byte-level BPE.

    None also where it lacks added tokens that are ``declared`` elsewhere, by id. ``describe`` tells
    what ids mean, from all of the file but its vocabulary and merges, and the pieces.
    """
    from tokenizers import Tokenizer as Backend  # needed by tokenizer.json alone

    try:
        spec = json.loads(path.read_bytes())
        model, added = spec["model"], spec["added_tokens"]
        vocab = model["vocab"]
        if not (_is_plain(spec) and _are_ids(vocab) and _is_numbered(added, vocab)):
            return None
        names = {entry["content"]: entry["id"] for entry in added}
        if not declared.keys() <= set(names.values()):
            return None
        packed = _packed_merges(model.pop("merges"))
        words, pieces = _tables(vocab, names)
        merges = MergeTable(words, packed)
        known = {char: vocab[char] for char in BYTE_TO_CHAR} | names
        spec["model"] = {"type": "BPE", "vocab": known, "merges": []}
        spec["truncation"] = spec["padding"] = None
        whole_words = bool(model.get("ignore_merges"))
        del model, vocab
        backend = Backend.from_str(json.dumps(spec))
    except BaseException as error:
        if not is_package_error(error):
            raise
        return None  # broken in one of many ways; the package says in which
    return ByteLevelTokenizer(
        describe(backend, pieces),
        words=words,
        merges=merges,
        whole_words=whole_words,
        added=names,
        normalizer=backend.normalizer,
        pre_tokenizer=backend.pre_tokenizer,
        cut_long=_can_be_cut(spec),
    )


def _is_plain(spec: Mapping[str, Any]) -> bool:
    """Whether it is BPE without extras, of words that are spelled in the byte alphabet.

    And whether added tokens are found in the text as it is, all in one go.
    """
    model = spec["model"]
    if model["type"] != "BPE" or any(model.get(key) for key in _EXTRAS):
        return False
    kinds = _kinds(spec["pre_tokenizer"], "pretokenizers")
    if kinds[-1] != "ByteLevel" or not set(kinds) <= _STEPS:
        return False
    if "ByteLevel" not in _kinds(spec["decoder"], "decoders"):
        return False
    added = spec["added_tokens"]
    if any(entry["lstrip"] or entry["rstrip"] or entry["single_word"] for entry in added):
        return False
    late = {bool(entry["normalized"]) for entry in added}
    return late <= {False} or (late == {True} and spec["normalizer"] is None)


def _can_be_cut(spec: Mapping[str, Any]) -> bool:
    """Whether words are the same when a text begins at any of them; see ``ByteLevelTokenizer``."""
    if spec["normalizer"] is not None and _kinds(spec["normalizer"], "normalizers") != ["NFC"]:
        return False
    return all(
        not step.get("add_prefix_space")
        and step.get("behavior", "Isolated") in ("Isolated", "Removed")
        and not _LOOKS_BACK.search(step.get("pattern", {}).get("Regex", ""))
        for step in _steps(spec["pre_tokenizer"], "pretokenizers")
    )


def _kinds(part: Mapping[str, Any], steps: str) -> list[str]:
    """The type of each of a part's steps."""
    return [step["type"] for step in _steps(part, steps)]


def _steps(part: Mapping[str, Any], steps: str) -> list[Mapping[str, Any]]:
    """A part's steps, which a sequence lists under ``steps``."""
    return part[steps] if part["type"] == "Sequence" else [part]


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


def _packed_merges(merges: list[str] | list[list[str]]) -> PackedStrings:
    """The merges as GGUF has them: two pieces and the space between them.

    Raises:
        ValueError: a merge is not two pieces.
    """
    spelled = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    for merge in spelled:
        if merge.count(" ") != 1 or merge.startswith("#version"):
            raise ValueError(merge)
    return PackedStrings.of(spelled)
