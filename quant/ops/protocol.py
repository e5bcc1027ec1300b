"""The contract of the implementations: the few fused steps that architectures are written with.

An architecture hands weights in once (``weight``, ``vector``), then passes opaque arrays from step
to step. Implementations decide dtype, device, fusion and memory layout. Nothing here knows file
formats, sampling or text.

Shapes below: R rows (tokens of one pass, sequences one after another), D hidden size, H query
heads, G key/value heads, E head size, V vocabulary, K experts of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.common.errors import LocalrtError
from localrt.quant.formats.packed import Floats, Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor
from localrt.quant.ops.adapters import AdapterTable, Mix
from localrt.quant.ops.arrays import (
    Array,
    Hidden,
    Pass,
    Vector,
    Weight,
)
from localrt.quant.ops.attention import (
    AttentionSpec,
    AttentionWeights,
    IndexSpec,
    IndexWeights,
    LatentSpec,
    LatentWeights,
)
from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertTable,
    HostShare,
    RouterSpec,
    RouterWeights,
    Routing,
    SharedLayers,
)
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights
from localrt.quant.ops.streams import (
    ConnectionWeights,
    InputGateSpec,
    InputGateWeights,
    InputProjection,
    NgramWeights,
)

Activation = Literal["silu", "gelu_tanh", "relu2", "xielu", "swiglu"]
UNGATED = ("relu2", "xielu")
"""Activations of MLPs without a gate."""

LayerSpec: TypeAlias = AttentionSpec | RecurrentSpec
"""What a layer remembers of a sequence: keys and values of each token, or a state."""

Check: TypeAlias = Callable[[], None]
"""Called between the parts of a pass, and while it waits; raises to abandon it."""

Forward: TypeAlias = Callable[..., npt.NDArray[np.float32]]
"""A decoder's ``forward``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """Behaviour of an MLP: gated, except for ``relu2``, the squared ReLU, and ``xielu``.

    Gates are multiplied by ``gate_scale``; ``limit`` is that of ``ExpertSpec``. ``post_eps`` is
    that of the norm of the result, if it differs.

    ``xielu`` (Huang and Schlag, 2024) is ``alpha_p x² + beta x`` for positive numbers, and
    ``alpha_n (exp(min(x, eps)) - 1 - x) + beta x`` for others; ``curve`` is alpha_p, alpha_n, beta
    and eps, which each layer learns.
    """

    activation: Activation
    eps: float
    gate_scale: float = 1.0
    limit: float = math.inf
    curve: tuple[float, float, float, float] = (0.0,) * 4
    post_eps: float | None = None

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.activation not in UNGATED

    @property
    def result_eps(self) -> float:
        """That of the norm of the result."""
        return self.eps if self.post_eps is None else self.post_eps


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class MlpWeights:
    """One MLP unit. ``gate_up`` stacks the rows of gate and up, (2F, D), or is up alone, (F, D).

    Without a ``norm`` its input is used as is: shared experts get normed rows, and some
    architectures only norm results.
    """

    norm: Vector | None
    gate_up: Weight
    down: Weight  # (D, F)
    post_norm: Vector | None = None


class HostRows(Protocol):
    """The host's rows of an MLP that a GPU computes the others of, from the first on."""

    def begin(self, check: Callable[[], None] | None) -> None:
        """The GPU gets its products with the pieces from now on, until ``down``."""

    def gate(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """What down multiplies, of the residual stream ``x`` (R, D): (R, its rows of gate)."""

    def down(self, inner: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The products with all of those, ``inner`` (R, F): (R, its rows of down)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of a pass that extend one sequence.

    ``mask`` (rows, extra + rows) says which new rows, and which of the last ``extra`` held tokens,
    a new row sees; the latter are a tree's rows of earlier passes. None is causal. Every new row
    sees all tokens held before those, within the layer's window. Of a mask's rows, a row sees its
    ancestors in the tree, in order, and itself.

    ``ahead`` (rows,), without a mask, is how many of the new rows behind it a row sees too: a
    picture's, which see one another. They do not move its window. ``windows_only``: only in
    layers that have one.
    """

    cache: KVCache
    rows: int
    mask: npt.NDArray[np.bool_] | None = None
    ahead: npt.NDArray[np.int32] | None = None
    windows_only: bool = False

    def paths(self) -> list[npt.NDArray[np.int64]]:
        """Of each row the places in the cache of the tokens that it sees, itself last."""
        held, whole = self.cache.length, np.arange(self.cache.length + self.rows)
        if self.mask is None:
            return [whole[: held + row + 1] for row in range(self.rows)]
        base = len(whole) - self.mask.shape[1]
        return [np.concatenate([whole[:base], base + np.flatnonzero(row)]) for row in self.mask]


@dataclass(frozen=True, slots=True, eq=False)
class PictureRows:
    """Picture rows of a pass: ``rows`` (n, D) replace the embeddings of the rows ``index`` (n,);
    each of ``deep`` (n, D) is added to these rows of the residual stream after one of the first
    layers.
    """

    index: npt.NDArray[np.int64]
    rows: npt.NDArray[np.float32]
    deep: tuple[npt.NDArray[np.float32], ...] = ()


BEST_COUNT = 64
BEST = np.dtype([("token", "<i4"), ("value", "<f4")])
"""The best of a row's logits, by descending value, ties by token, NaN first. If a ``Batch`` is
``best_only``, its logits (n, V) may be an array (n, 64) of these; narrower if V is less.
"""


def is_best(logits: npt.NDArray[Any]) -> bool:
    """Whether these are ``BEST``."""
    return logits.dtype.names is not None


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one pass. ``positions`` are the rotary positions; ``axes`` (3, R) those of time,
    height and width, where pictures make them differ. ``best_only``: its logits may be ``BEST``.
    """

    tokens: npt.NDArray[np.int64]  # (R,)
    positions: npt.NDArray[np.int64]  # (R,)
    spans: tuple[Span, ...]
    pictures: PictureRows | None = None
    axes: npt.NDArray[np.int64] | None = None
    best_only: bool = False

    @property
    def plain(self) -> bool:
        """Whether it has tokens alone: a pass with pictures is not recorded."""
        return self.pictures is None and self.axes is None

    def __post_init__(self) -> None:
        rows = sum(span.rows for span in self.spans)
        if not rows == len(self.tokens) == len(self.positions):
            raise ValueError(f"spans hold {rows} rows, tokens {len(self.tokens)}")

    @property
    def mixes(self) -> list[tuple[Mix, int]]:
        """The adapters of each sequence, and its rows."""
        return [(span.cache.mix, span.rows) for span in self.spans]

    @classmethod
    def extend(cls, sequences: Sequence[tuple[KVCache, Sequence[int]]]) -> Batch:
        """Each sequence's next tokens, causally, at the positions that follow its cache."""
        tokens = np.concatenate([np.asarray(ids, np.int64) for _, ids in sequences])
        positions = np.concatenate(
            [np.arange(cache.length, cache.length + len(ids)) for cache, ids in sequences]
        )
        return cls(tokens, positions, tuple(Span(cache, len(ids)) for cache, ids in sequences))


def ranges(spans: Sequence[Span]) -> Iterator[tuple[int, int, Span]]:
    """First row, end, span."""
    first = 0
    for span in spans:
        yield first, first + span.rows, span
        first += span.rows


class PassLostError(LocalrtError):
    """A pass has no results, but nothing is broken: it can be computed again."""


RECORDED_PARTS = 96
"""Parts of a segment, and those of new ones that are recorded in one pass, at most: recording takes
the host about a millisecond for four.
"""


class Recorder(Protocol):
    """Records segments of a pass's steps, and replays each with one launch when it recurs.

    A recording reads weights at their old places: after moving them, call ``forget``. In one pass
    at most ``most_new`` parts are recorded, as it is waited for.
    """

    most_new: int
    while_waiting: Callable[[], None] | None
    """Called in each pass that gives logits, before the host waits for them."""

    def begin(self, batch: Batch, logit_rows: Sequence[int]) -> Pass:
        """``Ops.begin``, for a pass that gives the logits of ``logit_rows``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that recordings take, as measured."""

    def takes(self, step: Pass | None, key: object, parts: int) -> bool:
        """Whether to ``run`` a segment of ``parts`` parts in this pass, the latest begun, and not
        its steps one by one: it is recorded, or may be now.
        """

    def run(
        self,
        step: Pass,
        x: Hidden,
        key: object,
        body: Callable[[Pass, Hidden], Hidden],
        check: Check | None = None,
    ) -> npt.NDArray[np.float32] | None:
        """Apply ``body`` to ``x`` in place; ``key`` names the segment in passes of one kind.

        Returns the logits of ``logit_rows`` if the segment has the head. ``body`` is not called if
        it was recorded before, and must keep no state. ``check`` is for what the host does in it.
        """

    def share(self, rows: Array, routing: Routing, table: ExpertTable) -> HostShare | None:
        """Within ``body``: begin to share a layer's experts with the host, which gets the rows and
        the choice; None where nothing is recorded.
        """

    def forget(self, key: object | None = None) -> None:
        """Drop the recordings of a segment, or all, between passes: its weights have moved."""


class BaseOps(Protocol):
    """The steps that every model needs."""

    @property
    def name(self) -> str:
        """``"native"``, ``"torch"`` or ``"cuda"``."""

    @property
    def device(self) -> str:
        """``"cpu"``, ``"cuda:0"``."""

    @property
    def compute_format(self) -> str:
        """How matrices are kept and multiplied: ``"f32"``, ``"bf16"``, ``"packed"`` (as stored)."""

    @property
    def exact_rows(self) -> int:
        """The most rows of a pass that have the bits that they would have one by one, in a chain or
        in a tree; 1 if that is not promised.
        """

    @property
    def fresh_passes(self) -> int:
        """Passes on the device so far that took longer than later ones of their shape will: it was
        new, or was recorded.
        """

    @property
    def adapters(self) -> AdapterTable[Any] | None:
        """The adapters that are added to products, by sequence; None if unsupported."""

    def scope(self) -> AbstractContextManager[object]:
        """Held around every pass and around loading (torch: inference mode)."""

    def free_memory(self) -> int | None:
        """Bytes free on the device's own memory; None where it computes in RAM."""

    def graphed(self, forward: Forward) -> Forward:
        """``forward``, or a faster way to run the same pass (CUDA graphs, recorded calls).

        The weights must stay where they are.
        """

    def recorder(self) -> Recorder | None:
        """A recorder for segments of a pass; None if recording is not faster."""

    # -- weights, once ---------------------------------------------------------------------------

    def weight(
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> Weight:
        """A matrix from consecutive row blocks, which are read and converted one at a time.

        A store's matrices come whole, as tiles.
        """

    def vector(self, values: npt.NDArray[np.float32]) -> Vector:
        """A norm weight or bias, (n,)."""

    def weight_nbytes(self, shape: tuple[int, int], format: Format) -> int:
        """Bytes that a matrix stored in ``format`` takes once loaded: for estimates before."""

    def in_place(self, format: Format, columns: int) -> bool:
        """Whether a matrix's tiles on the device are computed on: new bytes there change it."""

    def kv_nbytes(self, layers: Sequence[LayerSpec], length: int) -> int:
        """Bytes of a cache that has grown to ``length`` tokens."""

    def kv_cache(self, layers: Sequence[LayerSpec], capacity: int) -> KVCache:
        """An empty cache for one sequence. Each kind of layer is numbered on its own."""

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
        each: int = 1,
    ) -> Hidden:
        """Rows of ``table`` for the batch's tokens: (R, D).

        ``tokens`` (R,) replaces them if the table is not the whole vocabulary's. A table with
        ``each`` rows per token gives them one after another, (R * each, D); a missing token gets
        the first token's.
        """

    def begin_adapters(self, batch: Batch) -> None:
        """The adapter part of ``begin``, if only a pass's products are computed here."""

    def adapt_tokens(self, x: Hidden, step: Pass, scale: float) -> Hidden:
        """x (R, D), rows of the embedding times ``scale``, plus adapters' changes."""

    def norm_qkv_rope_append(
        self,
        x: Hidden,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: Pass,
        layer: int,
    ) -> Array:
        """RMSNorm, QKV projection, per-head norms, rotary; keys and values go to the caches.

        Returns the queries, (R, H, E), times the spec's temperature; gated attention's gates
        follow, (2R, H, E) in all.
        """

    def attention_output(
        self,
        q: Array,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: Pass,
        layer: int,
    ) -> Array:
        """Attention over each row's sequence, output projection: (R, D). ``q`` is given up."""

    def norm_latent_append(
        self,
        x: Hidden,
        weights: LatentWeights,
        spec: LatentSpec,
        step: Pass,
        layer: int,
    ) -> Array:
        """``norm_qkv_rope_append`` of latent attention; the rows' latents go to the caches.

        Returns the queries as ``latent_output`` takes them: R rows, the rest is up to the
        implementation.
        """

    def latent_output(
        self,
        q: Array,
        weights: LatentWeights,
        spec: LatentSpec,
        step: Pass,
        layer: int,
    ) -> Array:
        """Attention over latents, each head's values, output projection: (R, D).

        ``q`` is given up.
        """

    def norm_recurrent(
        self,
        x: Hidden,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        step: Pass,
        layer: int,
    ) -> Array:
        """RMSNorm, a recurrent layer over each row's sequence, output projection: (R, D)."""

    def norm_gated_mlp(self, x: Hidden, weights: MlpWeights, spec: MlpSpec) -> Array:
        """RMSNorm, ``down(activation(gate(x)) * up(x))``: (R, D); without a gate,
        ``down(activation(up(x)))``.
        """

    def norm(self, x: Hidden, weight: Vector, eps: float) -> Hidden:
        """RMSNorm of a step's result (R, D), which may be overwritten."""

    def norm_sum(self, y: Array, more: Array | None, weight: Vector, eps: float) -> Array:
        """RMSNorm of a step's result y (R, D), plus ``more`` if given; y may be overwritten."""

    # -- layers' own inputs ----------------------------------------------------------------------

    def project_inputs(self, x: Hidden, rows: Hidden, weights: InputProjection) -> Hidden:
        """All layers' inputs, (R, L * P): a table's ``rows`` (R * L, P), which may be overwritten,
        plus the projected embeddings ``x`` (R, D).
        """

    def gate_inputs(
        self,
        x: Hidden,
        inputs: Hidden,
        weights: InputGateWeights,
        spec: InputGateSpec,
    ) -> Array:
        """Gate one layer's part of ``inputs`` and project it: (R, D)."""

    # -- a draft head, which reads another model's features ----------------------------------------

    def given_rows(self, values: npt.NDArray[np.float32]) -> Hidden:
        """Another model's features (R, F), from the host, as a residual stream."""

    def joined_norms(
        self, x: Hidden, y: Hidden, norms: tuple[Vector | None, Vector | None], eps: float
    ) -> Hidden:
        """RMSNorm of x (R, D) and of y (R, F), where it has a weight, side by side: (R, D + F).

        ``x`` and ``y`` stay as they are.
        """

    def projected(self, x: Hidden, weight: Weight) -> Hidden:
        """x (R, F) times ``weight`` (D, F), a new residual stream: (R, D)."""

    # -- sums and logits -------------------------------------------------------------------------

    def add(self, x: Hidden, y: Array, scale: float = 1.0, total: float = 1.0) -> Hidden:
        """The residual sum ``(x + scale * y) * total``.

        ``x`` may become the result and ``y`` be reused: both may be overwritten.
        """

    def head(
        self,
        x: Hidden,
        rows: npt.NDArray[np.intp],
        norm: Vector | None,
        eps: float,
        weight: Weight,
        softcap: float | None = None,
        first_row: int = 0,
    ) -> npt.NDArray[np.float32]:
        """Final norm and vocabulary projection of the chosen rows: (len(rows), V) on the host.

        The weight's rows are the vocabulary's from ``first_row`` on.
        """


class ExpertOps(Protocol):
    """The steps of a mixture of experts."""

    def expert_table(self, count: int) -> ExpertTable:
        """An empty table of a layer with ``count`` experts."""

    def norm_route(
        self, x: Hidden, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Array, Routing]:
        """RMSNorm of ``x`` (R, D), and the experts chosen for each normed row; returns both.

        The router is computed in float32 whatever the compute format. Non-finite logits give
        non-finite weights: the caller checks.
        """

    def expert_slots(self, normed: Array, routing: Routing) -> Array:
        """Room for the result of every slot: (R * K, D), not initialized."""

    def run_experts(
        self,
        normed: Array,
        routing: Routing,
        table: ExpertTable,
        spec: ExpertSpec,
        slots: Array,
        experts: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Fill the slots of ``experts`` (default: all chosen ones), which must be in the table."""

    def put_slots(self, slots: Array, index: npt.NDArray[np.intp], rows: Array | Hidden) -> Array:
        """``slots`` with those of ``index`` (n,) replaced by ``rows`` (n, D); it is given up."""

    def weigh_rows(self, normed: Array, routing: Routing) -> Array:
        """Rows (R, D) times the weight of their only expert; ``normed`` stays as it is."""

    def combine_experts(
        self, slots: Array, routing: Routing, shared: Array | None, *, weighted: bool = True
    ) -> Array:
        """Every row's slots times their weights, summed in the order of k, plus ``shared``: (R, D).

        Weights are 1 if not ``weighted``. ``slots`` and ``shared`` are given up.
        """

    def latent_rows(self, normed: Array, weight: Weight) -> Array:
        """The experts' inputs if they are projected from normed rows: (R, L)."""

    def widen_latents(self, rows: Array, weight: Weight, shared: Array | None) -> Array:
        """Such experts' results (R, L) projected to (R, D), plus ``shared``.

        Both may be overwritten.
        """

    def shared_mlp(
        self,
        normed: Array,
        weights: MlpWeights,
        spec: MlpSpec,
        gate: Weight | None,
    ) -> Array:
        """An MLP on rows that are normed already: (R, D).

        ``gate`` (1, D) scales each row of the result by the sigmoid of its product with the row.
        """


class Ops(
    BaseOps,
    ExpertOps,
    Protocol,
):
    """One implementation of the compute steps on one device. Used by one thread at a time.

    A caller does not look into its arrays (``quant/ops/arrays.py``). It may have the protocols
    below, too: the layers that need one name it (``AttentionSpec.needs``), and ``quant/choose.py``
    says what a GPU's implementation lacks.
    """


ImplementationT = TypeVar("ImplementationT")


def implementation(ops: Ops, kind: type[ImplementationT]) -> ImplementationT:
    """``ops`` for those who know that it is of this ``kind``."""
    assert isinstance(ops, kind), f"it is not of {kind.__name__}"
    return ops


class StreamOps(Protocol):
    """The steps of models with several residual streams."""

    def repeat_stream(self, x: Hidden, count: int) -> Array:
        """x (R, D) as each of so many streams."""

    def read_streams(
        self, streams: Array, weights: ConnectionWeights
    ) -> tuple[Hidden, Array | None]:
        """A layer's input from all streams (R, D), and each stream's share of its output (R, S),
        None without a matrix for it. The streams stay as they are.
        """

    def share_out(self, streams: Array, y: Array, shares: Array) -> Array:
        """Add to each stream its share of y (R, D); both may be overwritten."""

    def add_ngrams(
        self,
        streams: Array,
        rows: Hidden,
        weights: NgramWeights,
        spec: RecurrentSpec,
        step: Pass,
        layer: int,
    ) -> Array:
        """Add ``rows`` (R * H, E / H) of hashed n-grams to the streams, in place."""


class IndexOps(Protocol):
    """The steps of attention to tokens that an indexer chooses."""

    def choose_tokens(
        self,
        x: Hidden,
        weights: IndexWeights,
        spec: IndexSpec,
        step: Pass,
        layer: int,
    ) -> Any:
        """The tokens that each row sees, for ``chosen_output``; ``x`` (R, D) is read as it is.

        The indexer's keys go to the caches.
        """

    def chosen_output(
        self,
        q: Array,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: Pass,
        layer: int,
        chosen: Any,
    ) -> Array:
        """``Ops.attention_output`` over the tokens ``chosen`` of each row's sequence."""


class ParallelOps(Protocol):
    """The step of blocks whose attention and MLP read the same normed rows."""

    def layer_norm(self, x: Hidden, weight: Vector, eps: float, *, centered: bool = True) -> Hidden:
        """LayerNorm without a bias, or RMSNorm if not ``centered``: new rows, x (R, D) stays."""


class SplitOps(Protocol):
    """What a GPU's ``Ops`` may have: MLPs that it shares with the host."""

    def norm_split_mlp(
        self,
        x: Hidden,
        pieces: Sequence[MlpWeights],
        spec: MlpSpec,
        host: HostRows | None,
    ) -> Array:
        """``norm_gated_mlp`` where each of ``pieces`` has some rows of gate, up and down, one after
        another, and the first one the norms. ``host`` has the last rows, if any, and computes them
        meanwhile.
        """


class HostOps(Protocol):
    """What the CPU's ``Ops`` have for its part of layers that a GPU computes too."""

    def shared_layers(
        self, layers: Sequence[tuple[HostShare, ExpertTable, ExpertSpec]]
    ) -> SharedLayers:
        """The host's part of the recorded layers of one graph."""

    def norm_gate_rows(self, x: Floats, weights: MlpWeights, spec: MlpSpec) -> Floats:
        """What down multiplies: (R, rows of gate)."""

    def projected(self, x: Floats, weight: Weight) -> Floats:
        """x (R, D) times the weight's rows: (R, rows)."""
