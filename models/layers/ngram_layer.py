"""Hashed n-grams in a pass: which rows of the table it asks for, and the layer that takes them.

What is computed is ``quant/ops/streams.py``'s, which rows belong to a token ``ngrams.py``'s. The
tokens before a pass are in the layer's memory, beside the rows that its convolution looks back on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localrt.models.config import DecoderConfig, NgramLayer
from localrt.models.layers.ngrams import Ids, NgramHash, ngrams_of
from localrt.models.layers.parts import PassState
from localrt.models.weights import TapsFirst, WeightLoader
from localrt.quant.ops.hybrid_cache import states_of
from localrt.quant.ops.protocol import Batch, Span, Weight
from localrt.quant.ops.states import tree_parents
from localrt.quant.ops.streams import NgramWeights


def rows_of_pass(hashed: NgramHash, batch: Batch, place: int) -> Ids:
    """The table's rows (R, H) for each token of ``batch``.

    ``place`` is the layer's number among those with states in a cache.
    """
    parts, row = [], 0
    for span in batch.spans:
        parts.append(_ngrams(hashed, span, batch.tokens[row : row + span.rows], place))
        row += span.rows
    return hashed.rows_of(np.concatenate(parts))


def _ngrams(hashed: NgramHash, span: Span, tokens: Ids, place: int) -> Ids:
    """Each of a sequence's new tokens, and those before it."""
    states, spec = states_of(span.cache), hashed.spec
    if span.mask is None:
        return ngrams_of(spec, tokens, states.tokens_behind(place, spec.orders))
    extra = span.mask.shape[1] - span.rows
    behind = states.tokens_behind(place, spec.orders + extra)
    held = len(behind) - extra
    parents: Sequence[int] = tree_parents(span.mask).tolist()
    tree = np.concatenate([behind[held:], tokens])
    return ngrams_of(spec, tree, behind[:held], parents)[extra:]


@dataclass(frozen=True, slots=True, eq=False)
class NgramRows:
    """The tokens' rows of a table that is in memory."""

    hashed: NgramHash
    table: Weight
    place: int

    def __call__(self, state: PassState) -> None:
        """``state.ngrams`` gives the rows."""
        assert state.batch is not None, "rows are asked for where a pass begins"
        rows = rows_of_pass(self.hashed, state.batch, self.place).reshape(-1)
        state.ngrams = lambda: state.ops.embed(self.table, state.step, tokens=rows)


class AddNgrams:
    """Adds to all streams what a layer makes of its n-grams."""

    def __init__(
        self, config: DecoderConfig, own: NgramLayer, weights: WeightLoader, place: int
    ) -> None:
        assert config.connections is not None, "n-grams are for several streams"
        count, hidden, width = config.connections.count, config.hidden_size, own.width
        wide, prefix = count * hidden, f"model.layers.{own.layer}.ple."
        self.spec, self.layer = own.memory, place

        def norm(name: str) -> object:
            return weights.vector(wide, f"{prefix}norm_{name}.weight", offset=config.norm_offset)

        self.weights = NgramWeights(
            count=count,
            key=weights.matrix((wide, width), f"{prefix}key_proj.weight"),
            value=weights.matrix((hidden, width), f"{prefix}value_proj.weight"),
            key_norm=norm("key"),
            stream_norm=norm("query"),
            value_norm=norm("conv"),
            taps=weights.vector(
                own.memory.taps * wide,
                f"{prefix}conv1d.weight",
                transform=TapsFirst(own.memory.taps),
            ),
            eps=config.norm_eps,
        )

    def __call__(self, state: PassState) -> None:
        """``state.streams`` become those with n-grams; their rows are waited for."""
        assert state.ngrams is not None, "the first part of a pass asks for them"
        rows = state.ngrams()
        state.streams = state.ops.add_ngrams(
            state.streams, rows, self.weights, self.spec, state.step, self.layer
        )
