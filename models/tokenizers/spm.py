"""SentencePiece BPE (Llama 2, Mistral, Gemma): merge the adjacent pair that scores best.

Follows SentencePiece's own algorithm: no merge list is needed, a vocabulary with scores is enough,
so 262,144 tokens load in a fraction of a second. GGUF files of Gemma 4 have a list all the same.
Text is merged chunk by chunk, cut where no piece of the vocabulary reaches across, and short chunks
are remembered. Characters without a piece fall back to their UTF-8 bytes. Does not know where the
vocabulary was stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.tokenizers.base import (
    TokenMatcher,
    Vocabulary,
    VocabularyTokenizer,
    Watch,
    behind,
    ignore_count,
)
from localrt.models.tokenizers.tables import Join, MergeTable, PieceTable, join_neighbours

SPACE = "▁"
_CACHED_CHARS = 48
_CACHED_CHUNKS = 1 << 15
_SHORT_TEXT = 1 << 12  # characters, which are read in no time
_HEARD = 4096  # tokens between two calls of a watch
_LINES = re.compile("[^\n]+|\n+")


def join_by_scores(words: PieceTable, scores: npt.NDArray[Any]) -> Join[str]:
    """Neighbours become any piece there is; that of the best score first."""
    floats = np.ascontiguousarray(scores, np.result_type(scores, np.float32)).data

    def join(left: str, right: str) -> tuple[float, str] | None:
        joined = left + right
        token = words.find(joined)
        return None if token is None else (-floats[token], joined)

    return join


def join_by_merges(words: PieceTable, merges: MergeTable) -> Join[str]:
    """Neighbours become what a list says, in its order."""

    def join(left: str, right: str) -> tuple[float, str] | None:
        first, second = words.find(left), words.find(right)
        found = None if first is None or second is None else merges.join(first, second)
        return None if found is None else (found[0], left + right)

    return join


class SentencePieceTokenizer(VocabularyTokenizer):
    """``words`` knows the pieces that merges may build, and ``join`` which come first.

    With ``lines_apart`` line ends are never joined to other text, and several of them are one piece
    if there is such a piece. ``byte_ids`` has the token of each byte where the vocabulary has byte
    tokens. ``added`` are matched in text as a whole; of those, the ones in the vocabulary's
    ``special`` count only with ``parse_special``. ``space_prefix`` puts a space in front of text
    that begins a sequence or follows an added token. ``swallow_space`` are added tokens that take
    the whitespace after them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        words: PieceTable,
        join: Join[str],
        byte_ids: Mapping[int, int],
        added: Mapping[str, int],
        space_prefix: bool,
        swallow_space: frozenset[int] = frozenset(),
        lines_apart: bool = False,
    ) -> None:
        super().__init__(vocabulary)
        self._words = words
        self._join = join
        self._lines_apart = lines_apart
        self._byte_ids = byte_ids
        self._bytes = {token: bytes([byte]) for byte, token in byte_ids.items()}
        self._space_prefix = space_prefix
        self._swallow_space = swallow_space
        # U+2581 is a space, whether the vocabulary or the text writes it: match both as one
        self._added = TokenMatcher(
            {text.replace(SPACE, " "): token for text, token in added.items()}
        )
        self._name_lengths = [len(text) for text in added]
        self._boundary = _boundary(words)
        self._cached = lru_cache(_CACHED_CHUNKS)(self._merge)

    def least_tokens(self, text: str) -> int:
        leaves_out = self._vocabulary.unknown is None and len(self._byte_ids) < 256
        if self._swallow_space or leaves_out or len(text) < _SHORT_TEXT:
            return 0
        return -(-len(text) // self._longest)

    @cached_property
    def _longest(self) -> int:
        """Characters that one token stands for, at most."""
        return max(self._words.longest, *self._name_lengths, 1)

    def _encode_text(self, text: str, parse_special: bool, watch: Watch) -> list[int]:
        ids: list[int] = []
        after_token, swallow = True, False
        ignored = () if parse_special else self.special_ids
        for part in self._added.split(text.replace(SPACE, " "), ignored):
            if isinstance(part, int):
                ids.append(part)
                after_token, swallow = True, part in self._swallow_space
                continue
            plain = part.lstrip() if swallow else part
            if plain:
                prefix = " " if after_token and self._space_prefix else ""
                ids += self._encode_plain(prefix + plain, behind(ids, watch))
                after_token = swallow = False
        return ids

    def _encode_plain(self, text: str, watch: Watch) -> list[int]:
        ids: list[int] = []
        heard = 0
        for chunk in self._chunks(text.replace(" ", SPACE)):
            if len(chunk) <= _CACHED_CHARS:
                ids += self._cached(chunk)
            else:
                ids += self._merge(chunk, behind(ids, watch))
            if len(ids) > heard + _HEARD:
                heard = len(ids)
                watch(heard)
        return ids

    def _chunks(self, text: str) -> Iterator[str]:
        lines = (found[0] for found in _LINES.finditer(text)) if self._lines_apart else (text,)
        for line in lines:
            start = 0
            for found in self._boundary.finditer(line):
                yield line[start : found.start()]
                start = found.start()
            yield line[start:]

    def _merge(self, chunk: str, watch: Watch = ignore_count) -> tuple[int, ...]:
        """Ids of a chunk: the best merges first."""
        if self._lines_apart and chunk[:1] == "\n":
            token = self._words.find(chunk)
            if token is not None:
                return (token,)
        symbols = join_neighbours(chunk, self._join, watch)
        return tuple(token for symbol in symbols for token in self._symbol_ids(symbol))

    def _symbol_ids(self, symbol: str) -> list[int]:
        token = self._words.find(symbol)
        if token is not None:
            return [token]
        fallback = [self._byte_ids.get(byte) for byte in symbol.encode()]
        known = [byte_token for byte_token in fallback if byte_token is not None]
        if len(known) == len(fallback):
            return known
        return [] if self._vocabulary.unknown is None else [self._vocabulary.unknown]

    def _byte_id(self, byte: int) -> int | None:
        found = self._byte_ids.get(byte)
        return self._words.find(chr(byte)) if found is None and byte < 128 else found

    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``: a control token's name, nothing for an unknown id."""
        byte = self._bytes.get(token)
        if byte is not None:
            return byte
        return self.token_text(token).replace(SPACE, " ").encode("utf-8", "surrogateescape")


def _boundary(words: PieceTable) -> re.Pattern[str]:
    """Where text may be cut: in front of a space that no piece joins to what precedes it."""
    mark = SPACE.encode()
    text, offsets = words.pieces.data, words.pieces.offsets.astype(np.int64)
    data = np.frombuffer(text, np.uint8)
    places = np.flatnonzero(data == mark[0])
    for index in range(1, len(mark)):
        places = places[data[np.minimum(places + index, len(data) - 1)] == mark[index]]
    owners = np.searchsorted(offsets, places, "right") - 1
    inside = (places > offsets[owners]) & words.members[owners]
    inside &= ~np.isin(places - len(mark), places)
    begins = np.maximum(offsets[owners], places - 4)  # no character is longer
    heads = {
        text[a:b] for a, b in zip(begins[inside].tolist(), places[inside].tolist(), strict=True)
    }
    crossing = sorted({head.decode(errors="ignore")[-1:] for head in heads})
    return re.compile(f"(?<=[^{SPACE}{re.escape(''.join(crossing))}])(?={SPACE})")
