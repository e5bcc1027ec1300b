"""Byte-level BPE (GPT-2, Llama 3, Qwen, ...) from a vocabulary and its merges.

The ``tokenizers`` package normalizes text and cuts it into words, which takes no vocabulary;
merging is done here, on packed tables, and yields what the package's own model would. Added tokens
are found before, because whether a control token counts is decided call by call. Does not know
where the vocabulary was stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from localrt.models.tokenizers.matcher import TokenMatcher
from localrt.models.tokenizers.merges import MergeTable
from localrt.models.tokenizers.pieces import PieceTable
from localrt.models.tokenizers.vocabulary import Vocabulary, VocabularyTokenizer

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["BYTE_TO_CHAR", "ByteLevelTokenizer", "piece_bytes"]

_PRINTABLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTE_TO_CHAR: tuple[str, ...] = tuple(
    chr(byte) if byte in _PRINTABLE else chr(0x100 + _OTHERS.index(byte)) for byte in range(256)
)
"""GPT-2's alphabet: a printable character for each byte, so that a vocabulary is spelled as text.

Bytes that print keep their Latin-1 character; the others take the characters from U+0100 on.
"""
_CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}

_CACHED_CHARS = 48
_CACHED_WORDS = 1 << 13  # some 2 MB when full
_LONG_TEXT = 1 << 14  # characters; cutting into words puts some 170 bytes aside for each
_WORD_START = re.compile("(?<=[a-z])(?= [a-z])")


def piece_bytes(piece: str) -> bytes:
    """The bytes that a vocabulary entry spells; one outside the alphabet stands for itself."""
    try:
        return bytes([_CHAR_TO_BYTE[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "surrogateescape")


class ByteLevelTokenizer(VocabularyTokenizer):
    """``words`` knows the pieces that a word may become, in the byte alphabet.

    With ``whole_words`` a word that is one of them is taken as it is, whatever ``merges`` say.
    ``added`` are matched as a whole, and the vocabulary's special ones only with ``parse_special``;
    they stand for their names. What lies between goes through ``normalizer`` and ``pre_tokenizer``,
    which ends in the byte alphabet. ``cut_long`` says that these never look across a space between
    two small ASCII letters: long text is cut there, to save memory.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        words: PieceTable,
        merges: MergeTable,
        whole_words: bool,
        added: Mapping[str, int],
        normalizer: Normalizer | None,
        pre_tokenizer: PreTokenizer,
        cut_long: bool = False,
    ) -> None:
        super().__init__(vocabulary)
        self._words = words
        self._merges = merges
        self._whole_words = whole_words
        self._added = TokenMatcher(added)
        self._literal = frozenset(added.values())
        self._normalizer = normalizer
        self._pre_tokenizer = pre_tokenizer
        self._cut_long = cut_long
        found = {char: words.find(char) for char in BYTE_TO_CHAR}
        self._byte_ids = {char: token for char, token in found.items() if token is not None}
        self._cached = lru_cache(_CACHED_WORDS)(self._merge)

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in self._added.split(text, () if parse_special else self.special_ids):
            if isinstance(part, int):
                ids.append(part)
                continue
            for stretch in self._stretches(part):
                normal = self._normalizer.normalize_str(stretch) if self._normalizer else stretch
                for word, _ in self._pre_tokenizer.pre_tokenize_str(normal):
                    ids += self._cached(word) if len(word) <= _CACHED_CHARS else self._merge(word)
        return ids

    def _stretches(self, text: str) -> Iterator[str]:
        """``text`` in pieces that no word reaches across, where there are such places."""
        start = 0
        while self._cut_long and len(text) - start > _LONG_TEXT:
            found = _WORD_START.search(text, start + _LONG_TEXT)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        yield text[start:] if start else text

    def _merge(self, word: str) -> tuple[int, ...]:
        """Ids of ``word``; bytes without a piece are left out."""
        if self._whole_words and (token := self._words.find(word)) is not None:
            return (token,)
        known = self._byte_ids
        return tuple(self._merges.merge([known[char] for char in word if char in known]))

    def _byte_id(self, byte: int) -> int | None:
        return self._byte_ids.get(BYTE_TO_CHAR[byte])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``: an added token's name, nothing for an unknown id."""
        if token in self._literal:
            return self.token_text(token).encode("utf-8", "surrogateescape")
        return piece_bytes(self.token_text(token))
