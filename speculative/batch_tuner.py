"""Which guesses of several sequences are worth their rows, where the sequences share passes.

A row costs a pass the same, whoever's it is: of all that was guessed the likeliest are taken, as
many as bring more tokens than their rows cost time (as SpecInfer's and Sequoia's trees weigh nodes,
here across sequences). What a pass costs is measured, and what attempts may lose is bounded as for
a sequence that is alone. It knows no model: seconds in, trees out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import REFRESH, TOLERANCE, Tuner
from localrt.speculative.worth import Retry, nodes_worth

_ASSUMED = 96  # passes that are taken to come: what may be lost at the start
_CREDIT = 8  # passes: what was gained long ago is no reason to lose now


class BatchTuner:
    """Of a model whose ``tuner`` it is. Not thread-safe."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self._sequences = 0
        self._spent = 0.0  # seconds of passes
        self._lost = 0.0  # seconds beyond passes without guesses; negative: gained
        self._since_plain = 0
        self._retry = Retry()

    def looks(self, sequences: int) -> bool:
        """Whether guesses are wanted for the next pass, which so many share."""
        self._sequences = sequences
        return self.plain is not None and self._since_plain < REFRESH

    def choose(self, trees: Sequence[TokenTree], room: int, beside: int = 0) -> list[TokenTree]:
        """The part of each sequence's tree to verify in the pass that was asked for.

        Scores are logarithms of believed chances. ``room`` bounds the nodes of all together;
        ``beside`` are the rows of prompts that the pass computes too.
        """
        sizes = [len(tree) for tree in trees]
        counts = [0] * len(trees)
        if sum(sizes) and room > 0:
            owner = np.repeat(np.arange(len(trees)), sizes)
            scores = np.concatenate([tree.scores for tree in trees])
            order = np.argsort(-scores, kind="stable")[:room]
            best = self._worth(np.cumsum(np.exp(scores[order])), beside)
            counts = np.bincount(owner[order[:best]], minlength=len(trees)).tolist()
        return [tree.trim(count) for tree, count in zip(trees, counts, strict=True)]

    def passed(self, guesses: int, emitted: int, seconds: float, thinking: float) -> None:
        """The pass over what was chosen took ``seconds`` and brought ``emitted`` tokens.

        Guessing took ``thinking`` seconds before.
        """
        tuner = self.tuner
        with tuner.lock:
            tuner.passed(self._sequences + guesses, seconds)
            self._spent += seconds + thinking
            self._since_plain = self._since_plain + 1 if guesses else 0
            plain = tuner.cost.seconds(self._sequences)
            beyond = thinking
            if guesses:
                beyond += seconds - emitted * plain / self._sequences
            self._lost = max(self._lost + beyond, -_CREDIT * plain)
            if guesses:
                self._retry.tried(paid=beyond < 0)

    @property
    def plain(self) -> float | None:
        """Seconds of a pass without guesses; None before one of about that size was measured."""
        with self.tuner.lock:
            cost, rows = self.tuner.cost, self._sequences
            return cost.seconds(rows) if cost.covers(rows) else None

    def _worth(self, sums: np.ndarray[tuple[int], np.dtype[np.float64]], beside: int) -> int:
        """How many of the likeliest nodes, which bring ``sums`` tokens, to verify."""
        with self.tuner.lock:
            cost, rows = self.tuner.cost, self._sequences
            plain, base = cost.seconds(rows), rows + beside
            limit = TOLERANCE * max(self._spent, _ASSUMED * plain) - self._lost

            def affordable(count: int) -> bool:
                return cost.seconds(base + count) - cost.seconds(base) <= limit

            def longer_s(count: int) -> float:
                longest = cost.seconds(base + count, hopeful=True)
                return longest - cost.seconds(base, hopeful=True)

            best = nodes_worth(sums, plain / rows, longer_s, affordable)
            if best or beside:
                return best
            self._retry.wait -= 1
            attempt = min(rows, len(sums))
            return attempt if self._retry.wait < 0 and affordable(attempt) else 0
