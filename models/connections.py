"""Hyper-connections: layers that read a mixture of several residual streams, in the place of
``Residual``.

``quant/ops/streams.py`` says what is computed. Before the first layer each stream is the embedding;
behind the last, ``ReadStreams`` makes of them what the head sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from localrt.models.parts import Layer, PassState
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Weight
from localrt.quant.ops.streams import ConnectionWeights

__all__ = ["Connected", "ReadStreams", "RepeatStream", "load_connection"]

_NORM = "hc_norm.weight"
_DOWN, _UP = "input_mix_weight_down.weight", "input_mix_weight_up.weight"
_SHARE = "block_inject_weight.weight"


@dataclass(frozen=True, slots=True, eq=False)
class RepeatStream:
    """The streams, of the embedding."""

    count: int

    def __call__(self, state: PassState) -> None:
        """Fill ``state.streams``."""
        state.streams = state.ops.repeat_stream(state.x, self.count)


@dataclass(frozen=True, slots=True, eq=False)
class Connected:
    """A layer that reads all streams, each of which takes its share of what the layer gives."""

    layer: Layer
    weights: ConnectionWeights

    def __call__(self, state: PassState) -> None:
        """``state.streams`` become those behind the layer."""
        state.x, shares = state.ops.read_streams(state.streams, self.weights)
        state.streams = state.ops.share_out(state.streams, self.layer(state), shares)

    def matrices(self) -> dict[str, Weight]:
        """See ``Layer``."""
        return self.layer.matrices()


@dataclass(frozen=True, slots=True, eq=False)
class ReadStreams:
    """What the head sees, of the streams."""

    weights: ConnectionWeights

    def __call__(self, state: PassState) -> None:
        """Fill ``state.x``."""
        state.x, _ = state.ops.read_streams(state.streams, self.weights)
        state.streams = None


def load_connection(
    weights: WeightLoader,
    prefix: str,
    *,
    hidden: int,
    count: int,
    rank: int,
    eps: float,
    norm_offset: float,
    shares: bool = True,
) -> ConnectionWeights:
    """The connection whose tensors' names begin with ``prefix``."""
    wide = count * hidden
    return ConnectionWeights(
        count=count,
        norm=weights.vector(wide, prefix + _NORM, offset=norm_offset),
        down=weights.matrix((rank, wide), prefix + _DOWN),
        up=weights.matrix((wide, rank), prefix + _UP),
        share=weights.matrix((count, wide), prefix + _SHARE) if shares else None,
        eps=eps,
    )
