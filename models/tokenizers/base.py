"""The base of all tokenizers: protocol, vocabulary, and special cases of encoding.

A token may end in the middle of a UTF-8 character, so text is decoded from bytes: complete
characters are returned, the rest waits for the next token. The special cases are BOS and EOS, text
that was not UTF-8, and the guarantee that ``parse_special=False`` never yields a control token.
Subclasses turn plain text into ids.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeAlias

from localrt.common.errors import TokenizerError, disk_errors
from localrt.common.files import parse_json

Watch: TypeAlias = Callable[[int], None]
"""Hears now and then how many tokens a text has become so far; raises to end that."""
_UTF8 = codecs.getincrementaldecoder("utf-8")
# Names of tokens that end a turn, and those that do only as control tokens: Gemma's "</s>" is HTML.
_END_NAMES = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)
_END_CONTROL_NAMES = (
    "</s>",
    "<eos>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<turn|>",
    "<|tool_response>",  # Gemma 4: a tool's result comes next
)


def end_ids(find: Callable[[str], int | None], is_control: Callable[[int], bool]) -> set[int]:
    """Tokens whose name shows that they end a turn; ``find`` gives the id of a name."""
    ends = {token for name in _END_NAMES if (token := find(name)) is not None}
    named = map(find, _END_CONTROL_NAMES)
    ends |= {token for token in named if token is not None and is_control(token)}
    if find("<|return|>") is not None and find("<|call|>") is not None:
        ends -= {find("<|end|>")}  # gpt-oss: ends a message, not the turn
    return ends


def ignore_count(count: int) -> None:
    """A ``Watch`` that never stops encoding."""


def behind(ids: Sequence[int], watch: Watch) -> Watch:
    """A ``Watch`` for text encoded after ``ids``: ``watch`` gets the sum of both counts."""
    return lambda count: watch(len(ids) + count)


class Detokenizer:
    """Text of one growing token sequence, piece by piece, without the tokens in ``skip``.

    ``strip_space`` drops one space at the very start, which the encoder of some vocabularies adds
    to every text.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        skip: Container[int] = (),
        strip_space: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._strip_space = strip_space
        self._decoder = _UTF8("replace")

    def push(self, token: int) -> str:
        """Text that is certain after ``token``: complete characters only, possibly none."""
        if token in self._skip:
            return ""
        data = self._token_bytes(token)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return the rest; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(ABC):
    """Text to token ids and back. Thread-safe.

    It has ``vocab_size`` ids; a model's head may have more rows. ``eos_ids`` end a generation (end
    of sequence, end of turn), ``special_ids`` are the control tokens. With ``strip_space``,
    decoding drops the space that encoding adds before a text. ``infill_ids`` are the
    fill-in-the-middle tokens, if the model's files declare them: ``pre``, ``suf``, ``mid``,
    ``pad``, ``rep`` and ``sep``, as in GGUF. ``chat_prefix`` begins every conversation, even if its
    template does not write it. ``around_pairs`` are the tokens before, between and after two texts
    that a model reads as one.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    strip_space: bool
    infill_ids: Mapping[str, int] = MappingProxyType({})
    chat_prefix: Sequence[int] = ()
    around_pairs: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ())

    @abstractmethod
    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        watch: Watch = ignore_count,
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds what the model adds around plain text (BOS, mostly); ``parse_special``
        reads control tokens written in the text (``<|im_start|>``) as themselves: for rendered chat
        templates, never for what a user typed. ``watch`` is called at least every few thousand
        tokens of a long text.
        """

    def encode_raw(self, text: str, watch: Watch = ignore_count) -> list[int]:
        """Token ids of a prompt to be read as it is written: control tokens in it count, and a BOS
        that it begins with is not added again.
        """
        ids = self.encode(text, parse_special=True, watch=watch)
        start = self.encode("")
        sizes = range(len(start), 0, -1)
        return ids[next((n for n in sizes if ids[:n] == start[:n] == ids[n : 2 * n]), 0) :]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts that a model reads as one."""
        before, between, after = self.around_pairs
        ids, others = (self.encode(text, add_special=False) for text in (first, second))
        return [*before, *ids, *between, *others, *after]

    def least_tokens(self, text: str) -> int:
        """A lower bound of ``text``'s token count, from the longest token; 0: not known."""
        return 0

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of ``token``; a control token's are its name."""

    @abstractmethod
    def token_text(self, token: int) -> str:
        """The vocabulary's own spelling of ``token``, for logs and log-probabilities."""

    @abstractmethod
    def token_id(self, text: str) -> int | None:
        """Id of the token that the vocabulary spells ``text``, if there is one."""

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``tokens``, without control tokens by default."""
        stream = self.detokenizer(skip_special=skip_special)
        return "".join([*map(stream.push, tokens), stream.flush()])

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh streaming detokenizer."""
        skip = self.special_ids if skip_special else ()
        return Detokenizer(self.token_bytes, skip=skip, strip_space=self.strip_space)


