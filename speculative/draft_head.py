"""A trained draft head: a small recurrent decoder on a frozen target's features.

Its input at position t is the target's hidden state there and the embedding of token t + 1, its
output stands for the hidden state at t + 1, from which the target's own final norm and head guess
token t + 2 (dynamic gating fusion as in Dovetail, Zhang et al. 2024; with features fed back as in
EAGLE, Li et al. 2024). It computes through ``Ops`` like a model, on the CPU kernels. What of the
fusion depends on a token alone is computed once per token and remembered. It knows no trees.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.base import TensorSource
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig, LayerNames
from localrt.models.decoder import PartLoader
from localrt.models.parts import PassState
from localrt.models.weights import WeightLoader
from localrt.quant.formats import PackedTensor, unpack
from localrt.quant.ops.protocol import (
    AttentionSpec,
    Batch,
    KVCache,
    MlpSpec,
    Ops,
    Rope,
    Span,
    Vector,
    Weight,
)
from localrt.speculative.draft_head_file import HeadConfig, HeadWeights
from localrt.speculative.drafter import Drafter, GuessedRows
from localrt.speculative.source import Check

__all__ = ["REMEMBERED", "DraftHead", "Features", "HeadDrafter", "TargetParts", "target_parts"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

REMEMBERED = 2048
"""Tokens whose part of the fusion is kept: 9 MB at a hidden size of 576."""
_PIECE = 4096  # rows of the target's head read at a time


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head shares with its target.

    ``head`` are the rows of the draft vocabulary as published, ``norm`` (D,) the final norm with
    its offset. ``embed`` gives tokens' embeddings, (n, D), as the target's first layer sees them.
    """

    head: tuple[PackedTensor, ...]
    norm: Floats
    eps: float
    softcap: float | None
    embed: Callable[[Sequence[int]], Floats]


def target_parts(source: TensorSource, config: DecoderConfig, draft_tokens: Ints) -> TargetParts:
    """The parts of a target's checkpoint, which must stay open for its embeddings to be read."""
    name = EMBEDDING if config.tied_head else HEAD
    head = []
    for start in range(0, config.vocab_size, _PIECE):
        stop = min(start + _PIECE, config.vocab_size)
        first, last = np.searchsorted(draft_tokens, (start, stop))
        if first < last:
            rows = source.read(name, start, stop)
            head.append(rows.take_rows(draft_tokens[first:last] - start))
    norm = unpack(source.read("model.norm.weight")).reshape(-1) + np.float32(config.norm_offset)

    def embed(tokens: Sequence[int]) -> Floats:
        rows = [unpack(source.read(EMBEDDING, token, token + 1)) for token in tokens]
        return np.concatenate(rows) * np.float32(config.embedding_scale)

    return TargetParts(tuple(head), norm, config.norm_eps, config.final_softcap, embed)


class DraftHead:
    """A head with its weights in ``ops``. One thread at a time uses it, and ``ops`` meanwhile."""

    def __init__(self, weights: HeadWeights, target: TargetParts, ops: Ops) -> None:
        self.config = config = weights.config
        self.draft_tokens = weights.draft_tokens
        self._target = target
        self._decoder_config = decoder = _decoder_config(config)
        loader = WeightLoader(weights, ops)
        size = config.hidden_size
        square = (size, size)
        with ops.scope():
            self._feature = loader.matrix(square, "fusion.feature.weight")
            self._token = loader.matrix(square, "fusion.token.weight")
            self._gate_feature = loader.matrix(square, "fusion.gate_feature.weight")
            self._gate_token = loader.matrix(square, "fusion.gate_token.weight")
            self._feature_norm = loader.vector(size, "fusion.feature_norm.weight")
            self._token_norm = loader.vector(size, "fusion.token_norm.weight")
            self._ones = ops.vector(np.ones(size, np.float32))
            parts = PartLoader(decoder, LayerNames())
            self._parts = [
                part
                for block in range(config.blocks)
                for part in (parts.attention(block, loader), parts.mlp(block, loader, None))
            ]
            self._norm: Vector = ops.vector(target.norm)
            self._head: Weight = ops.weight((config.draft_vocab, size), target.head)
        loader.finish()
        self._known: OrderedDict[int, tuple[Floats, Floats]] = OrderedDict()

    def cache(self, ops: Ops, capacity: int) -> KVCache:
        """An empty cache of its own for one sequence."""
        return ops.kv_cache(self._decoder_config.attention, capacity)

    def forward(
        self,
        ops: Ops,
        cache: KVCache,
        features: Floats,
        tokens: Sequence[int],
        positions: Ints,
        *,
        wanted: Sequence[int],
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Floats, Floats]:
        """One pass over rows that join ``cache``: features (R, D), logits (wanted, draft vocab).

        Row r takes in ``features[r]`` of one position and the token of the next, ``tokens[r]``.
        ``mask``: see ``Span``.
        """
        span = Span(cache, len(tokens), mask)
        with ops.scope():
            step = ops.begin(Batch(np.asarray(tokens, np.int64), positions, (span,)))
            state = PassState(ops, step, self.fuse(ops, features, tokens))
            for part in self._parts:
                part(state)
            logits = ops.head(
                state.x,
                np.asarray(wanted, np.intp),
                self._norm,
                self._target.eps,
                self._head,
                self._target.softcap,
            )
        cache.advance(len(tokens))
        return state.x, logits

    def fuse(self, ops: Ops, features: Floats, tokens: Sequence[int]) -> Floats:
        """Dynamic gating fusion of rows, (R, D): z * h1 + (1 - z) * h2."""
        eps = self.config.norm_eps
        rows = np.arange(len(tokens))
        h2, gate = self._tokens(ops, tokens)
        h1 = ops.head(features, rows, self._feature_norm, eps, self._feature)
        gate = gate + self._linear(ops, h1, self._gate_feature)
        np.clip(gate, -60, 60, out=gate)
        z = 1 / (1 + np.exp(-gate))
        fused: Floats = h2 + z * (h1 - h2)
        return fused

    def _linear(self, ops: Ops, x: Floats, weight: Weight) -> Floats:
        """``x`` (R, D) times the rows of ``weight``: ``Ops`` has a norm before, taken back here."""
        eps = 1e-12
        size = np.sqrt(np.square(x).mean(1, keepdims=True) + np.float32(eps))
        product: Floats = ops.head(x, np.arange(len(x)), self._ones, eps, weight) * size
        return product

    def _tokens(self, ops: Ops, tokens: Sequence[int]) -> tuple[Floats, Floats]:
        """Of each token: h2 and its part of the gate, (R, D) each."""
        known = self._known
        new = [token for token in dict.fromkeys(tokens) if token not in known]
        if new:
            embedded = self._target.embed(new)
            rows = np.arange(len(new))
            x = ops.head(embedded, rows, self._token_norm, self.config.norm_eps, self._token)
            h2 = x / (1 + np.exp(np.clip(-x, -60, 60)))  # SiLU
            gate = self._linear(ops, h2, self._gate_token)
            known.update(zip(new, zip(h2, gate, strict=True), strict=True))
        found = [known[token] for token in tokens]
        while len(known) > REMEMBERED:
            known.popitem(last=False)
        return np.stack([h2 for h2, _ in found]), np.stack([gate for _, gate in found])


