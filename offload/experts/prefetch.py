"""Loads before they are asked for: who proposes them, whether they pay, and what goes first.

Three sources propose experts of a layer to come: its gate on the hidden state of now, the experts
of the token before, and the transition table. Each is off until a measurement shows that it pays:
at batch 1 the link is often the bottleneck, and a wrong load delays a right one. Nothing here loads
anything: ``LoadQueue`` says what is next.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Load",
    "LoadQueue",
    "PredictionMeter",
    "PrefetchSources",
    "PreviousExperts",
    "gate_candidates",
    "prefetch_pays",
]

Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchSources:
    """What may propose loads. All off: ``prefetch_pays`` decides."""

    gates: bool = False
    previous: bool = False
    transitions: bool = False


def gate_candidates(
    scores: NDArray[Any], resident: NDArray[np.bool_], *, most: int
) -> list[tuple[int, float]]:
    """Absent experts by what a gate gives them, best first: (expert, score), at most ``most``.

    ``scores`` is (rows, count) of a later layer's gate on the present hidden state, or any
    prediction as (count,); an expert's score is the sum over the rows.
    """
    total = scores.astype(np.float64)
    if total.ndim == 2:
        total = total.sum(axis=0)
    total = np.where(resident, -np.inf, total)
    best = np.argsort(-total, kind="stable")[: max(0, most)]
    return [(int(i), float(total[i])) for i in best if total[i] > 0]


class PreviousExperts:
    """Proposes for each layer what the last pass used there."""

    def __init__(self, layers: int, count: int) -> None:
        self._rows = np.zeros((layers, count), np.float32)

    def note(self, layer: int, chosen: NDArray[Any], rows: NDArray[Any]) -> None:
        """A pass has used these, with so many rows each."""
        self._rows[layer] = 0.0
        self._rows[layer, chosen] = rows / max(1, int(rows.max(initial=1)))

    def predict(self, layer: int) -> NDArray[np.float32]:
        """(count,): 1 for the most loaded expert of the last pass, 0 for those not used."""
        row: NDArray[np.float32] = self._rows[layer]
        return row


class PredictionMeter:
    """How often a source is right, measured without loading anything.

    Only predictions that would have been loaded count: of absent experts.
    """

    FORGET_AT = 4096

    def __init__(self) -> None:
        self.predicted = 0
        self.right = 0
        self._open: dict[int, tuple[int, ...]] = {}

    def predict(self, layer: int, experts: Sequence[int]) -> None:
        """A source would load these for ``layer``."""
        self._open[layer] = tuple(experts)

    def observe(self, layer: int, chosen: NDArray[Any]) -> None:
        """``layer`` has chosen."""
        experts = self._open.pop(layer, ())
        if not experts:
            return
        asked = set(chosen.tolist())
        self.predicted += len(experts)
        self.right += sum(expert in asked for expert in experts)
        if self.predicted >= self.FORGET_AT:
            self.predicted //= 2
            self.right //= 2

    @property
    def precision(self) -> float | None:
        """The share that was asked for; None before any."""
        return self.right / self.predicted if self.predicted else None


def prefetch_pays(
    meter: PredictionMeter,
    *,
    fetch_s: float,
    idle_s: float,
    saved_s: float,
    victim_use: float = 0.0,
    least_samples: int = 256,
) -> bool:
    """Whether one load ahead saves more time than it costs, by what was measured.

    ``fetch_s`` is one load, ``idle_s`` how long the link (or disk) rests before the next demand, on
    average, ``saved_s`` what a layer is quicker by when one more expert is there. A right
    prediction saves that. Every one delays the next demand by what does not fit the idle time, and
    costs ``victim_use``, the chance that what it replaced was needed meanwhile, times ``saved_s``.
    Too few samples are no reason to begin.
    """
    if meter.predicted < least_samples or meter.precision is None:
        return False
    gain = meter.precision * saved_s
    loss = max(0.0, fetch_s - idle_s) + victim_use * saved_s
    return gain > loss


@dataclass(frozen=True, slots=True)
class Load:
    """One expert to bring in. ``demanded`` ones are waited for; ``epoch`` is of who asked."""

    layer: int
    expert: int
    demanded: bool
    epoch: int


class LoadQueue:
    """What to load next: demands in the order of their asking, then proposals by their gain.

    Not thread-safe. An expert is in it once; a demand for a proposed one makes it a demand.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Load]] = []
        self._waiting: dict[Key, Load] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def demand(self, layer: int, expert: int, *, epoch: int) -> None:
        """Somebody waits for it."""
        waiting = self._waiting.get((layer, expert))
        if waiting is None or not waiting.demanded:
            self._push(0, 0.0, Load(layer, expert, True, epoch))

    def propose(self, layer: int, expert: int, *, gain: float, epoch: int) -> None:
        """It may be asked for; nothing happens where it is in the queue already."""
        if (layer, expert) not in self._waiting:
            self._push(1, -gain, Load(layer, expert, False, epoch))

    def pop(self, *, proposals: bool = True) -> Load | None:
        """The next load, or None; without ``proposals`` demands only."""
        while self._heap:
            rank, _, _, load = self._heap[0]
            if self._waiting.get((load.layer, load.expert)) is not load:
                heapq.heappop(self._heap)  # cancelled, or demanded since
                continue
            if rank and not proposals:
                return None
            heapq.heappop(self._heap)
            del self._waiting[load.layer, load.expert]
            return load
        return None

    def cancel(self, epoch: int | None = None) -> list[Load]:
        """Forget what was asked up to ``epoch``, demands included; None: all proposals, only they.

        What was forgotten comes back, so that its slots can be given up.
        """
        gone = [
            load
            for load in self._waiting.values()
            if (not load.demanded if epoch is None else load.epoch <= epoch)
        ]
        for load in gone:
            del self._waiting[load.layer, load.expert]
        return gone

    def _push(self, rank: int, order: float, load: Load) -> None:
        self._number += 1
        self._waiting[load.layer, load.expert] = load
        heapq.heappush(self._heap, (rank, order, self._number, load))
