"""Hashed n-grams: maps a token and its predecessors to rows of a large table; and the layer that
uses them.

Each order of n-grams, from pairs up, has several heads; a head hashes the n-gram into its own range
of rows, whose size is a prime (Engram, Cheng et al. 2026; Qwen3.8-Flash-Next). A token's rows
depend only on the last tokens, so they can be requested before the pass begins. The layer's memory
has the tokens before a pass and its convolution's last rows. ``quant/ops/streams.py`` computes with
the rows.

A pass requests all its rows before the first layer, and the layer waits for missing ones;
``offload/pipeline/tables.py`` reads each from disk or RAM and caches nothing. The layer's memory is
trimmed, branched and saved with the rest of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import cast

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig, Part, Table
from localrt.models.layers.parts import PassState
from localrt.models.weights import TapsFirst, WeightLoader
from localrt.quant.ops.arrays import Vector, Weight
from localrt.quant.ops.hybrid_cache import states_of
from localrt.quant.ops.protocol import Batch, Span, StreamOps, ranges
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.ops.states import tree_parents
from localrt.quant.ops.streams import NgramWeights

NGRAM_TABLE = "model.ngram_embedding.weight"

Ids = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's constants (Steele et al. 2014)
_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SEED_OF_LAYER = 10007
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramSpec:
    """A layer's hashed n-grams. ``table`` is its index among the layers with n-grams.

    ``heads`` is the number per order, ``rows_from`` the least number of rows of a head, and
    ``separator`` the end-of-text token that no n-gram crosses. Where a file has them, ``sizes`` are
    the rows of each head, ``multipliers`` the factors of tokens, the latest token's first, and
    ``rows`` is the table's number of rows.
    """

    orders: int = 3  # the longest n-gram
    heads: int = 8
    rows_from: int = 20_000_000
    rows_multiple: int = 128
    vocab: int
    separator: int
    seed: int = 1234
    table: int = 0
    sizes: tuple[int, ...] = ()
    multipliers: tuple[int, ...] = ()
    rows: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.orders <= 16:
            raise ValueError(f"ngram_size must be from 2 to 16, is {self.orders}")
        for name, bound, value in (
            ("heads_per_ngram", 1, self.heads),
            ("ngram_vocab_size_base", 2, self.rows_from),
            ("make_ngram_vocab_size_divisible_by", 1, self.rows_multiple),
            ("vocab_size", 1, self.vocab),
            ("ple_layer_ids", 0, self.table),
        ):
            if value < bound:
                raise ValueError(f"{name} must be at least {bound}, is {value}")
        if not 0 <= self.separator < self.vocab:
            raise ValueError(f"eos_token_id must be below {self.vocab}, is {self.separator}")
        for name, wanted, most, values in (
            ("head_vocab_sizes", self.rows_per_token, _LARGEST >> 16, self.sizes),
            ("layer_multipliers", self.orders, _LARGEST // self.vocab, self.multipliers),
        ):
            if values and len(values) != wanted:
                raise ValueError(f"{name} must be {wanted} numbers, are {len(values)}")
            if not all(type(value) is int and 0 < value <= most for value in values):
                raise ValueError(f"{name} must be integers from 1 to {most}, are {values!r:.60}")
        if self.rows is not None and self.rows < sum(self.sizes):
            raise ValueError(f"the table has {self.rows} rows, its heads {sum(self.sizes)}")

    @property
    def rows_per_token(self) -> int:
        """Table rows per token: one for each head of each order."""
        return (self.orders - 1) * self.heads


class NgramHash:
    """The rows of n-grams, as a model's config defines them."""

    def __init__(self, spec: NgramSpec) -> None:
        self.spec = spec
        self.sizes: Ids = np.array(spec.sizes or _head_sizes(spec), np.int64)
        """Rows of each head, (H,): heads of pairs first."""
        ends = np.cumsum(self.sizes)
        self.offsets: Ids = ends - self.sizes
        """The first row of each head, (H,)."""
        padded = -(-int(ends[-1]) // spec.rows_multiple) * spec.rows_multiple
        self.rows = padded if spec.rows is None else spec.rows
        """The number of rows of the whole table."""
        self.multipliers: Ids = np.array(spec.multipliers or _multipliers(spec), np.int64)
        """The factors of a token and of those before it, (N,)."""

    def rows_of(self, ngrams: Ids) -> Ids:
        """The table's row numbers (R, H) of ``ngrams`` (R, N), which ``ngrams_of`` returns."""
        products = ngrams * self.multipliers  # below 2^63 by the choice of multipliers
        mixed = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]  # (R, orders)
        return np.repeat(mixed, self.spec.heads, axis=1) % self.sizes + self.offsets


def ngrams_of(
    spec: NgramSpec, tokens: Ids, before: Ids, parents: Sequence[int] | None = None
) -> Ids:
    """Each of ``tokens`` (R,) with its predecessors, the latest first: (R, N).

    ``before`` are a sequence's last tokens, fewer at its beginning. Predecessors before a separator
    or the beginning are separators. With ``parents`` the tokens are a tree: a token follows its
    parent, an earlier token, or with -1 follows ``before``.
    """
    last = np.full(spec.orders, spec.separator, np.int64)
    latest = before[::-1][: spec.orders]
    last[: len(latest)] = latest
    ngrams = np.empty((len(tokens), spec.orders), np.int64)
    ngrams[:, 0] = tokens
    if parents is None:
        history = np.concatenate([last[::-1], tokens])
        for back in range(1, spec.orders):
            ngrams[:, back] = history[spec.orders - back : len(history) - back]
    else:
        for row, parent in enumerate(parents):
            ngrams[row, 1:] = (last if parent < 0 else ngrams[parent])[:-1]
    ended = np.logical_or.accumulate(ngrams[:, 1:] == spec.separator, axis=1)
    ngrams[:, 1:][ended] = spec.separator
    return ngrams


