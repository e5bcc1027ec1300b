"""A complete request for a generation: tokens, sampling, limits, callbacks.

Constraint and parser are made anew for each answer; grammars and templates are unknown here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.common.errors import ContextOverflowError, OptionError
from localrt.common.option_names import option
from localrt.common.progress import ProgressCallback
from localrt.engine.protocol import EngineSession, check_ids
from localrt.engine.sampling import Sampling, best_suffice
from localrt.engine.speculation import Speculation
from localrt.engine.stopping import LineLimit, ThinkingLimit
from localrt.engine.types import ToolCall
from localrt.quant.ops.adapters import Mix

if TYPE_CHECKING:
    from localrt.models.vision.encoder_cache import VisionState


class Constraint(Protocol):
    """Restricts the tokens of an answer, and says whether it may end. Not thread-safe.

    Speculation stays exact: a draft token is accepted only if the sampler chooses the same token
    under the constraint.
    """

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return which tokens may come next, (vocab,), without those that end a generation."""

    def accept(self, token: int) -> None:
        """Record that ``token``, which was allowed, has been chosen."""

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete and may end here."""

    @property
    def ends_early(self) -> bool:
        """Whether to end here once allowed, unless the model chooses an allowed continuation."""

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""


class AnswerParser(Protocol):
    """Removes thinking and tool calls from an answer's text before it is shown. Not thread-safe."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens that the parser reads as text; others stay hidden."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within the model's thinking."""

    def push(self, piece: str) -> str:
        """Return the text to show after ``piece``."""

    def flush(self, *, cut: bool = False) -> str:
        """Return the text held back at the end, without a partial call if it was ``cut``."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls found so far."""


MakeConstraint: TypeAlias = Callable[[], Constraint]
MakeParser: TypeAlias = Callable[[], AnswerParser]
Restore: TypeAlias = Callable[[EngineSession, Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. ``max_tokens=None`` runs to the end of the context. The last ``begun`` tokens
    of the prompt are an answer that is continued: its first chunk repeats them (``Chunk.info``).
    """

    prompt: Sequence[int]
    begun: int = 0
    sampling: Sampling
    repeated: tuple[int, ...] = ()  # passes end after as many tokens: later prompts begin with them
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    lines: LineLimit | None = None
    fills_gap: bool = False  # ends by the rule of ``ends_middle``
    logprobs: int | None = None  # alternatives per token; None records nothing
    exactness: str | None = None
    speculation: Speculation | None = None
    constraint: MakeConstraint | None = None  # creates the answer's constraint
    parser: MakeParser | None = None  # creates the parser of thinking and tool calls
    thinking_limit: ThinkingLimit | None = None  # needs a parser
    left_out: tuple[str, ...] = ()  # schema keywords that are not enforced
    mix: Mix = ()  # its adapter set
    restore: Restore | None = None  # restores a saved prefix of the prompt to the session
    private: bool = False  # its KV cache is saved nowhere
    cancel: threading.Event = field(default_factory=threading.Event)
    on_progress: ProgressCallback | None = None

    @property
    def best_only(self) -> bool:
        """Whether the best logits give the same answer as all of them."""
        whole = self.constraint is not None or self.logprobs is not None or self.fills_gap
        return best_suffice(self.sampling) and not whole

    def check(
        self, *, ctx: int, vocab_size: int | None = None, vision: VisionState | None = None
    ) -> None:
        """Raise an error unless it can run in ``ctx`` tokens; a session knows its ``vocab_size``
        and pictures.

        Raises:
            ContextOverflowError: the prompt leaves no room for one token.
            OptionError: the prompt is empty, or has an id outside the vocabulary.
        """
        if not self.prompt:
            raise OptionError("the prompt is empty: there is nothing to continue")
        if vocab_size is not None:
            check_ids(self.prompt, vocab_size, vision)
        if len(self.prompt) >= ctx:
            raise ContextOverflowError(
                f"the prompt has {len(self.prompt)} tokens and the context holds {ctx}: "
                f"shorten it, raise {option('ctx')}, or use {option('overflow', 'drop_oldest')}",
                tokens=len(self.prompt),
                ctx=ctx,
            )
