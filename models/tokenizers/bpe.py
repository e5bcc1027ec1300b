"""Byte-level BPE (GPT-2, Llama 3, Qwen, ...) from a vocabulary and its merges.

The ``tokenizers`` package normalizes text and cuts it into words, which takes no vocabulary; merging
is done here, on packed tables, and yields what the package's own model would. Added tokens are found
before, because whether a control token counts is decided call by call. Does not know where the
vocabulary was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from localrt.models.tokenizers.bytelevel import BYTE_TO_CHAR, piece_bytes
from localrt.models.tokenizers.matcher import TokenMatcher
from localrt.models.tokenizers.merges import MergeTable
from localrt.models.tokenizers.pieces import PieceTable
from localrt.models.tokenizers.pretokenizers import PreType
from localrt.models.tokenizers.vocabulary import Vocabulary, VocabularyTokenizer

__all__ = ["ByteLevelTokenizer"]

_CACHED_CHARS = 48
_CACHED_WORDS = 1 << 13  # some 2 MB when full


class ByteLevelTokenizer(VocabularyTokenizer):
    """``words`` knows the pieces that ``merges`` may build; ``added`` are matched as a whole.

    Of ``added``, those in the vocabulary's ``special`` count only with ``parse_special``.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        words: PieceTable,
        merges: MergeTable,
        added: Mapping[str, int],
        pre: PreType,
    ) -> None:
        super().__init__(vocabulary)
        self._words = words
        self._merges = merges
        self._whole_words = pre.whole_words
        self._normalizer = pre.normalizer()
        self._pre_tokenizer = pre.pre_tokenizer()
        self._byte_ids = {char: token for char in BYTE_TO_CHAR if (token := words.find(char)) is not None}
        self._cached = lru_cache(_CACHED_WORDS)(self._word_ids)
        self._literal = frozenset(added.values())
        self._added = TokenMatcher(added)
        self._always = TokenMatcher(
            {text: token for text, token in added.items() if token not in vocabulary.special}
        )

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in (self._added if parse_special else self._always).split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        ids: list[int] = []
        for word, _ in self._pre_tokenizer.pre_tokenize_str(text):
            ids += self._cached(word) if len(word) <= _CACHED_CHARS else self._word_ids(word)
        return ids

    def _word_ids(self, word: str) -> tuple[int, ...]:
        """Ids of a word, spelled in the byte alphabet; bytes without a piece are left out."""
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
