"""Bytes of tokens to text: at once, or token by token without ever emitting half a character.

A token may end in the middle of a UTF-8 character, so text is decoded from bytes: what is complete
comes out, the rest waits for the next token. Malformed bytes become U+FFFD as ``errors="replace"``
has it, and pieces pushed one by one join to exactly the text decoded at once. Knows no vocabulary.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Iterable

__all__ = ["StreamDetokenizer", "decode_tokens"]

_UTF8 = codecs.getincrementaldecoder("utf-8")


def decode_tokens(
    tokens: Iterable[int],
    token_bytes: Callable[[int], bytes],
    *,
    skip: Container[int] = (),
    strip_space: bool = False,
) -> str:
    """Text of ``tokens`` without those in ``skip``.

    ``strip_space`` drops one space at the very start: the one that such a vocabulary's encoder puts
    in front of every text.
    """
    data = b"".join([token_bytes(token) for token in tokens if token not in skip])
    if strip_space:
        data = data.removeprefix(b" ")
    return data.decode("utf-8", "replace")


class StreamDetokenizer:
    """``decode_tokens`` for a sequence that still grows; constant work for each token."""

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
