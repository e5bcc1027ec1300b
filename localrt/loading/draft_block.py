"""DFlash (block diffusion): one pass of a head drafts all tokens of a block at once.

The pass gives a distribution for each depth, whatever the tokens before it are. A path's
probability is taken as the product of its tokens' (as in DDTree), and the tree is grown best-first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from localrt.engine.native.session import FeatureRows
from localrt.models.heads import BlockDecoder
from localrt.quant.ops.protocol import Batch, Span
from localrt.speculative.best_first import Children, Growth, likeliest
from localrt.speculative.ngram import common_length
from localrt.speculative.source import Check, DraftFailedError, DraftSource
from localrt.speculative.tree import TokenTree

if TYPE_CHECKING:
    from localrt.loading.draft_head import HeadDraft

_PASS_ROWS = 512
_LEAST = -9.0  # the log-probability below which tokens are not drafted


class BlockSource(DraftSource):
    """Drafts for one session with these ``features``. Its cache keeps what the head makes of them;
    ``capacity`` counts a block.
    """

    name = "head"

    def __init__(
        self, head: HeadDraft, features: FeatureRows, *, capacity: int, temperature: float
    ) -> None:
        assert isinstance(head.decoder, BlockDecoder), "its config says so"
        self._head, self._decoder, self._features = head, head.decoder, features
        self._temperature = temperature or 1.0
        with head.engine.alone():
            self._cache = head.decoder.cache(capacity)
        self._start = 0  # the index of the token in the cache's first row
        self._known: list[int] = []  # the tokens up to that of the last row

    def missing(self, history: Sequence[int]) -> int:
        return len(history) - 1 - self._kept(history) if self._readable(history) else 0

    def catch_up(self, history: Sequence[int], *, check: Check | None = None) -> None:
        if not self._readable(history):
            return
        cache, features, known = self._cache, self._features, len(history) - 1
        kept = self._kept(history)
        if kept == features.first:
            self._start = kept
        cache.trim(kept - self._start)
        for start in range(kept, known, _PASS_ROWS):
            self._known = list(history[:start])
            stop = min(start + _PASS_ROWS, known)
            tokens, positions = np.array(history[start:stop], np.int64), np.arange(start, stop)
            with self._head.engine.alone():
                self._decoder.context.forward(
                    Batch(tokens, positions, (Span(cache, stop - start),)),
                    rows=[],
                    check=check,
                    given=features.get(start, stop),
                )
        self._known = list(history[:known])

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        cache, block, known = self._cache, self._head.config.block, len(history) - 1
        depth = min(depth, block - 1)
        if budget <= 0 or depth <= 0 or not self._readable(history):
            return TokenTree.empty()
        self.catch_up(history, check=check)
        tokens = np.full(block, self._head.config.mask, np.int64)
        tokens[0] = history[-1]
        span = Span(cache, block, np.ones((block, block), np.bool_))
        held = cache.length
        with self._head.engine.alone():
            logits = self._decoder.forward(
                Batch(tokens, np.arange(known, known + block), (span,)),
                rows=range(1, 1 + depth),
                check=check,
            )
        cache.trim(held)
        found = [self._children(row) for row in logits]
        growth = Growth(self.name)
        return growth.grow(
            lambda nodes, _: [found[growth.level(node)] for node, _, _ in nodes],
            budget=budget,
            depth=depth,
        )

    def _children(self, logits: np.ndarray) -> Children:
        try:
            found = likeliest(logits, _LEAST, temperature=self._temperature)
        except ValueError as error:
            raise DraftFailedError(f"the draft head produced NaN logits: {error}") from error
        tokens = self._head.config.tokens
        return found if tokens is None else Children(tokens[found.tokens], found.logprobs)

    def _readable(self, history: Sequence[int]) -> bool:
        """Whether there are features of the tokens before the last."""
        return self._features.first < len(history) - 1 <= self._features.length

    def _kept(self, history: Sequence[int]) -> int:
        """The token before the last that lacks a row, with all after it."""
        kept = min(common_length(self._known, history), len(history) - 1)
        return kept if kept > self._start and kept >= self._features.first else self._features.first
