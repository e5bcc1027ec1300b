"""What the tokenizers here share: the vocabulary, and the edges of encoding.

The edges are the tokens around a text (BOS, EOS), text that was not UTF-8, and the promise that
``parse_special=False`` never yields a control token. How plain text becomes ids is the subclass's.

Finds the leftmost, longest of many fixed strings in a text: the added tokens of a vocabulary.

Vocabularies hold thousands of them (Gemma 6,400), too many for one alternation of Python's ``re``;
here a place in the text costs one dictionary lookup unless two characters already fit. Knows
strings and numbers only, not what a token means.

Ids of a vocabulary's pieces and pieces of its ids, in a few bytes for each.

A dictionary of 151,936 pieces takes 25 MB and more in Python or Rust. Here pieces stay packed, and
a hash table of two integer arrays leads from a piece to its id: ids in the order of their bucket,
and where each bucket begins. One piece is looked up in about a microsecond, many at once by numpy.
Knows pieces and ids, not what they mean.
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.packed_strings import PackedStrings
from localrt.models.tokenizers.base import Tokenizer, Watch, behind, ignore_count


class TokenMatcher:
    """The strings of ``tokens`` (text -> id), to be looked for in any number of texts."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: token for text, token in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: sorted(sizes, reverse=True) for head, sizes in lengths.items()}
        first = "".join(sorted({head[0] for head in self._lengths}))
        self._start = re.compile(f"[{re.escape(first)}]") if first else None

    def spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        """``(start, stop, token)`` of each match, left to right, never overlapping."""
        position = 0
        while self._start is not None and (found := self._start.search(text, position)):
            start = found.start()
            match = self._longest_at(text, start)
            if match is None:
                position = start + 1
            else:
                position = match[0]
                yield start, *match

    def _longest_at(self, text: str, start: int) -> tuple[int, int] | None:
        """Where the longest token that begins at ``start`` ends, and its id."""
        head = text[start : start + 2]
        sizes = self._lengths.get(head, ())
        for size in (*sizes, 1) if len(head) == 2 else sizes:
            token = self._tokens.get(text[start : start + size])
            if token is not None:
                return start + len(text[start : start + size]), token
        return None

    def split(self, text: str, ignored: Container[int] = ()) -> Iterator[str | int]:
        """``text`` as an alternation of plain stretches (never empty) and token ids.

        Tokens in ``ignored`` remain text, in which no other token is found.
        """
        end = 0
        for start, stop, token in self.spans(text):
            if token in ignored:
                continue
            if start > end:
                yield text[end:start]
            yield token
            end = stop
        if end < len(text):
            yield text[end:]


_HASHED = 32  # bytes; longer pieces are mostly runs of one character, told apart by their length
_AT_ONCE = 1 << 14
Integers = npt.NDArray[np.int64]


class Pieces(Protocol):
    """A vocabulary's spelling of its ids."""

    def __len__(self) -> int:
        """One more than the largest id."""

    def text(self, token: int) -> str:
        """The piece of ``token``; empty for an id outside the vocabulary."""

    def find(self, text: str) -> int | None:
        """The id of the piece ``text``, if there is one."""


