"""A session that follows a script: after n tokens it wants token ``script(n)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from localrt.engine.protocol import EngineSession

VOCAB = 300


class ScriptedSession(EngineSession):
    """Records what it was asked to compute."""

    tokens: list[int] = []  # noqa: RUF012  an attribute, not a property
    nbytes = 0

    def __init__(self, script: Callable[[int], int], capacity: int = 100) -> None:
        self.tokens: list[int] = []
        self.capacity = capacity
        self.computed: list[list[int]] = []
        self.closed = False
        self._script = script

    def extend(self, tokens: Sequence[int], *, check=None, on_progress=None) -> np.ndarray:  # type: ignore[no-untyped-def]
        if check is not None:
            check()
        self.tokens += tokens
        self.computed.append(list(tokens))
        if on_progress is not None:
            on_progress(len(tokens))
        logits = np.zeros(VOCAB, np.float32)
        logits[self._script(len(self.tokens))] = 10.0
        return logits

    def trim(self, length: int) -> int:
        del self.tokens[length:]
        return length

    def close(self) -> None:
        self.closed = True


class ByteDetokenizer:
    """One token, one character."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


class ByteTokenizer:
    """As much of a tokenizer as the loop needs."""

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def token_text(self, token: int) -> str:
        return chr(token)

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(character) for character in text]
