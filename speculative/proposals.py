"""The speculative tree of several draft sources, and what each source learns from it.

Acceptance rates make the sources' probabilities comparable: a token that two sources propose is one
node, with the better probability.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrt.speculative.cost_model import AcceptanceRate, first_choice, stated
from localrt.speculative.tree import ROOT, TokenTree, merge


class Proposals:
    """The trees proposed for one pass. Empty at first; emptied by ``clear``."""

    def __init__(self) -> None:
        self._proposed: dict[str, tuple[TokenTree, AcceptanceRate]] = {}

    def add(self, source: str, tree: TokenTree, acceptance: AcceptanceRate) -> None:
        """Set the proposal of ``source``, replacing its earlier one."""
        self._proposed[source] = tree, acceptance

    def clear(self) -> None:
        """Remove all proposals."""
        self._proposed.clear()

    def tree(self, most: int) -> TokenTree:
        """Return the ``most`` likeliest nodes, scored by log of expected acceptance."""
        return merge((rate.rescored(tree) for tree, rate in self._proposed.values()), most)

    def learn(self, verified: TokenTree, path: Sequence[int]) -> None:
        """Learn that ``path`` was accepted of the ``verified`` part of the proposals."""
        for tree, acceptance in self._proposed.values():
            own: int | None = ROOT
            for above, accepted in zip([ROOT, *path], [*path, None], strict=True):
                choice = None if own is None else first_choice(tree, own)
                if own is None or choice is None:
                    break
                node = verified.follow(above, int(tree.tokens[choice]))
                if (node, accepted) != (None, None):  # else it was not tested
                    acceptance.tested(
                        stated(tree, choice), accepted=node is not None and node == accepted
                    )
                if accepted is not None:
                    own = tree.follow(own, int(verified.tokens[accepted]))