def _decoder_config(config: HeadConfig) -> DecoderConfig:
    """The head's blocks as a decoder of the target's hidden size."""
    spec = AttentionSpec(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        eps=config.norm_eps,
        rope=Rope(config.inv_freq),
        window=config.window,
    )
    return DecoderConfig(
        architecture="draft_head",
        vocab_size=config.draft_vocab,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        context_length=config.window,
        norm_eps=config.norm_eps,
        attention=(spec,) * config.blocks,
        mlp=MlpSpec(activation="silu", eps=config.norm_eps),
    )


class Features(Protocol):
    """The hidden states of a sequence's tokens ``first`` to ``length``."""

    @property
    def first(self) -> int:
        """The first token whose row is held."""

    @property
    def length(self) -> int:
        """The token behind the last one whose row is held."""

    def get(self, start: int, stop: int) -> Floats:
        """Rows of tokens ``start`` to ``stop``, (stop - start, hidden size)."""


class HeadDrafter(Drafter):
    """The head for one session with these ``features``. ``alone`` gives the head's ``Ops`` while
    nobody else computes.

    The row of token t takes in the hidden state of token t - 1. Rows of guesses do not last, since
    what they took in for hidden states were guesses.
    """

    name = "head"
    lasting = prepares = False

    def __init__(
        self,
        head: DraftHead,
        features: Features,
        alone: Callable[[], AbstractContextManager[Ops]],
    ) -> None:
        self._head = head
        self._features = features
        self._alone = alone
        self._ops: Ops | None = None
        self._guessed: list[Floats] = []  # features (D,): behind the known tokens, and of each row
        self.tokens = head.draft_tokens

    def cache(self, capacity: int) -> KVCache:
        """See ``Drafter``."""
        with self._alone() as ops:
            return self._head.cache(ops, capacity)

    def first(self, history: Sequence[int]) -> int | None:
        """See ``Drafter``: as far back as attention sees, where hidden states are held."""
        end = len(history) - 1
        start = max(self._features.first, end - self._head.config.window)
        return start + 1 if start < end <= self._features.length else None

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """See ``Drafter``."""
        with self._alone() as self._ops:
            yield

    def known(
        self,
        cache: KVCache,
        history: Sequence[int],
        start: int,
        stop: int,
        *,
        last: bool,
        check: Check | None,
    ) -> Floats:
        """See ``Drafter``."""
        tokens, positions = history[start:stop], np.arange(start - 1, stop - 1)
        given = self._features.get(start - 1, stop - 1)
        wanted = [len(tokens) - 1] if last else []
        features, logits = self._forward(cache, given, tokens, positions, wanted, None, check)
        self._guessed = [features[-1]]
        return logits

    def guessed(self, cache: KVCache, rows: GuessedRows, *, check: Check | None) -> Floats:
        """See ``Drafter``."""
        given = np.stack([self._guessed[1 + row] for row in rows.above])
        wanted = range(len(rows.tokens))
        features, logits = self._forward(
            cache, given, rows.tokens, rows.positions - 1, wanted, rows.mask, check
        )
        self._guessed += list(features)
        return logits

    def _forward(
        self,
        cache: KVCache,
        features: Floats,
        tokens: Sequence[int],
        positions: Ints,
        wanted: Sequence[int],
        mask: npt.NDArray[np.bool_] | None,
        check: Check | None,
    ) -> tuple[Floats, Floats]:
        if check is not None:
            check()
        assert self._ops is not None, "a tree is being drafted"
        return self._head.forward(
            self._ops, cache, features, tokens, positions, wanted=wanted, mask=mask
        )
