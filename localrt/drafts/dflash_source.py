"""DFlash (block diffusion): one pass of a head drafts all tokens of a block at once.

The pass gives a distribution for each depth, independent of the tokens at earlier depths. A path's
probability is approximated by the product of its tokens' probabilities (as in DDTree), and the tree
is grown best-first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localrt.drafts.heads.config import HeadConfig
from localrt.drafts.heads.dflash import BlockDecoder
from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.session import NativeSession
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.protocol import Batch, Span
from localrt.speculative.best_first import Children, Growth
from localrt.speculative.ngram import common_length
from localrt.speculative.source import Check, DraftSource, TreeSize
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tree_source import children_of

_PASS_ROWS = 512
_LEAST = -9.0  # the log-probability below which tokens are not drafted


class BlockSource(DraftSource):
    """Drafts for one session of ``engine``. Its cache has keys and values of the tokens' features;
    ``capacity`` includes one block.
    """

    name = "head"

    def __init__(
        self,
        engine: NativeEngine,
        config: HeadConfig,
        decoder: BlockDecoder,
        session: NativeSession,
        capacity: int,
        temperature: float,
    ) -> None:
        self._engine, self._config, self._decoder = engine, config, decoder
        self._features = session.record_features(config.layers)
        self._temperature = temperature or 1.0
        with engine.alone():
            self._cache = decoder.cache(capacity)
        self._start = 0  # the index of the token in the cache's first row
        self._known: list[int] = []  # tokens up to that of the cache's last row

    def missing(self, history: Sequence[int]) -> int:
        return len(history) - 1 - self._first_missing(history) if self._readable(history) else 0

    def catch_up(self, history: Sequence[int], *, check: Check | None = None) -> None:
        cache, first, known = self._cache, self._first_missing(history), list(history[:-1])
        if first == self._features.first:
            self._start = first
        cache.trim(first - self._start)
        for start in range(first, len(known), _PASS_ROWS):
            self._known = known[:start]
            tokens = np.array(known[start : start + _PASS_ROWS], np.int64)
            stop = start + len(tokens)
            batch = Batch(tokens, np.arange(start, stop), (Span(cache, len(tokens)),))
            features = self._features.get(start, stop)
            with self._engine.alone():
                self._decoder.context.forward(batch, rows=[], check=check, target_features=features)
        self._known = known

    def propose(
        self, history: Sequence[int], size: TreeSize, *, check: Check | None = None
    ) -> TokenTree:
        config, cache, known = self._config, self._cache, len(history) - 1
        first, pairs = config.first, self._decoder.pairs
        budget, depth = size.budget, min(size.depth, config.block - first)
        if budget <= 0 or depth <= 0 or not self._readable(history):
            return TokenTree.empty()
        self.catch_up(history, check=check)
        tokens = np.array([history[-1], *[config.mask] * (config.block - 1)], np.int64)
        seen = np.ones((config.block, config.block), np.bool_)
        span = Span(cache, config.block, np.tril(seen) if config.causal else seen)
        batch, length = Batch(tokens, known + np.arange(config.block), (span,)), cache.length
        growth, drafted = Growth(self.name), range(first, first + depth)
        width, temperature = self._engine.hidden_size, self._temperature
        own = Features((AFTER_LAST,), np.empty((config.block, width), np.float32))

        def likeliest(rows: Floats) -> list[Children]:
            return [children_of(row, _LEAST, temperature, config.tokens) for row in rows]

        with self._engine.alone() as ops, ops.scope():
            logits = self._decoder.forward(batch, rows=drafted, check=check, features=own)
            cache.trim(length)
            plain = likeliest(logits) if pairs is None else []

            def expand(nodes: Sequence[tuple[int, int, int]], _: object) -> list[Children]:
                levels = [growth.level(node) for node, *_ in nodes]
                if pairs is None:
                    return [plain[level] for level in levels]
                before = [history[-1] if node == ROOT else token for node, token, _ in nodes]
                return likeliest(pairs.add(ops, logits[levels], before, own.rows[first:][levels]))

            # A node's logits are computed for it alone where they depend on the token before
            some = {} if pairs is None else {"round_nodes": 16}
            return growth.grow(expand, budget=budget, depth=depth, **some)

    def _readable(self, history: Sequence[int]) -> bool:
        """Whether the features of all tokens before the last are available."""
        return self._features.first < len(history) - 1 <= self._features.length

    def _first_missing(self, history: Sequence[int]) -> int:
        """Return the index of the first token that needs a new row in the cache."""
        first, shared = self._features.first, common_length(self._known, history)
        shared = min(shared, len(history) - 1)
        return shared if shared > self._start and shared >= first else first
