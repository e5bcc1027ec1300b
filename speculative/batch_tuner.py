"""The speculation policy for a pass that several sequences share.

A row costs a pass the same, whichever sequence it belongs to. Of all draft tokens the likeliest are
verified, as long as they bring more tokens than their rows cost time (as SpecInfer's and Sequoia's
trees weigh nodes, here across sequences). The cost of passes is measured, and what drafts may lose
is bounded as for a lone sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import ASSUMED, MARGIN, REFRESH, TOLERANCE, Tuner, nodes_that_pay

# Chosen, not measured, as all constants here. The most that may have been gained, in passes: gains
# of earlier answers do not justify losses.
_CREDIT = 8
_SIZES = ((1, 1), (2, 2), (4, 4), (8, 4))  # of the trees that a source computes for a sequence
_BLEND = 0.2  # weight of a new measurement in a running mean


class BatchTuner:
    """Decides by ``tuner`` which draft tokens a shared pass verifies. Not thread-safe."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self._sequences = 0
        self._spent = 0.0  # seconds of passes
        self._lost = 0.0  # seconds more than passes without drafts took; negative: gained
        self._since_plain = 0
        self._level: dict[int, float] = {}  # seconds of a draft's pass, by sequences

    def should_draft(self, sequences: int) -> bool:
        """Whether to draft for the next pass, which this many sequences share."""
        self._sequences = sequences
        with self.tuner.lock:  # a pass of about that size must have been measured
            known = self.tuner.cost.covers(sequences)
            return known and self._since_plain < REFRESH and self._left() >= 0

    def size(self, name: str) -> tuple[int, int] | None:
        """Budget and depth of the trees that the source ``name`` is to compute for each sequence
        before the next pass; None: it would cost more time than it saves.
        """
        with self.tuner.lock:
            source, cost, count = self.tuner.sources[name], self.tuner.cost, self._sequences
            plain = cost.seconds(count)
            level = self._level.get(count, source.level * plain)
            best, best_rate = None, MARGIN / plain
            for budget, depth in _SIZES:
                seconds = level * source.cost.passes(depth) + cost.seconds(count * (1 + budget))
                rate = (1 + source.gain(budget, depth)) / seconds
                if rate > best_rate and seconds - plain <= self._left():
                    best, best_rate = (budget, depth), rate
            return best

    def drafted(
        self, name: str, trees: Sequence[TokenTree], size: tuple[int, int], seconds: float
    ) -> None:
        """Record that computing these ``trees`` took ``seconds``."""
        with self.tuner.lock:
            source = self.tuner.sources[name]
            level = seconds / source.cost.passes(size[1])
            old = self._level.get(self._sequences, level)
            self._level[self._sequences] = old + _BLEND * (level - old)
            for tree in trees:
                source.note(tree)

    def choose(
        self, trees: Sequence[TokenTree], room: int, prompt_rows: int = 0
    ) -> list[TokenTree]:
        """Return the part of each sequence's tree to verify in the next pass.

        Scores are logarithms of expected acceptance. ``room`` bounds the nodes of all trees
        together; ``prompt_rows`` is the number of prompt rows in the same pass.
        """
        with self.tuner.lock:
            cost, rows = self.tuner.cost, self._sequences
            base, room = rows + prompt_rows, min(room, self.tuner.most_rows - rows - prompt_rows)
            if room <= 0 or not any(map(len, trees)):
                return [TokenTree.empty() for _ in trees]

            def longer_s(count: int) -> float:
                return cost.seconds(base + count) - cost.seconds(base)

            token_s = cost.seconds(rows) / rows
            return nodes_that_pay(
                trees, room, token_s, longer_s, lambda n: longer_s(n) <= self._left()
            )[0]

    def passed(self, drafted: int, emitted: int, seconds: float, drafting: float) -> None:
        """Record that ``drafting`` seconds of drafting, and ``seconds`` of a pass with ``drafted``
        nodes, brought ``emitted`` tokens.
        """
        with self.tuner.lock:
            cost = self.tuner.cost
            cost.add(self._sequences + drafted, seconds)
            self._spent += seconds + drafting
            self._since_plain = self._since_plain + 1 if drafted else 0
            plain, beyond = cost.seconds(self._sequences), drafting
            if drafted:
                beyond += seconds - emitted * plain / self._sequences
            else:
                self.tuner.rest()
            self._lost = max(self._lost + beyond, -_CREDIT * plain)

    def _left(self) -> float:
        """Return the seconds that may still be lost."""
        plain = self.tuner.cost.seconds(self._sequences)
        return TOLERANCE * max(self._spent, ASSUMED * plain) - self._lost
