"""The accept rule of speculation: which tokens of a draft tree are part of the answer."""

from __future__ import annotations

from typing import Any

from localrt.quant.formats.packed import Floats
from localrt.quant.ops.protocol import is_best
from localrt.speculative.tree import ROOT, TokenTree


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
