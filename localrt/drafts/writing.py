"""Sequences that the target writes, with its hidden states: what a draft head learns from.

Many sequences share each pass. Each has random numbers of its own, so that what it says depends
neither on its company nor on where a run was interrupted. It knows an engine's sessions, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from localrt.drafts.prompts import Beginning, Prompts
    from localrt.engine.native.engine import NativeEngine, NativeSession

__all__ = ["Written", "draw", "write_sequences"]

Logits = npt.NDArray[np.float32]

# Logits that far below the best (times the temperature) have no chance worth counting.
_REACH = 12.0


@dataclass(frozen=True, slots=True)
class Written:
    """A sequence: ``tokens`` (length,) and the target's ``features`` (length, hidden) at them."""

    number: int
    tokens: npt.NDArray[np.int32]
    features: npt.NDArray[np.float32]


class _Live:
    """A sequence on its way."""

    def __init__(self, number: int, beginning: Beginning, session: NativeSession) -> None:
        self.number = number
        self.beginning = beginning
        self.session = session
        self.features = session.record_features()
        self.pending = beginning.first()

    @property
    def left(self) -> int:
        """Tokens until it is complete."""
        return self.session.capacity - len(self.session.tokens)

    def accept(self, logits: Logits, eos_ids: frozenset[int]) -> None:
        """Choose the next token."""
        token = draw(logits, self.beginning.temperature, float(self.beginning.random.random()))
        self.pending = self.beginning.ended(token) if token in eos_ids else [token]


def write_sequences(
    engine: NativeEngine,
    prompts: Prompts,
    numbers: Sequence[int],
    *,
    length: int,
    together: int,
    eos_ids: frozenset[int],
    check: Callable[[], None],
    on_tokens: Callable[[int], None],
) -> Iterator[Written]:
    """The sequences of these ``numbers``, each of ``length`` tokens, as they are completed.

    ``together`` share a pass; ``check`` may raise to stop, ``on_tokens`` gets each pass's rows.
    """
    waiting = list(reversed(numbers))
    live: list[_Live] = []
    try:
        while waiting or live:
            check()
            while waiting and len(live) < together:
                number = waiting.pop()
                live.append(_Live(number, prompts.sequence(number), engine.session(length)))
            _advance(engine, live, eos_ids, on_tokens)
            for sequence in [s for s in live if not s.left]:
                live.remove(sequence)
                tokens = np.array(sequence.session.tokens, np.int32)
                yield Written(sequence.number, tokens, sequence.features.get(0, length))
                sequence.session.close()
    finally:
        for sequence in live:
            sequence.session.close()


def _advance(
    engine: NativeEngine,
    live: Sequence[_Live],
    eos_ids: frozenset[int],
    on_tokens: Callable[[int], None],
) -> None:
    """One pass: a piece of what each sequence wants computed, as far as rows go."""
    room = engine.pass_rows
    parts: list[tuple[_Live, list[int]]] = []
    for sequence in live:
        piece = sequence.pending[: min(room, sequence.left)]
        if piece:
            parts.append((sequence, piece))
            room -= len(piece)
    ends = [len(s.pending) == len(piece) and s.left > len(piece) for s, piece in parts]
    wanted = [index for index, end in enumerate(ends) if end]
    logits = engine.extend_batch([(s.session, piece) for s, piece in parts], wanted=wanted)
    rows = iter(logits)
    for (sequence, piece), end in zip(parts, ends, strict=True):
        sequence.pending = sequence.pending[len(piece) :]
        if end:
            sequence.accept(next(rows), eos_ids)
    on_tokens(sum(len(piece) for _, piece in parts))


def draw(logits: Logits, temperature: float, uniform: float) -> int:
    """A token of ``logits`` (V,) at a ``temperature`` above 0; ``uniform`` is in [0, 1)."""
    top = logits.max()
    ids = np.flatnonzero(logits > top - np.float32(_REACH * temperature))
    weights = np.cumsum(np.exp((logits[ids] - top) / np.float32(temperature), dtype=np.float64))
    chosen = int(np.searchsorted(weights, uniform * weights[-1], side="right"))
    return int(ids[min(chosen, len(ids) - 1)])
