"""Mixtures of experts as the steps see them: routers, experts, and the choices of a pass.

A router scores every expert for each row and chooses ``used`` of them. A *slot* is one choice of
one row: slot ``row * used + k``. Experts fill slots, wherever they are computed; slots are combined
in the order of k, so that the output does not depend on timing. Knows neither files nor caches.

Shapes: R rows, D hidden size, E experts, K used experts, W ranked experts, F an expert's width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.arrays import Array, Vector, Weight

ExpertActivation = Literal["silu", "gelu_tanh", "swiglu_oai", "relu2", "swiglu"]
Scoring = Literal["softmax", "sigmoid", "softmax-chosen", "sqrt-softplus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How experts are chosen. The defaults are Mixtral's, except for the counts.

    The logits become scores by a softmax over all experts, by a sigmoid each, or by the root of a
    softplus. Experts are ranked by score plus ``choice_bias``; with ``groups``, only those of the
    ``used_groups`` best groups (by the sum of a group's ``group_top`` largest). Chosen scores
    without the bias are the weights: made to sum to 1 where ``normalize`` is set, then times
    ``scale``. ``"softmax-chosen"`` makes them the softmax of the chosen logits alone. With a
    ``softcap`` c, logits are c tanh(logit / c).
    """

    count: int
    used: int
    eps: float  # of the norm before it
    scoring: Scoring = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    used_groups: int = 1
    group_top: int = 1
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.count:
            raise ValueError(
                f"{self.used} experts for each token (top-k) cannot be chosen of {self.count}"
            )
        if self.groups < 1 or self.count % self.groups:
            raise ValueError(f"{self.count} experts are not {self.groups} equal groups")
        if not 1 <= self.used_groups <= self.groups:
            raise ValueError(f"{self.used_groups} of {self.groups} expert groups cannot be used")
        if self.used_groups * (self.count // self.groups) < self.used:
            raise ValueError(
                f"{self.used_groups} groups hold fewer than the {self.used} experts of each token"
            )

    @property
    def ranked(self) -> int:
        """Experts that are reported for each row, best first: W = min(2 K, E)."""
        return min(2 * self.used, self.count)

    def choose(self, scored: Routing, chosen: npt.NDArray[np.int32]) -> Routing:
        """The weights of ``chosen`` (R, K), by the scores of a choice of all experts."""
        places = np.take_along_axis(np.argsort(scored.experts, axis=1), chosen, 1)
        scores = np.take_along_axis(scored.scores, places, 1)
        sums = np.maximum(scores.sum(1, keepdims=True), 1e-20) if self.normalize else 1
        return Routing(chosen, scores, (scores / sums * self.scale).astype(np.float32))


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class RouterWeights:
    """A router and the norm before it."""

    norm: Vector | None  # (D,), None where rows are taken as they are
    gate: Weight  # (E, D)
    gate_bias: Vector | None = None  # (E,), part of the logits
    choice_bias: Vector | None = None  # (E,), of the ranking alone
    gate_norm: Vector | None = None  # (D,), replaces ``norm`` for the gate's input
    expert_scale: Vector | None = None  # (E,), factors of the chosen experts' weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """What an expert computes: ``down(activation(gate(x)) * up(x))``, with ``activation(gate(x))``
    at most ``limit`` and ``up(x)`` within ``limit``.

    ``swiglu_oai`` is gpt-oss's: gate at most ``limit``, up within ``limit``, ``gate * sigmoid(1.702
    gate) * (up + 1)``; ``swiglu``: ``silu(gate) * up`` of these. ``relu2`` has no gate: it squares
    the ReLU of ``up(x)``.
    """

    activation: ExpertActivation = "silu"
    limit: float = math.inf

    @property
    def gated(self) -> bool:
        """Whether there is a gate."""
        return self.activation != "relu2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert's unit. ``gate_up`` stacks the rows of gate and up, or is up alone."""

    gate_up: Weight  # (2F, D), or (F, D)
    down: Weight  # (D, F)
    gate_up_bias: Vector | None = None  # (2F,), or (F,)
    down_bias: Vector | None = None  # (D,)


@dataclass(frozen=True)
class Routing:
    """The choices of one layer in one pass.

    ``experts`` (R, W) int32 are each row's best experts, best first (ties: the lower number), of
    which the first ``used`` are chosen; ``scores`` (R, W) float32 are their scores, between 0 and
    1, without the choice's bias; ``weights`` (R, K) float32 are the weights of the chosen. All are
    in host memory; an implementation may copy them there on first use.
    """

    experts: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]

    @property
    def away(self) -> bool:
        """Whether reading the choices would wait for a device."""
        return False

    @property
    def rows(self) -> int:
        """R."""
        return len(self.experts)

    @property
    def used(self) -> int:
        """K."""
        return int(self.weights.shape[1])

    @property
    def chosen(self) -> npt.NDArray[np.int32]:
        """(R, K): a view."""
        return self.experts[:, : self.weights.shape[1]]

    def loads(self, count: int) -> npt.NDArray[np.int64]:
        """Rows that each of ``count`` experts sees: (E,)."""
        return np.bincount(self.chosen.reshape(-1), minlength=count)


