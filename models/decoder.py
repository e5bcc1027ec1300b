"""The decoder that the known architectures share: a list of parts, one after another.

Parts are made of weights that are there, one layer's as well as all; ``Decoder`` runs them. A
``WeightStore`` knows where their weights are: the pass is the same for a model in memory and for
one that is streamed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localrt.common.errors import MemoryBudgetError
from localrt.models.config import (
    EMBEDDING,
    HEAD,
    LAYER_EMBEDDING,
    NGRAM_TABLE,
    DecoderConfig,
)
from localrt.models.layers.attention import IndexedAttention, LatentAttention
from localrt.models.layers.inputs import (
    InputGate,
    InputRows,
    input_scale,
    load_input_projection,
)
from localrt.models.layers.moe import (
    Experts,
    ResidentExperts,
    SparseMlp,
    load_expert,
)
from localrt.models.layers.ngram_layer import AddNgrams, NgramRows
from localrt.models.layers.ngrams import NgramHash
from localrt.models.layers.parts import (
    Attention,
    Chain,
    Embedding,
    GatedMlp,
    Head,
    Layer,
    Logits,
    Part,
    PassState,
    Residual,
    SideBySide,
)
from localrt.models.layers.recurrent import Recurrent
from localrt.models.layers.streams import (
    JOIN,
    SPLIT,
    Connected,
    JoinStreams,
    ReadStreams,
    RepeatStream,
    SplitStreams,
    StreamAttention,
    StreamMlp,
    load_connection,
    load_projections,
)
from localrt.models.weight_store import Check, ResidentWeights, WeightStore
from localrt.models.weights import WeightLoader
from localrt.quant.ops.attention import AttentionSpec, IndexSpec, LatentSpec
from localrt.quant.ops.protocol import Batch, KVCache, LayerSpec, Ops, RecurrentSpec, Vector
from localrt.quant.ops.streams import ConnectionWeights

_ATTENTION, _MLP = "attn_hyper_connection.", "mlp_hyper_connection."
_MIXER = "model.hyper_connection_mixer."


def load_attention(
    config: DecoderConfig,
    layer: int,
    weights: WeightLoader,
    at: Sequence[int] | None = None,
) -> Part:
    """A layer's attention or recurrence, ``at`` its places in a cache that has not all layers.

    With the first layer's comes what is computed once, before it.
    """
    parts: list[Part] = []
    if layer == 0 and config.layer_inputs is not None:
        parts.append(load_input_projection(config, weights))
    if layer == 0 and config.streams is not None:
        parts.append(SplitStreams(load_projections(config, weights, SPLIT)))
    if layer == 0 and config.connections is not None:
        parts.append(RepeatStream(config.connections.count))
    places = config.cache_places[layer] if at is None else at
    memory = list(zip(config.memory_of(layer), places, strict=True))
    if (ngrams := config.ngrams_of(layer)) is not None:
        _, place = memory.pop()
        parts.append(AddNgrams(config, ngrams, weights, place))
    if config.index is not None and isinstance(config.attention[layer], AttentionSpec):
        (index, index_at), (_, place) = memory
        assert isinstance(index, IndexSpec), "it comes before what it chooses for"
        mixers: list[Layer] = [IndexedAttention(config, layer, weights, index, index_at, place)]
    else:
        mixers = [_load_mixer(config, layer, weights, spec, place) for spec, place in memory]
    if config.connections is not None:
        (mixer,) = mixers
        parts.append(_connected(config, mixer, weights, f"model.layers.{layer}.{_ATTENTION}"))
    elif config.streams is not None:
        (mixer,) = mixers
        assert isinstance(mixer, Attention), "no model with streams has another kind"
        parts.append(StreamAttention(config, layer, weights, mixer))
    else:
        joining = tuple(Residual(mixer, _scale_of(config, mixer)) for mixer in mixers)
        parts.append(joining[0] if len(joining) == 1 else SideBySide(joining))
    return _joined(parts)


def _scale_of(config: DecoderConfig, mixer: Layer) -> float:
    """Of what attention or a recurrent layer adds to the residual stream."""
    factors = config.multipliers
    own = factors.recurrent_out if isinstance(mixer, Recurrent) else factors.attention_out
    return config.residual_scale * own


def _load_mixer(
    config: DecoderConfig, layer: int, weights: WeightLoader, spec: LayerSpec, place: int
) -> Layer:
    if isinstance(spec, RecurrentSpec):
        return Recurrent(config, layer, weights, spec, place)
    kind = LatentAttention if isinstance(spec, LatentSpec) else Attention
    return kind(config, layer, weights, place)


def load_mlp(
    config: DecoderConfig, layer: int, weights: WeightLoader, experts: Experts | None
) -> Part:
    """A layer's MLP; a sparse one has its ``experts`` compute.

    With the last layer's comes what is computed once, behind it.
    """
    mlp = (
        GatedMlp(config, layer, weights)
        if experts is None
        else SparseMlp(config, layer, weights, experts)
    )
    if config.streams is not None:
        parts: list[Part] = [StreamMlp(config, layer, weights, mlp)]
        if layer == config.layers - 1:
            parts.append(JoinStreams(load_projections(config, weights, JOIN)))
        return _joined(parts)
    if config.connections is not None:
        prefix = f"model.layers.{layer}.{_MLP}"
        last_one = layer == config.layers - 1
        reading = (
            [ReadStreams(_connection(config, weights, _MIXER, shares=False))] if last_one else []
        )
        return _joined([_connected(config, mlp, weights, prefix), *reading])
    joining: list[Layer] = [mlp]
    if config.layer_inputs is not None:
        joining.append(InputGate(config, layer, weights))
    total = weights.scalar(f"model.layers.{layer}.layer_scalar") if config.layer_scale else 1.0
    scale = config.residual_scale * config.multipliers.mlp_out
    *first, last = joining
    return _joined([*(Residual(part, scale) for part in first), Residual(last, scale, total)])


def _connected(config: DecoderConfig, layer: Layer, weights: WeightLoader, prefix: str) -> Part:
    return Connected(layer, _connection(config, weights, prefix))


def _connection(
    config: DecoderConfig, weights: WeightLoader, prefix: str, *, shares: bool = True
) -> ConnectionWeights:
    assert config.connections is not None, "the model has several streams"
    return load_connection(
        weights,
        prefix,
        hidden=config.hidden_size,
        count=config.connections.count,
        rank=config.connections.rank,
        eps=config.norm_eps,
        norm_offset=config.norm_offset,
        shares=shares,
    )


def _joined(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))


def load_resident_mlp(
    config: DecoderConfig, layer: int, weights: WeightLoader, ops: Ops, experts: ResidentExperts
) -> Part:
    """A layer's MLP with all that it computes with; a sparse one's go to ``experts``."""
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
    """The norm before the head, if there is one."""
    if not config.final_norm:
        return None
    return weights.vector(
        config.hidden_size,
        "model.norm.weight",
        offset=config.norm_offset,
        scale=config.logit_scale,
    )


def load_resident(config: DecoderConfig, ops: Ops, weights: WeightLoader) -> ResidentWeights:
    """All parts of a model in the memory of ``ops``."""
    shape = (config.vocab_size, config.hidden_size)
    with ops.scope():
        table = weights.matrix(shape, EMBEDDING)
        body: list[Part] = [Embedding(table, config.embedding_scale)]
        if (inputs := config.layer_inputs) is not None:
            size = (inputs.vocab_size * config.layers, inputs.width)
            rows = weights.matrix(size, LAYER_EMBEDDING)
            body.append(InputRows(rows, input_scale(config), config.layers))
        if (own := config.ngrams) is not None:
            grams = weights.matrix(own.shape, NGRAM_TABLE)
            body.append(NgramRows(NgramHash(own.spec), grams, config.ngram_place))
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
    """A model that can run: ``weights`` has its parts, and waits for what is not in memory."""

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
        weights = self.weights
        wanted = np.arange(len(batch.tokens)) if rows is None else np.asarray(rows, np.intp)
        with self.ops.scope():
            # A second time where a card's memory, which others use too, has run out in the first.
            for again in (True, False):
                state = weights.begin(batch, wanted, check)
                try:
                    self._compute(state, check, features)
                    break
                except BaseException as error:
                    weights.abandon()
                    full = isinstance(error, MemoryBudgetError)
                    if not (again and full and weights.relieve()):
                        raise
        for span in batch.spans:
            span.cache.advance(span.rows)
        weights.end(state, batch)
        if state.logits is None:
            return np.empty((0, self.config.vocab_size), np.float32)
        return state.logits

    def _compute(self, state: PassState, check: Check | None, features: Logits | None) -> None:
        """All parts of a pass."""
        for part in self.weights.body:
            if check is not None:
                check()
            part(state)
        if features is not None:
            state.copy_features(features)
        for part in self.weights.head(state):
            if check is not None:
                check()
            part(state)

    def close(self) -> None:
        """End all threads and free all weights."""
        self.weights.close()
