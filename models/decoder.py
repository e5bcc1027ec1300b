"""The decoder that the known architectures share: a list of parts, one after another.

``PartLoader`` makes the parts of an architecture, and of one layer or a slice of the head as well
as of all; ``Decoder`` runs them. Where their weights are is a ``Residency``'s: the pass is the same
for a model in memory and for one that is streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localrt.models.config import EMBEDDING, HEAD, DecoderConfig, LayerNames
from localrt.models.latent import LatentAttention
from localrt.models.moe import Experts, ResidentExperts, SparseMlp, load_expert
from localrt.models.parts import Attention, Embedding, GatedMlp, Head, Logits, Part, Residual
from localrt.models.residency import Check, Residency, Resident
from localrt.models.weights import WeightLoader
from localrt.quant.ops.attention import LatentSpec
from localrt.quant.ops.experts import ExpertWeights
from localrt.quant.ops.protocol import Batch, KVCache, Ops, Vector

__all__ = ["Decoder", "PartLoader", "load_resident"]


@dataclass(frozen=True, slots=True)
class PartLoader:
    """Makes the parts of an architecture of weights that are there."""

    config: DecoderConfig
    names: LayerNames

    def attention(self, layer: int, weights: WeightLoader, at: int | None = None) -> Residual:
        """A layer's attention, ``at`` another place in its cache than its layer's."""
        config = self.config
        kind = isinstance(config.attention[layer], LatentSpec)
        part = (
            LatentAttention(config, layer, weights, at)
            if kind
            else Attention(config, layer, self.names, weights, at)
        )
        return Residual(part, config.residual_scale)

    def mlp(self, layer: int, weights: WeightLoader, experts: Experts | None) -> Residual:
        """A layer's MLP; a sparse one has its ``experts`` compute."""
        config = self.config
        part = (
            GatedMlp(config, layer, self.names, weights)
            if experts is None
            else SparseMlp(config, layer, self.names, weights, experts)
        )
        return Residual(part, config.residual_scale)

    def expert(self, layer: int, number: int, weights: WeightLoader) -> ExpertWeights:
        """One expert of a sparse layer."""
        return load_expert(self.config, layer, number, self.names, weights)

    def resident_mlp(
        self, layer: int, weights: WeightLoader, ops: Ops, experts: ResidentExperts
    ) -> Residual:
        """A layer's MLP with all that it computes with; a sparse one's go to ``experts``."""
        spec = self.config.mixture(layer)
        if spec is None:
            return self.mlp(layer, weights, None)
        part = self.mlp(layer, weights, experts)
        table = ops.expert_table(spec.router.count)
        for number in range(spec.router.count):
            table.put(number, self.expert(layer, number, weights))
        experts.tables[self.config.sparse_layers[layer]] = table
        return part

    def norm(self, weights: WeightLoader) -> Vector:
        """The norm before the head."""
        config = self.config
        return weights.vector(
            config.hidden_size,
            "model.norm.weight",
            offset=config.norm_offset,
            scale=config.logit_scale,
        )


def load_resident(loader: PartLoader, ops: Ops, weights: WeightLoader) -> Resident:
    """All parts of a model in the memory of ``ops``."""
    config = loader.config
    shape = (config.vocab_size, config.hidden_size)
    with ops.scope():
        table = weights.matrix(shape, EMBEDDING)
        body: list[Part] = [Embedding(table, config.embedding_scale)]
        experts = ResidentExperts()
        for layer in range(config.layers):
            body.append(loader.attention(layer, weights))
            body.append(loader.resident_mlp(layer, weights, ops, experts))
        norm = loader.norm(weights)
        if config.tied_head:
            weights.skip(HEAD)
        head = Head(config, norm, table if config.tied_head else weights.matrix(shape, HEAD))
    weights.finish()
    return Resident(ops, config, body, head, experts)


class Decoder:
    """A model that can run: ``residency`` has its parts, and waits for what is not in memory."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.config = residency.config
        self.ops = residency.ops

    def cache(self, capacity: int) -> KVCache:
        """An empty KV cache for one sequence."""
        return self.residency.cache(capacity)

    def forward(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
        features: Logits | None = None,
    ) -> Logits:
        """Logits of the chosen ``rows`` (default: all), shape (rows, vocab), float32.

        Keys and values of the batch are in the caches afterwards and count as held. ``check`` runs
        before every part; when it raises, the caches are as they were. ``features`` (R, D) is
        filled with the residual stream of all rows after the last block, before the final norm.

        Raises:
            MemoryBudgetError: the caches have outgrown what the budget leaves beside the weights.
            CheckpointError: a file fails, or is no longer what it was.
        """
        residency = self.residency
        wanted = np.arange(len(batch.tokens)) if rows is None else np.asarray(rows, np.intp)
        with self.ops.scope():
            state = residency.begin(batch, wanted, check)
            try:
                for part in residency.body:
                    if check is not None:
                        check()
                    part(state)
                if features is not None:
                    state.copy_features(features)
                for part in residency.head(state):
                    if check is not None:
                        check()
                    part(state)
            except BaseException:
                residency.abandon()
                raise
        for span in batch.spans:
            span.cache.advance(span.rows)
        residency.end(state, batch)
        if state.logits is None:
            return np.empty((0, self.config.vocab_size), np.float32)
        return state.logits

    def close(self) -> None:
        """End all threads and free all weights."""
        self.residency.close()
