"""What a mixture of experts is to the compute room: routers, experts, and the choices of a pass.

A router scores every expert for each row and chooses ``used`` of them. A *slot* is one choice of
one row: slot ``row * used + k``. Experts fill slots, wherever they are computed; slots are combined
in the order of k, so that the output does not depend on who was first. Knows neither files nor
caches.

Shapes: R rows, D hidden size, E experts, K used experts, W ranked experts, F an expert's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.arrays import Vector, Weight

ExpertActivation = Literal["silu", "gelu_tanh", "swiglu_oai", "relu2"]
Scoring = Literal["softmax", "sigmoid", "softmax-chosen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How experts are chosen. The defaults are Mixtral's, but for the numbers.

    The logits become scores by a softmax over all experts, or by a sigmoid each. Experts are ranked
    by score plus ``choice_bias``; with ``groups``, only those of the ``used_groups`` best groups
    (by the sum of a group's ``group_top`` largest). Chosen scores without the bias are the weights:
    made to sum to 1 where ``normalize`` is set, then times ``scale``. ``"softmax-chosen"`` makes
    them the softmax of the chosen logits alone.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterWeights:
    """A router and the norm before it."""

    norm: Vector  # (D,), None where rows are taken as they are
    gate: Weight  # (E, D)
    gate_bias: Vector | None = None  # (E,), part of the logits
    choice_bias: Vector | None = None  # (E,), of the ranking alone
    gate_norm: Vector | None = None  # (D,), in the place of ``norm`` for what the gate sees
    expert_scale: Vector | None = None  # (E,), of the chosen ones' weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """What an expert computes: ``down(activation(gate(x)) * up(x))``.

    ``swiglu_oai`` is gpt-oss's: gate at most ``limit``, up within ``limit``,
    ``gate * sigmoid(1.702 gate) * (up + 1)``. ``relu2`` has no gate: it squares what is above 0
    of ``up(x)``.
    """

    activation: ExpertActivation = "silu"
    limit: float = 7.0

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
    which the first ``used`` are chosen; ``scores`` (R, W) float32 are theirs, between 0 and 1 and
    without the choice's bias; ``weights`` (R, K) float32 are what the chosen ones count. All are in
    host memory; an implementation may bring them there when they are first asked for.
    """

    experts: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]

    @property
    def away(self) -> bool:
        """Whether asking for them would wait for a device."""
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


class ExpertTable(Protocol):
    """A layer's experts as far as they are in an implementation's memory, by number."""

    @property
    def capturable(self) -> bool:
        """Whether all of the layer's are there, and run without the host knowing the choice."""

    def put(self, expert: int, weights: ExpertWeights) -> None:
        """From now on ``expert`` can be computed; the table keeps its weights alive."""

    def drop(self, expert: int) -> None:
        """Its memory may be used for something else."""

    def holds(self, expert: int) -> bool:
        """Whether it can be computed."""
