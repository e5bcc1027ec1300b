"""DFlash (block diffusion): a head that drafts a block of tokens in one pass. DSpark's logits also
depend on the token before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from localrt.common.errors import UnsupportedModelError
from localrt.drafts.heads.config import FUSION, HeadConfig, input_layers
from localrt.drafts.heads.files import OpenHead
from localrt.models.architectures import qwen
from localrt.models.config import DecoderConfig
from localrt.models.decoder import Decoder
from localrt.models.layers.moe import ResidentExperts
from localrt.models.layers.parts import Head, PassState
from localrt.models.raw_config import RawConfig
from localrt.models.weight_store import ResidentWeights, WeightStore
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Pass, Weight
from localrt.quant.ops.protocol import Ops

# Supported keys of ``dflash_config``
_BLOCK_OPTIONS = {"mask_token_id", "target_layer_ids", "block_size", "causal"}
_BLOCK_OPTIONS |= {"input_embedding_scale", "final_logit_softcapping"}


class ContextKeys:
    """Computes keys and values of known tokens for each of ``layers`` from the target's features,
    which are projected and normed first.
    """

    def __init__(
        self, config: DecoderConfig, features: int, weights: WeightLoader, layers: Sequence[Any]
    ) -> None:
        self._projection = weights.matrix((config.hidden_size, features), FUSION)
        norm = weights.vector(config.hidden_size, "model.hidden_norm.weight")
        parts = [layer.parts[-1].layer for layer in layers]
        self._layers = [(each, replace(each.weights, norm=norm)) for each in parts]

    def __call__(self, state: PassState) -> None:
        """Append keys and values to the caches."""
        assert state.target_features is not None, "a pass over the context is given its features"
        x = state.ops.projected(state.ops.given_rows(state.target_features), self._projection)
        for layer, weights in self._layers:
            state.ops.norm_qkv_rope_append(x, weights, layer.spec, state.step, layer.layer)


class Transitions:
    """What logits gain by the token before: DSpark's Markov head."""

    def __init__(self, head: HeadConfig, weights: WeightLoader) -> None:
        self._before, self._behind = (weights.matrix(shape, name) for name, shape in head.pairs)

    def add(self, ops: Ops, logits: Floats, tokens: Sequence[int]) -> Floats:
        """Return ``logits`` (n, V) behind ``tokens`` (n,)."""
        rows = ops.embed(self._before, cast(Pass, None), tokens=np.array(tokens, np.int64))
        gains = ops.head(rows, np.arange(len(tokens)), None, 0.0, self._behind)
        return logits + gains[:, : logits.shape[1]]


class BlockDecoder(Decoder):
    """DFlash's decoder. A pass of ``context`` appends the keys and values of known tokens."""

    def __init__(
        self, weights: WeightStore, context: ContextKeys, pairs: Transitions | None
    ) -> None:
        super().__init__(weights)
        self.pairs = pairs
        no_logits, ops = cast(Weight, None), weights.ops
        end = Head(self.config, weights.norm, no_logits)
        self.context = Decoder(ResidentWeights(ops, self.config, [context], end, ResidentExperts()))


def read_dflash(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    """Read the config of a DFlash draft for ``target``."""
    options = RawConfig(checkpoint).mapping("dflash_config")
    config = checkpoint.config = {"markov_head_type": "vanilla", **checkpoint.config, **options}
    unknown = {key for key, value in options.items() if value} - _BLOCK_OPTIONS
    if unknown or config["markov_head_type"] != "vanilla":
        what = min(unknown, default="markov_head_type")
        raise UnsupportedModelError(f"a DFlash draft with its {what} is not supported")
    raw, tokens = RawConfig(checkpoint), checkpoint.tokens
    names = next(((n, n.replace("w1", "w2")) for n in checkpoint.tensors if "markov_w1" in n), ())
    # Speculators list inputs, and the first row of their blocks drafts nothing
    inputs, causal = "aux_hidden_state_layer_ids", raw.flag("is_causal", raw.flag("causal"))
    listed = inputs if inputs in config else "target_layer_ids"
    anchored = bool(names) and raw.flag("sample_from_anchor", listed != inputs)
    own, mask = qwen.read_qwen3(raw), raw.index("mask_token_id", None)
    block = raw.integer("block_size", 16)
    scale = raw.number("input_embedding_scale", target.embedding_scale)
    if mask >= target.vocab_size or not math.isclose(scale, target.embedding_scale, rel_tol=1e-3):
        raise UnsupportedModelError(f"its mask is token {mask}, and embeddings times {scale:g}")
    # A row sees the whole block: windows reach from the first row's window to the end of the block
    attention = tuple(
        spec if spec.window is None or causal else replace(spec, window=spec.window + block - 1)
        for spec in own.attending
    )
    vocab = target.vocab_size if tokens is None else len(tokens)
    rank = checkpoint.tensors[names[0]].shape[-1] if names else 0
    return HeadConfig(
        decoder=replace(
            own,
            attention=attention,
            vocab_size=vocab,
            tied_head=False,
            final_softcap=raw.optional_number("final_logit_softcapping"),
        ),
        layers=input_layers(config.get(listed), int(listed != inputs), target.layers),
        tokens=tokens,
        block=block,
        mask=mask,
        first=int(not anchored),
        causal=causal,
        pairs=tuple(zip(names, ((target.vocab_size, rank), (vocab, rank)), strict=False)),
    )
