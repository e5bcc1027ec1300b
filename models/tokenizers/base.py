"""The contract of a tokenizer, and the streaming detokenizer that never emits half a character.

A token may end in the middle of a UTF-8 character, so text is decoded from bytes: what is complete
comes out, the rest waits for the next token. Malformed bytes become U+FFFD.

What the ``tokenizers`` package raises, as localrt's errors.

It raises plain ``Exception``. A panic of its Rust code is not even that: nothing but
``BaseException`` catches it, and its class cannot be imported. Does not know tokenizers.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias

from localrt.common.errors import TokenizerError

Watch: TypeAlias = Callable[[int], None]
"""Hears now and then how many tokens a text has become so far; raises to end that."""
_UTF8 = codecs.getincrementaldecoder("utf-8")


def ignore_count(count: int) -> None:
    """The ``Watch`` that lets every text become tokens to its end."""


def behind(ids: Sequence[int], watch: Watch) -> Watch:
    """For what is read behind ``ids``, as long as they are by then: ``watch`` hears of both."""
    return lambda count: watch(len(ids) + count)


class Detokenizer:
    """Text of one growing token sequence, piece by piece, without the tokens in ``skip``.

    ``strip_space`` drops one space at the very start: the one that such a vocabulary's encoder puts
    in front of every text.
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
        """What is left at the end; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(ABC):
    """Text to token ids and back. Thread-safe.

    It knows ``vocab_size`` ids; a model's head may have more rows. ``eos_ids`` end a generation
    (end of sequence, end of turn), ``special_ids`` are the control tokens. With ``strip_space``,
    decoding drops the space that encoding puts in front of a text. ``infill_ids`` are the tokens to
    fill in the middle with, where the model's files declare them: ``pre``, ``suf``, ``mid``,
    ``pad``, ``rep`` and ``sep``, as in GGUF. ``chat_prefix`` begins every conversation, whether or
    not its template writes it.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    strip_space: bool
    infill_ids: Mapping[str, int] = MappingProxyType({})
    chat_prefix: Sequence[int] = ()

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

    def least_tokens(self, text: str) -> int:
        """No more than ``text`` becomes, from its length and the longest token; 0: not known."""
        return 0

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; a control token stands for its own name."""

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


def is_package_error(error: BaseException) -> bool:
    """Whether a call of the package may have raised it: no interrupt, no exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def package_errors(what: str) -> Iterator[None]:
    """For calls of the package alone: what they raise is a TokenizerError that begins ``what``."""
    try:
        yield
    except BaseException as error:
        if not is_package_error(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{what}: {reason}") from None
