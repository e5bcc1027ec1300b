"""The rows of one pass of several sessions: their positions, and what each attends to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from localrt.engine.native.session import NativeSession
from localrt.quant.ops.protocol import Batch, Span
from localrt.speculative.tree import Ints, TokenTree

if TYPE_CHECKING:
    from localrt.models.vision.encoder_cache import VisionState


def rows_of_pass(
    sessions: Sequence[NativeSession],
    tokens: Sequence[Ints],
    trees: Sequence[TokenTree],
    vision: VisionState | None,
) -> tuple[Batch, list[int]]:
    """Return the batch that appends ``tokens`` to each session, and each one's ``shift`` after it.

    The first sessions, one for each of ``trees``, append a token and then the tree's nodes.
    """
    positions, axes, shifts, spans = [], [], [], []
    for session, ids, tree in zip_longest(sessions, tokens, trees):
        held, shift, own, ahead = len(session.tokens), session.shift, None, None
        session.cache.trim(held)
        alone = tree is None or not len(tree)
        if not alone:
            at = held - shift
            places = np.concatenate([[at], tree.positions(at)])
        elif vision is None:
            places = np.arange(held, held + len(ids))
        else:
            own, places, shift = vision.positions(ids, held, shift)
            ahead = vision.ahead(ids)
        positions.append(places)
        axes.append(own)
        shifts.append(shift)
        mask = None if alone else tree.pass_mask()
        windows = vision is not None and vision.encoder.full_layers_causal
        spans.append(Span(session.cache, len(ids), mask, ahead, windows))
    batch = Batch(
        np.concatenate(tokens),
        np.concatenate(positions),
        tuple(spans),
        axes=_joined_axes(axes, positions),
    )
    return batch, shifts


def _joined_axes(axes: Sequence[Ints | None], positions: Sequence[Ints]) -> Ints | None:
    """The positions of all sequences on three axes; None if the axes are equal in all."""
    if all(own is None for own in axes):
        return None
    parts = zip(axes, positions, strict=True)
    return np.concatenate([np.repeat(p[None], 3, 0) if a is None else a for a, p in parts], 1)
