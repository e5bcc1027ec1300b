"""What decides how to speculate: the contract, and the policy that does as it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localrt.speculative.tree import TokenTree, merge

__all__ = ["AHEAD_S", "DEPTH", "MOST_NODES", "Ahead", "Fixed", "Gaps", "Plan", "Policy", "TreeSize"]

DEPTH = 16
MOST_NODES = 2048
# Passes that wait less than this leave no room for drafting: about one level of a small draft.
AHEAD_S = 0.005


@dataclass(frozen=True, slots=True)
class TreeSize:
    """At most ``budget`` nodes, ``depth`` deep."""

    budget: int
    depth: int = DEPTH


@dataclass(frozen=True, slots=True)
class Plan:
    """Draft ``budget`` nodes with ``source``, ``depth`` deep; ``ready`` levels are there."""

    source: str
    budget: int
    depth: int
    ready: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """While a pass runs, ``source`` prepares its next tree, by at most ``nodes`` steps."""

    source: str
    nodes: int


@dataclass(frozen=True, slots=True)
class Gaps:
    """What a pass of ``rows`` left of the processor, in seconds.

    It ``waited_s`` for weights; for up to ``shared_s`` it computed beside drafting ahead, if there
    was any of that (``ahead``).
    """

    rows: int
    waited_s: float
    shared_s: float = 0.0
    ahead: bool = False


class Policy(ABC):
    """Asked before every pass and told what came of it, for one generation. Seconds everywhere."""

    @abstractmethod
    def plan(
        self, room: int, ready: Mapping[str, int] = {}, missing: Mapping[str, int] = {}
    ) -> Plan | None:
        """What to draft for the next pass; None for a plain step. ``room`` bounds the nodes.

        ``ready`` are the levels that sources have prepared, ``missing`` the tokens that they must
        compute before they can draft.
        """

    @abstractmethod
    def drafted(self, plan: Plan, tree: TokenTree, seconds: float) -> TokenTree | None:
        """The part of the drafted trees to verify, an empty one for a plain step.

        None: there is another plan, to be asked for.
        """

    @abstractmethod
    def ahead(self, plan: Plan | None, tree: TokenTree) -> Ahead | None:
        """What to prepare while the pass over ``tree`` runs; None: nothing."""

    @abstractmethod
    def passed(self, gaps: Gaps) -> None:
        """What that pass, or a plain step, has left room for. ``verified`` comes later."""

    @abstractmethod
    def verified(
        self, plan: Plan | None, tree: TokenTree, path: Sequence[int], seconds: float
    ) -> None:
        """A target pass over ``tree`` ended: ``path`` came true. A plain step has no plan."""

    @abstractmethod
    def failed(self, source: str, why: str) -> None:
        """A source is of no use any more."""

    def caught_up(self, source: str, tokens: int, seconds: float) -> None:  # noqa: B027
        """``source`` has computed what was missing, to draft as planned."""

    def thought(self, seconds: float) -> None:  # noqa: B027
        """Choosing what to guess has itself taken so long."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """What is done and why, in one sentence."""


class Fixed(Policy):
    """All ``sources`` for every pass, in one tree: an explicit draft and budget are obeyed.

    The last source drafts ahead where passes wait. ``in_gaps`` False: never.
    """

    def __init__(self, sources: Sequence[str], size: TreeSize, *, in_gaps: bool = True) -> None:
        self._sources = list(sources)
        self._size = size
        self._in_gaps = in_gaps
        self._waited_s = 0.0
        self._trees: dict[str, TokenTree] = {}  # of the pass to come
        self._why = f"{'+'.join(sorted(sources))}, {size.budget} guesses a pass as asked"

    def plan(
        self, room: int, ready: Mapping[str, int] = {}, missing: Mapping[str, int] = {}
    ) -> Plan | None:
        """See ``Policy``: the last source first, since it is the one that may fail."""
        waiting = [name for name in self._sources if name not in self._trees]
        if not waiting or room < 1:
            return None
        name = waiting[-1]
        return Plan(name, min(self._size.budget, room), self._size.depth, ready.get(name, 0))

    def drafted(self, plan: Plan, tree: TokenTree, seconds: float) -> TokenTree | None:
        """See ``Policy``."""
        self._trees[plan.source] = tree
        if len(self._trees) < len(self._sources):
            return None
        return merge((self._trees[name] for name in self._sources), plan.budget)

    def ahead(self, plan: Plan | None, tree: TokenTree) -> Ahead | None:
        """See ``Policy``."""
        if plan is None or not self._sources or not self._in_gaps or self._waited_s < AHEAD_S:
            return None
        return Ahead(self._sources[-1], 2 * plan.budget + plan.depth)

    def passed(self, gaps: Gaps) -> None:
        """See ``Policy``."""
        self._waited_s = gaps.waited_s

    def verified(
        self, plan: Plan | None, tree: TokenTree, path: Sequence[int], seconds: float
    ) -> None:
        """See ``Policy``."""
        self._trees.clear()

    def failed(self, source: str, why: str) -> None:
        """See ``Policy``."""
        self._sources.remove(source)
        if not self._sources:
            self._why = f"off, {why}"

    @property
    def reason(self) -> str:
        """See ``Policy``."""
        return f"speculation: {self._why}"
