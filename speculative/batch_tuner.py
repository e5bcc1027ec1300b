"""Decides which draft tokens a pass verifies that several sequences share.

A row costs a pass the same, whichever sequence it belongs to. Of all draft tokens the likeliest are
verified, as long as they bring more tokens than their rows cost time (as SpecInfer's and Sequoia's
trees weigh nodes, here across sequences). The cost of passes is measured, and the loss of attempts
is bounded as for a lone sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from localrt.speculative.cost_model import MARGIN, Backoff, Retry, nodes_to_verify
from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import REFRESH, TOLERANCE, Tuner

_ASSUMED = 96  # passes assumed to follow, which bounds the loss at the start
_CREDIT = 8  # passes: old gains do not justify losses now
# The share of a pass's time that drafting may take when no draft pays, and the most passes without
# drafting.
_DRAFTING, _LONGEST_BACKOFF = 0.01, 64
# Budget and depth of the trees that a source computes; the first is an attempt.
_SIZES = ((1, 1), (2, 2), (4, 2), (4, 4), (8, 4))
_BLEND = 0.2  # weight of a new measurement in a running mean


class BatchTuner:
    """Decides by ``tuner`` which draft tokens a shared pass verifies. Not thread-safe."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self._sequences = 0
        self._spent = 0.0  # seconds of passes
        self._lost = 0.0  # seconds more than passes without drafts took; negative: gained
        self._since_plain = 0
        self._retry = Retry()
        self._backoff = Backoff(_DRAFTING, _LONGEST_BACKOFF)
        self._drafting = False
        self._computing = Retry()  # of sources that compute their trees
        self._computed = False
        self._level: dict[int, float] = {}  # their seconds a level, by sequences

    def should_draft(self, sequences: int) -> bool:
        """Whether to draft for the next pass, which this many sequences share."""
        self._sequences = sequences
        with self.tuner.lock:  # a pass of about that size must have been measured
            known = self.tuner.cost.covers(sequences)
        self._drafting = known and self._since_plain < REFRESH and self._backoff.due()
        return self._drafting

    def size(self, name: str) -> tuple[int, int] | None:
        """Budget and depth of the trees that the source ``name`` is to compute for each sequence
        before the next pass; None: it would cost more time than it saves.
        """
        count, self._computed = self._sequences, False
        with self.tuner.lock:
            source, cost = self.tuner.sources[name], self.tuner.cost
            plain, level = cost.seconds(count), self._level_of(name)
            limit = TOLERANCE * max(self._spent, _ASSUMED * plain) - self._lost
            best, best_rate = None, MARGIN / plain
            for budget, depth in _SIZES:
                rows = count * (1 + budget)
                draft = level * source.cost.passes(depth)
                if draft + cost.seconds(rows) - plain > limit:
                    continue
                seconds = draft + cost.seconds(rows, hopeful=True)
                rate = (1 + source.gain(budget, depth)) / seconds
                if rate > best_rate:
                    best, best_rate = (budget, depth), rate
            self._computing.wait -= 1
            if best is None and self._computing.wait < 0 and 2 * level <= limit:
                best = _SIZES[0]
            self._computed = best is not None
            return best

    def _level_of(self, name: str) -> float:
        """Seconds of a level for all sequences: measured, or as for a sequence alone."""
        known = self._level.get(self._sequences)
        if known is not None:
            return known
        source, cost = self.tuner.sources[name], self.tuner.cost
        alone = source.cost.seconds(1, 0) or source.level * (cost.plain or cost.seconds(1))
        return alone * math.sqrt(self._sequences)

    def drafted(
        self, name: str, trees: Sequence[TokenTree], size: tuple[int, int], seconds: float
    ) -> None:
        """Record that computing these ``trees`` took ``seconds``."""
        height = max((tree.height for tree in trees), default=0)
        with self.tuner.lock:
            level = seconds / self.tuner.sources[name].cost.passes(height)
            old = self._level.get(self._sequences, level)
            self._level[self._sequences] = old + _BLEND * (level - old)
            for tree in trees:
                if len(tree):
                    self.tuner.sources[name].note_tree(tree, *size)

    def choose(
        self, trees: Sequence[TokenTree], room: int, prompt_rows: int = 0
    ) -> list[TokenTree]:
        """Return the part of each sequence's tree to verify in the next pass.

        Scores are logarithms of calibrated probabilities. ``room`` bounds the nodes of all trees
        together; ``prompt_rows`` is the number of prompt rows in the same pass.
        """
        room = min(room, self.tuner.most_rows - len(trees) - prompt_rows)
        sizes = [len(tree) for tree in trees]
        counts = [0] * len(trees)
        if sum(sizes) and room > 0:
            owner = np.repeat(np.arange(len(trees)), sizes)
            scores = np.concatenate([tree.scores for tree in trees])
            order = np.argsort(-scores, kind="stable")[:room]
            best = self._worth(np.cumsum(np.exp(scores[order])), prompt_rows)
            counts = np.bincount(owner[order[:best]], minlength=len(trees)).tolist()
        return [tree.trim(count) for tree, count in zip(trees, counts, strict=True)]

    def passed(self, drafted: int, emitted: int, seconds: float, drafting: float) -> None:
        """Record that ``drafting`` seconds of drafting, and ``seconds`` of a pass with ``drafted``
        nodes, brought ``emitted`` tokens.
        """
        with self.tuner.lock:
            cost = self.tuner.cost
            cost.add(self._sequences + drafted, seconds)
            self._spent += seconds + drafting
            self._since_plain = self._since_plain + 1 if drafted else 0
            plain = cost.seconds(self._sequences)
            beyond = drafting
            if drafted:
                beyond += seconds - emitted * plain / self._sequences
                self._retry.tried(paid=beyond < 0)
            if self._computed:
                self._computing.tried(paid=beyond < 0)
            self._lost = max(self._lost + beyond, -_CREDIT * plain)
        if self._drafting:
            self._backoff.drafting_took(drafting, plain, found=drafted > 0)

    def _worth(self, sums: np.ndarray[tuple[int], np.dtype[np.float64]], prompt_rows: int) -> int:
        """Return how many of the likeliest nodes to verify, which bring ``sums`` tokens."""
        with self.tuner.lock:
            cost, rows = self.tuner.cost, self._sequences
            plain, base = cost.seconds(rows), rows + prompt_rows
            limit = TOLERANCE * max(self._spent, _ASSUMED * plain) - self._lost

            def affordable(count: int) -> bool:
                return cost.seconds(base + count) - cost.seconds(base) <= limit

            def longer_s(count: int) -> float:
                longest = cost.seconds(base + count, hopeful=True)
                return longest - cost.seconds(base, hopeful=True)

            best = nodes_to_verify(sums, plain / rows, longer_s, affordable)
            if best or prompt_rows:
                return best
            self._retry.wait -= 1
            attempt = min(rows, len(sums))
            return attempt if self._retry.wait < 0 and affordable(attempt) else 0
