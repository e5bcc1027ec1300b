"""The accept rule: which guesses of a tree the target confirms, and what it says instead.

    1. Choose a token from the target's logits at the last known token, exactly as plain decoding
       would: same penalties, same filters, one random number.
    2. If a child of the present node is that token, step to the child and choose again from its
       logits. The choice is the answer's next token either way.
    3. If there is none, the choice is the bonus token, and the pass is over.

The target is sampled once per node on the path and nothing is ever rejected and drawn again, so
every emitted token has the target's own distribution given what came before: exact for any tree,
any draft and any sampler (SpecExec, Svirschevski et al. 2024, section 4). It knows no logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localrt.speculative.tree import ROOT, TokenTree

__all__ = ["Verified", "follow", "verify"]


@dataclass(frozen=True, slots=True)
class Verified:
    """``tokens``: the accepted guesses and the bonus token; ``path``: the accepted nodes."""

    tokens: tuple[int, ...]
    path: tuple[int, ...]


def follow(tree: TokenTree, node: int, token: int) -> int | None:
    """The child of ``node`` (-1: the last known token) that guessed ``token``, if there is one."""
    for child in tree.children(node).tolist():
        if tree.tokens[child] == token:
            return int(child)
    return None


def verify(tree: TokenTree, choose: Callable[[int, tuple[int, ...]], int]) -> Verified:
    """Walk down ``tree``. ``choose(node, emitted)`` is the target's token after ``node``.

    ``emitted`` are the tokens of this pass so far, which penalties depend on.
    """
    node = ROOT
    tokens: list[int] = []
    path: list[int] = []
    while True:
        token = choose(node, tuple(tokens))
        tokens.append(token)
        child = follow(tree, node, token)
        if child is None:
            return Verified(tuple(tokens), tuple(path))
        path.append(child)
        node = child
