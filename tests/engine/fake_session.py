"""Sessions that follow a script: after n tokens one wants token ``script(n)``; their engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from localrt.engine.protocol import Engine, EngineInfo, EngineSession
from localrt.engine.request import Request
from localrt.engine.sampling import Sampling
from localrt.quant.ops.kv import grown_capacity

VOCAB = 300
PASS_ROWS = 12
CTX = 600
KV = 10  # bytes of a cache per token


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


class ScriptedEngine(Engine):
    """Counts up: after a sequence's token t comes t + 1. Remembers the rows of every pass."""

    shares_passes = True
    pass_rows = PASS_ROWS
    info = EngineInfo(
        engine="scripted",
        architecture="none",
        device="cpu",
        format="none",
        parameters=0,
        layers=0,
        vocab_size=VOCAB,
        weight_bytes=0,
        context_length=CTX,
        exactness="bit-exact",
    )

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.sessions: list[ScriptedSession] = []

    def kv_nbytes(self, length: int) -> int:
        return KV * grown_capacity(length)

    def session(self, capacity: int) -> ScriptedSession:
        self.sessions.append(ScriptedSession(lambda n: 0, capacity))
        return self.sessions[-1]

    def logits(self, tokens: Any, **options: Any) -> Any:
        raise AssertionError

    def close(self) -> None:
        pass

    def extend_batch(
        self, parts: Sequence[tuple[Any, Sequence[int]]], *, wanted: Sequence[int], check: Any
    ) -> Any:
        check()
        for session, tokens in parts:
            assert tokens
            session.tokens += tokens
            assert len(session.tokens) <= session.capacity
        self.passes.append([len(tokens) for _, tokens in parts])
        logits = np.zeros((len(wanted), VOCAB), np.float32)
        for row, part in enumerate(wanted):
            logits[row, (parts[part][0].tokens[-1] + 1) % VOCAB] = 10.0
        return logits


def request(prompt: Sequence[int], max_tokens: int | None = 3, **options: Any) -> Request:
    sampling = options.pop("sampling", Sampling(temperature=0))
    return Request(prompt=prompt, sampling=sampling, max_tokens=max_tokens, **options)
