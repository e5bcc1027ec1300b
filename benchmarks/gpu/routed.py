"""A mixture whose routers choose as a trained one did, and ways of dividing its experts.

The trace is that of ``benchmarks.routing``, for models of any size: further layers choose as those
of the trace do at later tokens. Of more experts than the trace has, each group chooses as one of
its layers does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.routing import trained_trace
from localrt.offload.experts.hybrid import HybridExperts
from localrt.offload.pipeline.streamed import StreamedWeights
from localrt.quant.cuda import experts
from localrt.quant.cuda.routing import choose
from localrt.quant.cuda.tensor import Tensor, zeros

_APART = 1000  # tokens between layers, and groups, that share a layer of the trace
_NEVER = -100.0  # the logit of an expert that is not chosen

DIVISIONS = ("dynamic", "static", "copies")
"""GPU and CPU with a cache that learns; with one that is filled once; the GPU alone, by copies."""


class TrainedChoices:
    """What the routers of a mixture with ``count`` experts choose for each token."""

    def __init__(self, count: int) -> None:
        trace, self._count = trained_trace(), count
        steps = len(trace.steps) // trace.layers
        shape = steps, trace.layers, 2 * trace.used
        self._experts = np.concatenate([step.experts for step in trace.steps]).reshape(shape)
        self._scores = np.concatenate([step.scores for step in trace.steps]).reshape(shape)
        self._groups, self._each = max(1, count // trace.count), trace.count

    def choose(
        self, layer: int, token: int, ranked: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """A layer's ``ranked`` best experts for a token, best first, and their scores."""
        steps, layers, _ = self._experts.shape
        again, place = divmod(layer, layers)
        each = -(-ranked // self._groups)
        at = [(token + _APART * (again * self._groups + g)) % steps for g in range(self._groups)]
        found = self._experts[at, place, :each] + self._each * np.arange(self._groups)[:, None]
        scores = self._scores[at, place, :each] / self._groups
        chosen = found.T.reshape(-1)[:ranked] % self._count
        if self._count < self._each:  # a tiny model
            chosen = (chosen[0] + np.arange(ranked)) % self._count
        return chosen.astype(np.int32), scores.T.reshape(-1)[:ranked].astype(np.float32)


class _Routers:
    """Logits of all layers on the GPU, which each pass sets for one more token."""

    def __init__(self) -> None:
        self._layers: dict[int, int] = {}  # by the router's weights, in the order of a pass
        self._biases: Tensor | None = None
        self._choices: TrainedChoices | None = None
        self._ranked = self._token = 0

    def bias(self, weights: Any, logits: Tensor, ranked: int, most: int = 256) -> Tensor:
        """The (E,) of a layer."""
        layer = self._layers.setdefault(id(weights), len(self._layers))
        if self._biases is None:
            count, device = logits.shape[1], logits.device
            self._choices, self._ranked = TrainedChoices(count), ranked
            self._biases = zeros(most, count, device=device, pool=device.persistent)
        return self._biases[layer : layer + 1].view(-1)

    def next_token(self) -> None:
        """Before each pass."""
        if self._biases is None or self._choices is None:
            return
        self._token += 1
        values = np.full(self._biases.shape, _NEVER, np.float32)
        for layer in self._layers.values():
            chosen, scores = self._choices.choose(layer, self._token, self._ranked)
            values[layer, chosen] = np.log(np.maximum(scores, 1e-6))
        self._biases.put(values)


@contextmanager
def routed_as(division: str) -> Iterator[None]:
    """Models that are loaded meanwhile have such routers, and divide experts so."""
    routers = _Routers()
    route, begin, init = experts.route_rows, StreamedWeights.begin, HybridExperts.__init__

    @cache
    def nothing(rows: int, count: int, device: Any) -> Tensor:
        return zeros(rows, count, device=device, pool=device.persistent)

    def routed(normed: Tensor, rows: Tensor, weights: Any, spec: Any) -> Any:
        def chosen(logits: Tensor, gate_bias: Any, *more: Any) -> Tensor:
            logits = nothing(*logits.shape, logits.device)
            return choose(logits, routers.bias(weights, logits, spec.ranked), *more)

        with patch.object(experts, "choose", chosen):
            return route(normed, rows, weights, spec)

    def begun(weights: StreamedWeights, *args: Any) -> Any:
        routers.next_token()
        return begin(weights, *args)

    def divided(hybrid: HybridExperts, *args: Any, **options: Any) -> None:
        if division == "copies":  # all passes are as long ones, but copy nothing ahead
            options["gpu_rows"] = 1
            hybrid._ahead = lambda place: None  # type: ignore[method-assign]
        init(hybrid, *args, **options)
        hybrid.fills = division != "copies"

    def has_room(hybrid: HybridExperts) -> bool:
        return len(hybrid.slots.cache) < hybrid.slots.cache.capacity

    fills = property(has_room, lambda hybrid, value: None)
    once = patch.object(HybridExperts, "fills", fills, create=True)

    with (
        patch("localrt.quant.cuda.ops.route_rows", routed),
        patch.object(StreamedWeights, "begin", begun),
        patch.object(HybridExperts, "__init__", divided),
        once if division == "static" else nullcontext(),
    ):
        yield
