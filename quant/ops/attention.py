"""Attention as the steps see it: its shape, behaviour and weights, ordinary and latent.

Shapes: R rows, D hidden size, H query heads, G key/value heads, E head size. Of latent attention: P
rotary size, L latent size, N a query's part without rotation, V a head's value, Q the queries'
rank. It knows no caches.

Latent attention is DeepSeek-V2's, in its absorbed form. A token is cached as one row: a rotary key
that all heads share, and a latent of low rank (64 + 512 numbers), from which each head's key and
value follow by a matrix. The key's matrix is applied to the query instead, the value's to
attention's result, so that attention itself is over one key/value head whose values are the latents
(DeepSeek-V2, 2024, section 2.1). For caches, trees, trims and the planner its spec is an
``AttentionSpec`` like any other. The compiled kernels (``quant/cpu/csrc/latent.h``) multiply each
head's rows by its own tiles, in any format; a block's keys are put into tiles for 32 queries at a
time. A prompt is computed a few rows at a time, because queries against latents are wide: this
takes 8 MB instead of hundreds.

Attention to chosen tokens (Qwen3.8-Flash-Next's QSA): an indexer scores blocks of a few tokens, and
rows see the best ones. A block's index key is the mean of its tokens' keys, normed and rotated at
the block's first token; its score for a row is the sum of the ReLU of its products with the row's
index queries. A row sees the tokens of the blocks with the best scores, within a budget, and those
after its last whole block. So the cache grows, but the keys and values read do not. The indexer's
memory is one more layer of the cache: a token's key is its own index key as projected, its value
the key of the block that it ends, or zeros. Both depend on earlier tokens, as keys and values do.
DeepSeek's indexer (DSA; GLM-5) chooses single tokens for latent attention, or blocks of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.arrays import Vector, Weight
from localrt.quant.ops.mathematics import log, turns

LATENT_SCRATCH_NBYTES = 64 << 20
"""What the compiled kernels take at most for queries against latents: they go a few at a time."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first ``2 * len(inv_freq)`` elements of a head, rotate-half order.

    ``sections`` are each pair's axis (0 time, 1 height, 2 width) in models that place pictures on
    three of them (M-RoPE); empty in others.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0  # multiplies cos and sin (YaRN's and LongRoPE's attention factor)
    # Text is placed alike on all axes: saved caches, whose names are made of this, stay valid.
    sections: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.sections and len(self.sections) != len(self.inv_freq):
            raise ValueError(f"{len(self.sections)} sections for {len(self.inv_freq)} frequencies")

    def places(
        self, positions: npt.NDArray[np.int64], axes: npt.NDArray[np.int64] | None
    ) -> npt.NDArray[np.int64]:
        """What turns the pairs of rows at ``positions`` (R,), or at ``axes`` (3, R) if they are
        given: (R, 1) if it is the same for all pairs, or (R, pairs).
        """
        if axes is None or not self.sections:
            return positions[:, None]
        return np.ascontiguousarray(axes[list(self.sections)].T)

    def turns(
        self, positions: npt.NDArray[np.int64], axes: npt.NDArray[np.int64] | None = None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cosines and sines of rows, each (R, pairs), computed in float32: see ``places``."""
        places = self.places(positions, axes)
        first = int(places.min()) // _TOGETHER * _TOGETHER
        if places.shape[1] == 1 and places.max() < first + 2 * _TOGETHER:
            cos, sin = _turns_from(self, first)
            return cos[places[:, 0] - first], sin[places[:, 0] - first]
        return self.turns_of(places)

    def turns_of(
        self, places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Those of ``places``."""
        cos, sin = turns(places.astype(np.float32) * np.asarray(self.inv_freq, np.float32))
        return cos * np.float32(self.scale), sin * np.float32(self.scale)


Needed: TypeAlias = Literal["IndexOps", "ParallelOps", "StreamOps"]
"""Protocols that an ``Ops`` may have besides (``quant/ops/protocol.py``)."""

_TOGETHER = 64  # positions whose turns are computed at once: a token's neighbours come next


@lru_cache(maxsize=16)
def _turns_from(rope: Rope, first: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    return rope.turns_of(np.arange(first, first + 2 * _TOGETHER)[:, None])


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Queries are multiplied by 1 + beta * log(1 + (position + offset) // length)."""

    beta: float
    length: int
    offset: int = field(default=0, repr=False)  # see ``AttentionSpec``

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be at least 1, is {self.length}")

    def factors(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The factors of queries at ``positions`` (R,)."""
        steps = (positions + self.offset) // self.length
        return (1 + self.beta * log(1 + steps)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shape and behaviour of one attention layer. ``window`` counts the query's own position; if
    ``chunked``, windows begin at multiples of their size.

    With ``joint_norms``, queries are normed over all heads at once, and so are keys. A layer that
    ``reads`` an earlier one's keys and values has none of its own. With ``keys_as_values``, values
    are the projected keys, before their norm and rotation. In ``gated`` attention, each head's rows
    of the query projection are followed by as many gate rows, whose sigmoid scales the head's
    result. With ``head_gates``, each head has one gate; their rows are the last of all projections.
    With ``number_gates``, each number of a head's result has one, and their rows are the last.
    ``softplus``: gates are softplus instead of sigmoid. ``norms_last``: queries and keys are normed
    after their rotation. ``unit_norms``: these norms have no weights. ``post_eps`` is that of the
    norm of the layer's result, if it differs. ``needs``: what an ``Ops`` must have for the layer.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    rope: Rope | None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False  # a learned logit per head joins the softmax and takes its share
    joint_norms: bool = False
    temperature: AttentionTemperature | None = None
    reads: int | None = None  # the number of the layer whose cache it reads
    keys_as_values: bool = False
    value_norm: bool = False  # each head's values are normed, without weights
    gated: bool = False
    head_gates: bool = False
    norms_last: bool = False
    # Not shown where older models have none: the names of saved caches are made of these.
    number_gates: bool = field(default=False, repr=False)
    softplus: bool = field(default=False, repr=False)
    unit_norms: bool = field(default=False, repr=False)
    chunked: bool = field(default=False, repr=False)
    post_eps: float | None = field(default=None, repr=False)
    needs: Needed | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, is {self.window}")
        if self.gated + self.head_gates + self.number_gates > 1:
            raise ValueError("heads have a gate each, or one for every number: not both")
        if self.norms_last and self.joint_norms:
            raise ValueError("norms of all heads at once come before their rotation")

    @property
    def has_gates(self) -> bool:
        """Whether gates scale the heads' results."""
        return self.gated or self.head_gates or self.number_gates

    @property
    def result_eps(self) -> float:
        """That of the norm of the layer's result."""
        return self.eps if self.post_eps is None else self.post_eps

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are turned; P of latent attention."""
        return 2 * len(self.rope.inv_freq) if self.rope else 0

    @property
    def last_gates(self) -> int:
        """Gate rows that follow those of queries, keys and values."""
        return self.heads * (self.head_dim if self.number_gates else self.head_gates)

    @property
    def cached_heads(self) -> int:
        """Key/value heads that the layer's own cache holds."""
        return self.kv_heads if self.reads is None else 0

    @property
    def projections(self) -> int:
        """Matrices that its input is projected by: queries, keys, values."""
        if self.reads is not None:
            return 1
        return 2 if self.keys_as_values else 3

    @property
    def projected_rows(self) -> int:
        """Rows of these and of gates: (H + 2G) * E for an ordinary layer."""
        queries = 2 * self.heads if self.gated else self.heads
        rows = (queries + (self.projections - 1) * self.kv_heads) * self.head_dim
        return rows + self.last_gates

    @property
    def value_dim(self) -> int:
        """Numbers of a value that are cached beside its key: 0 where the key holds them."""
        return self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class AttentionWeights:
    """One attention unit. ``qkv`` stacks the rows of q, k and v, as far as a layer has them."""

    norm: Vector | None  # None if the input is not normed
    qkv: Weight  # (projected_rows, D)
    out: Weight  # (D, H * E)
    qkv_bias: Vector | None = None
    out_bias: Vector | None = None
    q_norm: Vector | None = None  # (E,), before the rotary embedding; (H * E,) with joint norms
    k_norm: Vector | None = None  # (E,) or (G * E,)
    v_norm: Vector | None = None  # (E,)
    post_norm: Vector | None = None  # on the output projection's result
    sinks: Vector | None = None  # (H,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(AttentionSpec):
    """A layer of latent attention. ``kv_heads`` is 1, ``head_dim`` is that of a cached row: P + L.

    A cached row, and a query against it, is the rotary part first, then the latent. ``interleaved``
    says that the projections give rotary pairs side by side (x0, y0, x1, y1, ...); rotated, they
    are kept as halves. ``latent_eps`` is that of the norms of the latents. ``index`` is the layer's
    indexer; only ``sparse`` attention uses it, or that of a layer before.
    """

    latent: int
    nope: int
    value: int
    query_rank: int | None = None
    interleaved: bool = True
    latent_eps: float = 1e-6
    # The indexer is a layer of the cache: it is in the name of saved caches already
    index: LatentIndexSpec | None = field(default=None, repr=False)
    sparse: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)  # super() does not know a class with slots
        if self.rope is None or self.kv_heads != 1:
            raise ValueError("latent attention has rotary keys, and one of them for all heads")
        if self.index is not None and self.index.size < self.rope_dim:
            raise ValueError(f"index_head_dim is {self.index.size}, {self.rope_dim} are turned")
        if self.head_dim != self.rope_dim + self.latent:
            raise ValueError(
                f"a latent row is {self.rope_dim} rotary and {self.latent} other numbers, "
                f"head_dim is {self.head_dim}"
            )
        if self.window is not None or self.softcap is not None or self.sinks:
            raise ValueError("latent attention has neither a window nor a softcap nor sinks")

    @property
    def value_dim(self) -> int:
        """Values are the latents in the keys: none are cached."""
        return 0

    @property
    def query_rows(self) -> int:
        """Rows of the queries' (last) projection: H (N + P)."""
        return self.heads * (self.nope + self.rope_dim)

    @property
    def gate_rows(self) -> int:
        """Rows of heads' gates in the down projection: H, or 0."""
        return self.heads if self.head_gates else 0

    @property
    def row_nbytes(self) -> int:
        """Float32 bytes of a row's queries and of its heads' values: both are held at once."""
        index = self.index.row_nbytes if self.sparse and self.index else 0
        return 4 * (self.query_rows + self.gate_rows + self.heads * self.value) + index

    @property
    def down_rows(self) -> int:
        """Rows of the down projection: queries or their Q latents, heads' gates, then L + P."""
        return (self.query_rank or self.query_rows) + self.gate_rows + self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class LatentWeights:
    """One unit of latent attention.

    ``down`` stacks the rows of the queries' (first) projection, of heads' gates if there are any,
    and of the latents with the rotary keys: (Q or H (N + P), H, then L + P; D). ``key_up`` holds
    each head's matrix transposed, so that it turns a query into one against latents; ``value_up``
    turns latents into values.
    """

    norm: Vector  # (D,)
    down: Weight
    latent_norm: Vector  # (L,)
    key_up: Weight  # (H L, N)
    value_up: Weight  # (H V, L)
    out: Weight  # (D, H V)
    query_norm: Vector | None = None  # (Q,)
    query_up: Weight | None = None  # (H (N + P), Q)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedSpec(AttentionSpec):
    """A layer that sees the last ``nearest`` tokens, of ``size`` numbers, and an entry for each
    ``block`` of tokens (0: none), or the ``chosen`` best of an indexer: ``layers/compressed.py``.

    A token's row in the cache has a key, and for each size of ``entries`` an entry, and values and
    gates of each series. Results of heads are projected in ``groups``, each to ``group_rank``.
    """

    size: int
    nearest: int
    query_rank: int
    groups: int
    group_rank: int
    block: int = 0
    series: int = 1
    entries: tuple[int, ...] = ()  # attention's, and the indexer's
    index_heads: int = 0
    chosen: int = 0

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)  # super() does not know a class with slots
        if self.heads * self.size % self.groups:
            raise ValueError(f"{self.groups} groups do not divide {self.heads} heads")
        if min((self.size, *self.entries)) < self.rope_dim:
            raise ValueError(
                f"a head or the indexer's has fewer than {self.rope_dim} rotary numbers"
            )

    @property
    def columns(self) -> list[slice]:
        """Where a token's row has the entry of each size; values and gates are behind it."""
        widths = [(1 + 2 * self.series) * size for size in self.entries]
        firsts = accumulate(widths[:-1], initial=self.size)
        return [slice(n, n + size) for n, size in zip(firsts, self.entries, strict=False)]

    @property
    def value_dim(self) -> int:
        """Keys are values: none are cached."""
        return 0

    @property
    def row_nbytes(self) -> int:
        """Float32 bytes of a row of a pass, about."""
        return 8 * (self.head_dim + self.query_rank + 2 * self.heads * self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec(AttentionSpec):
    """An indexer, as a layer of the cache. ``budget`` tokens are chosen, in blocks of ``block``."""

    block: int
    budget: int
    needs: Needed | None = field(default="IndexOps", repr=False)

    def __post_init__(self) -> None:
        AttentionSpec.__post_init__(self)  # super() does not know a class with slots
        if self.kv_heads != 1:
            raise ValueError(f"indexer_kv_heads must be 1, is {self.kv_heads}")
        if self.block < 1 or self.budget < self.block or self.budget % self.block:
            raise ValueError(
                f"an indexer's budget must be a multiple of its blocks of {self.block} tokens, is "
                f"{self.budget}"
            )

    @property
    def most_blocks(self) -> int:
        """The most blocks chosen."""
        return self.budget // self.block

    @property
    def most_tokens(self) -> int:
        """The most tokens that a row sees: chosen blocks', and those of a partial block."""
        return self.budget + self.block - 1

    @property
    def projected_rows(self) -> int:
        """Rows of ``IndexWeights.qk``."""
        return (self.heads + 1) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentIndexSpec(IndexSpec):
    """The indexer of latent attention, with keys of ``size`` numbers: ``layers/compressed.py``.

    A token's row in the cache is its key; where it chooses blocks, a gate for each number and the
    key of the block that the token ends follow. ``longest`` is the context, in tokens.
    """

    size: int
    longest: int = field(repr=False)

    @property
    def value_dim(self) -> int:
        """None are cached."""
        return 0

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row of a pass, about: what it sees is marked, and listed by the kernels."""
        return 6 * self.longest + 4 * self.projected_rows


HOST_SPECS = (CompressedSpec, LatentIndexSpec)
"""What is computed on the host, whose rows in the cache are bf16."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class IndexWeights:
    """One indexer; ``qk`` stacks the rows of its queries and of its key."""

    qk: Weight  # (projected_rows, D)
    q_norm: Vector  # (E,)
    k_norm: Vector  # (E,), of a block's mean


RUN = 256
"""Keys of a run: RUN in quant/cuda/src/attention.cuh."""
_MOST_ROWS = 64  # the most rows that are split: MOST_ROWS of the products
_MOST_NBYTES = 32 << 20


# A GPU splits the keys that few rows see into runs, each of which gives a row's result and two
# numbers for each head, in float32; they are joined afterwards.


def run_nbytes(runs: int, heads: int, value: int) -> int:
    """Bytes of a row's results, of ``value`` numbers, over all runs of keys."""
    return runs * heads * (value + 2) * 4


def rows_together(rows: int, nbytes: int) -> int:
    """How many of ``rows`` rows to take at once, so that with ``nbytes`` each they stay small."""
    return max(1, min(rows, _MOST_NBYTES // nbytes))


def scratch_nbytes(heads: int, value: int, longest: int) -> int:
    """The most that a GPU's passes take over caches of up to ``longest`` tokens."""
    row = run_nbytes(-(-longest // RUN), heads, value)
    return row * rows_together(_MOST_ROWS, row)
