"""What is decided before a pass: with which source to guess, and how much. ``tuner.py`` decides."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEPTH", "MOST_NODES", "Ahead", "Plan", "TreeSize"]

DEPTH = 16
MOST_NODES = 2048


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
