"""Choosing tokens on torch, row by row: the oracle of the kernels. See ``quant/ops/index.py``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.ops.index import IndexSpec
from localrt.quant.ops.protocol import Span
from localrt.quant.ops.torch.kv import kv_of

__all__ = ["choose_rows"]

Finish = Callable[[Tensor, int], Tensor]
"""A block's mean (E,) normed, and rotated at a position."""


def choose_rows(
    q: Tensor,
    keys: Tensor,
    spec: IndexSpec,
    span: Span,
    positions: Tensor,
    layer: int,
    finish: Finish,
) -> Tensor:
    """(rows, held + rows), True where a row of a sequence sees a token.

    ``q`` (rows, H, E) are normed and rotated, ``keys`` (rows, E) as projected.
    """
    cache, held = kv_of(span), span.cache.length
    cache.write(layer, keys[:, None], torch.zeros_like(keys)[:, None])
    own, blocks = (part[0] for part in cache.view(layer, span.rows))
    chosen = torch.zeros(span.rows, held + span.rows, dtype=torch.bool, device=q.device)
    for row in range(span.rows):
        path = _path(span, held, row)
        whole = len(path) // spec.block
        if len(path) % spec.block == 0:
            mean = own[path[-spec.block :]].float().mean(0).to(own.dtype)
            blocks[held + row] = finish(mean, int(positions[row]) - spec.block + 1)
        if whole > spec.most_blocks:
            finished = blocks[path[spec.block - 1 :: spec.block]]
            scores = F.relu(q[row].float() @ finished.float().T).sum(0)
            best = torch.sort(scores, descending=True, stable=True).indices[: spec.most_blocks]
            kept = path[: whole * spec.block].reshape(whole, -1)[np.sort(best.cpu().numpy())]
            path = np.concatenate([kept.reshape(-1), path[whole * spec.block :]])
        chosen[row, path] = True
    return chosen


def _path(span: Span, held: int, row: int) -> np.ndarray:
    """Where the tokens lie that a row sees, itself last."""
    if span.mask is None:
        return np.arange(held + row + 1)
    base = held + span.rows - span.mask.shape[1]
    return np.concatenate([np.arange(base), base + np.flatnonzero(span.mask[row])])
