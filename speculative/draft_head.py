"""A trained draft head: a small recurrent decoder on a frozen target's features.

Its input at position t is the target's hidden state there and the embedding of token t + 1, its
output stands for the hidden state at t + 1, from which the target's own final norm and head guess
token t + 2 (dynamic gating fusion as in Dovetail, Zhang et al. 2024; with features fed back as in
EAGLE, Li et al. 2024). It computes through ``Ops`` like a model, on the CPU kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.base import TensorSource
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig
from localrt.models.decoder import load_attention, load_mlp
from localrt.models.parts import PassState
from localrt.quant.formats import PackedTensor, unpack
from localrt.quant.ops.protocol import Batch, KVCache, Ops, Span, Weight
from localrt.speculative.draft_head_file import HeadConfig, head_loader
from localrt.speculative.drafter import Drafter, Rows
from localrt.speculative.features import FeatureRows
from localrt.speculative.source import Check

__all__ = ["REMEMBERED", "DraftHead", "HeadDrafter", "TargetParts", "target_parts"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

REMEMBERED = 2048
"""Tokens whose embedding is kept: 4.5 MB at a hidden size of 576."""
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

    @lru_cache(REMEMBERED)
    def row(token: int) -> Floats:
        return unpack(source.read(EMBEDDING, token, token + 1))

    def embed(tokens: Sequence[int]) -> Floats:
        return np.concatenate([row(token) for token in tokens]) * np.float32(config.embedding_scale)

    return TargetParts(tuple(head), norm, config.norm_eps, config.final_softcap, embed)


class DraftHead:
    """A head with its weights in ``ops``. One thread at a time uses it, and ``ops`` meanwhile."""

    def __init__(self, config: HeadConfig, target: TargetParts, ops: Ops) -> None:
        self.config = config
        self._target = target
        self._ops = ops
        decoder, size = config.decoder, config.decoder.hidden_size
        with ops.scope(), head_loader(config, ops) as loader:

            def square(name: str) -> Weight:
                return loader.matrix((size, size), f"fusion.{name}.weight")

            self._feature, self._token = square("feature"), square("token")
            self._gate_feature, self._gate_token = square("gate_feature"), square("gate_token")
            self._feature_norm = loader.vector(size, "fusion.feature_norm.weight")
            self._token_norm = loader.vector(size, "fusion.token_norm.weight")
            self._ones = ops.vector(np.ones(size, np.float32))
            self._parts = [
                part
                for block in range(decoder.layers)
                for part in (
                    load_attention(decoder, block, loader),
                    load_mlp(decoder, block, loader, None),
                )
            ]
            self._norm = ops.vector(target.norm)
            self._head = ops.weight((len(config.draft_tokens), size), target.head)

    def cache(self, capacity: int) -> KVCache:
        """An empty cache of its own for one sequence."""
        return self._ops.kv_cache(self.config.decoder.attending, capacity)

    def forward(
        self,
        cache: KVCache,
        features: Floats,
        tokens: Sequence[int],
        positions: Ints,
        *,
        wanted: int,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Floats, Floats]:
        """One pass over rows that join ``cache``: features (R, D), logits (wanted, draft vocab).

        Row r takes in ``features[r]`` of one position and the token of the next, ``tokens[r]``. The
        last ``wanted`` rows get logits. ``mask``: see ``Span``.
        """
        ops, count = self._ops, len(tokens)
        span = Span(cache, count, mask)
        with ops.scope():
            step = ops.begin(Batch(np.asarray(tokens, np.int64), positions, (span,)))
            state = PassState(ops, step, self.fuse(features, tokens))
            for part in self._parts:
                part(state)
            rows = np.arange(count - wanted, count)
            target = self._target
            logits = ops.head(state.x, rows, self._norm, target.eps, self._head, target.softcap)
        cache.advance(count)
        return state.x, logits

    def fuse(self, features: Floats, tokens: Sequence[int]) -> Floats:
        """Dynamic gating fusion of rows, (R, D): z * h1 + (1 - z) * h2."""
        eps, rows = self.config.decoder.norm_eps, np.arange(len(tokens))
        embedded = self._target.embed(tokens)
        h1 = self._ops.head(features, rows, self._feature_norm, eps, self._feature)
        h2 = self._ops.head(embedded, rows, self._token_norm, eps, self._token)
        h2 = h2 * _sigmoid(h2)  # SiLU
        z = _sigmoid(self._linear(h1, self._gate_feature) + self._linear(h2, self._gate_token))
        return np.asarray(h2 + z * (h1 - h2))

    def _linear(self, x: Floats, weight: Weight) -> Floats:
        """``x`` (R, D) times the rows of ``weight``: ``Ops`` has a norm before, taken back here."""
        eps = 1e-12
        size = np.sqrt(np.square(x).mean(1, keepdims=True) + np.float32(eps))
        return np.asarray(self._ops.head(x, np.arange(len(x)), self._ones, eps, weight) * size)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(np.clip(-x, -60, 60))))


class HeadDrafter(Drafter):
    """The head for one session with these ``features``. ``alone`` keeps others from computing.

    The row of token t takes in the hidden state of token t - 1. Rows of guesses do not last, since
    what they took in for hidden states were guesses.
    """

    name = "head"
    lasting = False

    def __init__(
        self,
        head: DraftHead,
        features: FeatureRows,
        alone: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.tokens = head.config.draft_tokens
        self._head = head
        self._features = features
        self._alone = alone
        self._guessed: list[Floats] = []  # features behind the last token, then of every guess

    def cache(self, capacity: int) -> KVCache:
        """See ``Drafter``."""
        with self._alone():
            return self._head.cache(capacity)

    def first(self, length: int) -> int | None:
        """See ``Drafter``: as far back as attention sees, where hidden states are held."""
        end = length - 1
        start = max(self._features.first, end - self._head.config.window)
        return start + 1 if start < end <= self._features.length else None

    def drafting(self) -> AbstractContextManager[object]:
        """See ``Drafter``."""
        return self._alone()

    def compute(self, cache: KVCache, rows: Rows, *, check: Check | None) -> Floats:
        """See ``Drafter``."""
        if check is not None:
            check()
        positions = rows.positions - 1
        if rows.above is None:
            given = self._features.get(int(positions[0]), int(positions[-1]) + 1)
        else:
            given = np.stack([self._guessed[1 + row] for row in rows.above])
        features, logits = self._head.forward(
            cache, given, rows.tokens, positions, wanted=rows.wanted, mask=rows.mask
        )
        if rows.above is None:
            self._guessed = [features[-1]]
        else:
            self._guessed += list(features)
        return logits
