"""DFlash (block diffusion), DSpark and DFlash 2: heads that draft a block of tokens in one pass.

No card has run this yet.

The pass gives a distribution for each depth, in DFlash independent of the tokens at earlier depths.
A path's probability is approximated by the product of its tokens' probabilities (as in DDTree), and
the draft source grows its tree best-first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from localrt.common.errors import UnsupportedModelError
from localrt.drafts.heads.files import FUSION, HeadConfig, OpenHead, input_layers
from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.session import NativeSession
from localrt.models.architectures import qwen
from localrt.models.config import DecoderConfig
from localrt.models.decoder import Decoder
from localrt.models.layers.compressed import normed
from localrt.models.layers.moe import ResidentExperts
from localrt.models.layers.parts import Head, PassState
from localrt.models.raw_config import RawConfig
from localrt.models.weight_store import ResidentWeights, WeightStore
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import AFTER_LAST, Features, Pass, Vector, Weight, to_host
from localrt.quant.ops.protocol import Batch, Ops, Span
from localrt.speculative.best_first import Children, Growth
from localrt.speculative.ngram import common_length
from localrt.speculative.source import Check, DraftSource, TreeSize
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tree_source import children_of

_PASS_ROWS = 512  # of a prompt, in a pass
_LEAST = -9.0  # the log-probability below which tokens are not drafted
# Supported keys of ``dflash_config``
_BLOCK_OPTIONS = {"mask_token_id", "target_layer_ids", "block_size", "causal", "num_target_layers"}
_BLOCK_OPTIONS |= {"input_embedding_scale", "final_logit_softcapping", "conv_kernel_size"}
_BLOCK_OPTIONS |= {"conv_group_size", "selector_rank", "selector_top_k", "markov_rank"}
_BLOCK_OPTIONS |= {"markov_head_type", "projector_type", "attention_mode", "confidence_head_alpha"}
_BLOCK_OPTIONS |= {"enable_confidence_head", "confidence_head_with_markov"}


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


class Convolved:
    """A part of DFlash 2's layers between two convolutions, on the host, of the block's rows."""

    def __init__(self, place: int, part: Any, head: HeadConfig, weights: WeightLoader) -> None:
        (rows, self._group), hidden = head.kernel, head.decoder.hidden_size
        norm, name = (("input", "attention"), ("post_attention", "mlp"))[place % 2]
        prefix = f"model.layers.{place // 2}."
        self._layer = getattr(part, "parts", (part,))[-1].layer  # not the residual sum
        self._layer.weights = replace(self._layer.weights, norm=None)
        self._norm = weights.array((hidden,), f"{prefix}{norm}_layernorm.weight")
        shape, self._eps = (2 * rows * -(-hidden // self._group), hidden), head.decoder.norm_eps
        self._kernels = weights.matrix(shape, f"{prefix}{name}_conv.kernel_projection.weight")
        self._base = weights.array((2, rows, hidden), f"{prefix}{name}_conv.base_kernel")

    def __call__(self, state: PassState) -> None:
        """Add to ``state.x``."""
        ops, x, (sides, count, hidden) = state.ops, to_host(state.x).copy(), self._base.shape
        rows = normed(x, self._eps, self._norm)
        found = to_host(ops.projected(ops.given_rows(rows), self._kernels))
        by_group = found.reshape(len(x), sides, count, -1)
        kernels = np.repeat(by_group, self._group, 3)[..., :hidden] + self._base
        state.x = ops.given_rows(_convolved(rows, kernels[:, 0]))
        state.x = ops.given_rows(x + _convolved(to_host(self._layer(state)), kernels[:, 1]))


def _convolved(rows: Floats, kernels: Floats) -> Floats:
    """Each row (D,), and those before it, times its kernel (rows, D)."""
    earlier = [np.pad(rows, ((n, 0), (0, 0)))[: len(rows)] for n in range(kernels.shape[1])]
    summed: Floats = (np.stack(earlier, 1) * kernels).sum(1)
    return summed


class Transitions:
    """What logits gain by the token before: DSpark's Markov head, DFlash 2's selector."""

    def __init__(self, head: HeadConfig, weights: WeightLoader, norm: Vector | None) -> None:
        matrices = (weights.matrix(shape, name) for name, shape in head.pairs)
        self._behind, self._before, *self._gate = matrices
        self._norm, self._eps, self._choices = norm, head.decoder.norm_eps, head.choices

    def add(self, ops: Ops, logits: Floats, tokens: Sequence[int], x: Floats) -> Floats:
        """Return ``logits`` (n, V) behind ``tokens`` (n,); ``x`` (n, D) are their outputs."""
        each = np.arange(len(tokens))
        rows = ops.embed(self._before, cast(Pass, None), tokens=np.array(tokens, np.int64))
        for gate in self._gate:
            gates = ops.head(ops.given_rows(x), each, self._norm, self._eps, gate)
            rows = ops.given_rows(to_host(rows) * gates)
        found = ops.head(rows, each, None, 0.0, self._behind)[:, : logits.shape[1]] + logits
        if self._choices:
            least = np.partition(logits, -self._choices)[:, -self._choices, None]
            found[logits < least] = -np.inf
        return found


class BlockDecoder(Decoder):
    """DFlash's decoder. A pass of ``context`` appends the keys and values of known tokens."""

    def __init__(self, store: WeightStore, head: HeadConfig, weights: WeightLoader) -> None:
        super().__init__(store)
        features, (first, *parts) = self.config.hidden_size * len(head.layers), store.body
        context = ContextKeys(self.config, features, weights, parts[::2])
        if head.kernel[0]:
            convolved = (Convolved(n, part, head, weights) for n, part in enumerate(parts))
            store.body = [first, *convolved]
        self.pairs = Transitions(head, weights, store.norm) if head.pairs else None
        end, ops = Head(self.config, store.norm, cast(Weight, None)), store.ops  # without logits
        self.context = Decoder(ResidentWeights(ops, self.config, [context], end, ResidentExperts()))


