"""Gemma 4's assistants: layers of the target's kind that read the target's keys and values.

No card has run this yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from localrt.common.errors import UnsupportedModelError
from localrt.drafts.heads.files import HeadConfig, OpenHead
from localrt.drafts.heads.mtp import Fusion
from localrt.models.architectures import gemma4
from localrt.models.config import DecoderConfig, Part
from localrt.models.layers.inputs import GatedInputs
from localrt.models.layers.parts import Head, PassState
from localrt.models.raw_config import RawConfig
from localrt.models.tensor_source import EMBEDDING, HEAD
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import AFTER_LAST, CARRIED, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantBlock(GatedInputs):
    """Layers of the target's kind that use the target's keys and values. Embeddings and features
    have the target's ``width``. Only tokens in the best ``used`` of the ``clusters`` (C, n) get
    logits; None: all tokens do.
    """

    width: int
    clusters: npt.NDArray[np.int64] | None = field(compare=False)
    used: int

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        shape = (config.hidden_size, 2 * self.width)
        projection = weights.matrix(shape, "model.pre_projection.weight")
        return (Fusion(projection, (None, None), config.norm_eps),)


class AssistantHead(Head):
    """An assistant's logits, and its output projected back to the target's width (``CARRIED``)."""

    def __init__(
        self, head: Head, block: AssistantBlock, config: DecoderConfig, weights: WeightLoader
    ) -> None:
        super().__init__(config, head.norm, head.weight)
        hidden, self._clusters, self._used = config.hidden_size, block.clusters, block.used
        self._carried = weights.matrix((block.width, hidden), "model.post_projection.weight")
        if block.clusters is not None:
            shape = (len(block.clusters), hidden)
            self._centroids = weights.matrix(shape, "model.masked_embedding.centroids.weight")

    def __call__(self, state: PassState) -> None:
        """Set ``state.logits`` and the features ``CARRIED`` of the wanted rows."""

        def product(weight: Weight) -> npt.NDArray[np.float32]:
            return state.ops.head(state.x, state.logit_rows, self.norm, self._eps, weight)

        state.logits = logits = product(self.weight)
        if self._clusters is not None:
            best = np.argpartition(product(self._centroids), -self._used)[:, -self._used :]
            seen = self._clusters[best].reshape(len(best), -1)
            kept = np.take_along_axis(logits, seen, 1)
            logits[:] = kept.min(1, keepdims=True) - 1
            np.put_along_axis(logits, seen, kept, 1)
        out = None if state.features is None else state.features.of(CARRIED)
        if out is not None:
            out[:] = product(self._carried)


def read_assistant(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    """Read the config of an assistant for ``target``."""
    # Its layers share the target's keys and values, not each other's
    checkpoint.config = {**checkpoint.config, "num_kv_shared_layers": 0}
    raw, clusters = RawConfig(checkpoint), checkpoint.order
    own, count = gemma4.read_config(raw), raw.integer("num_centroids", 2048)
    last = {spec.window is None: layer for layer, spec in enumerate(target.attending)}
    attention, places = [], list[int]()
    for spec in own.attending:
        layer = last.get(spec.window is None, 0)
        sizes = {(each.kv_heads, each.head_dim) for each in (spec, target.attending[layer])}
        if len(sizes) > 1 or target.architecture != "gemma4":
            raise UnsupportedModelError("its layers do not fit the model's keys and values")
        places += target.cache_places[layer]
        # The row's position is after all tokens that it sees, so the window is one longer
        window = None if spec.window is None else spec.window + 1
        attention.append(replace(spec, reads=layer, window=window))
    if clusters is not None:
        if clusters.size % count or not np.array_equal(np.sort(clusters), range(own.vocab_size)):
            raise UnsupportedModelError(f"its {clusters.size} tokens do not fill {count} clusters")
        clusters = clusters.reshape(count, -1)
    used = min(raw.integer("centroid_intermediate_top_k", 32), count)
    width = raw.integer("backbone_hidden_size", 1536)
    block = AssistantBlock(inputs=None, width=width, clusters=clusters, used=used)
    return HeadConfig(
        decoder=replace(own, block=block, attention=tuple(attention), final_softcap=None),
        layers=(AFTER_LAST,),
        normed=True,
        output=EMBEDDING if own.tied_head else HEAD,
        places=tuple(places),
    )
