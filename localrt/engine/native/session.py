"""One sequence on the native engine: its tokens, its KV cache, and its rows in a pass.

The rows of a pass of several sessions have positions and what each attends to, along an open tree
too. With ``record_features`` a session also keeps its tokens' features, for draft heads that read
them. The engine runs the passes. A session does not know weights, text or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localrt.common.errors import LocalrtError
from localrt.engine.native.meters import RamMeter
from localrt.engine.protocol import Engine, EngineSession, Logits, Speeds
from localrt.models.weight_store import PipelineCounts
from localrt.offload.account import pass_logits_nbytes
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.adapters import Mix
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.kv import BlockCache, FillBlocks, KVCache, ReadBlocks
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.protocol import Batch, Check, Span
from localrt.quant.ops.states import SavedState
from localrt.speculative.tree import Ints, TokenTree

if TYPE_CHECKING:
    from localrt.models.vision.encoder_cache import VisionState

Rows = npt.NDArray[np.float32]

_LENDING_NBYTES = 16 << 20  # of logits of a pass, while other programs need memory
FEATURE_NBYTES = 64 << 20
"""The most bytes of a sequence's features."""


class FeatureRows:
    """The features (n, ``size``) of a sequence's tokens ``first`` to ``length``: the residual
    stream before ``layers``. The oldest are dropped if they would take more than 64 MB.
    """

    def __init__(self, layers: tuple[int, ...], first: int, size: int) -> None:
        self.layers = layers
        self.first = first
        self.length = first
        self._rows = np.empty((64, size), np.float32)
        self._open: Rows = np.empty((0, size), np.float32)

    def room(self, count: int) -> Rows:
        """Return the array (count, size) for the next rows; ``advance`` makes them valid."""
        width = self._rows.shape[1]
        if (self.length - self.first + count) * 4 * width > FEATURE_NBYTES:
            self._drop(self.length - FEATURE_NBYTES // (8 * width))
        held = self.length - self.first
        if held + count > len(self._rows):
            grown = np.empty((max(2 * held, held + count), width), np.float32)
            grown[:held] = self._rows[:held]
            self._rows = grown
        return self._rows[held : held + count]

    def _drop(self, before: int) -> None:
        gone = before - self.first
        if gone > 0:
            self._rows = self._rows[gone:].copy()
            self.first = before

    def advance(self, count: int) -> None:
        """Make the next ``count`` rows valid."""
        self.length += count

    def open(self, count: int) -> Rows:
        """Return the array for the rows of a tree's pass, held until some are kept."""
        self._open = np.empty((count, self._rows.shape[1]), np.float32)
        return self._open

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows of the tree for the next tokens."""
        self.room(len(rows))[:] = self._open[list(rows)]
        self.advance(len(rows))
        self._open = self._open[:0]

    def restart(self, first: int) -> None:
        """Hold no rows; the next is of token ``first``."""
        self.first = self.length = first

    def trim(self, length: int) -> None:
        """Drop the rows of all tokens from ``length`` on."""
        self.first = min(self.first, length)
        self.length = min(self.length, length)

    def get(self, start: int, stop: int) -> Rows:
        """Return the rows of tokens ``start`` to ``stop``, valid until the sequence changes.

        Raises:
            IndexError: some of them are not held.
        """
        if not self.first <= start <= stop <= self.length:
            raise IndexError(f"features {start} to {stop} of {self.first} to {self.length}")
        return self._rows[start - self.first : stop - self.first]


class NativeSession(EngineSession):
    """See ``EngineSession``.

    ``shift`` is a token's index minus its rotary position, after the pictures so far.
    ``attention_key`` identifies what keys depend on besides the weights. ``reserve`` makes room in
    a cache for a number of tokens that do not come from a pass.
    """

    takes_trees = True

    def __init__(
        self,
        engine: Engine,
        cache: KVCache,
        ram: RamMeter,
        *,
        attention_key: str,
        reserve: Callable[[KVCache, int], None],
    ) -> None:
        self._engine = engine
        self._cache: KVCache | None = cache
        self._ram = ram
        self._attention_key = attention_key
        self._reserve = reserve
        self._tokens: list[int] = []
        self._open: list[int] = []  # the tokens of a tree's rows, until some are kept
        self._features: FeatureRows | None = None
        self.shift = 0
        self.capacity = cache.capacity

    def record_features(self, layers: tuple[int, ...] = (AFTER_LAST,)) -> FeatureRows:
        """Start to record features of computed tokens; calls for the same layers return the same
        rows.
        """
        if self._features is None or self._features.layers != layers:
            size = len(layers) * self._engine.hidden_size
            self._features = FeatureRows(layers, len(self._tokens), size)
        return self._features

    @property
    def mix(self) -> Mix:  # type: ignore[override]  # a cache's
        """The adapter set that computes its tokens."""
        return () if self._cache is None else self._cache.mix

    def use(self, mix: Mix) -> None:
        if mix != self.cache.mix:
            self.trim(0)
            self.cache.mix = mix

    def plain(self, tokens: Sequence[int]) -> Sequence[int]:
        vision = self._engine.vision
        if vision is None or not tokens or min(tokens) >= 0:
            return tokens
        return [vision.token if token < 0 else token for token in tokens]

    @property
    def tree_rows(self) -> int | None:
        rows = self._ram.logit_rows
        if not self._engine.weights.memory.lends:
            return rows
        few = _LENDING_NBYTES // pass_logits_nbytes(self._engine.info.vocab_size, 2)
        return few if rows is None else min(few, rows)

    @property
    def fresh_passes(self) -> int:  # type: ignore[override]
        return sum(ops.fresh_passes for ops in self._engine.weights.implementations)

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def nbytes(self) -> int:
        cache = self._cache
        return 0 if cache is None else cache.nbytes + getattr(cache, "gpu_nbytes", 0)

    def extend(
        self,
        tokens: Sequence[int],
        *,
        check: Check | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Logits:
        """Append ``tokens`` in passes of the engine's size; return logits after the last."""
        self.check_tokens(tokens, self._engine.info.vocab_size, self._engine.vision)
        most = self._engine.pass_rows
        done = 0
        while done < len(tokens):
            chunk = tokens[done : self._engine.uncut(tokens, done, most)]
            done += len(chunk)
            wanted = [0] if done == len(tokens) else []
            logits = self._engine.extend_batch([(self, chunk)], wanted=wanted, check=check)
            if on_progress is not None:
                on_progress(done)
        last: Logits = logits[0]
        return last

    def extend_tree(self, token: int, tree: TokenTree, *, check: Check | None = None) -> Logits:
        (logits,) = self._engine.extend_trees([(self, token, tree)], check=check)
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.select(len(self._tokens), rows)
        if self._features is not None:
            self._features.keep(rows)
        self._tokens += [self._open[row] for row in rows]
        self._open = []

    # -- passes of several sequences, which the engine makes ---------------------------------------

    @property
    def cache(self) -> KVCache:
        """Its keys and values.

        Raises:
            LocalrtError: the session is closed.
        """
        if self._cache is None:
            raise LocalrtError("the session is closed")
        return self._cache

    @property
    def recorded_layers(self) -> tuple[int, ...]:
        """The layers whose features are recorded."""
        return () if self._features is None else self._features.layers

    def appended(self, tokens: Sequence[int], features: Features | None, first: int) -> None:
        """Record the ``tokens`` that a pass has computed, in its rows from ``first`` on."""
        self._tokens += tokens
        if self._features is not None and features is not None:
            features.copy(self._features.layers, first, self._features.room(len(tokens)))
            self._features.advance(len(tokens))

    def opened(self, tokens: Sequence[int], features: Features | None, first: int) -> None:
        """Record the tokens of a tree's pass; ``keep`` will say which of them to keep."""
        self._open = list(tokens)
        if self._features is not None and features is not None:
            features.copy(self._features.layers, first, self._features.open(len(tokens)))

    def counts(self) -> PipelineCounts | None:
        return self._engine.counts()

    def forecast(self) -> Speeds | None:
        return self._engine.forecast()

    def trim(self, length: int) -> int:
        if self._cache is not None:
            length = self._cache.trim(length)
        if self._features is not None:
            self._features.trim(length)
        if length < len(self._tokens):
            del self._tokens[length:]
            if self.shift:
                self._recount()
        return length

    def _recount(self) -> None:
        """Compute the shift of the held tokens again."""
        vision = self._engine.vision
        if vision is not None:
            *_, self.shift = vision.positions(np.asarray(self._tokens, np.int64), 0, 0)

    @property
    def blocks(self) -> BlockCache | None:
        cache: object = self._cache
        return cache if isinstance(cache, BlockCache) and cache.kv_layout else None

    @property
    def kv_layout(self) -> str:
        blocks = self.blocks
        if blocks is None:
            return ""
        adapters = "".join(f" {key}*{weight:g}" for key, weight in self.mix)
        return f"{blocks.kv_layout} {self._attention_key}{adapters}"

    def put_tokens(
        self,
        tokens: Sequence[int],
        read: Callable[[FillBlocks], int],
        states: Sequence[SavedState] = (),
    ) -> int:
        blocks = self.blocks
        if blocks is None:
            return 0
        self.trim(0)
        self._reserve(blocks, len(tokens))
        held = blocks.restore(read(blocks.fill_blocks), states)
        self._tokens = list(tokens[:held])
        self._recount()
        if self._features is not None:
            self._features.restart(held)
        return held

    def copy_prefix(self, other: EngineSession, length: int) -> int:
        source = other.blocks
        if source is None or self.blocks is None or other.kv_layout != self.kv_layout:
            return 0
        states = [state for state in source.saved_states() if state.position <= length]

        def read(fill: FillBlocks) -> int:
            fill(0, -(-length // BLOCK_TOKENS), _copied(source))
            return length

        return self.put_tokens(other.tokens[:length], read, states)

    def close(self) -> None:
        self._cache = self._features = None
        self._tokens, self.shift = [], 0


def _copied(source: BlockCache) -> ReadBlocks:
    """Copy blocks of another cache."""

    def read(first: int, room: Bytes) -> int:
        room[:] = source.take_blocks(first, len(room))
        return len(room)

    return read


def rows_of_pass(
    sessions: Sequence[NativeSession],
    tokens: Sequence[Ints],
    trees: Sequence[TokenTree],
    vision: VisionState | None,
) -> tuple[Batch, list[int]]:
    """Return the batch that appends ``tokens`` to each session, and each one's ``shift`` after it.

    The first sessions, one for each of ``trees``, append a token and then the tree's nodes.
    """
    positions, axes, shifts, spans = [], [], [], []
    for session, ids, tree in zip_longest(sessions, tokens, trees):
        held, shift, own, ahead = len(session.tokens), session.shift, None, None
        session.cache.trim(held)
        alone = tree is None or not len(tree)
        if not alone:
            at = held - shift
            places = np.concatenate([[at], tree.positions(at)])
        elif vision is None:
            places = np.arange(held, held + len(ids))
        else:
            own, places, shift = vision.positions(ids, held, shift)
            ahead = vision.ahead(ids)
        positions.append(places)
        axes.append(own)
        shifts.append(shift)
        mask = None if alone else tree.pass_mask()
        windows = vision is not None and vision.encoder.full_layers_causal
        spans.append(Span(session.cache, len(ids), mask, ahead, windows))
    batch = Batch(
        np.concatenate(tokens),
        np.concatenate(positions),
        tuple(spans),
        axes=_joined_axes(axes, positions),
    )
    return batch, shifts


def _joined_axes(axes: Sequence[Ints | None], positions: Sequence[Ints]) -> Ints | None:
    """The positions of all sequences on three axes; None if the axes are equal in all."""
    if all(own is None for own in axes):
        return None
    parts = zip(axes, positions, strict=True)
    return np.concatenate([np.repeat(p[None], 3, 0) if a is None else a for a, p in parts], 1)
