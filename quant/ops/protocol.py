"""The compute room's contract: the few fused steps that an architecture is written against.

An architecture hands weights in once (``weight``, ``vector``), then passes opaque arrays from step
to step. Implementations (torch today) decide dtype, device, fusion and memory layout. Nothing here
knows file formats, sampling or text.

Shapes below: R rows (tokens of one pass, sequences one after another), D hidden size, H query
heads, G key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.quant.formats.packed import Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor
from localrt.quant.ops.experts import ExpertOps

if TYPE_CHECKING:
    from localrt.quant.ops.latent import LatentSpec, LatentWeights

__all__ = [
    "Activation",
    "Array",
    "AttentionSpec",
    "AttentionWeights",
    "Batch",
    "KVCache",
    "MlpSpec",
    "MlpWeights",
    "Ops",
    "Pass",
    "Rope",
    "Span",
    "Vector",
    "Weight",
]

# Opaque to everything above an implementation.
Array: TypeAlias = Any  # activations, (R, ...)
Weight: TypeAlias = Any  # a matrix as the implementation keeps it, (out, in)
Vector: TypeAlias = Any  # a norm weight or a bias, (n,)
Pass: TypeAlias = Any  # what an implementation derives once from a Batch

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first ``2 * len(inv_freq)`` elements of a head, rotate-half order."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0  # multiplies cos and sin (YaRN's and LongRoPE's attention factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Shape and behaviour of one attention layer. ``window`` counts the query's own position.

    With ``joint_norms``, queries are normed over all heads at once, and so are keys.
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

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, is {self.window}")

    @property
    def value_dim(self) -> int:
        """Numbers of a value that are cached beside its key: 0 where the key holds them."""
        return self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """One attention unit. ``qkv`` stacks the rows of q, k and v: ((H + 2G) * E, D)."""

    norm: Vector
    qkv: Weight
    out: Weight  # (D, H * E)
    qkv_bias: Vector | None = None
    out_bias: Vector | None = None
    q_norm: Vector | None = None  # (E,), before the rotary embedding; (H * E,) with joint norms
    k_norm: Vector | None = None  # (E,) or (G * E,)
    post_norm: Vector | None = None  # on the output projection's result
    sinks: Vector | None = None  # (H,)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Behaviour of a gated MLP."""

    activation: Activation
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """One gated MLP unit. ``gate_up`` stacks the rows of gate and up: (2F, D).

    Without a ``norm`` its input is normed already: experts that every row sees.
    """

    norm: Vector | None
    gate_up: Weight
    down: Weight  # (D, F)
    post_norm: Vector | None = None


class KVCache(Protocol):
    """Keys and values of one sequence over all layers: contiguous, growing in steps, trimmable."""

    @property
    def length(self) -> int:
        """Tokens held."""

    @property
    def capacity(self) -> int:
        """The most tokens it may ever hold."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens in all; keeps what is held."""

    def advance(self, count: int) -> None:
        """Count ``count`` rows that a finished pass has written as held."""

    def trim(self, length: int) -> None:
        """Forget every token from ``length`` on."""

    def select(self, first: int, rows: Sequence[int]) -> None:
        """Keep token ``first + rows[i]`` as token ``first + i``, and no other from ``first`` on.

        ``rows`` ascend from 0: the accepted path of a tree whose rows begin at ``first``.
        """


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a pass that extend one sequence.

    ``mask`` (rows, extra + rows) says what a new row sees of the new rows and of the last ``extra``
    tokens held, which are a tree's rows of earlier passes (``extra`` is 0 on Triton); None is
    causal. Every new row sees all that the cache held before, within the layer's window. What a row
    sees of a mask's rows are its ancestors in a tree, in their order, and itself.
    """

    cache: KVCache
    rows: int
    mask: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one pass. ``positions`` are the rotary positions."""

    tokens: npt.NDArray[np.int64]  # (R,)
    positions: npt.NDArray[np.int64]  # (R,)
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        rows = sum(span.rows for span in self.spans)
        if not rows == len(self.tokens) == len(self.positions):
            raise ValueError(f"spans hold {rows} rows, tokens {len(self.tokens)}")

    @classmethod
    def extend(cls, sequences: Sequence[tuple[KVCache, Sequence[int]]]) -> Batch:
        """Each sequence's next tokens, causally, at the positions that follow its cache."""
        tokens = np.concatenate([np.asarray(ids, np.int64) for _, ids in sequences])
        positions = np.concatenate(
            [np.arange(cache.length, cache.length + len(ids)) for cache, ids in sequences]
        )
        return cls(tokens, positions, tuple(Span(cache, len(ids)) for cache, ids in sequences))


