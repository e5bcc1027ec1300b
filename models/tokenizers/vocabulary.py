"""What the tokenizers here share: the vocabulary, and the edges of encoding.

The edges are the tokens around a text (BOS, EOS), text that was not UTF-8, and the promise that
``parse_special=False`` never yields a control token. How plain text becomes ids is the subclass's.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from localrt.models.tokenizers.base import Tokenizer, Watch, behind, ignore_count
from localrt.models.tokenizers.pieces import Pieces

__all__ = ["Vocabulary", "VocabularyTokenizer"]

_SURROGATES = re.compile("([\ud800-\udfff]+)")
_UNESCAPED = re.compile("[\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces by id, ids by piece, and the ids with a meaning.

    ``prefix`` and ``suffix`` go around a text with ``add_special``; ``eos`` ends a generation;
    ``special`` are the control tokens; ``strip_space`` drops one leading space in decoding;
    ``infill`` are the ``Tokenizer.infill_ids``.
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