class TokenMatcher:
    """Finds the strings of ``tokens`` (text -> id) in texts."""

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
        """Split ``text`` into plain segments (never empty) and token ids.

        Tokens in ``ignored`` remain text, and no token is found inside them.
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


class Pieces(Protocol):
    """A vocabulary's spelling of its ids."""

    def __len__(self) -> int:
        """One more than the largest id."""

    def text(self, token: int) -> str:
        """The piece of ``token``; empty for an id outside the vocabulary."""

    def find(self, text: str) -> int | None:
        """The id of the piece ``text``, if there is one."""


_SURROGATES = re.compile("([\ud800-\udfff]+)")
_UNESCAPED = re.compile("[\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces by id, ids by piece, and the ids with a meaning.

    ``add_special`` adds ``prefix`` and ``suffix`` to a text; ``eos`` ends a generation;
    ``special`` are the control tokens; ``strip_space`` drops one leading space in decoding;
    ``infill`` are the ``Tokenizer.infill_ids``. ``begins_chats``: conversations begin with the
    prefix too, if the template does not write it. ``between`` separates the texts of a pair.
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
    between: tuple[int, ...] = ()


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
        self.around_pairs = vocabulary.prefix, vocabulary.between, vocabulary.suffix
        self.chat_prefix = vocabulary.prefix if vocabulary.begins_chats else ()

    @abstractmethod
    def _encode_text(self, text: str, parse_special: bool, watch: Watch) -> list[int]:
        """Ids of valid Unicode text that is not empty; no BOS, no EOS."""

    @abstractmethod
    def _byte_id(self, byte: int) -> int | None:
        """The token of a byte, if the vocabulary has one."""

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
        return self._vocabulary.pieces.find(text)

    def _encode_bytes(self, data: bytes) -> list[int]:
        """One token for each byte; U+FFFD if a byte has no token."""
        ids = [token for byte in data if (token := self._byte_id(byte)) is not None]
        return ids if len(ids) == len(data) else self._encode_text("\ufffd", False, ignore_count)

    def _spell_out(self, ids: list[int]) -> list[int]:
        """Replace control tokens that plain text merged into by the bytes of their names.

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
    """Split ``text`` into valid Unicode and the bytes that lone surrogates stand for.

    ``surrogateescape`` surrogates stand for one byte (consecutive bytes that form a character
    become it); other lone surrogates for three.
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


def is_package_error(error: BaseException) -> bool:
    """Whether the package may have raised the error: not an interrupt or exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def package_errors(what: str) -> Iterator[None]:
    """Turn the package's errors in this block into a TokenizerError that begins ``what``."""
    try:
        yield
    except BaseException as error:
        if not is_package_error(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{what}: {reason}") from None


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; empty if the file does not exist.

    Raises:
        TokenizerError: not JSON, or not an object.
        StorageError: the disk fails.
    """
    if not path.is_file():
        return {}
    try:
        found = parse_json(read_file(path))
    except ValueError as error:
        raise TokenizerError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return found


def read_file(path: Path) -> bytes:
    """The bytes of a tokenizer's file.

    Raises:
        StorageError: the disk fails.
    """
    with disk_errors(path):
        return path.read_bytes()


def token_name(entry: object) -> str | None:
    """The text of a token in a config: a string, or an object with ``content``."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
