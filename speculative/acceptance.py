"""The acceptance rule of draft trees, and each draft source's acceptance rate.

The rule says which tokens of a verified tree are part of the answer. A rate is one number: how many
of a source's draft tokens are accepted for each that its stated probabilities promise. It makes the
probabilities of several sources comparable, and ``expected_tokens`` says what a tree brings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np

from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import is_best
from localrt.speculative.tree import ROOT, TokenTree

# Shares as in ``tuner.py``, by ``python -m tests.speculative.worlds``: today 0.881 and 0.949.
FIRST_CHOICE = 0.7
"""The assumed chance that a draft's first choice is accepted, until it is measured. 0.5: 0.870,
0.945.
"""
# Accepted tokens that the assumed acceptance counts for, against measured ones. 1: 0.897, 0.937;
# 16: 0.882, 0.941.
_PRIOR = 4.0
# Of the weight of earlier tests at each new one: the last 50 count. 0.95: 0.883, 0.944; 0.995:
# 0.896, 0.946.
_FADE = 0.98
_BLEND = 0.2  # weight of a new number in a running mean; chosen, not measured
_LEAST = 1e-9  # the least probability, so that its logarithm is a valid score


class TreePass:
    """A pass over a token and a ``tree`` after it, whose tokens are accepted one after another.

    A token is chosen from the target's ``logits``, all or ``BEST``, exactly as plain decoding
    would (same penalties, same filters, one random number). If a child of the current node has that
    token, the next is chosen from its logits; if not, the pass is over. The token is part of the
    answer either way. Nothing is rejected and drawn again, so every token has the target's own
    distribution given what came before: exact for any tree, any draft and any sampler (SpecExec,
    Svirschevski et al. 2024, section 4). ``path`` has the nodes accepted so far.
    """

    def __init__(self, tree: TokenTree, logits: Floats) -> None:
        self._logits = logits
        self.tree = tree
        self.path: list[int] = []

    @classmethod
    def plain(cls, logits: Floats) -> TreePass:
        """Return a pass without a tree; ``logits`` (vocab,) are after its last token."""
        return cls(TokenTree.empty(), logits[None])

    @property
    def first(self) -> Floats:
        """Logits (vocab,) after the root's token."""
        row: Floats = self._logits[0]
        return row

    def after(self, token: int) -> Floats | None:
        """Return the logits (vocab,) after the chosen ``token``; None if it is not in the tree."""
        node = self.tree.follow(self.path[-1] if self.path else ROOT, token)
        if node is None:
            return None
        self.path.append(node)
        row: Floats = self._logits[1 + node]
        return row

    @property
    def rows(self) -> list[int]:
        """The accepted rows of the pass: the first, and those of the nodes in ``path``."""
        return [0, *(1 + node for node in self.path)]

    def likeliest(self) -> list[int]:
        """Return the tokens that greedy decoding would choose along the tree."""
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None:
            row: Any = self._logits[1 + node]
            tokens.append(int(row["token"][0] if is_best(row) else row.argmax()))
            node = self.tree.follow(node, tokens[-1])
        return tokens


class AcceptanceRate:
    """How many of one source's draft tokens are accepted, against what their scores promise.

    A draft token is tested when the target has accepted its parent and the token was verified. The
    evidence fades, so that a source that has failed is tried again.
    """

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0
        self._stated = FIRST_CHOICE  # mean probability of first choices

    @property
    def ratio(self) -> float:
        """Accepted tokens for each that was promised."""
        return (self._accepted + _PRIOR) / (self._promised + _PRIOR)

    @property
    def first_choice(self) -> float:
        """The chance that a first choice is accepted if its parent is."""
        return min(1.0, self.ratio * self._stated)

    def proposed(self, tree: TokenTree) -> None:
        """Learn how sure the source is of the first choices of ``tree``."""
        node = _first_choice(tree, ROOT)
        while node is not None:
            self._stated += _BLEND * (_stated(tree, node) - self._stated)
            node = _first_choice(tree, node)

    def verified(self, proposed: TokenTree, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn that ``path`` was accepted of ``tree``, a part of which the source ``proposed``."""
        own: int | None = ROOT
        for above, accepted in zip([ROOT, *path], [*path, None], strict=True):
            choice = None if own is None else _first_choice(proposed, own)
            if own is None or choice is None:
                return
            node = tree.follow(above, int(proposed.tokens[choice]))
            if (node, accepted) != (None, None):  # else it was not tested
                self.tested(
                    _stated(proposed, choice), accepted=node is not None and node == accepted
                )
            if accepted is not None:
                own = proposed.follow(own, int(tree.tokens[accepted]))

    def tested(self, promised: float, *, accepted: bool) -> None:
        """Learn whether a token of that stated probability was accepted."""
        self.fade(_FADE)
        self._promised += promised
        self._accepted += accepted

    def fade(self, factor: float) -> None:
        """Let the evidence count for less."""
        self._promised *= factor
        self._accepted *= factor

    def rescored(self, tree: TokenTree) -> TokenTree:
        """Return the same nodes with the logarithms of expected acceptance as scores."""
        own = np.where(tree.parents == ROOT, 0.0, tree.scores[tree.parents])
        own = np.minimum(tree.scores - own + math.log(max(self.ratio, _LEAST)), 0.0)
        scores = np.maximum(own, math.log(_LEAST))
        for node, parent in enumerate(tree.parents.tolist()):
            if parent != ROOT:
                scores[node] += scores[parent]
        return replace(tree, scores=scores)


def _first_choice(tree: TokenTree, node: int) -> int | None:
    """Return the likeliest child of ``node``; None for a leaf."""
    children = tree.children(node)
    return int(children[tree.scores[children].argmax()]) if len(children) else None


def _stated(tree: TokenTree, node: int) -> float:
    """Return the stated probability of ``node`` given its parent."""
    parent = int(tree.parents[node])
    above = 0.0 if parent == ROOT else float(tree.scores[parent])
    return math.exp(min(float(tree.scores[node]) - above, 0.0))


@lru_cache(maxsize=2048)
def expected_tokens(acceptance: float, budget: int, depth: int) -> float:
    """Return the accepted tokens of the likeliest tree of ``budget`` nodes and ``depth`` levels.

    A first choice is accepted with probability ``acceptance`` at every level, a second one with the
    same share of the rest, and so on.
    """
    waiting, total = [(-acceptance, 1)], 0.0
    for _ in range(budget):
        if not waiting:
            break
        chance, level = heappop(waiting)
        total -= chance
        if 0.0 < acceptance < 1.0:
            heappush(waiting, (chance * (1 - acceptance), level))
        if level < depth:
            heappush(waiting, (chance * acceptance, level + 1))
    return total
