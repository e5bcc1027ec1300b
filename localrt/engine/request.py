"""What a generation is asked for, fully spelled out: tokens, sampling, limits, who hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localrt.engine.constraint import MakeConstraint
from localrt.engine.protocol import EngineSession
from localrt.engine.reader import MakeReader
from localrt.engine.sampling import Sampling
from localrt.engine.speculation import Speculation
from localrt.progress import ProgressCallback

__all__ = ["Request", "Restore"]

Restore = Callable[[EngineSession, Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. ``max_tokens=None`` runs to the end of the context."""

    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    logprobs: int | None = None  # alternatives per token; None records nothing
    exactness: str | None = None
    speculation: Speculation | None = None
    constraint: MakeConstraint | None = None  # makes what binds the answer
    reader: MakeReader | None = None  # makes what finds calls of tools in it
    restore: Restore | None = None  # gives the session what is kept of the prompt elsewhere
    cancel: threading.Event = field(default_factory=threading.Event)
    on_progress: ProgressCallback | None = None
