"""A recurrent layer in a block: its tensors, for all architectures.

``quant/ops/recurrent.py`` computes it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from localrt.models.config import DecoderConfig, RecurrentNames
from localrt.models.layers.parts import PassState, norm_of_layer
from localrt.models.weights import TapsFirst, WeightLoader
from localrt.quant.ops.arrays import Array, Vector, Weight
from localrt.quant.ops.mathematics import exp
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights


def recurrent_groups(names: RecurrentNames) -> tuple[tuple[str, ...], ...]:
    """The matrices, grouped by shared input."""
    widening = ((names.gate_up,), (names.decay_up,)) if names.gate_up else ()
    return (names.mix, (names.out,), *widening)


class Recurrent:
    """Norm, projections, convolution, state, output projection.

    ``at`` is the layer's index among a cache's recurrent layers.
    """

    def __init__(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, spec: RecurrentSpec, at: int
    ) -> None:
        hidden, names = config.hidden_size, config.recurrent
        around = config.names_of(layer)
        assert names is not None, "an architecture with recurrent layers names their tensors"
        self.layer, self.spec, self._names = at, spec, names
        prefix, norm = f"model.layers.{layer}.", partial(norm_of_layer, config, layer, weights)
        optional, heads, rank = weights.optional_vector, spec.heads, spec.low_rank
        stateful, inner = spec.stateful, spec.inner
        rates = spec.factors - heads if stateful else 0
        norm_width = spec.value_size if spec.kind == "delta" else inner

        def vector(present: bool, size: int, name: str) -> Vector | None:
            return optional(present, size, f"{prefix}{name}")

        def widening(rows: int, name: str) -> Weight | None:
            return weights.matrix((rows, rank), f"{prefix}{name}.weight") if rank else None

        decay = None
        if stateful:
            transform = _negative if names.decay_is_rate else _rate
            decay = weights.vector(heads, f"{prefix}{names.decay}", transform=transform)
        self.weights = RecurrentWeights(
            norm=norm(around.attention_norm, config.multipliers.recurrent_in),
            mix=weights.matrix(
                (spec.mix_rows, hidden), *(f"{prefix}{name}.weight" for name in names.mix)
            ),
            taps=weights.vector(
                spec.taps * spec.channels,
                *(f"{prefix}{name}.weight" for name in names.taps),
                transform=TapsFirst(spec.taps),
            ),
            out=weights.matrix((hidden, inner), f"{prefix}{names.out}.weight"),
            taps_bias=optional(
                spec.conv_bias, spec.channels, *(f"{prefix}{name}.bias" for name in names.taps)
            ),
            decay=decay,
            decay_bias=vector(stateful, rates, names.decay_bias),
            skip=vector(spec.kind == "ssm", heads, names.skip),
            out_norm=vector(spec.norm_size > 0, norm_width, f"{names.out_norm}.weight"),
            mix_bias=optional(
                names.biased, spec.mix_rows, *(f"{prefix}{name}.bias" for name in names.mix)
            ),
            out_bias=vector(names.biased, hidden, f"{names.out}.bias"),
            mix_scale=_mix_scale(config, spec, weights),
            post_norm=norm(around.attention_post_norm),
            gate_up=widening(inner, names.gate_up),
            decay_up=widening(rates, names.decay_up),
        )

    def __call__(self, state: PassState) -> Array:
        return state.ops.norm_recurrent(state.x, self.weights, self.spec, state.step, self.layer)

    def matrices(self) -> dict[str, Weight]:
        groups = recurrent_groups(self._names)
        own = (self.weights.mix, self.weights.out, self.weights.gate_up, self.weights.decay_up)
        whole = (weight for weight in own if weight is not None)
        return {group[0]: weight for group, weight in zip(groups, whole, strict=True)}


def _mix_scale(config: DecoderConfig, spec: RecurrentSpec, weights: WeightLoader) -> Vector | None:
    """The factors of the rows of ``mix``, if there are any."""
    factors = config.multipliers.projected
    if set(factors) == {1.0}:
        return None
    sizes = (spec.inner, spec.inner, spec.keys, spec.keys, spec.heads)
    values = np.repeat(np.asarray(factors, np.float32), sizes)
    return weights.constants("multipliers", values)


def _negative(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return negative rates: some files have them without a sign."""
    return -np.abs(values)


def _rate(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return decay rates from their logarithms."""
    return -exp(values).astype(np.float32)
