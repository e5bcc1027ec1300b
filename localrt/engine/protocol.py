"""The contract between the generation loop and whatever runs a model.

An engine holds one model's weights; a session holds one sequence's KV cache. The loop asks a
session for the logits that follow some tokens, so sampling, stop strings, prefix reuse and chat
behave the same on every engine. Neither knows text. What every engine must do is abstract; an
optional feature has a default here that reports it as missing, so callers never check an engine's
class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from localrt.common.option_names import option
from localrt.models.weight_store import GpuUse, PipelineCounts, WeightStore
from localrt.offload.memory import current_rss
from localrt.quant.ops.adapters import Adapter, LowRank, Mix
from localrt.quant.ops.protocol import Check
from localrt.system import return_free_memory

if TYPE_CHECKING:
    from localrt.models.tokenizers.base import Tokenizer
    from localrt.models.vision.encoder_cache import VisionState
    from localrt.planning.forecast import Forecast
    from localrt.quant.ops.kv import BlockCache, FillBlocks
    from localrt.quant.ops.states import SavedState
    from localrt.speculative.tree import TokenTree

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """A description of what runs, for people and benchmarks."""

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
class Speeds:
    """Forecast decoding speed in tokens per second; the ceiling assumes perfect overlap."""

    tok_s: float
    ceiling_tok_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Recent rates of a pipeline: the disk's bytes per second; CPU seconds of a decoding pass; the
    share of needed experts that were in memory. None: not known yet.
    """

    ssd_bytes_s: float
    cpu_s: float | None = None
    expert_hits: float | None = None


Forecaster = Callable[[Rates], Speeds]
"""Makes a forecast from the current rates."""


def check_ids(ids: Sequence[int], vocab_size: int, vision: VisionState | None = None) -> None:
    """Raise ``OptionError`` if one of ``ids`` is not in the vocabulary, nor a picture's row."""
    if vision is not None:
        ids = [token for token in ids if token >= 0 or not vision.has_row(token)]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise OptionError(f"token ids must be from 0 to {vocab_size - 1}")


