"""A tokenizer from the key-values of a GGUF file: ``tokenizer.ggml.*``.

Reads the vocabulary, the type of each token and the special ids, and makes byte-level BPE
(``gpt2``), SentencePiece BPE (``llama``; ``gemma4`` with a list of merges), or an encoder's
WordPiece (``bert``) or Unigram (``t5``). Some tokens that end a turn are known only by name, since
files rarely mark them. Does not read files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import TokenizerError, UnsupportedModelError
from localrt.common.option_names import option
from localrt.models.checkpoints.gguf.metadata import GgufMetadata
from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.base import Tokenizer, Vocabulary, end_ids, package_errors
from localrt.models.tokenizers.bpe import (
    ByteLevelTokenizer,
    SentencePieceTokenizer,
    join_by_merges,
    join_by_scores,
)
from localrt.models.tokenizers.pretokenizers import KNOWN_PRE_TYPES, PreType, family_pre, pre_type
from localrt.models.tokenizers.tables import MergeTable, PieceTable

_PREFIX = "tokenizer.ggml."
_KNOWN_MODELS = ("gpt2", "llama", "gemma4", "bert", "t5")

_CAPITALS = re.compile("[A-Z]")
_END_KEYS = ("eos", "eot", "eom")
# Keys of ``Tokenizer.infill_ids``, those of older files first.
_INFILL_KEYS = (
    *(("pre", "prefix"), ("suf", "suffix"), ("mid", "middle")),
    *((part, f"fim_{part}") for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
)


class _Type(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The vocabulary as stored: pieces and their types by id."""

    table: PieceTable
    types: npt.NDArray[np.integer]

    def of_type(self, *types: _Type) -> dict[str, int]:
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return {self.table.text(token): token for token in ids}


