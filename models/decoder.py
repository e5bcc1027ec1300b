"""The decoder that all architectures share: a list of parts, run in order.

Parts are built from weights in memory, one layer at a time or all; the config's ``block`` composes
a layer's parts, and ``Decoder`` runs them. A ``WeightStore`` knows where weights are: the pass is
the same for resident and streamed models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localrt.common.errors import MemoryBudgetError
from localrt.models.config import DecoderConfig, Layer, Part
from localrt.models.layers.moe import Experts, ResidentExperts, SparseMlp, load_expert
from localrt.models.layers.parts import (
    Embedding,
    FromPictures,
    GatedMlp,
    Head,
    Logits,
    PassState,
    Tap,
    joined,
)
from localrt.models.tensor_source import EMBEDDING, HEAD
from localrt.models.weight_store import ResidentWeights, WeightStore
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import AFTER_LAST, Features, Vector, vector_to_host
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Check, Ops, PassLostError


def load_attention(
    config: DecoderConfig, layer: int, weights: WeightLoader, at: Sequence[int] | None = None
) -> Part:
    """Build a layer's attention or recurrence; ``at`` are its places in a partial cache.

    The first layer's includes the parts that run once, before it.
    """
    places = config.cache_places[layer] if at is None else at
    before = config.block.before(config, weights) if layer == 0 else ()
    memory = tuple(zip(config.memory_of(layer), places, strict=True))
    attention = config.block.attention(config, layer, weights, memory)
    return joined([FromPictures(layer), *before, Tap(layer), attention])


def load_mlp(
    config: DecoderConfig,
    layer: int,
    weights: WeightLoader,
    experts: Experts | None,
    mlp: Layer | None = None,
) -> Part:
    """Build a layer's MLP, or what is around ``mlp``; a sparse one calls ``experts``.

    The last layer's includes the parts that run once, after it.
    """
    if experts is not None:
        layer_mlp: Layer = SparseMlp(config, layer, weights, experts)
    else:
        layer_mlp = mlp or GatedMlp(config, layer, weights)
    part = config.block.mlp(config, layer, weights, layer_mlp)
    first = () if config.memory_of(layer) else (Tap(layer),)
    after = config.block.after(config, weights) if layer == config.layers - 1 else ()
    return joined([*first, part, *after])


def load_resident_mlp(
    config: DecoderConfig, layer: int, weights: WeightLoader, ops: Ops, experts: ResidentExperts
) -> Part:
    """Build a layer's MLP with all weights; a sparse layer's experts are added to ``experts``."""
    spec = config.mixture(layer)
    if spec is None:
        return load_mlp(config, layer, weights, None)
    part = load_mlp(config, layer, weights, experts)
    table = ops.expert_table(spec.router.count)
    for number in range(spec.router.count):
        table.put(number, load_expert(config, layer, number, weights))
    experts.tables[config.sparse_layers[layer]] = table
    return part


def load_norm(config: DecoderConfig, weights: WeightLoader) -> Vector | None:
    """Load the norm before the head, if there is one."""
    if not config.block.final_norm:
        return None
    own = config.final_norm_offset
    return weights.vector(
        config.hidden_size,
        "model.norm.weight",
        offset=config.norm_offset if own is None else own,
        scale=config.logit_scale,
    )


def load_resident(config: DecoderConfig, ops: Ops, weights: WeightLoader) -> ResidentWeights:
    """Load all parts of a model into the memory of ``ops``."""
    shape = (config.vocab_size, config.hidden_size)
    with ops.scope():
        table = weights.matrix(shape, EMBEDDING)
        body: list[Part] = [Embedding(table, config.embedding_scale)]
        for beside in config.block.tables(config):
            body.append(beside.part(weights.matrix(beside.shape, beside.tensor)))
        experts = ResidentExperts()
        for layer, at in enumerate(config.cache_places):
            if at:
                body.append(load_attention(config, layer, weights, at))
            if config.has_mlp(layer):
                body.append(load_resident_mlp(config, layer, weights, ops, experts))
        norm = load_norm(config, weights)
        if config.tied_head:
            weights.skip(HEAD)
        head = Head(config, norm, table if config.tied_head else weights.matrix(shape, HEAD))
    weights.finish()
    return ResidentWeights(ops, config, body, head, experts)


class Decoder:
    """A model that can run: ``weights`` has its parts, and waits for missing ones."""

    def __init__(self, weights: WeightStore) -> None:
        self.weights = weights
        self.config = weights.config
        self.ops = weights.ops

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence."""
        return self.weights.cache(capacity)

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
        features: Features | None = None,
        target_features: Logits | None = None,
    ) -> Logits:
        """Logits of the chosen ``rows`` (default: all), shape (rows, vocab), float32.

        Afterwards the caches hold the keys and values of the batch. ``check`` runs before every
        part; if it raises, the caches are unchanged. ``features`` are filled with the residual
        stream of all rows. A draft head reads ``target_features`` (R, F).

        Raises:
            MemoryBudgetError: the caches have outgrown what the budget leaves beside the weights.
            CheckpointError: a file cannot be read, or has changed.
        """
        weights = self.weights
        logit_rows = np.arange(len(batch.tokens)) if rows is None else np.asarray(rows, np.intp)
        with self.ops.scope():
            # Try again if GPU memory, which other programs use too, ran out, or a pass was lost.
            for again in (True, False):
                state = weights.begin(batch, logit_rows, check)
                state.features, state.target_features = features, target_features
                try:
                    self._compute(state, check)
                    break
                except BaseException as error:
                    weights.abandon()
                    full = isinstance(error, MemoryBudgetError) and again and weights.relieve()
                    if not (full or (again and isinstance(error, PassLostError))):
                        raise
        for span in batch.spans:
            span.cache.advance(span.rows)
        weights.end(state, batch)
        if state.logits is None:
            return np.empty((0, self.config.vocab_size), np.float32)
        return state.logits

    def _compute(self, state: PassState, check: Check | None) -> None:
        """Run all parts of a pass."""
        for part in self.weights.body:
            if check is not None:
                check()
            part(state)
        state.tap(AFTER_LAST)
        for part in self.weights.head(state):
            if check is not None:
                check()
            part(state)

    def close(self) -> None:
        """End all threads and free all weights."""
        self.weights.close()


class FinalNorm:
    """A model's norm before the head, for rows on the host."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        self._eps = config.norm_eps
        self._weights = np.ones(config.hidden_size, np.float32)
        self._normed = decoder.weights.norm is None  # by the last layer's unit
        if decoder.weights.norm is not None:
            vector_to_host(decoder.weights.norm, self._weights)
        self._weights /= np.float32(config.logit_scale)

    def __call__(self, rows: Logits) -> Logits:
        """Return the normed rows (n, D)."""
        if self._normed:
            return rows * self._weights
        scale = np.sqrt(np.square(rows).mean(1, keepdims=True) + np.float32(self._eps))
        normed: Logits = rows / scale * self._weights
        return normed
