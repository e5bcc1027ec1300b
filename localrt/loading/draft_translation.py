"""A draft with another vocabulary than its target's.

The text so far is encoded with the draft's tokenizer, and the paths of its tree with the target's.
If the two split text differently, some draft tokens are useless.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from localrt.speculative.ngram import common_length
from localrt.speculative.source import Check, DraftSource, TreeSize
from localrt.speculative.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from localrt.models.tokenizers import Tokenizer

_BEFORE = "\n"  # some tokenizers add a space at the start of a text


class TranslatedSource(DraftSource):
    """Translates between tokenizers: ``source`` drafts in ``theirs``, its caller uses ``ours``."""

    def __init__(self, source: DraftSource, ours: Tokenizer, theirs: Tokenizer) -> None:
        self.name = source.name
        self._source = source
        self._ours, self._theirs = ours, theirs
        self._seen: list[int] = []  # of our tokens
        self._told: list[int] = []  # the same text in their tokens
        # Pairs (number of our tokens, of their tokens) that end at the same whole character.
        self._marks: list[tuple[int, int]] = [(0, 0)]

    def propose(
        self, history: Sequence[int], size: TreeSize, *, check: Check | None = None
    ) -> TokenTree:
        if not self._follow(history):
            return TokenTree.empty()
        tree = self._source.propose(self._told, size, check=check)
        return self._translated(tree, size.budget, size.depth)

    def _follow(self, history: Sequence[int]) -> bool:
        """Update ``_told`` to ``history``; return False if that ends within a character."""
        kept = common_length(self._seen, history)
        while self._marks[-1][0] > kept:
            self._marks.pop()
        ours, theirs = self._marks[-1]
        del self._told[theirs:]
        text, whole = _spelled(self._ours, history[ours:])
        self._seen = list(history[:ours])
        if not whole:
            return False
        if theirs:
            self._told += _inside(self._theirs, text)
        else:
            self._told = self._theirs.encode(text, parse_special=True)
        self._seen = list(history)
        if self._told:
            self._marks.append((len(history), len(self._told)))
        return bool(self._told)

    def _translated(self, tree: TokenTree, budget: int, depth: int) -> TokenTree:
        """Translate the whole characters of each path of ``tree``, the likeliest path first."""
        nodes: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        inner = set(tree.parents.tolist())
        leaves = [node for node in range(len(tree.tokens)) if node not in inner]
        for leaf in sorted(leaves, key=lambda node: -tree.scores[node]):
            path = _path(tree, leaf)
            text, _ = _spelled(self._theirs, tree.tokens[path].tolist())
            ends = np.cumsum([len(self._theirs.token_bytes(int(tree.tokens[n]))) for n in path])
            parent, at, score = ROOT, 0, 0.0
            for token in _inside(self._ours, text)[:depth]:
                at += len(self._ours.token_bytes(token))
                known = path[min(int(np.searchsorted(ends, at)), len(path) - 1)]
                score = min(score, float(tree.scores[known]))
                node = nodes.get((parent, token))
                if node is None:
                    if len(tokens) == budget:
                        break
                    node = nodes[parent, token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    scores.append(score)
                parent, score = node, scores[node]
        return TokenTree.of(tokens, parents, scores, self.name)


def _spelled(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, bool]:
    """Decode ``tokens``; return the whole characters, and whether no partial one follows."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(b"".join(map(tokenizer.token_bytes, tokens)))
    return text, not decoder.getstate()[0]


def _path(tree: TokenTree, leaf: int) -> list[int]:
    """Return the nodes from the root's child to ``leaf``, in order."""
    path = [leaf]
    while (parent := int(tree.parents[path[-1]])) != ROOT:
        path.append(parent)
    return path[::-1]


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of ``text`` as they are in the middle of a text."""
    before = tokenizer.encode(_BEFORE, add_special=False)
    both = tokenizer.encode(_BEFORE + text, add_special=False, parse_special=True)
    if both[: len(before)] == before:
        return both[len(before) :]
    return tokenizer.encode(text, add_special=False, parse_special=True)
