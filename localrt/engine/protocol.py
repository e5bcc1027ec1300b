"""The contract between the generation loop and whatever runs a model.

An engine holds one model's weights; a session holds one sequence's KV cache. The loop asks a
session for the logits that follow some tokens, so sampling, stop strings, prefix reuse and chat
behave the same on every engine. Neither knows text: tokenizer and template stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localrt.offload.trace import PipelineCounts

__all__ = [
    "Check",
    "Engine",
    "EngineInfo",
    "EngineSession",
    "Forecast",
    "Forecaster",
    "Logits",
    "Rates",
]

Logits = npt.NDArray[np.float32]

# Called between layers (or blocks of tokens) of a pass; raises CancelledError to abandon it.
Check = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What runs, in words and numbers for people and benchmarks."""

    engine: str
    architecture: str
    device: str
    format: str
    parameters: int
    layers: int
    vocab_size: int
    weight_bytes: int
    context_length: int
    exactness: str
    streamed: bool = False  # weights are read or copied again in each pass


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan expects of decoding, in tokens per second; the ceiling is with perfect overlap.

    ``simulated``: time is a virtual clock's.
    """

    tok_s: float
    ceiling_tok_s: float
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """What a pipeline has reached of late: bytes per second of the disk; CPU seconds of a decoding
    pass; the share of the experts asked for that were in memory. None: not known yet.
    """

    ssd_bytes_s: float
    cpu_s: float | None = None
    expert_hits: float | None = None


Forecaster = Callable[[Rates], Forecast]
"""A forecast for the rates that there are."""


class EngineSession(Protocol):
    """One sequence: the tokens whose keys and values are cached, in order. Not thread-safe."""

    @property
    def tokens(self) -> Sequence[int]:
        """What the cache holds. ``len(session.tokens)`` is the next position."""

    @property
    def capacity(self) -> int:
        """The most tokens that the session can hold."""

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes now."""

    def extend(
        self,
        tokens: Sequence[int],
        *,
        check: Check | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Logits:
        """Append ``tokens`` (at least one) and return the logits after the last, shape (vocab,).

        Long inputs run in chunks; ``on_progress`` gets the number of tokens done after each. When
        ``check`` raises, the cache keeps exactly the chunks that were finished. The array returned
        is the caller's until the next call on any session of the engine.
        """

    def counts(self) -> PipelineCounts | None:
        """What the engine's pipeline has done so far; None where there is none."""

    def forecast(self) -> Forecast | None:
        """What was planned; None where nothing was. Takes milliseconds."""

    def trim(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""

    def close(self) -> None:
        """Free the cache."""


class Engine(Protocol):
    """A loaded model. Thread-safe: passes of several sessions take turns."""

    @property
    def info(self) -> EngineInfo:
        """What runs."""

    def session(self, capacity: int) -> EngineSession:
        """A new, empty session for up to ``capacity`` tokens; memory is taken as it grows.

        Raises:
            MemoryBudgetError: the cache cannot fit.
        """

    def logits(
        self, tokens: Sequence[int], *, first: int = 0, check: Check | None = None
    ) -> Iterator[Logits]:
        """Logits after each of ``tokens`` from index ``first`` on, computed from nothing.

        Pieces (n, vocab) in order, n at most 64, each the caller's own.
        """

    def close(self) -> None:
        """Free the weights. Sessions must not be used afterwards."""
