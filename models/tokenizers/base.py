"""The contract of a tokenizer, and the streaming detokenizer that never emits half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Detokenizer", "Tokenizer"]


class Detokenizer(Protocol):
    """Text of one growing token sequence, piece by piece."""

    def push(self, token: int) -> str:
        """Text that is certain after ``token``: complete characters only, possibly none."""

    def flush(self) -> str:
        """What is left at the end; an incomplete character becomes U+FFFD."""


class Tokenizer(Protocol):
    """Text to token ids and back. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows (a model's head may have more rows)."""

    @property
    def bos_id(self) -> int | None:
        """Beginning-of-sequence id, if the model has one."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation: end of sequence, end of turn."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which ``decode`` leaves out by default."""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds what the model adds around plain text (BOS, mostly); ``parse_special``
        reads control tokens written in the text (``<|im_start|>``) as themselves: for rendered chat
        templates, never for what a user typed.
        """

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``tokens``; malformed UTF-8 becomes U+FFFD."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` stands for; a control token stands for its own name."""

    def token_text(self, token: int) -> str:
        """The vocabulary's own spelling of ``token``, for logs and log-probabilities."""

    def token_id(self, text: str) -> int | None:
        """Id of the token that the vocabulary spells ``text``, if there is one."""

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh streaming detokenizer."""