class Ops(ExpertOps, Protocol):
    """One implementation of the compute steps on one device. Used by one thread at a time."""

    @property
    def name(self) -> str:
        """``"native"`` or ``"torch"``."""

    @property
    def device(self) -> str:
        """``"cpu"``, ``"cuda:0"``."""

    @property
    def compute_format(self) -> str:
        """How matrices are kept and multiplied: ``"f32"``, ``"bf16"``, ``"packed"`` (as stored)."""

    def scope(self) -> AbstractContextManager[Any]:
        """Held around every pass and around loading (torch: inference mode)."""

    def free_memory(self) -> int | None:
        """Bytes free on the device's own memory; None where it computes in RAM."""

    # -- weights, once ---------------------------------------------------------------------------

    def weight(
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> Weight:
        """A matrix from consecutive row blocks, which are read and converted one at a time.

        A store's matrices come as tiles, each of them whole.
        """

    def vector(self, values: npt.NDArray[np.float32]) -> Vector:
        """A norm weight or bias, (n,)."""

    def weight_nbytes(self, shape: tuple[int, int], format: Format) -> int:
        """Bytes that a matrix stored in ``format`` takes once loaded: for estimates before."""

    def kv_nbytes(self, layers: Sequence[AttentionSpec], length: int) -> int:
        """Bytes of a cache that has grown to ``length`` tokens."""

    def kv_cache(self, layers: Sequence[AttentionSpec], capacity: int) -> KVCache:
        """An empty cache for one sequence."""

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> Pass:
        """Reserve cache room and derive what all layers share (rotary tables, masks)."""

    def embed(
        self,
        table: Weight,
        step: Pass,
        scale: float = 1.0,
        *,
        tokens: npt.NDArray[np.int64] | None = None,
    ) -> Array:
        """Rows of ``table`` for the batch's tokens: (R, D).

        ``tokens`` (R,) takes their place where the table is not the whole vocabulary's.
        """

    def norm_qkv_rope_append(
        self, x: Array, weights: AttentionWeights, spec: AttentionSpec, step: Pass, layer: int
    ) -> Array:
        """RMSNorm, QKV projection, per-head norms, rotary; keys and values go to the caches.

        Returns the queries, (R, H, E).
        """

    def attention_output(
        self, q: Array, weights: AttentionWeights, spec: AttentionSpec, step: Pass, layer: int
    ) -> Array:
        """Attention over each row's sequence, output projection: (R, D). ``q`` is given up."""

    def norm_latent_append(
        self, x: Array, weights: LatentWeights, spec: LatentSpec, step: Pass, layer: int
    ) -> Array:
        """``norm_qkv_rope_append`` of latent attention; the rows' latents go to the caches.

        Returns the queries as ``latent_output`` takes them: R rows, the rest is up to the
        implementation.
        """

    def latent_output(
        self, q: Array, weights: LatentWeights, spec: LatentSpec, step: Pass, layer: int
    ) -> Array:
        """Attention over latents, each head's values, output projection: (R, D).

        ``q`` is given up.
        """

    def norm_gated_mlp(self, x: Array, weights: MlpWeights, spec: MlpSpec) -> Array:
        """RMSNorm, ``down(activation(gate(x)) * up(x))``: (R, D)."""

    def add(self, x: Array, y: Array, scale: float = 1.0) -> Array:
        """The residual sum ``x + scale * y``.

        ``x`` may become the result, ``y`` a later array: both are given up.
        """

    def head(
        self,
        x: Array,
        rows: npt.NDArray[np.intp],
        norm: Vector,
        eps: float,
        weight: Weight,
        softcap: float | None = None,
    ) -> npt.NDArray[np.float32]:
        """Final norm and vocabulary projection of the chosen rows: (len(rows), V) on the host."""
