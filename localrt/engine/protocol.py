"""The contract between the generation loop and whatever runs a model.

An engine holds one model's weights; a session holds one sequence's KV cache. The loop asks a
session for the logits that follow some tokens, so sampling, stop strings, prefix reuse and chat
behave the same on every engine. Neither knows text. What an engine must do is abstract; what it may
lack has a default here that says so, so callers never check its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localrt.common.errors import (
    ContextOverflowError,
    MemoryBudgetError,
    OptionError,
    UnsupportedModelError,
)
from localrt.common.formatting import format_bytes
from localrt.common.free_memory import return_free_memory
from localrt.common.option_names import option
from localrt.models.weight_store import PipelineCounts, WeightStore
from localrt.offload.memory import current_rss
from localrt.quant.ops.adapters import Adapter, LowRank, Mix

if TYPE_CHECKING:
    from localrt.models.tokenizers.base import Tokenizer
    from localrt.offload.planner import Plan
    from localrt.quant.ops.kv import BlockCache, FillBlocks
    from localrt.quant.ops.states import SavedState
    from localrt.speculative.tree import TokenTree

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
    """Tokens per second that a plan expects of decoding; the ceiling is with perfect overlap."""

    tok_s: float
    ceiling_tok_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What a pipeline has reached of late: bytes per second of the disk; CPU seconds of a decoding
    pass; the share of the experts asked for that were in memory. None: not known yet.
    """

    ssd_bytes_s: float
    cpu_s: float | None = None
    expert_hits: float | None = None


Forecaster = Callable[[Rates], Forecast]
"""Makes a forecast from the current rates."""


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``OptionError`` where one of ``ids`` is not in the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise OptionError(f"token ids must be from 0 to {vocab_size - 1}")


