"""Byte-level BPE (GPT-2, Llama 3, Qwen, ...) from a vocabulary and its merges.

The ``tokenizers`` package normalizes text and cuts it into words, which takes no vocabulary;
merging is done here, on packed tables, and yields what the package's own model would. Added tokens
are found before, because whether a control token counts is decided call by call. Does not know
where the vocabulary was stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from localrt.models.tokenizers.base import (
    TokenMatcher,
    Vocabulary,
    VocabularyTokenizer,
    Watch,
    behind,
    ignore_count,
    package_errors,
)
from localrt.models.tokenizers.tables import MergeTable, PieceTable

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

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
# In bytes, about: cutting into words puts some 170 bytes aside for each.
_LONG_TEXT = 1 << 14
_LONGEST_WORD = 1 << 15  # a longer one is cut there
_OPEN = 3  # words at the end of a stretch, which the text behind it may change
# No normal form joins these to what precedes them.
_STARTER = re.compile("[\0-\u02ff\u0370-\u0482\u048a-\u0590\u3041-\u3096\u4e00-\u9fff가-\ud7a3]")
_SHRINKS = 3  # times, at most, when NFC puts characters together


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
    which ends in the byte alphabet. ``cut_long`` says that the one is NFC, and that the other finds
    the same words when it begins at any of them: long text is read in stretches then.
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
        missing = [byte for byte, char in enumerate(BYTE_TO_CHAR) if char not in self._byte_ids]
        self._left_out = bytes(missing)
        self._cached = lru_cache(_CACHED_WORDS)(self._merge)

    def least_tokens(self, text: str) -> int:
        if len(text) < _LONG_TEXT:
            return 0
        size = len(text.encode("utf-8", "surrogatepass").translate(None, self._left_out))
        if self._normalizer is not None and not text.isascii():
            size = size // _SHRINKS if self._cut_long else 0
        return -(-size // self._longest)

    @cached_property
    def _longest(self) -> int:
        """Bytes that one token stands for, at most."""
        names = (len(self.token_text(token).encode()) for token in self._literal)
        return max(self._words.longest, *names, 1)

    def _encode_text(self, text: str, parse_special: bool, watch: Watch) -> list[int]:
        ids: list[int] = []
        for part in self._added.split(text, () if parse_special else self.special_ids):
            if isinstance(part, int):
                ids.append(part)
                continue
            for words in self._words_of(part):
                watch(len(ids))
                for word in words:
                    if len(word) <= _CACHED_CHARS:
                        ids += self._cached(word)
                    else:
                        ids += self._merge(word, behind(ids, watch))
        return ids

    def _words_of(self, text: str) -> Iterator[Iterator[str]]:
        """The words of ``text``, those of a stretch at a time."""
        rest, width = "", 1 if text.isascii() else 3  # bytes of a character
        for stretch, last in self._stretches(text, width):
            with package_errors("the model's tokenizer cannot encode this text"):
                rest += self._normalizer.normalize_str(stretch) if self._normalizer else stretch
                words = self._pre_tokenizer.pre_tokenize_str(rest)
            count = len(words)
            if not last:
                count -= _OPEN
                # A character's bytes may be two words.
                while count > 0 and words[count][1][0] < words[count - 1][1][1]:
                    count -= 1
                if count <= 0 and width * len(rest) < _LONGEST_WORD:
                    continue
                count = count if count > 0 else len(words)
            yield (word for word, _ in words[:count])
            rest = rest[words[count][1][0] :] if count < len(words) else ""

    def _stretches(self, text: str, width: int) -> Iterator[tuple[str, bool]]:
        """``text`` in pieces that are normalized alone, and whether each is the last."""
        start, size, most = 0, max(1, _LONG_TEXT // width), _LONGEST_WORD // width
        while self._cut_long and len(text) - start > size:
            stop = start + size
            if self._normalizer is not None:
                found = _STARTER.search(text, stop, start + most)
                stop = start + most if found is None else found.start()
            yield text[start:stop], stop >= len(text)
            start = stop
        if start < len(text):
            yield text[start:], True

    def _merge(self, word: str, watch: Watch = ignore_count) -> tuple[int, ...]:
        """Ids of ``word``; bytes without a piece are left out."""
        if self._whole_words and (token := self._words.find(word)) is not None:
            return (token,)
        known = self._byte_ids
        return tuple(self._merges.merge([known[char] for char in word if char in known], watch))

    def _byte_id(self, byte: int) -> int | None:
        return self._byte_ids.get(BYTE_TO_CHAR[byte])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``: an added token's name, nothing for an unknown id."""
        if token in self._literal:
            return self.token_text(token).encode("utf-8", "surrogateescape")
        return piece_bytes(self.token_text(token))
