"""Byte-pair encoding from packed tables, in two variants.

Byte-level (GPT-2, Llama 3, Qwen), and SentencePiece (Llama 2, Mistral, Gemma). Neither knows where
the vocabulary was stored.

For byte-level BPE the ``tokenizers`` package normalizes text and splits it into words, without a
vocabulary; merging is done here with the same result as the package's. Added tokens are found
first, because each call decides whether control tokens count.

SentencePiece needs no list of merges: the adjacent pair that scores best is merged, so 262,144
tokens load in a fraction of a second. GGUF files of Gemma 4 have a list nevertheless. Text is
merged in chunks, cut where no piece of the vocabulary can cross, and short chunks are cached.
Characters without a piece fall back to their UTF-8 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localrt.models.tokenizers.base import (
    TokenMatcher,
    Vocabulary,
    VocabularyTokenizer,
    Watch,
    behind,
    ignore_count,
    package_errors,
)
from localrt.models.tokenizers.tables import Join, MergeTable, PieceTable, join_neighbours

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
# Approximate bytes of a segment: splitting into words takes some 170 bytes of memory for each.
_LONG_TEXT = 1 << 14
_LONGEST_WORD = 1 << 15  # longer words are cut there
_OPEN = 3  # words at a segment's end that the next text may change
# Normalization never combines these with preceding characters.
_STARTER = re.compile("[\0-\u02ff\u0370-\u0482\u048a-\u0590\u3041-\u3096\u4e00-\u9fff가-\ud7a3]")
_SHRINKS = 3  # the most times that NFC shortens text


def piece_bytes(piece: str) -> bytes:
    """The bytes of a vocabulary entry; an entry outside the byte alphabet is plain UTF-8."""
    try:
        return bytes([_CHAR_TO_BYTE[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "surrogateescape")


class ByteLevelTokenizer(VocabularyTokenizer):
    """``words`` has the pieces of words, in the byte alphabet.

    With ``whole_words`` a word that is itself a piece is not merged from parts. ``added`` tokens
    are matched whole, the vocabulary's special ones only with ``parse_special``; they decode to
    their names. Other text goes through ``normalizer`` and ``pre_tokenizer``, which ends in the
    byte alphabet. ``cut_long`` says that the normalizer is NFC and that the words do not change
    when text begins at any of them: long text is then encoded in segments.
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
        """The most bytes of one token."""
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
        """Yield the words of ``text``, segment by segment."""
        rest, width = "", 1 if text.isascii() else 3  # bytes of a character
        for stretch, last in self._stretches(text, width):
            with package_errors("the model's tokenizer cannot encode this text"):
                rest += self._normalizer.normalize_str(stretch) if self._normalizer else stretch
                words = self._pre_tokenizer.pre_tokenize_str(rest)
            count = len(words)
            if not last:
                count -= _OPEN
                # A character's bytes may be split into two words.
                while count > 0 and words[count][1][0] < words[count - 1][1][1]:
                    count -= 1
                if count <= 0 and width * len(rest) < _LONGEST_WORD:
                    continue
                count = count if count > 0 else len(words)
            yield (word for word, _ in words[:count])
            rest = rest[words[count][1][0] :] if count < len(words) else ""

    def _stretches(self, text: str, width: int) -> Iterator[tuple[str, bool]]:
        """Segments of ``text`` that can be normalized alone, and whether each is the last."""
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
        """Merge ``word`` into ids; bytes without a piece are left out."""
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


SPACE = "▁"
_CACHED_CHUNKS = 1 << 15
_SHORT_TEXT = 1 << 12  # characters; encoding these takes no noticeable time
_HEARD = 4096  # tokens between calls of a watch
_LINES = re.compile("[^\n]+|\n+")


def join_by_scores(words: PieceTable, scores: npt.NDArray[np.floating]) -> Join[str]:
    """Join neighbours to pieces of the vocabulary, best score first."""
    floats = np.ascontiguousarray(scores, np.result_type(scores, np.float32)).data

    def join(left: str, right: str) -> tuple[float, str] | None:
        joined = left + right
        token = words.find(joined)
        return None if token is None else (-floats[token], joined)

    return join


def join_by_merges(words: PieceTable, merges: MergeTable) -> Join[str]:
    """Join neighbours by a list of merges, in its order."""

    def join(left: str, right: str) -> tuple[float, str] | None:
        first, second = words.find(left), words.find(right)
        found = None if first is None or second is None else merges.join(first, second)
        return None if found is None else (found[0], left + right)

    return join


class SentencePieceTokenizer(VocabularyTokenizer):
    """``words`` has the pieces that merges may build; ``join`` ranks them.

    With ``lines_apart`` line ends are never joined to other text, and several of them are one piece
    if the vocabulary has it. ``byte_ids`` has the token of each byte if the vocabulary has byte
    tokens. ``added`` tokens are matched whole, the vocabulary's special ones only with
    ``parse_special``. ``space_prefix`` adds a space before text that begins a sequence or follows
    an added token. ``swallow_space`` are added tokens that drop the whitespace after them.
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
        # U+2581 is a space in the vocabulary and in text: match both
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
        """The most characters of one token."""
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
        """Merge a chunk into ids, best merges first."""
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
    """Where text may be cut: before a space that no piece joins to the text before it."""
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