def _head_sizes(spec: NgramSpec) -> list[int]:
    """Return prime sizes, different for all heads of the model."""
    count = spec.rows_per_token
    return _primes(spec.rows_from, (spec.table + 1) * count)[spec.table * count :]


def _multipliers(spec: NgramSpec) -> list[int]:
    """Return odd numbers whose product with a token fits in 63 bits."""
    bound = max(1, _LARGEST // spec.vocab // 2)
    seed = spec.seed + _SEED_OF_LAYER * spec.table
    return [2 * (_splitmix(seed + _GAMMA * (n + 1)) % bound) + 1 for n in range(spec.orders)]


def _splitmix(value: int) -> int:
    """SplitMix64's next number from the state ``value``."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK
    return value ^ (value >> 31)


def _primes(start: int, count: int) -> list[int]:
    """The first ``count`` primes from ``start`` on, by a segmented sieve."""
    found: list[int] = []
    start, length = max(start, 2), max(1024, 32 * count)
    while len(found) < count:
        end = start + length
        prime = np.ones(length, bool)
        for divisor in range(2, isqrt(end) + 1):
            first = max(divisor * divisor, -(-start // divisor) * divisor)
            prime[first - start :: divisor] = False
        found += (np.flatnonzero(prime) + start).tolist()
        start = end
    return found[:count]


def rows_of_pass(hashed: NgramHash, batch: Batch, place: int) -> Ids:
    """The table's row numbers (R, H) for each token of ``batch``.

    ``place`` is the layer's index among a cache's states.
    """
    parts = [
        _ngrams(hashed, span, batch.tokens[first:stop], place)
        for first, stop, span in ranges(batch.spans)
    ]
    return hashed.rows_of(np.concatenate(parts))


def _ngrams(hashed: NgramHash, span: Span, tokens: Ids, place: int) -> Ids:
    """Each of a sequence's new tokens with its predecessors."""
    states, spec = states_of(span.cache), hashed.spec
    if span.mask is None:
        return ngrams_of(spec, tokens, states.tokens_behind(place, spec.orders))
    extra = span.mask.shape[1] - span.rows
    behind = states.tokens_behind(place, spec.orders + extra)
    held = len(behind) - extra
    parents: Sequence[int] = tree_parents(span.mask).tolist()
    tree = np.concatenate([behind[held:], tokens])
    return ngrams_of(spec, tree, behind[:held], parents)[extra:]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramLayer:
    """Hashed n-grams before ``layer``: ``width`` numbers per token, all its table rows
    concatenated. ``memory`` is the layer's memory of a sequence.
    """

    layer: int
    width: int
    spec: NgramSpec
    memory: RecurrentSpec

    def __post_init__(self) -> None:
        if self.width % self.spec.rows_per_token:
            raise ValueError(
                f"ple_embed_dim must be a multiple of {self.spec.rows_per_token} (the heads of all "
                f"n-grams), is {self.width}"
            )

    def table(self, place: int) -> HashedTable:
        """The table that passes read; ``place`` is the layer's index among a cache's states."""
        hashed = NgramHash(self.spec)
        return HashedTable(
            unit="ngrams",
            tensor=NGRAM_TABLE,
            shape=(hashed.rows, self.width // self.spec.rows_per_token),
            hashed=hashed,
            place=place,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedTable(Table):
    """A table whose rows ``hashed`` chooses from a token and its predecessors."""

    hashed: NgramHash
    place: int

    def part(self, weight: Weight) -> Part:
        return NgramRows(self, weight)

    def rows_of(self, batch: Batch) -> Ids:
        """The row numbers of all tokens of ``batch``, each token's in order."""
        return rows_of_pass(self.hashed, batch, self.place).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class NgramRows:
    """Looks up the tokens' rows in a table in memory."""

    table: HashedTable
    weight: Weight

    def __call__(self, state: PassState) -> None:
        """Set ``state.ngrams`` to a function that returns the rows."""
        assert state.batch is not None, "rows are asked for where a pass begins"
        rows = self.table.rows_of(state.batch)
        state.ngrams = lambda: state.ops.embed(self.weight, state.step, tokens=rows)


class AddNgrams:
    """Adds a layer's n-gram embeddings to all ``count`` streams."""

    def __init__(
        self, config: DecoderConfig, own: NgramLayer, weights: WeightLoader, place: int, count: int
    ) -> None:
        hidden, width = config.hidden_size, own.width
        wide, prefix = count * hidden, f"model.layers.{own.layer}.ple."
        self.spec, self.layer = own.memory, place

        def norm(name: str) -> Vector:
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
        """Wait for the rows and add the n-gram embeddings to ``state.streams``."""
        assert state.streams is not None, "they are made before the first layer"
        assert state.ngrams is not None, "the first part of a pass asks for them"
        rows = state.ngrams()
        state.streams = cast(StreamOps, state.ops).add_ngrams(
            state.streams, rows, self.weights, self.spec, state.step, self.layer
        )