class EngineSession(ABC):
    """One sequence: the tokens whose keys and values are cached, in order. Not thread-safe.

    ``capacity`` is the most tokens that it can hold. ``takes_trees``: it has ``extend_tree`` and
    ``keep``, and its engine ``extend_trees``. ``best_only`` is set by whoever is content with the
    best logits of its passes (``BEST``), where not copying all is faster. What a ``private`` one
    holds is not to be saved. ``known`` are deletions before its request: ``PromptCache.log``.
    """

    best_only: bool = False
    private: bool = False
    known: str = ""
    capacity: int
    takes_trees: bool = False
    fresh_passes: int = 0  # see ``Ops``
    mix: Mix = ()

    def use(self, mix: Mix) -> None:
        """Compute with the adapter set ``mix`` from now on; a change drops the tokens held.

        Raises:
            UnsupportedModelError: the engine supports no adapters.
        """
        if mix:
            raise UnsupportedModelError("the engine computes no adapters")

    def plain(self, tokens: Sequence[int]) -> Sequence[int]:
        """``tokens`` as what drafts reads them: of the vocabulary, pictures' rows too."""
        return tokens

    @property
    def tree_rows(self) -> int | None:
        """The most rows of a tree's pass that fit in memory; None: any number."""
        return None

    @property
    @abstractmethod
    def tokens(self) -> Sequence[int]:
        """The tokens in the cache. ``len(session.tokens)`` is the next position."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes that the cache takes now."""

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
        """Drop everything after the first ``length`` tokens; return how many are still held.

        These are fewer than ``length`` if a recurrent model's state cannot go back that far.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the cache."""

    def check_tokens(
        self, tokens: Sequence[int], vocab_size: int, vision: VisionState | None = None
    ) -> None:
        """Raise an error unless ``tokens`` can be appended.

        Raises:
            OptionError: there are none, or an id outside the vocabulary.
            ContextOverflowError: more than there is room for.
        """
        if not tokens:
            raise OptionError("there are no tokens to compute")
        check_ids(tokens, vocab_size, vision)
        length = len(self.tokens) + len(tokens)
        if length > self.capacity:
            raise ContextOverflowError(
                f"{length} tokens do not fit a context of {self.capacity}: "
                f"use a larger {option('ctx')}"
            )

    def counts(self) -> PipelineCounts | None:
        """Return the counts of the engine's pipeline so far; None if it has none."""
        return None

    def forecast(self) -> Speeds | None:
        """Return the speed that was planned; None if there was no plan. Takes milliseconds."""
        return None

    # -- trees -----------------------------------------------------------------------------------

    def extend_tree(self, token: int, tree: TokenTree, *, check: Check | None = None) -> Logits:
        """Compute ``token`` and ``tree`` after it: logits (1 + nodes, vocab), the token's first.

        ``tokens`` does not change until ``keep`` says which rows to keep; nothing else may be
        computed before. If ``check`` raises, the session has not changed.
        """
        raise NotImplementedError

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the tree's pass, a path in order, as the session's next tokens."""
        raise NotImplementedError

    # -- saving the cache ------------------------------------------------------------------------

    @property
    def blocks(self) -> BlockCache | None:
        """The cache, to be read before the next pass; None if it cannot be exported."""
        return None

    @property
    def kv_layout(self) -> str:
        """The format of the bytes in ``blocks``."""
        return ""

    def put_tokens(
        self,
        tokens: Sequence[int],
        read: Callable[[FillBlocks], int],
        states: Sequence[SavedState] = (),
    ) -> int:
        """Replace the session's tokens: ``read`` fills the cache with blocks of ``tokens`` and
        returns how many of them it has. ``states`` were saved with them.

        Returns how many are held.

        Raises:
            MemoryBudgetError: there is no room for them.
        """
        raise NotImplementedError

    def copy_prefix(self, other: EngineSession, length: int) -> int:
        """Replace the session's tokens by the first ``length`` tokens of another session, or as
        many of them as can be copied.

        Returns how many are held.

        Raises:
            MemoryBudgetError: there is no room for them.
        """
        return 0


class Engine(ABC):
    """A loaded model. Thread-safe: passes of several sessions take turns.

    A pass has at most ``pass_rows`` rows, of several sessions if it ``shares_passes``. ``plan`` is
    the placement of the weights, ``weights`` reports on them while they exist. ``ram`` and
    ``gpu_memory`` are the user's budgets in bytes; None: no budget was given. ``turn`` is a
    batch's: see ``background``. ``vision`` is its image state, if it takes images. ``recurrent``:
    its sessions go back only to where a pass ended.
    """

    info: EngineInfo
    pass_rows: int = 512
    shares_passes: bool = False
    recurrent: bool = False
    plan: Forecast | None = None
    weights = WeightStore()  # an empty store
    ram: int | None = None
    gpu_memory: int | None = None
    turn: Callable[[], AbstractContextManager[int]] | None = None
    vision: VisionState | None = None

    def uncut(self, tokens: Sequence[int], first: int, most: int) -> int:
        """Up to which of ``tokens`` a pass computes that begins with number ``first``: ``most`` of
        them, or as many as a picture asks for.
        """
        end = min(first + most, len(tokens))
        return end if self.vision is None else self.vision.pass_end(tokens, first, end)

    def background(self) -> AbstractContextManager[int]:
        """Hold it for a pass that nobody waits for; it yields how many batches are at work."""
        return nullcontext(0) if self.turn is None else self.turn()

    @abstractmethod
    def session(self, capacity: int) -> EngineSession:
        """Return a new, empty session for up to ``capacity`` tokens; its memory grows as needed.

        Raises:
            MemoryBudgetError: the cache cannot fit.
        """

    @abstractmethod
    def logits(
        self, tokens: Sequence[int], *, first: int = 0, mix: Mix = (), check: Check | None = None
    ) -> Iterator[Logits]:
        """Yield logits after each of ``tokens`` from index ``first`` on, without a cache, with the
        adapter set ``mix``.

        Pieces (n, vocab) come in order, n at most 64; the caller owns each.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the weights. Sessions must not be used afterwards."""

    def tokenizer(self) -> Tokenizer:
        """Return the engine's own tokenizer, for a model whose tokenizer localrt cannot build.

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
        """Append tokens to several sessions in one pass, at most ``pass_rows`` in all.

        Returns a copy of the logits after the last token of the parts numbered in ``wanted``, shape
        (len(wanted), vocab). If it raises, no session has changed: ``check`` raised, or it is
        ``MemoryBudgetError`` because the caches cannot grow.
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
        """Run one pass; return for every part the logits of ``EngineSession.extend_tree``.

        ``beside`` has tokens to append to other sessions, as in ``extend_batch``; the logits
        (vocab,) of those numbered in ``wanted`` come after the trees'. If it raises, no session has
        changed: ``check`` raised, or it is ``MemoryBudgetError``.
        """
        raise NotImplementedError

    # -- memory ----------------------------------------------------------------------------------

    @abstractmethod
    def kv_nbytes(self, length: int) -> int:
        """Return the bytes of a sequence's cache with ``length`` tokens."""

    def free_memory(self) -> int | None:
        """Return the free bytes of the device's own memory; None if caches lie in RAM."""
        return None

    def idle_sessions(self, capacity: int) -> int:
        """Return how many idle sessions of ``capacity`` tokens are worth keeping."""
        return 4

    def ram_forecast(self) -> int | None:
        """Return the process's peak RAM, as loading forecast it, for the caches and passes so far;
        None if another library takes the memory.
        """
        return None

    def take_ram(self, nbytes: int) -> None:  # noqa: B027  nothing to do
        """Leave ``nbytes`` of the RAM budget to something else; below zero gives them back.

        Only streamed weights make room.

        Raises:
            MemoryBudgetError: so much cannot be given; nothing changes then.
        """

    @property
    def gpu_use(self) -> GpuUse | None:
        """What the model takes of a GPU's memory; None if it is on none, or if that is unknown."""
        return None

    def set_budget(
        self,
        *,
        ram: int | None = None,
        gpu_memory: int | None = None,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        """Limit the process to ``ram`` bytes, and the model to ``gpu_memory`` bytes of the GPU,
        from the next pass on; None: no change. ``free`` frees unused caches.

        This default is for a model loaded whole: its weights stay where they are.

        Raises:
            OptionError: ``gpu_memory`` for a model that runs on the CPU.
            MemoryBudgetError: the model takes more and cannot free enough.
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
                least = taken - self.info.weight_bytes
                raise MemoryBudgetError(
                    f"the model was loaded whole and this process takes {format_bytes(taken)}, "
                    f"more than {format_bytes(ram)}: "
                    + (
                        f"load it again with {option('ram', ram)}, which streams it"
                        if ram > least
                        else f"without the weights it takes {format_bytes(least)}, so give it more"
                    )
                )
            self.ram = ram

    # -- adapters --------------------------------------------------------------------------------

    def add_adapter(self, adapter: Adapter[LowRank]) -> int:
        """Let sessions use an adapter; returns the bytes that it takes.

        Raises:
            UnsupportedModelError: the engine supports no adapters.
            MemoryBudgetError: there is no room for it.
        """
        raise UnsupportedModelError(
            f"the engine {self.info.engine} computes no adapters: use {option('engine', 'native')}"
        )

    def remove_adapter(self, key: str) -> None:  # noqa: B027  nothing to do
        """Remove an adapter."""

    def uses_adapter(self, key: str) -> bool:
        """Whether a session holds tokens computed with this adapter."""
        return False

    # -- counts and forecast -----------------------------------------------------------------------

    def counts(self) -> PipelineCounts | None:
        """Return the pipeline's counts so far; None if everything is resident."""
        return self.weights.counts()

    def forecast(self) -> Speeds | None:
        """Return the planned speed at the disk's recent rate; None if there was no plan."""
        return None

    # -- hidden states ---------------------------------------------------------------------------

    @property
    def hidden_size(self) -> int:
        """Columns of the hidden states.

        Raises:
            UnsupportedModelError: the engine gives none.
        """
        raise UnsupportedModelError(f"the engine {self.info.engine} gives no embeddings")

    def hidden_states(
        self, texts: Sequence[Sequence[int]], *, check: Check | None = None
    ) -> Generator[tuple[int, Logits], None, None]:
        """Yield hidden states after the final norm, for every text: (index of the text, rows (n,
        D)).

        The rows of one text come in order; rows of different texts come in any order.

        Raises:
            UnsupportedModelError: the engine gives none.
        """
        raise UnsupportedModelError(f"the engine {self.info.engine} gives no embeddings")