def slots_of(
    routing: Routing, experts: Sequence[int] | npt.NDArray[np.int32] | None
) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Each of ``experts`` (default: all) that is chosen, with its slots in rising order."""
    chosen = routing.chosen.reshape(-1)
    order = np.argsort(chosen, kind="stable")
    found, starts = np.unique(chosen[order], return_index=True)
    wanted = None if experts is None else {int(expert) for expert in experts}
    for expert, slots in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        if wanted is None or expert in wanted:
            yield expert, slots


class ExpertTable(Protocol):
    """The experts of a layer that are in an implementation's memory, by number."""

    @property
    def capturable(self) -> bool:
        """Whether all experts are there and run without the host knowing the choice."""

    @property
    def sharable(self) -> bool | None:
        """Whether those that are there run without the host knowing the choice; see ``HostShare``.

        None if there has been none yet.
        """

    def put(self, expert: int, weights: ExpertWeights) -> None:
        """From now on ``expert`` can be computed; the table keeps its weights alive."""

    def drop(self, expert: int) -> None:
        """Forget ``expert``: its memory may be reused."""


class PlainExpertTable:
    """See ``ExpertTable``: the weights in a list."""

    def __init__(self, count: int) -> None:
        self._weights: list[ExpertWeights | None] = [None] * count

    @property
    def capturable(self) -> bool:
        return False

    @property
    def sharable(self) -> bool | None:
        return False

    def put(self, expert: int, weights: ExpertWeights) -> None:
        self._weights[expert] = weights

    def drop(self, expert: int) -> None:
        self._weights[expert] = None

    def __getitem__(self, expert: int) -> ExpertWeights:
        weights = self._weights[expert]
        assert weights is not None, f"expert {expert} is not in the table"
        return weights


class SharedWords(NamedTuple):
    """What GPU and host tell each other of a layer: int32 (1,) each.

    The host counts replays in ``turn``. The GPU sets ``ticket`` to it once rows and choice are on
    the host, and waits until the host sets ``done`` to it, or one of them ``stop`` to 1.
    """

    turn: npt.NDArray[np.int32]
    ticket: npt.NDArray[np.int32]
    done: npt.NDArray[np.int32]
    stop: npt.NDArray[np.int32]


class HostWork(Protocol):
    """The host's part of recorded layers: ``begin`` before their graph is launched, then the work,
    which may call the pass's ``check``.
    """

    def begin(self, check: Callable[[], None] | None) -> None: ...

    def __call__(self, check: Callable[[], None] | None) -> None: ...


class SharedLayers(Protocol):
    """The host's part of some recorded layers, in one call."""

    busy_s: float
    """Seconds in which it has computed so far."""

    def present(self, layer: int, mask: npt.NDArray[np.bool_]) -> None:
        """Set which experts (E,) the GPU computes in the next replay."""

    def run(self, first: int) -> int:
        """Compute the absent experts of the layers from ``first`` on, as the GPU gives its tickets.

        Returns the first layer that is left: one of its experts is not in RAM, or the GPU is late.
        """


MakeHostWork = Callable[[Sequence[Any]], HostWork]


class HostShare(Protocol):
    """A recorded layer whose experts a GPU shares with the host, which works while the graph runs.

    What it is recorded with: ``serve`` says what the host does, ``compute`` starts the experts that
    the table has at the time of a replay, ``take`` waits for the host and gives the slots. In a
    replay, once the GPU has given its ticket (see ``SharedWords``), ``rows`` (R, D) float32 and
    ``routing`` are on the host. For experts that are not ``present`` it fills ``host_slots`` (R *
    K, D) float32; then it is done. ``slots`` are the GPU's.
    """

    rows: npt.NDArray[np.float32]
    routing: Routing
    host_slots: npt.NDArray[np.float32]
    slots: Array
    words: SharedWords

    def serve(self, make: MakeHostWork, layer: object) -> None:
        """Do what ``make`` makes of this layer and others of its graph."""

    def compute(self, spec: ExpertSpec) -> None:
        """Start the experts that are there."""

    def take(self) -> Array:
        """The slots (R * K, D), once the host is done."""

    def begin(self, shares: Sequence[Self], tables: Sequence[Any]) -> None:
        """Bring ``tables`` up to date, and count a turn of a graph's ``shares``, launched next."""

    def present(self) -> npt.NDArray[np.bool_]:
        """(E,): the experts that ``compute`` finds in this replay."""

    def check(self) -> None:
        """Raise if the GPU has failed: it will not give its ticket."""

    def give_up(self) -> None:
        """End the replay without results, also for the layers to come."""