class EngineSession(ABC):
    """One sequence: the tokens whose keys and values are cached, in order. Not thread-safe.

    ``capacity`` is the most tokens that it can hold. ``takes_trees``: it has ``extend_tree`` and
    ``keep``, and its engine ``extend_trees``.
    """

    capacity: int
    takes_trees: bool = False
    mix: Mix = ()

    def use(self, mix: Mix) -> None:
        """Compute with these adapters from now on; what others computed is forgotten.

        Raises:
            UnsupportedModelError: the engine has none.
        """
        if mix:
            raise UnsupportedModelError("the engine computes no adapters")

    @property
    def tree_rows(self) -> int | None:
        """The most rows of a tree's pass that memory has room for; None: as many as wanted."""
        return None

    @property
    @abstractmethod
    def tokens(self) -> Sequence[int]:
        """What the cache holds. ``len(session.tokens)`` is the next position."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the cache takes now."""

    @abstractmethod
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

    @abstractmethod
    def trim(self, length: int) -> int:
        """Forget everything after the first ``length`` tokens; how many are still held.

        Fewer than ``length`` where the state of a recurrent model cannot go back to it.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the cache."""

    def check_tokens(self, tokens: Sequence[int], vocab_size: int) -> None:
        """Whether ``tokens`` can be appended.

        Raises:
            OptionError: there are none, or an id outside the vocabulary.
            ContextOverflowError: more than there is room for.
        """
        if not tokens:
            raise OptionError("there are no tokens to compute")
        check_ids(tokens, vocab_size)
        length = len(self.tokens) + len(tokens)
        if length > self.capacity:
            raise ContextOverflowError(
                f"{length} tokens do not fit a context of {self.capacity}: "
                f"use a larger {option('ctx')}"
            )

    def counts(self) -> PipelineCounts | None:
        """What the engine's pipeline has done so far; None where there is none."""
        return None

    def forecast(self) -> Forecast | None:
        """What was planned; None where nothing was. Takes milliseconds."""
        return None

    # -- trees -----------------------------------------------------------------------------------

    def extend_tree(self, token: int, tree: TokenTree, *, check: Check | None = None) -> Logits:
        """Compute ``token`` and, behind it, ``tree``: logits (1 + nodes, vocab), the token's first.

        ``tokens`` stays as it is until ``keep`` says what of it is wanted; nothing else may be
        computed before. When ``check`` raises, the session is as before.
        """
        raise NotImplementedError

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the tree's pass, a path in order, as the session's next tokens."""
        raise NotImplementedError

    # -- saving the cache ------------------------------------------------------------------------

    @property
    def blocks(self) -> BlockCache | None:
        """The cache, to be read before the next pass; None: it cannot be taken out."""
        return None

    @property
    def kv_layout(self) -> str:
        """What the bytes of ``blocks`` mean."""
        return ""

    def put_tokens(
        self,
        tokens: Sequence[int],
        read: Callable[[FillBlocks], int],
        states: Sequence[SavedState] = (),
    ) -> int:
        """Hold ``tokens`` instead of what is held: ``read`` fills the cache with their blocks, and
        returns how many of the tokens they are of. ``states`` are those that were saved with them.

        Returns how many are held.

        Raises:
            MemoryBudgetError: there is no room for them.
        """
        raise NotImplementedError

    def copy_prefix(self, other: EngineSession, length: int) -> int:
        """Hold the first ``length`` tokens of another session of the engine instead of what is
        held, or as many of them as can be copied.

        Returns how many are held.

        Raises:
            MemoryBudgetError: there is no room for them.
        """
        return 0


class Engine(ABC):
    """A loaded model. Thread-safe: passes of several sessions take turns.

    A pass has at most ``pass_rows`` rows, of several sessions where it ``shares_passes``.
    ``plan`` is what weights were placed by, ``weights`` tells of them while they are there.
    ``ram`` and ``gpu_memory`` are the budgets in bytes as the user gave them; None: not.
    """

    info: EngineInfo
    pass_rows: int = 512
    shares_passes: bool = False
    plan: Plan | None = None
    weights = WeightStore()  # of weights that nothing is known of
    ram: int | None = None
    gpu_memory: int | None = None

    @abstractmethod
    def session(self, capacity: int) -> EngineSession:
        """A new, empty session for up to ``capacity`` tokens; memory is taken as it grows.

        Raises:
            MemoryBudgetError: the cache cannot fit.
        """

    @abstractmethod
    def logits(
        self,
        tokens: Sequence[int],
        *,
        first: int = 0,
        mix: Mix = (),
        check: Check | None = None,
    ) -> Iterator[Logits]:
        """Logits after each of ``tokens`` from index ``first`` on, computed from nothing, with the
        adapters ``mix``.

        Pieces (n, vocab) in order, n at most 64, each the caller's own.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the weights. Sessions must not be used afterwards."""

    def tokenizer(self) -> Tokenizer:
        """The engine's own tokenizer, for a model whose own localrt cannot build.

        Raises:
            UnsupportedModelError: it has none.
        """
        raise UnsupportedModelError(f"the engine {self.info.engine} has no tokenizer of its own")

    # -- several sequences in one pass -----------------------------------------------------------

    def extend_batch(
        self,
        parts: Sequence[tuple[EngineSession, Sequence[int]]],
        *,
        wanted: Sequence[int],
        check: Check | None = None,
    ) -> Logits:
        """One pass that appends tokens to several sessions, ``pass_rows`` in all at most.

        Returns the logits after the last token of the parts numbered in ``wanted``, shape
        (len(wanted), vocab), the caller's own. When it raises, no session has changed: what
        ``check`` raises, or ``MemoryBudgetError`` where the caches have no room to grow.
        """
        ((session, tokens),) = parts
        logits: Logits = session.extend(tokens, check=check)[None]
        return logits[: len(wanted)].copy()

    def extend_trees(
        self,
        parts: Sequence[tuple[EngineSession, int, TokenTree]],
        beside: Sequence[tuple[EngineSession, Sequence[int]]] = (),
        *,
        wanted: Sequence[int] = (),
        check: Check | None = None,
    ) -> list[Logits]:
        """One pass: for every part what ``EngineSession.extend_tree`` gives.

        ``beside`` are tokens to append to other sessions, as in ``extend_batch``; the logits
        (vocab,) after those numbered in ``wanted`` come behind the trees'. When it raises, no
        session has changed: what ``check`` raises, or ``MemoryBudgetError``.
        """
        raise NotImplementedError

    # -- memory ----------------------------------------------------------------------------------

    @abstractmethod
    def kv_nbytes(self, length: int) -> int:
        """Bytes of one sequence's cache once grown to ``length`` tokens."""

    def free_memory(self) -> int | None:
        """Bytes free on the device's own memory; None where caches lie in RAM."""
        return None

    def idle_sessions(self, capacity: int) -> int:
        """Sessions of ``capacity`` tokens that are worth keeping while nobody uses them."""
        return 4

    def ram_forecast(self) -> int | None:
        """What the process takes of RAM at the most, as loading expected it of the caches and
        passes that there have been; None where another library takes the memory.
        """
        return None

    def take_ram(self, nbytes: int) -> None:  # noqa: B027  nothing to do
        """Leave ``nbytes`` of the RAM budget to something else; below zero gives them back.

        Only streamed weights make room.

        Raises:
            MemoryBudgetError: so much cannot be given; nothing changes then.
        """

    def set_budget(
        self,
        *,
        ram: int | None = None,
        gpu_memory: int | None = None,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        """Have the process take ``ram`` bytes at most, and the model ``gpu_memory`` of the GPU's,
        from the next pass on; None: as before. ``free`` frees caches that nobody uses.

        This is for a model that was loaded whole: what it holds stays.

        Raises:
            OptionError: GPU memory, of a model that runs on no GPU.
            MemoryBudgetError: it takes more, and cannot give enough of it back.
        """
        info = self.info
        if gpu_memory is not None:
            if info.device == "cpu":
                raise OptionError("the model runs on the CPU alone: it has no GPU memory")
            if info.weight_bytes > gpu_memory:
                raise MemoryBudgetError(
                    "the model was loaded whole and its weights take "
                    f"{format_bytes(info.weight_bytes)} of the GPU, more than "
                    f"{format_bytes(gpu_memory)}: load it again with "
                    f"{option('gpu_memory', gpu_memory)}, which streams it"
                )
            self.gpu_memory = gpu_memory
        if ram is not None:
            if current_rss() > ram:
                free()
                return_free_memory()
            if (taken := current_rss()) > ram:
                raise MemoryBudgetError(
                    f"the model was loaded whole and this process takes {format_bytes(taken)}, "
                    f"more than {format_bytes(ram)}: load it again with {option('ram', ram)}, "
                    "which streams it"
                )
            self.ram = ram

    # -- adapters --------------------------------------------------------------------------------

    def add_adapter(self, adapter: Adapter[LowRank]) -> int:
        """Let sessions use an adapter; returns the bytes that it takes.

        Raises:
            UnsupportedModelError: nothing computes them here.
            MemoryBudgetError: there is no room for it.
        """
        raise UnsupportedModelError(
            f"the engine {self.info.engine} computes no adapters: use {option('engine', 'native')}"
        )

    def remove_adapter(self, key: str) -> None:  # noqa: B027  nothing to do
        """Forget one."""

    def uses_adapter(self, key: str) -> bool:
        """Whether a session holds tokens that were computed with it."""
        return False

    # -- what it does ----------------------------------------------------------------------------

    def counts(self) -> PipelineCounts | None:
        """What the pipeline has done so far; None where everything is resident."""
        return self.weights.counts()

    def forecast(self) -> Forecast | None:
        """What was planned, for the disk as it has been lately; None where nothing was."""
        return None

    # -- hidden states ---------------------------------------------------------------------------

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states.

        Raises:
            UnsupportedModelError: it gives none.
        """
        raise UnsupportedModelError(f"the engine {self.info.engine} gives no embeddings")

    def hidden_states(
        self, texts: Sequence[Sequence[int]], *, check: Check | None = None
    ) -> Generator[tuple[int, Logits], None, None]:
        """Those after the final norm, of every text's tokens: (index of the text, rows (n, D)).

        The rows of a text come in order, those of different texts in any.

        Raises:
            UnsupportedModelError: it gives none.
        """
        raise UnsupportedModelError(f"the engine {self.info.engine} gives no embeddings")
