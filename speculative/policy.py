"""What decides how to speculate: the contract, and the policy that does as it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localrt.speculative.tree import TokenTree

__all__ = ["DEPTH", "MOST_NODES", "Fixed", "Plan", "Policy"]

DEPTH = 16
MOST_NODES = 2048


@dataclass(frozen=True, slots=True)
class Plan:
    """Draft ``budget`` nodes with ``source``, ``depth`` deep."""

    source: str
    budget: int
    depth: int


class Policy(Protocol):
    """Asked before every pass and told what came of it, for one generation. Seconds everywhere."""

    def plan(self, room: int) -> Plan | None:
        """What to draft for the next pass; None for a plain step. ``room`` bounds the nodes."""

    def drafted(self, plan: Plan, tree: TokenTree, seconds: float) -> TokenTree | None:
        """The part of the drafted tree to verify, an empty one for a plain step.

        None: another plan is better, and to be asked for.
        """

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
    """Always the same plan: an explicit draft with an explicit budget is obeyed."""

    def __init__(self, source: str, budget: int, depth: int = DEPTH) -> None:
        self._plan: Plan | None = Plan(source, budget, depth)
        self._why = f"{source}, {budget} guesses a pass as asked"

    def plan(self, room: int) -> Plan | None:
        """See ``Policy``."""
        plan = self._plan
        if plan is None or room < 1:
            return None
        return Plan(plan.source, min(plan.budget, room), plan.depth)

    def drafted(self, plan: Plan, tree: TokenTree, seconds: float) -> TokenTree:
        """See ``Policy``."""
        return tree

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
