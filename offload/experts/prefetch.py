"""Which experts the next sparse layer will ask for, and whether loading them early pays here.

The next layer's gate, applied to the hidden state of now, predicts its choice. Prefetching is off
until measuring shows that it pays on this machine: for less than a percent of the passes' time,
predictions are compared with what the layers choose. With how long disk or link rest, what a load
takes and what a hit saves, that decides every few passes. Only passes of one row count. Nothing
here loads anything, or knows slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.ops.experts import Routing

__all__ = ["Judgement", "Measured", "PredictionMeter", "Prefetcher", "prefetch_pays"]

Gate = Callable[[int, Any], Routing | None]

_PASSES = 32  # between judgements
_SHARE = 0.008  # of the time, for measuring


@dataclass(frozen=True, slots=True)
class Measured:
    """Totals of a way that experts come by: disk or link.

    ``busy_s`` with ``loads`` demanded ones; ``saved_s`` that layers would have been quicker by in
    all, had each of ``misses`` been there; ``cpu_s`` that loads took of what computes.
    """

    busy_s: float = 0.0
    loads: float = 0.0
    saved_s: float = 0.0
    misses: float = 0.0
    cpu_s: float = 0.0

    def since(self, before: Measured) -> Measured:
        """What came after ``before``."""
        return Measured(
            self.busy_s - before.busy_s,
            self.loads - before.loads,
            self.saved_s - before.saved_s,
            self.misses - before.misses,
            self.cpu_s - before.cpu_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """By the latest measurement; times of one load, one turn of a layer, one miss."""

    pays: bool
    precision: float | None
    samples: int
    fetch_s: float
    idle_s: float
    saved_s: float
    cost_s: float


class PredictionMeter:
    """How often predictions are right, measured without loading anything.

    Only predictions that would have been loaded count: of absent experts.
    """

    FORGET_AT = 4096

    def __init__(self) -> None:
        self.predicted = 0
        self.right = 0
        self._open: dict[int, tuple[int, ...]] = {}

    def predict(self, layer: int, experts: Sequence[int]) -> None:
        """These would be loaded for ``layer``."""
        self._open[layer] = tuple(experts)

    def forget(self) -> None:
        """What was predicted is not compared with anything: another text comes between."""
        self._open.clear()

    def observe(self, layer: int, chosen: npt.NDArray[Any]) -> None:
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
    cost_s: float = 0.0,
    least_samples: int = 64,
) -> bool:
    """Whether one load ahead saves more time than it costs, by what was measured.

    ``fetch_s`` is one load, ``idle_s`` how long the link (or disk) rests before the next demand, on
    average, ``saved_s`` what a layer is quicker by when one more expert is there. A right
    prediction saves that, as far as it fits the idle time. A wrong one delays the next demand by
    what does not fit. Every one takes ``cost_s`` of the processors that compute. Too few samples
    are no reason to begin.
    """
    right = meter.precision
    if meter.predicted < least_samples or right is None or fetch_s <= 0:
        return False
    gain = right * saved_s * min(1.0, idle_s / fetch_s)
    return gain > (1 - right) * max(0.0, fetch_s - idle_s) + cost_s


class Prefetcher:
    """Proposes loads for the next of ``layers`` sparse layers while it is ``on``.

    ``gate(layer, x)`` is a later layer's routing of the activations of now, None where its router
    is not at hand. ``now`` is the clock of the passes. ``most`` bounds the proposals of a turn.
    """

    def __init__(
        self,
        layers: int,
        *,
        gate: Gate,
        now: Callable[[], float],
        measured: Callable[[], Measured],
        most: int = 2,
    ) -> None:
        self.on = False
        self.judgement: Judgement | None = None
        self.most = most
        self._forced = False
        self._layers = layers
        self._gate, self._now, self._measured = gate, now, measured
        self._meter = PredictionMeter()
        self._predicting_s, self._predictions = 0.0, 0
        self._spent = self._wall = 0.0
        self._turned = 0.0  # when the last turn of a pass of one row began, by the wall
        self._turn_s = 0.0
        self._clock = self._seconds = 0.0  # the same by the clock, and the passes' time since then
        self._start: Measured | None = None  # when the passes since the judgement began
        self._turns = 0

    @property
    def measuring_share(self) -> float:
        """The part of the passes' time that has gone into this."""
        return self._spent / self._wall if self._wall else 0.0

    @property
    def turn_s(self) -> float:
        """Seconds from one layer's turn to the next, of late."""
        return self._turn_s

    @property
    def measures(self) -> bool:
        """Whether measuring has taken less than its share so far."""
        return self._spent <= _SHARE * self._wall

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """The time of the block is of that share."""
        began = time.perf_counter()
        yield
        self._spent += time.perf_counter() - began

    def force(self, on: bool | None) -> None:
        """On or off whatever is measured; None: as it is measured."""
        self._forced = on is not None
        self.on = bool(on)

    def turn(
        self, layer: int, routing: Routing, x: Any, resident: Callable[[int], npt.NDArray[np.bool_]]
    ) -> tuple[int, list[int]]:
        """``layer`` has chosen from ``x``: the next layer, and what to bring for it, best first."""
        after = (layer + 1) % self._layers
        if len(routing.experts) != 1:
            self._start, self._turned = None, 0.0
            self._meter.forget()
            return after, []
        began, clock = time.perf_counter(), self._now()
        if layer == 0:  # nobody knows how long the text before it took to come
            self._new_pass()
        elif self._turned:
            self._wall += began - self._turned
            passed = clock - self._clock
            self._seconds += passed
            self._turn_s += 0.05 * (passed - self._turn_s)
            self._turns += 1
        self._turned, self._clock = began, clock
        self._meter.observe(layer, routing.chosen[0])
        absent: list[int] = []
        if after and (self.on or self.measures):  # what follows the last layer is the next token
            absent = self._predict(after, x, resident(after))
        self._spent += time.perf_counter() - began
        return after, absent if self.on else []

    def _predict(self, layer: int, x: Any, resident: npt.NDArray[np.bool_]) -> list[int]:
        """The absent ones among the experts that its gate names, which are compared later."""
        began = self._now()
        routing = self._gate(layer, x)
        absent: list[int] = []
        if routing is not None:
            experts = routing.chosen[0]
            absent = experts[~resident[experts]][: self.most].tolist()
        self._meter.predict(layer, absent)
        self._predicting_s += self._now() - began
        self._predictions += 1
        return absent

    def _new_pass(self) -> None:
        """A pass of one row begins: judge by those before it, if they were enough."""
        if self._start is not None and self._turns < _PASSES * (self._layers - 1):
            return
        totals = self._measured()
        if self._start is not None and self._turns:
            self.judgement = self._judge(totals.since(self._start))
            if not self._forced:
                self.on = self.judgement.pays
        self._start, self._turns, self._seconds = totals, 0, 0.0

    def _judge(self, measured: Measured) -> Judgement:
        loads, misses, meter = measured.loads, measured.misses, self._meter
        fetch_s = measured.busy_s / loads if loads else 0.0
        idle_s = max(0.0, self._seconds - measured.busy_s) / self._turns
        saved_s = measured.saved_s / misses if misses else 0.0
        wrong = 1.0 - (meter.precision or 0.0)  # a right one's reading only comes sooner
        predicting_s = self._predicting_s / max(1, self._predictions)
        cost_s = predicting_s + wrong * (measured.cpu_s / loads if loads else 0.0)
        return Judgement(
            pays=prefetch_pays(
                meter, fetch_s=fetch_s, idle_s=idle_s, saved_s=saved_s, cost_s=cost_s
            ),
            precision=meter.precision,
            samples=meter.predicted,
            fetch_s=fetch_s,
            idle_s=idle_s,
            saved_s=saved_s,
            cost_s=cost_s,
        )