class PieceTable:
    """``Pieces`` by position. Of equal pieces the last is found, as in a dictionary."""

    def __init__(self, pieces: PackedStrings) -> None:
        self.pieces = pieces
        count = len(pieces)
        self._buckets = bucket_count(count)
        self._data = np.frombuffer(pieces.data, np.uint8)
        self._longest = 0
        hashes = np.empty(count, np.uint32)
        for start, stop in chunks(count):
            offsets = pieces.offsets[start : stop + 1].astype(np.int64)
            lengths = np.diff(offsets)
            self._longest = max(self._longest, int(lengths.max()))
            hashes[start:stop] = self._hash(self._data, offsets[:-1], lengths)
        ids, begins = bucket_order(hashes, self._buckets)
        self._ids, self._begins = ids.data, begins.data
        self._members: memoryview | None = None

    @property
    def members(self) -> npt.NDArray[np.bool_]:
        """Whether each id can be found."""
        if self._members is None:
            return np.ones(len(self), np.bool_)
        return np.asarray(self._members).view(np.bool_)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest piece."""
        longest = 0
        for start, stop in chunks(len(self)):
            offsets = self.pieces.offsets[start : stop + 1].astype(np.int64)
            begins = (self._data[offsets[0] : offsets[-1]] & 0xC0) != 0x80  # of characters
            counts = np.append(0, np.cumsum(begins))[offsets - offsets[0]]
            longest = max(longest, int(np.diff(counts).max()))
        return longest

    def only(self, members: npt.NDArray[np.bool_]) -> PieceTable:
        """The same table in which only ids that are true in ``members`` are found."""
        table = copy.copy(self)
        table._members = members.astype(np.uint8).data
        return table

    def __len__(self) -> int:
        return len(self.pieces)

    def text(self, token: int) -> str:
        """The piece of ``token``; empty for an id outside the vocabulary."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else ""

    def find(self, text: str) -> int | None:
        """The id of the piece ``text``, if there is one."""
        piece = text.encode("utf-8", "surrogatepass")
        for token in self._bucket(piece):
            if self.pieces.encoded(token) == piece and (
                self._members is None or self._members[token]
            ):
                return token
        return None

    def _bucket(self, piece: bytes) -> memoryview:
        """Ids that ``piece`` may have."""
        if len(piece) > self._longest:
            return self._ids[:0]
        bucket = (int.from_bytes(piece[:_HASHED], "big") + len(piece)) % self._buckets
        return self._ids[self._begins[bucket] : self._begins[bucket + 1]]

    def find_many(
        self, data: npt.NDArray[np.uint8], starts: Integers, lengths: Integers
    ) -> Integers:
        """The id of each piece of UTF-8 ``data``, which begins at ``starts``; -1 without one.

        Puts some 200 bytes aside for each: come with no more than ``chunks`` has.
        """
        offsets, begins, ids = self.pieces.offsets, np.asarray(self._begins), np.asarray(self._ids)
        found = np.full(len(starts), -1, np.int64)
        open_ = np.flatnonzero(lengths <= self._longest)
        buckets = self._hash(data, starts[open_], lengths[open_])
        at, stop = begins[buckets].astype(np.int64), begins[buckets + 1].astype(np.int64)
        while True:
            left = at < stop
            open_, at, stop = open_[left], at[left], stop[left]
            if not len(open_):
                return found
            tokens = ids[at].astype(np.int64)
            begin, end = offsets[tokens].astype(np.int64), offsets[tokens + 1].astype(np.int64)
            fits = end - begin == lengths[open_]
            if self._members is not None:
                fits &= np.asarray(self._members)[tokens] != 0
            same = np.flatnonzero(fits)
            fits[same] = _equal(
                data, starts[open_[same]], self._data, begin[same], (end - begin)[same]
            )
            found[open_[fits]] = tokens[fits]
            open_, at, stop = open_[~fits], at[~fits] + 1, stop[~fits]

    def _hash(
        self, data: npt.NDArray[np.uint8], starts: Integers, lengths: Integers
    ) -> npt.NDArray[np.uint64]:
        """Buckets of pieces: their first bytes as one number and their length, modulo a prime."""
        prime = np.uint64(self._buckets)
        hashes = np.zeros(len(starts), np.uint64)
        longer = np.arange(len(starts))
        for index in range(_HASHED):
            longer = longer[lengths[longer] > index]
            if not len(longer):
                break
            byte = data[starts[longer] + index]
            hashes[longer] = (hashes[longer] * np.uint64(256) + byte) % prime
        result: npt.NDArray[np.uint64] = (hashes + lengths.astype(np.uint64)) % prime
        return result


def bucket_count(count: int) -> int:
    """A prime number of buckets for ``count`` entries, not less than them."""
    number = max(count, 2)
    while any(number % divisor == 0 for divisor in range(2, isqrt(number) + 1)):
        number += 1
    return number


