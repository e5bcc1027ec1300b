"""SpecExec's draft tree: the K likeliest continuations, found best-first in batches.

Each round expands the best unexpanded nodes among the K best so far, all in one batch; a child's
score is its parent's plus its log-probability plus log 0.95, so that depth costs a little. It ends
when every node among the K best has been expanded: no new one could be better (Svirschevski et al.
2024, algorithm 1). What expanding a node means is the caller's business.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.speculative.tree import ROOT, TokenTree

__all__ = ["CHILDREN", "DECAY", "Children", "Expand", "grow", "likeliest"]

DECAY = math.log(0.95)
CHILDREN = 32
_ROUND = 128  # nodes expanded at once


@dataclass(frozen=True, slots=True)
class Children:
    """What may follow one node: ``tokens`` and their ``logprobs``, best first."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]


# Nodes to expand, as (node, its token, its parent), with the log-probability below which a child of
# each is of no use; -1 is the last known token. One ``Children`` for each.
Expand = Callable[[Sequence[tuple[int, int, int]], Sequence[float]], Sequence[Children]]


def grow(
    expand: Expand,
    *,
    budget: int,
    depth: int,
    source: str,
    round_nodes: int = _ROUND,
    rounds: int | None = None,
) -> TokenTree:
    """The tree of the ``budget`` best nodes, at most ``depth`` deep.

    ``expand`` is called with the root alone first. ``rounds`` ends early.
    """
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    scores: list[float] = []
    best: list[float] = []  # the scores of the K best, a heap with the K-th on top
    waiting: list[tuple[float, int]] = []  # unexpanded, best first

    def floor() -> float:
        return best[0] if len(best) >= budget else -math.inf

    batch = [ROOT]
    done = 0
    while batch:
        base = [0.0 if node == ROOT else scores[node] for node in batch]
        asked = [(n, -1, -1) if n == ROOT else (n, tokens[n], parents[n]) for n in batch]
        least = [floor() - score - DECAY for score in base]
        for node, score, found in zip(batch, base, expand(asked, least), strict=True):
            level = 1 if node == ROOT else depths[node] + 1
            for token, logprob in zip(found.tokens.tolist(), found.logprobs.tolist(), strict=True):
                value = score + min(logprob, 0.0) + DECAY
                if value <= floor():
                    break  # best first: those behind are no better
                if len(best) >= budget:
                    heapq.heapreplace(best, value)
                else:
                    heapq.heappush(best, value)
                if level < depth:
                    heapq.heappush(waiting, (-value, len(tokens)))
                tokens.append(token)
                parents.append(node)
                depths.append(level)
                scores.append(value)
        done += 1
        batch = []
        if rounds is not None and done >= rounds:
            break
        while waiting and len(batch) < round_nodes and -waiting[0][0] >= floor():
            batch.append(heapq.heappop(waiting)[1])
    return TokenTree.of(tokens, parents, scores, source).trim(budget)


def likeliest(
    logits: npt.NDArray[np.float32], least: float, *, temperature: float = 1.0, most: int = CHILDREN
) -> Children:
    """The ``most`` likeliest tokens of a row of logits (V,) with a log-probability above ``least``.

    Whole vocabularies are never sorted: what is too unlikely is cut off first.

    Raises:
        ValueError: the logits are not numbers.
    """
    top = float(logits.max())
    if not math.isfinite(top):
        raise ValueError("the logits are not numbers")
    scale = 1.0 / temperature
    if temperature == 1.0:
        total = float(np.exp(logits - np.float32(top)).sum(dtype=np.float64))
    else:
        total = float(np.exp((logits - np.float32(top)) * np.float32(scale)).sum(dtype=np.float64))
    norm = math.log(total)
    # The best ``most`` cannot be below 1 / V times the best; start high, where few are.
    cut = max(least, -9.0)
    ids = np.flatnonzero(logits > top + (cut + norm) / scale)
    if len(ids) < most and cut > least:
        ids = np.flatnonzero(logits > top + (max(least, -30.0) + norm) / scale)
    if len(ids) > most:
        ids = ids[np.argpartition(logits[ids], len(ids) - most)[len(ids) - most :]]
    logprobs = (logits[ids].astype(np.float64) - top) * scale - norm
    order = np.lexsort((ids, -logprobs))
    return Children(ids[order].astype(np.int64), logprobs[order])
