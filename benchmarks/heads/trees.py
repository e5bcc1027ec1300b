"""What trees of a head would save: a target's greedy text, drafted again and compared.

Trees are grown by ``speculative/best_first.py``, as they are when the head runs; the target's
verdict is the recorded text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.heads.head import HeadModel
from localrt.speculative.best_first import Children, Growth, likeliest
from localrt.speculative.tree import ROOT

_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Saved:
    """``tokens`` of a greedy text came in so many ``passes``; the head took ``steps`` for them."""

    tokens: int
    passes: int
    steps: int


@torch.no_grad()
def simulate(model: HeadModel, record: npt.NDArray[np.void], budget: int, most: int) -> Saved:
    """Draft the first text that the target wrote in ``record``, ``most`` tokens of it at most."""
    written = np.array(record["written"])
    start = int(written.argmax())
    stop = start + int(np.argmin(written[start:]) or len(written) - start)
    tokens = np.array(record["tokens"], np.int64)[: min(stop, start + most)]
    features = torch.from_numpy(np.array(record["features"])[: len(tokens)].view(np.int16))
    with torch.autocast("cpu", torch.bfloat16):
        drafts = _Drafts(model, tokens, features.view(torch.bfloat16))
        at, passes, steps = start, 0, 0
        while at < len(tokens) - 1:
            accepted, rounds = drafts.accepted(at, budget)
            at, passes, steps = at + accepted + 1, passes + 1, steps + rounds
    return Saved(min(at, len(tokens) - 1) - start, passes, steps)


class _Drafts:
    """Trees at any place of ``tokens`` (n,): rows of known tokens are computed once for all."""

    def __init__(self, model: HeadModel, tokens: npt.NDArray[np.int64], features: Tensor) -> None:
        self._model, self._tokens = model, tokens
        rows = torch.arange(len(tokens) - 1)
        x = model.fused(features[None, :-1])
        q, self._known = model.project(x, torch.from_numpy(tokens[None, 1:]), rows)
        seen = rows[:, None] >= rows
        self._outs = model.finish(x, q, [self._known], seen)[0]
        self._first = model.logits(self._outs).numpy()
        self._ids = model.target.ids.numpy()

    def accepted(self, at: int, budget: int) -> tuple[int, int]:
        """How many nodes of a tree behind token ``at`` are the true ones; the head's steps."""
        root, steps = at - 1, 0  # the row of a token is one less
        known = (self._known[0][:, :, : root + 1], self._known[1][:, :, : root + 1])
        outs, own, lines = {ROOT: self._outs[root]}, [known], {ROOT: list[int]()}
        made = 0

        def expand(nodes: Sequence[tuple[int, int, int]], least: Sequence[float]) -> list[Children]:
            nonlocal steps, made
            steps += 1
            if nodes[0][0] == ROOT:
                return [self._children(self._first[root], least[0])]
            x = torch.stack([outs[parent] for _, _, parent in nodes])[None]
            ids = torch.tensor([[token for _, token, _ in nodes]])
            for number, (node, _, parent) in enumerate(nodes):
                lines[node] = [*lines[parent], made + number]
            made += len(nodes)
            seen = torch.zeros(len(nodes), root + 1 + made, dtype=torch.bool)
            seen[:, : root + 1] = True
            for number, (node, _, _) in enumerate(nodes):
                seen[number, [root + 1 + row for row in lines[node]]] = True
            depths = torch.tensor([root + len(lines[node]) for node, _, _ in nodes])
            q, level = self._model.project(x, ids, depths)
            own.append(level)
            out = self._model.finish(x, q, own, seen)[0]
            outs.update({node: row for (node, _, _), row in zip(nodes, out, strict=True)})
            logits = self._model.logits(out).numpy()
            return [self._children(row, low) for row, low in zip(logits, least, strict=True)]

        tree = Growth("head").grow(expand, budget=budget, depth=_DEPTH)
        true, node, count = self._tokens[at + 1 :], ROOT, 0
        pairs = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        places = {pair: number for number, pair in enumerate(pairs)}
        while count < len(true) and (node, int(true[count])) in places:
            node, count = places[node, int(true[count])], count + 1
        return count, steps

    def _children(self, logits: npt.NDArray[np.float32], least: float) -> Children:
        found = likeliest(logits, least)
        return Children(self._ids[found.tokens], found.logprobs)
