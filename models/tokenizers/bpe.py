"""Byte-level BPE (GPT-2, Llama 3, Qwen, ...) from a vocabulary and its merges.

The ``tokenizers`` package normalizes text and cuts it into words, which takes no vocabulary;
merging is done here, on packed tables, and yields what the package's own model would. Added tokens
are found before, because whether a control token counts is decided call by call. Does not know
where the vocabulary was stored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from localrt.models.tokenizers.bytelevel import BYTE_TO_CHAR, piece_bytes
from localrt.models.tokenizers.matcher import TokenMatcher
from localrt.models.tokenizers.merges import MergeTable
from localrt.models.tokenizers.pieces import PieceTable
from localrt.models.tokenizers.vocabulary import Vocabulary, VocabularyTokenizer

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

__all__ = ["ByteLevelEncoder", "ByteLevelTokenizer", "WordMerger"]

_CACHED_CHARS = 48
_CACHED_WORDS = 1 << 13  # some 2 MB when full
_LONG_TEXT = 1 << 14  # characters; cutting into words puts some 170 bytes aside for each
_WORD_START = re.compile("(?<=[a-z])(?= [a-z])")


class WordMerger:
    """Ids of single words, spelled in the byte alphabet. Thread-safe.

    ``words`` knows the pieces that ``merges`` may build; with ``whole_words`` a word that is one of
    them is taken as it is, whatever the merges say.
    """

    def __init__(self, words: PieceTable, merges: MergeTable, *, whole_words: bool) -> None:
        self._words = words
        self._merges = merges
        self._whole_words = whole_words
        found = {char: words.find(char) for char in BYTE_TO_CHAR}
        self.byte_ids = {char: token for char, token in found.items() if token is not None}
        self._cached = lru_cache(_CACHED_WORDS)(self._merge)

    def ids(self, word: str) -> tuple[int, ...]:
        """Ids of ``word``; bytes without a piece are left out."""
        return self._cached(word) if len(word) <= _CACHED_CHARS else self._merge(word)

    def _merge(self, word: str) -> tuple[int, ...]:
        if self._whole_words and (token := self._words.find(word)) is not None:
            return (token,)
        known = self.byte_ids
        return tuple(self._merges.merge([known[char] for char in word if char in known]))


class ByteLevelEncoder:
    """Ids of text. Thread-safe.

    ``added`` are matched as a whole, and those in ``special`` only with ``parse_special``. What
    lies between goes through ``normalizer`` and ``pre_tokenizer``, which ends in the byte alphabet.
    ``cut_long`` says that these never look across a space between two small ASCII letters: long
    text is cut there, to save memory. With ``special_hides``, names of control tokens that do not
    count still keep other added tokens from being found in them.
    """

    def __init__(
        self,
        merger: WordMerger,
        *,
        added: Mapping[str, int],
        special: Collection[int],
        normalizer: Normalizer | None,
        pre_tokenizer: PreTokenizer,
        cut_long: bool = False,
        special_hides: bool = False,
    ) -> None:
        self.merger = merger
        self._cut_long = cut_long
        self._normalizer = normalizer
        self._pre_tokenizer = pre_tokenizer
        self._added = TokenMatcher(added)
        self._always = TokenMatcher(
            {text: token for text, token in added.items() if token not in special}
        )
        self._hiding = special if special_hides else ()

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of ``text``, which is valid Unicode."""
        ids: list[int] = []
        for part in self._parts(text, parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part)
        return ids

    def _parts(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """``text`` as plain stretches and the added tokens that count."""
        if parse_special or not self._hiding:
            yield from (self._added if parse_special else self._always).split(text)
            return
        end = 0
        for start, stop, token in self._added.spans(text):
            if token not in self._hiding:
                if start > end:
                    yield text[end:start]
                yield token
                end = stop
        if end < len(text):
            yield text[end:]

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for stretch in self._stretches(text):
            normal = self._normalizer.normalize_str(stretch) if self._normalizer else stretch
            for word, _ in self._pre_tokenizer.pre_tokenize_str(normal):
                ids += self.merger.ids(word)
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


class ByteLevelTokenizer(VocabularyTokenizer):
    """``encoder`` does the work; ``literal`` are added tokens, which stand for their names."""

    def __init__(
        self, vocabulary: Vocabulary, *, encoder: ByteLevelEncoder, literal: Iterable[int]
    ) -> None:
        super().__init__(vocabulary)
        self._encoder = encoder
        self._literal = frozenset(literal)

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        return self._encoder.encode(text, parse_special)

    def _byte_id(self, byte: int) -> int | None:
        return self._encoder.merger.byte_ids.get(BYTE_TO_CHAR[byte])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``: an added token's name, nothing for an unknown id."""
        if token in self._literal:
            return self.token_text(token).encode("utf-8", "surrogateescape")
        return piece_bytes(self.token_text(token))
