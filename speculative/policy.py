"""What decides how to speculate: the contract, and the policy that does as it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from localrt.speculative.tree import TokenTree

__all__ = ["AHEAD_S", "DEPTH", "MOST_NODES", "Ahead", "Fixed", "Gaps", "Plan", "Policy"]

DEPTH = 16
MOST_NODES = 2048
# Passes that wait less than this leave no room for drafting: about one level of a small draft.
AHEAD_S = 0.005


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


class Policy(Protocol):
    """Asked before every pass and told what came of it, for one generation. Seconds everywhere."""

    def plan(
        self, room: int, ready: Mapping[str, int] = {}, missing: Mapping[str, int] = {}
    ) -> Plan | None:
        """What to draft for the next pass; None for a plain step. ``room`` bounds the nodes.

        ``ready`` are the levels that sources have prepared, ``missing`` the tokens that they must
        compute before they can draft.
        """

    def caught_up(self, source: str, tokens: int, seconds: float) -> None:
        """``source`` has computed what was missing, to draft as planned."""

    def drafted(self, plan: Plan, tree: TokenTree, seconds: float) -> TokenTree | None:
        """The part of the drafted tree to verify, an empty one for a plain step.

        None: another plan is better, and to be asked for.
        """

    def thought(self, seconds: float) -> None:
        """Choosing what to guess has itself taken so long."""

    def ahead(self, plan: Plan | None, tree: TokenTree) -> Ahead | None:
        """What to prepare while the pass over ``tree`` runs; None: nothing."""

    def passed(self, gaps: Gaps) -> None:
        """What that pass, or a plain step, has left room for. ``verified`` comes later."""

    def verified(
        self, plan: Plan | None, tree: TokenTree, path: Sequence[int], seconds: float
    ) -> None:
        """A target pass over ``tree`` ended: ``path`` came true. A plain step has no plan."""

    def failed(self, source: str, why: str) -> None:
        """A source is of no use any more."""

    @property
    def reason(self) -> str:
        """What is done and why, in one sentence."""


class Fixed:
    """Always the same plan: an explicit draft with an explicit budget is obeyed.

    It drafts ahead where passes wait. ``in_gaps`` False: never.
    """

    def __init__(
        self, source: str, budget: int, depth: int = DEPTH, *, in_gaps: bool = True
    ) -> None:
        self._plan: Plan | None = Plan(source, budget, depth)
        self._in_gaps = in_gaps
        self._waited_s = 0.0
        self._why = f"{source}, {budget} guesses a pass as asked"

    def plan(
        self, room: int, ready: Mapping[str, int] = {}, missing: Mapping[str, int] = {}
    ) -> Plan | None:
        """See ``Policy``."""
        plan = self._plan
        if plan is None or room < 1:
            return None
        return Plan(plan.source, min(plan.budget, room), plan.depth, ready.get(plan.source, 0))

    def caught_up(self, source: str, tokens: int, seconds: float) -> None:
        """See ``Policy``."""

    def drafted(self, plan: Plan, tree: TokenTree, seconds: float) -> TokenTree:
        """See ``Policy``."""
        return tree

    def thought(self, seconds: float) -> None:
        """See ``Policy``."""

    def ahead(self, plan: Plan | None, tree: TokenTree) -> Ahead | None:
        """See ``Policy``."""
        if plan is None or self._plan is None or not self._in_gaps or self._waited_s < AHEAD_S:
            return None
        return Ahead(plan.source, 2 * plan.budget + plan.depth)

    def passed(self, gaps: Gaps) -> None:
        """See ``Policy``."""
        self._waited_s = gaps.waited_s

    def verified(
        self, plan: Plan | None, tree: TokenTree, path: Sequence[int], seconds: float
    ) -> None:
        """See ``Policy``."""

    def failed(self, source: str, why: str) -> None:
        """See ``Policy``."""
        self._plan = None
        self._why = f"off, {why}"

    @property
    def reason(self) -> str:
        """See ``Policy``."""
        return f"speculation: {self._why}"
