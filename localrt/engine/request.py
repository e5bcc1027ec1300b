"""What a generation is asked for, fully spelled out: tokens, sampling, limits, callbacks.

Constraint and parser are made anew for each answer; grammars and templates are unknown here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.common.errors import ContextOverflowError, OptionError
from localrt.common.option_names import option
from localrt.common.progress import ProgressCallback
from localrt.engine.protocol import EngineSession, check_ids
from localrt.engine.sampling import Sampling
from localrt.engine.speculation import Speculation
from localrt.engine.stopping import LineLimit, ThinkingLimit
from localrt.engine.types import ToolCall
from localrt.quant.ops.adapters import Mix


class Constraint(Protocol):
    """Which tokens may come next in an answer, and whether it may end. Not thread-safe.

    Speculation stays exact: a draft token counts if it is the one that the sampler chooses under
    the constraint.
    """

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, (vocab,); those that end a generation are not among them."""

    def accept(self, token: int) -> None:
        """``token``, which was allowed, has been chosen."""

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete as it is."""

    @property
    def ends_early(self) -> bool:
        """Whether it ends where it may, unless the model itself wants to go on as is allowed."""

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""


class AnswerParser(Protocol):
    """Sees an answer's text first, and takes thinking and calls of tools out. Not thread-safe."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens that it reads as text; others stay hidden."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within the model's thinking."""

    def push(self, piece: str) -> str:
        """Text to show, now that ``piece`` has come."""

    def flush(self, *, cut: bool = False) -> str:
        """What was held back, at the end; of an answer that was ``cut``, without half a call."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls found so far."""


MakeConstraint: TypeAlias = Callable[[], Constraint]
MakeParser: TypeAlias = Callable[[], AnswerParser]
Restore: TypeAlias = Callable[[EngineSession, Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. ``max_tokens=None`` runs to the end of the context."""

    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    lines: LineLimit | None = None
    fills_gap: bool = False  # it ends as ``ends_middle`` says
    logprobs: int | None = None  # alternatives per token; None records nothing
    exactness: str | None = None
    speculation: Speculation | None = None
    constraint: MakeConstraint | None = None  # makes what binds the answer
    parser: MakeParser | None = None  # makes what finds thinking and calls of tools in it
    thinking_limit: ThinkingLimit | None = None  # needs a parser
    left_out: tuple[str, ...] = ()  # keywords of its schema that the answer is not bound by
    mix: Mix = ()  # the adapters that it is computed with
    restore: Restore | None = None  # gives the session what is kept of the prompt elsewhere
    cancel: threading.Event = field(default_factory=threading.Event)
    on_progress: ProgressCallback | None = None

    def check(self, *, ctx: int, vocab_size: int | None = None) -> None:
        """Whether it can run in a context of ``ctx`` tokens; a session knows its ``vocab_size``.

        Raises:
            ContextOverflowError: the prompt leaves no room for one token.
            OptionError: it is empty, or has an id outside the vocabulary.
        """
        if not self.prompt:
            raise OptionError("the prompt is empty: there is nothing to continue")
        if vocab_size is not None:
            check_ids(self.prompt, vocab_size)
        if len(self.prompt) >= ctx:
            raise ContextOverflowError(
                f"the prompt has {len(self.prompt)} tokens and the context holds {ctx}: "
                f"shorten it, raise {option('ctx')}, or use {option('overflow', 'drop_oldest')}",
                tokens=len(self.prompt),
                ctx=ctx,
            )
