"""The parts of a pass: embedding, attention, gated MLP, and slices of the head.

A part runs on an ``Ops``, never looks inside an array, and has its weights in memory: the
``WeightStore`` waits for them. ``block.py`` composes parts. Latent attention is in
``attention.py``, mixtures of experts in ``moe.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig, Layer, Part
from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import (
    Array,
    Features,
    Hidden,
    Pass,
    Vector,
    Weight,
    copy_to_host,
    large_floats,
)
from localrt.quant.ops.attention import AttentionSpec, AttentionWeights
from localrt.quant.ops.mathematics import exp, log
from localrt.quant.ops.protocol import Batch, Check, HostRows, MlpWeights, Ops, SplitOps, is_best

Logits = npt.NDArray[np.float32]


NOT_YET = cast(Hidden, None)
"""The hidden states before the first part has run."""


@dataclass(slots=True, eq=False)
class PassState:
    """The state of a pass, handed from part to part.

    ``x`` (R, D) is the residual stream in the form of ``ops``, ``step`` what ``ops`` derived from
    the ``batch``, which captured graphs do not need. ``inputs`` are the per-layer inputs, or the
    rows that a layer's MLP reads instead of ``x``. ``streams`` are several residual streams; ``x``
    is then a layer's mixture of them. ``ngrams`` returns the rows of hashed
    n-grams and may wait for them. The head fills ``logits`` (logit rows, V) for ``logit_rows`` of
    ``x``. ``check`` is called while a part waits, and may raise. ``features`` are to be filled; a
    draft head reads ``target_features`` (R, F) of its target. Of ``chosen``, a step, rows see what
    an indexer chose.
    """

    ops: Ops
    step: Pass
    x: Hidden = NOT_YET
    logit_rows: npt.NDArray[np.intp] = field(default_factory=lambda: np.arange(0))
    logits: Logits | None = None
    inputs: Hidden | None = None
    streams: Array | None = None
    ngrams: Callable[[], Hidden] | None = None
    batch: Batch | None = None
    check: Check | None = None
    features: Features | None = None
    target_features: Logits | None = None
    chosen: Pass | None = None

    def tap(self, layer: int) -> None:
        """Copy ``x`` to the features of ``layer``, if they are wanted."""
        out = None if self.features is None else self.features.of(layer)
        if out is not None:
            self.copy_features(out)

    def copy_features(self, out: Logits) -> None:
        """Copy ``x`` to ``out`` (R, D) on the host."""
        copy_to_host(self.x, out)


@dataclass(frozen=True, slots=True, eq=False)
class Tap:
    """Where a layer begins: its input may be wanted."""

    layer: int

    def __call__(self, state: PassState) -> None:
        """Leave ``state.x`` as it is."""
        if state.features is not None:
            state.tap(self.layer)


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """``(x + scale * layer(x)) * total``: adds attention or an MLP to the residual stream."""

    layer: Layer
    scale: float = 1.0
    total: float = 1.0

    def __call__(self, state: PassState) -> None:
        """Update ``state.x``."""
        state.x = state.ops.add(state.x, self.layer(state), self.scale, self.total)

    def matrices(self) -> dict[str, Weight]:
        return self.layer.matrices()


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide:
    """Parallel layers: all read the same residual stream."""

    parts: tuple[Residual, ...]

    def __call__(self, state: PassState) -> None:
        """Add their outputs to ``state.x``, in order."""
        given = [part.layer(state) for part in self.parts]
        for part, rows in zip(self.parts, given, strict=True):
            state.x = state.ops.add(state.x, rows, part.scale, part.total)

    def matrices(self) -> dict[str, Weight]:
        """The matrices of all layers; see ``Layer``."""
        return {name: each for part in self.parts for name, each in part.matrices().items()}


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Parts of one unit, run in order."""

    parts: tuple[Part, ...]

    def __call__(self, state: PassState) -> None:
        """Run all of them."""
        for part in self.parts:
            part(state)