def bucket_order(
    buckets: npt.NDArray[np.uint32], count: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Entries sorted by their bucket, and where each of ``count`` buckets begins.

    Within a bucket they fall, so that the last of equal entries is met first. The second array has
    one number more: where the last bucket ends.
    """
    begins = np.zeros(count + 1, np.uint32)
    np.cumsum(np.bincount(buckets, minlength=count), out=begins[1:])
    order = np.argsort(buckets[::-1], kind="stable")
    return np.subtract(len(buckets) - 1, order, out=order).astype(np.uint32), begins


def chunks(count: int) -> Iterator[tuple[int, int]]:
    """``range(count)`` in pieces that keep what numpy puts aside small."""
    return ((start, min(start + _AT_ONCE, count)) for start in range(0, count, _AT_ONCE))


def _equal(
    ours: npt.NDArray[np.uint8],
    starts: Integers,
    theirs: npt.NDArray[np.uint8],
    begins: Integers,
    lengths: Integers,
) -> npt.NDArray[np.bool_]:
    """Whether each stretch of ``ours`` has the bytes of the stretch of ``theirs``."""
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    differ = (
        ours[np.repeat(starts, lengths) + within] != theirs[np.repeat(begins, lengths) + within]
    )
    equal = np.ones(len(starts), np.bool_)
    equal[np.searchsorted(ends, np.flatnonzero(differ), "right")] = False
    return equal


_SURROGATES = re.compile("([\ud800-\udfff]+)")
_UNESCAPED = re.compile("[\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces by id, ids by piece, and the ids with a meaning.

    ``prefix`` and ``suffix`` go around a text with ``add_special``; ``eos`` ends a generation;
    ``special`` are the control tokens; ``strip_space`` drops one leading space in decoding;
    ``infill`` are the ``Tokenizer.infill_ids``. ``begins_chats``: the prefix leads a conversation
    too where its template does not write it.
    """

    pieces: Pieces
    bos: int | None = None
    unknown: int | None = None
    eos: frozenset[int] = frozenset()
    special: frozenset[int] = frozenset()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    strip_space: bool = False
    infill: Mapping[str, int] = field(default_factory=dict)
    begins_chats: bool = False


class VocabularyTokenizer(Tokenizer):
    """A ``Tokenizer`` over a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._forbidden = vocabulary.special - {vocabulary.unknown}
        self.vocab_size = len(vocabulary.pieces)
        self.bos_id = vocabulary.bos
        self.eos_ids = vocabulary.eos
        self.special_ids = vocabulary.special
        self.strip_space = vocabulary.strip_space
        self.infill_ids = vocabulary.infill
        self.chat_prefix = vocabulary.prefix if vocabulary.begins_chats else ()

    @abstractmethod
    def _encode_text(self, text: str, parse_special: bool, watch: Watch) -> list[int]:
        """Ids of valid Unicode text that is not empty; no BOS, no EOS."""

    @abstractmethod
    def _byte_id(self, byte: int) -> int | None:
        """The token of one byte, if the vocabulary has it."""

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        watch: Watch = ignore_count,
    ) -> list[int]:
        """See ``Tokenizer``; lone surrogates stand for their bytes."""
        ids: list[int] = []
        for part in _valid_parts(text):
            watch(len(ids))
            if isinstance(part, str):
                ids += self._encode_text(part, parse_special, behind(ids, watch))
            else:
                ids += self._encode_bytes(part)
        if not parse_special and not self._forbidden.isdisjoint(ids):
            ids = self._spell_out(ids)
        if add_special:
            return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix]
        return ids

    def token_text(self, token: int) -> str:
        """The vocabulary's own spelling of ``token``; empty for an id outside it."""
        return self._vocabulary.pieces.text(token)

    def token_id(self, text: str) -> int | None:
        """Id of the token that the vocabulary spells ``text``, if there is one."""
        return self._vocabulary.pieces.find(text)

    def _encode_bytes(self, data: bytes) -> list[int]:
        """One token for each byte; U+FFFD where the vocabulary lacks one of them."""
        ids = [token for byte in data if (token := self._byte_id(byte)) is not None]
        return ids if len(ids) == len(data) else self._encode_text("\ufffd", False, ignore_count)

    def _spell_out(self, ids: list[int]) -> list[int]:
        """``ids`` with control tokens that text ran into replaced by the bytes of their names.

        Some vocabularies can merge ``<`` ``s`` ``>`` into the real ``<s>``.
        """
        spelled: list[int] = []
        for token in ids:
            if token in self._forbidden:
                name = self.token_text(token).encode("utf-8", "surrogateescape")
                spelled += [t for byte in name if (t := self._byte_id(byte)) is not None]
            else:
                spelled.append(token)
        return spelled


def _valid_parts(text: str) -> Iterator[str | bytes]:
    """``text`` as valid Unicode, with the bytes that lone surrogates carry in between.

    ``surrogateescape`` surrogates are their byte (neighbours that form a character become it);
    any other lone surrogate is its three bytes.
    """
    if not _SURROGATES.search(text):
        if text:
            yield text
        return
    escaped = _UNESCAPED.sub(
        lambda found: found[0].encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape"),
        text,
    )
    healed = escaped.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    for index, part in enumerate(_SURROGATES.split(healed)):
        if part:
            yield part.encode("utf-8", "surrogateescape") if index % 2 else part