def gguf_tokenizer(
    metadata: Mapping[str, object],
    *,
    pre: str | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Tokenizer:
    """The tokenizer that a GGUF file's ``metadata`` describes.

    ``pre`` overrides the file's pre-tokenizer; ``note`` is called if neither names one.

    Raises:
        TokenizerError: the file has none, or contradicts itself.
        UnsupportedModelError: an unknown type of tokenizer or pre-tokenizer.
    """
    model = metadata.get(f"{_PREFIX}model")
    if model is None or model in ("none", "no_vocab"):
        raise TokenizerError(
            "this model has no tokenizer: the GGUF file stores none, so only token_ids can be used"
        )
    if model not in _KNOWN_MODELS:
        raise UnsupportedModelError(
            f"the GGUF tokenizer model {model!r:.60} is not known; known are "
            f"{', '.join(_KNOWN_MODELS)}"
        )
    tokens = _read_tokens(metadata)
    if model in ("bert", "t5"):
        return _with_package(metadata, tokens, model)
    if model == "gpt2":
        return _byte_level(metadata, tokens, pre_type(pre or _pre_name(metadata, tokens, note)))
    return (_sentencepiece if model == "llama" else _gemma4)(metadata, tokens)


def _pre_name(metadata: Mapping[str, object], tokens: _Tokens, note: Callable[[str], None]) -> str:
    """The file's pre-tokenizer; its family's if the file has none or an unknown one."""
    named = metadata.get(f"{_PREFIX}pre") or "default"
    if not isinstance(named, str):
        raise _malformed("pre", "text", named)
    if named in KNOWN_PRE_TYPES and named != "default":
        return named
    architecture = str(metadata.get("general.architecture"))
    found = family_pre(architecture, len(tokens.table), tokens.table.find)
    said = "no pre-tokenizer" if named == "default" else f"the unknown pre-tokenizer {named!r:.60}"
    if found is not None:
        note(f"the GGUF file names {said}: it is read with {found}, its family's")
    elif named == "default":
        note(
            f"the GGUF file names {said}: text may be read otherwise than the model was trained, "
            f"and answers be worse; name the right one with {option('pre_tokenizer')}"
        )
    return found or named


def _byte_level(metadata: Mapping[str, object], tokens: _Tokens, pre: PreType) -> Tokenizer:
    merges = MergeTable(tokens.table, _strings(metadata, "merges"))
    vocabulary = _vocabulary(metadata, tokens, add_bos=pre.add_bos)
    # Merges may build any piece; control tokens built this way are replaced by their bytes
    hidden = np.isin(tokens.types, (_Type.CONTROL, _Type.UNKNOWN, _Type.UNUSED))
    return ByteLevelTokenizer(
        vocabulary,
        words=tokens.table.only(~hidden),
        merges=merges,
        whole_words=pre.whole_words,
        added=_added(tokens, vocabulary),
        normalizer=pre.normalizer(),
        pre_tokenizer=pre.pre_tokenizer(),
        cut_long="\\b" not in "".join(pre.patterns),  # its words depend on those behind them
    )


def _sentencepiece(metadata: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    scores = _numbers(metadata, "scores")
    if scores is None:
        raise _missing("scores")
    if len(scores) != len(tokens.table):
        raise TokenizerError(
            f"the GGUF tokenizer has {len(tokens.table)} tokens but {len(scores)} scores"
        )
    space_prefix = bool(metadata.get(f"{_PREFIX}add_space_prefix", True))
    vocabulary = _vocabulary(
        metadata, tokens, add_bos=True, bos=1, eos=2, unknown=0, strip_space=space_prefix
    )
    added = _added(tokens, vocabulary)
    swallow: frozenset[int] = frozenset()
    if metadata.get("general.architecture") == "phi3":
        # Phi-3's tokenizer.json marks its role tokens like this; GGUF has no such mark
        keep = ("<unk>", "<s>", "<|endoftext|>")
        swallow = frozenset(token for name, token in added.items() if name not in keep)
    return SentencePieceTokenizer(
        vocabulary,
        words=(words := _plain_words(tokens)),
        join=join_by_scores(words, scores),
        byte_ids=_byte_ids(tokens),
        added=added,
        space_prefix=space_prefix,
        swallow_space=swallow,
    )


def _gemma4(metadata: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    """Like llama.cpp: a text always begins with BOS, even if the file says otherwise."""
    vocabulary = _vocabulary(metadata, tokens, add_bos=True)
    if vocabulary.bos is not None:
        vocabulary = replace(vocabulary, prefix=(vocabulary.bos,))
    merges = MergeTable(tokens.table, _strings(metadata, "merges"))
    return SentencePieceTokenizer(
        vocabulary,
        words=(words := _plain_words(tokens)),
        join=join_by_merges(words, merges),
        byte_ids=_byte_ids(tokens),
        added=_added(tokens, vocabulary),
        space_prefix=False,
        lines_apart=True,
    )


def _with_package(metadata: Mapping[str, object], tokens: _Tokens, model: object) -> Tokenizer:
    """The package's WordPiece (``bert``) or Unigram (``t5``); pieces with capitals show that case
    counts. A text begins with CLS or BOS and ends with SEP or EOS.
    """
    from tokenizers import Tokenizer as Backend  # needed by these alone
    from tokenizers import models, normalizers, pre_tokenizers

    from localrt.models.tokenizers.hf import BackendPieces, HuggingFaceTokenizer, TokenDecoder

    pieces = [tokens.table.text(token) for token in range(len(tokens.table))]
    control = tokens.of_type(_Type.CONTROL, _Type.UNKNOWN)
    vocabulary = _vocabulary(metadata, tokens, add_bos=False)
    scores, characters = (_numbers(metadata, key) for key in ("scores", "precompiled_charsmap"))
    with package_errors("the GGUF tokenizer cannot be read"):
        if model == "bert":  # where words begin is marked, not where they go on
            spelled = (one if one in control else f"##{one}".replace("##▁", "") for one in pieces)
            plain = {piece: token for token, piece in enumerate(spelled)}
            cased = any(_CAPITALS.search(piece) for piece in plain.keys() - control.keys())
            backend = Backend(models.WordPiece(plain, unk_token="[UNK]"))
            backend.normalizer = normalizers.BertNormalizer(lowercase=not cased)
            backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        elif scores is None:
            raise _missing("scores")
        else:
            scored = list(zip(pieces, scores.tolist(), strict=True))
            backend = Backend(models.Unigram(scored, vocabulary.unknown, False))
            if characters is not None:
                backend.normalizer = normalizers.Precompiled(characters.astype(np.uint8).tobytes())
            words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
            backend.pre_tokenizer = pre_tokenizers.Sequence(words)
        backend.add_special_tokens(list(control))

    def first_of(*keys: str) -> tuple[int, ...]:
        found = (metadata.get(f"{_PREFIX}{key}_token_id", control.get(key)) for key in keys)
        return next(((token,) for token in found if type(token) is int), ())

    end = first_of("seperator", "eos", "[SEP]") if model == "bert" else first_of("eos")
    vocabulary = replace(
        vocabulary,
        pieces=BackendPieces(backend),
        prefix=first_of("bos", "cls", "[CLS]"),
        suffix=end,
        between=end if model == "bert" else 2 * end,
        strip_space=True,
    )
    decoder = TokenDecoder("word-pieces" if model == "bert" else "space")
    return HuggingFaceTokenizer(backend, vocabulary, decoder)


def _plain_words(tokens: _Tokens) -> PieceTable:
    """The pieces that plain text may become."""
    return tokens.table.only(np.isin(tokens.types, (_Type.NORMAL, _Type.USER_DEFINED)))


def _added(tokens: _Tokens, vocabulary: Vocabulary) -> dict[str, int]:
    """The tokens that are matched whole in text."""
    added = tokens.of_type(_Type.CONTROL, _Type.UNKNOWN, _Type.USER_DEFINED)
    return added | {tokens.table.text(token): token for token in vocabulary.special}


def _read_tokens(metadata: Mapping[str, object]) -> _Tokens:
    pieces = _strings(metadata, "tokens")
    types = _numbers(metadata, "token_type")
    if types is None:
        types = np.full(len(pieces), _Type.NORMAL, np.uint8)
    if len(types) != len(pieces):
        raise TokenizerError(
            f"the GGUF tokenizer has {len(pieces)} tokens but {len(types)} token types"
        )
    return _Tokens(PieceTable(pieces), types)


def _strings(metadata: Mapping[str, object], name: str) -> PackedStrings:
    """Return an array of strings."""
    found = metadata.get(f"{_PREFIX}{name}")
    if found is None:
        raise _missing(name)
    if isinstance(found, PackedStrings):
        return found
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise _malformed(name, "a list of strings", found)
    return PackedStrings.of(found)


def _numbers(metadata: Mapping[str, object], name: str) -> npt.NDArray[Any] | None:
    """Return an array of numbers, or None if the key is missing."""
    key = f"{_PREFIX}{name}"
    if isinstance(metadata, GgufMetadata):
        return metadata.numbers(key)
    found = metadata.get(key)
    return None if found is None else np.asarray(found)


def _malformed(name: str, wanted: str, found: object) -> TokenizerError:
    return TokenizerError(f"the GGUF file's {_PREFIX}{name} must be {wanted}, is {found!r:.60}")


def _missing(name: str) -> TokenizerError:
    return TokenizerError(f"the GGUF file's tokenizer is incomplete: {_PREFIX}{name} is missing")


def _vocabulary(
    metadata: Mapping[str, object],
    tokens: _Tokens,
    *,
    add_bos: bool,
    bos: int | None = None,
    eos: int | None = None,
    unknown: int | None = None,
    strip_space: bool = False,
) -> Vocabulary:
    """The vocabulary with special ids; ``bos``, ``eos``, ``unknown``, ``add_bos`` are defaults."""

    def special_id(key: str, default: int | None = None) -> int | None:
        found = metadata.get(f"{_PREFIX}{key}_token_id", default)
        if found is not None and type(found) is not int:
            raise _malformed(f"{key}_token_id", "a number", found)
        return found if found is not None and 0 <= found < len(tokens.table) else None

    bos_id, eos_id = special_id("bos", bos), special_id("eos", eos)
    control = tokens.types == _Type.CONTROL
    ends = end_ids(tokens.table.find, lambda token: bool(control[token]))
    ends |= {token for key in _END_KEYS if (token := special_id(key)) is not None}
    if eos_id is not None:
        ends |= {eos_id}
    special = frozenset(tokens.of_type(_Type.CONTROL, _Type.UNKNOWN).values()) | ends
    if bos_id is not None:
        special |= {bos_id}
    infill = {part: token for part, key in _INFILL_KEYS if (token := special_id(key)) is not None}
    prefix = metadata.get(f"{_PREFIX}add_bos_token", add_bos)
    suffixed = metadata.get(f"{_PREFIX}add_eos_token", False)
    suffix = (eos_id,) if suffixed and eos_id is not None else ()
    return Vocabulary(
        pieces=tokens.table,
        bos=bos_id,
        unknown=special_id("unknown", unknown),
        eos=frozenset(ends),
        special=special,
        prefix=(bos_id,) if prefix and bos_id is not None else (),
        suffix=suffix,
        between=suffix,  # of ModernBERT's pairs
        strip_space=strip_space,
        infill=infill,
        begins_chats=True,
    )


def _byte_ids(tokens: _Tokens) -> dict[int, int]:
    """Byte tokens, spelled ``<0x0A>``."""
    found: dict[int, int] = {}
    for piece, token in tokens.of_type(_Type.BYTE).items():
        try:
            found[int(piece.removeprefix("<0x").removesuffix(">"), 16)] = token
        except ValueError:
            raise TokenizerError(f"the GGUF byte token {piece!r} is malformed") from None
    return found