def joined(parts: Sequence[Part]) -> Part:
    """Join parts of one unit into one part."""
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Looks up rows of an embedding table in memory."""

    table: Weight
    scale: float

    def __call__(self, state: PassState) -> None:
        """Set ``state.x`` to the batch's token embeddings."""
        rows = state.ops.embed(self.table, state.step, self.scale)
        state.x = state.ops.adapt_tokens(rows, state.step, self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """Norms the residual stream itself."""

    weight: Vector
    eps: float

    def __call__(self, state: PassState) -> None:
        """Replace ``state.x``."""
        state.x = state.ops.norm(state.x, self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class FromPictures:
    """Where a layer begins: a pass may have rows from pictures, in the place of embeddings or
    behind the first layers.
    """

    layer: int

    def __call__(self, state: PassState) -> None:
        """Change the rows that pictures give ``state.x``, if any."""
        batch = state.batch
        pictures = None if batch is None else batch.pictures
        if batch is None or pictures is None or self.layer > len(pictures.deep):
            return
        x = np.empty((len(batch.tokens), pictures.rows.shape[1]), np.float32)
        state.copy_features(x)
        if self.layer:
            x[pictures.index] += pictures.deep[self.layer - 1]
        else:
            x[pictures.index] = pictures.rows
        state.x = state.ops.given_rows(x)


def norm_of_layer(
    config: DecoderConfig, layer: int, weights: WeightLoader, name: str, scale: float = 1.0
) -> Vector | None:
    """A layer's norm of the residual stream or of a result, times ``scale``; without a ``name``,
    None.
    """
    if not name:
        return None
    whole, offset = f"model.layers.{layer}.{name}.weight", config.norm_offset
    return weights.vector(config.hidden_size, whole, offset=offset, scale=scale)


class Attention:
    """Norm, projections, rotary, cache, attention, output projection.

    ``at`` is the index of its keys and values in a cache that does not have all layers.
    """

    def __init__(self, config: DecoderConfig, layer: int, weights: WeightLoader, at: int) -> None:
        names = config.names_of(layer)
        self.layer = at
        spec = config.attention[layer]
        assert isinstance(spec, AttentionSpec), "the layer is of another kind"
        self.spec = spec
        hidden, size = config.hidden_size, spec.head_dim
        rows, own = spec.projected_rows, spec.reads is None
        qkv = names.qkv
        if len(qkv) > 1:
            qkv = (*qkv[: spec.projections], *(qkv[3:] if spec.last_gates else ()))
        self._first, self._out = qkv[0], names.out
        norm, optional = partial(norm_of_layer, config, layer, weights), weights.optional_vector
        prefix = f"model.layers.{layer}."

        def ones(present: bool) -> Vector | None:
            return weights.constants(f"ones.{size}", np.ones(size, np.float32)) if present else None

        def head_norm(name: str, heads: int, present: bool) -> Vector | None:
            if spec.unit_norms:
                return ones(present)
            if not (config.qk_norm and present):
                return None
            width = size * (heads if spec.joint_norms else 1)
            return weights.vector(width, f"{prefix}{name}.weight", offset=config.norm_offset)

        self.weights = AttentionWeights(
            norm=norm(names.attention_norm, config.multipliers.attention_in),
            qkv=weights.matrix(
                (rows, config.block.attention_width(config)), *(f"{prefix}{n}.weight" for n in qkv)
            ),
            out=weights.matrix((hidden, spec.heads * size), f"{prefix}{names.out}.weight"),
            qkv_bias=optional(config.qkv_bias, rows, *(f"{prefix}{n}.bias" for n in qkv)),
            out_bias=optional(config.out_bias, hidden, f"{prefix}{names.out}.bias"),
            q_norm=head_norm(names.q_norm, spec.heads, True),
            k_norm=head_norm(names.k_norm, spec.kv_heads, own),
            v_norm=ones(spec.value_norm and own),
            post_norm=norm(names.attention_post_norm),
            sinks=optional(spec.sinks, spec.heads, f"{prefix}{names.sinks}"),
        )

    def __call__(self, state: PassState) -> Array:
        ops, step = state.ops, state.step
        q = ops.norm_qkv_rope_append(state.x, self.weights, self.spec, step, self.layer)
        return ops.attention_output(q, self.weights, self.spec, step, self.layer)

    def matrices(self) -> dict[str, Weight]:
        return {self._first: self.weights.qkv, self._out: self.weights.out}


class GatedMlp:
    """``down(activation(gate(norm(x))) * up(norm(x)))``, or without a gate
    ``down(activation(up(norm(x))))``.

    ``post_norm`` names the output's norm if it is not the layer's. ``rows`` are those of gate and
    of down where the matrices are pieces.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        weights: WeightLoader,
        post_norm: str = "",
        rows: tuple[int, int] | None = None,
    ) -> None:
        self._names = names = config.names_of(layer)
        hidden, inner = config.hidden_size, config.inner_size(layer)
        prefix, norm = f"model.layers.{layer}.", partial(norm_of_layer, config, layer, weights)
        gates, outputs = rows or (inner, hidden)
        self.spec = config.mlp_of(layer)
        if self.spec.activation == "xielu":
            self.spec = replace(self.spec, curve=_load_curve(weights, prefix))
        self.weights = MlpWeights(
            norm=norm(names.mlp_norm),
            gate_up=weights.matrix(
                ((2 if self.spec.gated else 1) * gates, hidden),
                *(f"{prefix}{n}.weight" for n in names.gate_up),
            ),
            down=weights.matrix((outputs, inner), f"{prefix}{names.down}.weight"),
            post_norm=norm(post_norm or names.mlp_post_norm),
        )

    def __call__(self, state: PassState) -> Array:
        return state.ops.norm_gated_mlp(state.x, self.weights, self.spec)

    def matrices(self) -> dict[str, Weight]:
        names = self._names
        return {names.gate_up[0]: self.weights.gate_up, names.down: self.weights.down}


def _load_curve(weights: WeightLoader, prefix: str) -> tuple[float, float, float, float]:
    """A layer's ``MlpSpec.curve``; both alphas are published as what their softplus is taken of."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    positive, negative, beta, eps = (weights.scalar(f"{prefix}mlp.act_fn.{n}") for n in names)

    def softplus(value: float) -> float:
        return float(log(1 + exp(value)))

    return softplus(positive), beta + softplus(negative), beta, eps


@dataclass(frozen=True, slots=True, eq=False)
class SplitMlp:
    """A ``GatedMlp`` in ``pieces`` of its rows, one after another; see ``SplitOps``, which a pass's
    ``Ops`` must be.
    """

    pieces: Sequence[GatedMlp]
    host: HostRows | None

    def __call__(self, state: PassState) -> Array:
        ops, weights = cast(SplitOps, state.ops), [piece.weights for piece in self.pieces]
        return ops.norm_split_mlp(state.x, weights, self.pieces[0].spec, self.host)

    def matrices(self) -> dict[str, Weight]:
        return {}


class Head:
    """The final norm, and the logits of the vocabulary's rows from ``first_row`` on."""

    def __init__(
        self, config: DecoderConfig, norm: Vector | None, weight: Weight, first_row: int = 0
    ) -> None:
        self.norm, self.weight = norm, weight
        self._eps, self._softcap = config.norm_eps, config.final_softcap
        self._vocab, self._first_row = config.vocab_size, first_row

    def __call__(self, state: PassState) -> None:
        """Fill ``state.logits``."""
        logits = state.ops.head(
            state.x,
            state.logit_rows,
            self.norm,
            self._eps,
            self.weight,
            self._softcap,
            self._first_row,
        )
        self.fill(state, logits)

    def fill(self, state: PassState, logits: Logits) -> None:
        """Fill ``state.logits`` from ``logits`` (logit rows, rows of its weight), or the best."""
        if logits.shape[1] == self._vocab or is_best(logits):
            state.logits = logits
            return
        if state.logits is None:  # at once: slices and whole would take twice the memory
            state.logits = large_floats((len(logits), self._vocab))
        state.logits[:, self._first_row : self._first_row + logits.shape[1]] = logits