class BlockSource(DraftSource):
    """Drafts for one session of ``engine``. Its cache has keys and values of the tokens' features;
    ``capacity`` includes one block.
    """

    name = "head"

    def __init__(
        self,
        engine: NativeEngine,
        config: HeadConfig,
        decoder: BlockDecoder,
        session: NativeSession,
        capacity: int,
        temperature: float,
    ) -> None:
        self._engine, self._config, self._decoder = engine, config, decoder
        self._features = session.record_features(config.layers)
        self._temperature = temperature or 1.0
        with engine.alone():
            self._cache = decoder.cache(capacity)
        self._start = 0  # the index of the token in the cache's first row
        self._known: list[int] = []  # tokens up to that of the cache's last row

    def missing(self, history: Sequence[int]) -> int:
        return len(history) - 1 - self._first_missing(history) if self._readable(history) else 0

    def catch_up(self, history: Sequence[int], *, check: Check | None = None) -> None:
        cache, first, known = self._cache, self._first_missing(history), list(history[:-1])
        if first == self._features.first:
            self._start = first
        cache.trim(first - self._start)
        for start in range(first, len(known), _PASS_ROWS):
            self._known = known[:start]
            tokens = np.array(known[start : start + _PASS_ROWS], np.int64)
            stop = start + len(tokens)
            batch = Batch(tokens, np.arange(start, stop), (Span(cache, len(tokens)),))
            features = self._features.get(start, stop)
            with self._engine.alone():
                self._decoder.context.forward(batch, rows=[], check=check, target_features=features)
        self._known = known

    def propose(
        self, history: Sequence[int], size: TreeSize, *, check: Check | None = None
    ) -> TokenTree:
        config, cache, known = self._config, self._cache, len(history) - 1
        first, pairs = config.first, self._decoder.pairs
        budget, depth = size.budget, min(size.depth, config.block - first)
        if budget <= 0 or depth <= 0 or not self._readable(history):
            return TokenTree.empty()
        self.catch_up(history, check=check)
        tokens = np.array([history[-1], *[config.mask] * (config.block - 1)], np.int64)
        seen = np.ones((config.block, config.block), np.bool_)
        span = Span(cache, config.block, np.tril(seen) if config.causal else seen)
        batch, length = Batch(tokens, known + np.arange(config.block), (span,)), cache.length
        growth, drafted = Growth(self.name), range(first, first + depth)
        width, temperature = self._engine.hidden_size, self._temperature
        own = Features((AFTER_LAST,), np.empty((config.block, width), np.float32))

        def likeliest(rows: Floats) -> list[Children]:
            return [children_of(row, _LEAST, temperature, config.tokens) for row in rows]

        with self._engine.alone() as ops, ops.scope():
            logits = self._decoder.forward(batch, rows=drafted, check=check, features=own)
            cache.trim(length)
            plain = likeliest(logits) if pairs is None else []

            def expand(nodes: Sequence[tuple[int, int, int]], _: object) -> list[Children]:
                levels = [growth.level(node) for node, *_ in nodes]
                if pairs is None:
                    return [plain[level] for level in levels]
                before = [history[-1] if node == ROOT else token for node, token, _ in nodes]
                return likeliest(pairs.add(ops, logits[levels], before, own.rows[first:][levels]))

            # A node's logits are computed for it alone where they depend on the token before
            some = {} if pairs is None else {"round_nodes": 16}
            return growth.grow(expand, budget=budget, depth=depth, **some)

    def _readable(self, history: Sequence[int]) -> bool:
        """Whether the features of all tokens before the last are available."""
        return self._features.first < len(history) - 1 <= self._features.length

    def _first_missing(self, history: Sequence[int]) -> int:
        """Return the index of the first token that needs a new row in the cache."""
        first, shared = self._features.first, common_length(self._known, history)
        shared = min(shared, len(history) - 1)
        return shared if shared > self._start and shared >= first else first


def read_dflash(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    """Read the config of a DFlash draft for ``target``."""
    options = RawConfig(checkpoint).mapping("dflash_config")
    config = checkpoint.config = {"markov_head_type": "vanilla", **checkpoint.config, **options}
    unknown = {key for key, value in options.items() if value} - _BLOCK_OPTIONS
    if unknown or config["markov_head_type"] != "vanilla":
        what = min(unknown, default="markov_head_type")
        raise UnsupportedModelError(f"a DFlash draft with its {what} is not supported")
    raw, tokens = RawConfig(checkpoint), checkpoint.tokens
    # In order: for the token behind (w2, successor), for that before (w1, predecessor), the gate
    names = sorted(n for n in checkpoint.tensors if "markov_w" in n or "selector" in n)[::-1]
    selects = len(names) == 3
    # Speculators list inputs, and the first row of their blocks drafts nothing
    inputs, causal = "aux_hidden_state_layer_ids", raw.flag("is_causal", raw.flag("causal"))
    listed = inputs if inputs in config else "target_layer_ids"
    anchored = len(names) == 2 and raw.flag("sample_from_anchor", listed != inputs)
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
    rank = (0, *checkpoint.tensors[names[0]].shape)[-1] if names else 0
    kernel = raw.integer("conv_kernel_size", 1), raw.integer("conv_group_size", 1)
    shapes = ((vocab, rank), (target.vocab_size, rank), (rank, own.hidden_size))
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
        pairs=tuple(zip(names, shapes, strict=False)) if len(names) > 1 else (),
        choices=min(raw.integer("selector_top_k", 16), vocab) if selects else 0,
        kernel=kernel if selects else (0, 0),
    )
