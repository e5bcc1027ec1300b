"""What the next sparse layer may ask for, and whether reading it ahead pays on this machine.

Three sources (``prefetch.py``) name absent experts of the next layer while this one is computed.
Each is measured while it is off: now and then, for as long as measuring takes less than a percent
of the passes, its prediction is compared with what the layer chose. With how long disk or
link rest, what a load takes and what a hit saves, that decides every few passes which are on. It
knows neither slots nor who computes; only passes of one row count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.offload.experts.prefetch import (
    SOURCES,
    PredictionMeter,
    PrefetchSources,
    prefetch_pays,
)
from localrt.offload.experts.transitions import TransitionTable
from localrt.quant.ops.experts import Routing

__all__ = ["Foresight", "Judgement", "Measured"]

Gate = Callable[[int, Any], Routing | None]
Chosen = npt.NDArray[Any]

_PASSES = 32  # between judgements
_SHARE = 0.008  # of the time, for measuring
_MOST_TABLE = 4 << 20  # bytes of a transition table that is worth having


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
    """Of one source by the latest measurement; times of one load, one turn of a layer, one miss."""

    pays: bool
    precision: float | None
    samples: int
    fetch_s: float
    idle_s: float
    saved_s: float
    cost_s: float


class Foresight:
    """``layers`` sparse ones with ``count`` experts, ``used`` by each row.

    ``gate(layer, x)`` is a later layer's routing of the activations of now, None where its router
    is not at hand. ``now`` is the clock of the passes. ``most`` bounds the proposals of a turn.
    """

    def __init__(
        self,
        layers: int,
        count: int,
        used: int,
        *,
        gate: Gate,
        now: Callable[[], float],
        measured: Callable[[], Measured],
        most: int = 2,
    ) -> None:
        self.sources = PrefetchSources()
        self.forced: PrefetchSources | None = None
        self.judgements: dict[str, Judgement] = {}
        self.most = most
        self._layers, self._used = layers, used
        self._gate, self._now, self._measured = gate, now, measured
        table = TransitionTable(layers, count, used)
        self._table = table if table.nbytes <= _MOST_TABLE else None
        self._latest: list[Chosen | None] = [None] * layers
        self._before: Chosen | None = None  # of the layer before, in this pass
        self._meters = {name: PredictionMeter() for name in SOURCES}
        self._predicting = dict.fromkeys(SOURCES, (0.0, 0))  # seconds, predictions
        self._open = [False] * layers  # whose predictions are to be compared
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
        """What is done meanwhile is of that share."""
        began = time.perf_counter()
        yield
        self._spent += time.perf_counter() - began

    def force(self, sources: PrefetchSources | None) -> None:
        """Have these on whatever is measured; None: as it is measured."""
        self.forced = sources
        self.sources = sources or PrefetchSources()

    def turn(
        self, layer: int, routing: Routing, x: Any, resident: Callable[[int], npt.NDArray[np.bool_]]
    ) -> tuple[int, list[int]]:
        """``layer`` has chosen from ``x``: the next layer, and what to bring for it, best first."""
        after = (layer + 1) % self._layers
        if len(routing.experts) != 1:
            self._before, self._start, self._turned = None, None, 0.0
            self._open = [False] * self._layers
            for meter in self._meters.values():
                meter.forget()
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
        chosen = routing.chosen[0]
        if self._open[layer]:
            self._open[layer] = False
            for meter in self._meters.values():
                meter.observe(layer, chosen)
        self._latest[layer] = chosen
        names: Sequence[str] = self.sources.names
        measures = self.measures
        proposals: list[int] = []
        if measures or names:
            asked = set(names)
            if measures:  # one after another: some cost much more than others
                asked.add(min(SOURCES, key=lambda name: self._predicting[name][1]))
            if "transitions" in asked:
                self._note(layer, chosen)
            found = self._predict(after, chosen, x, resident(after), asked)
            for name in sorted(names, key=lambda name: -(self._meters[name].precision or 0.0)):
                proposals += (e for e in found[name] if e not in proposals)
        self._before = chosen
        self._spent += time.perf_counter() - began
        return after, proposals[: self.most]

    def _note(self, layer: int, chosen: Chosen) -> None:
        """What the transition table learns; it costs like a prediction."""
        if layer and self._before is not None and self._table is not None:
            began = self._now()
            self._table.note(layer, self._before[None], chosen[None])
            seconds, count = self._predicting["transitions"]
            self._predicting["transitions"] = seconds + self._now() - began, count

    def _predict(
        self,
        layer: int,
        chosen: Chosen,
        x: Any,
        resident: npt.NDArray[np.bool_],
        names: Collection[str],
    ) -> dict[str, list[int]]:
        """The absent ones among the experts that each source names, which are compared later."""
        found = {}
        for name in names:
            began = self._now()
            experts = self._named(name, layer, chosen, x)
            absent = [] if experts is None else experts[~resident[experts]][: self.most].tolist()
            found[name] = absent
            self._meters[name].predict(layer, absent)
            seconds, count = self._predicting[name]
            self._predicting[name] = seconds + self._now() - began, count + 1
        self._open[layer] = True
        return found

    def _named(self, source: str, layer: int, chosen: Chosen, x: Any) -> Chosen | None:
        """The experts that a source expects, the likeliest first."""
        if source == "previous":
            return self._latest[layer]
        if layer == 0:  # what follows the last layer is the next token
            return None
        if source == "gates":
            routing = self._gate(layer, x)
            return None if routing is None else routing.chosen[0]
        if self._table is None:
            return None
        chances = self._table.predict(layer, chosen)
        best = np.argsort(-chances, kind="stable")[: self._used]
        return best[chances[best] > 0]

    def _new_pass(self) -> None:
        """A pass of one row begins: judge the sources by those before it, if they were enough."""
        if self._start is not None and self._turns < _PASSES * (self._layers - 1):
            return
        totals = self._measured()
        if self._start is not None and self._turns:
            self._judge(totals.since(self._start))
            if self.forced is None:
                paying = {name: each.pays for name, each in self.judgements.items()}
                self.sources = PrefetchSources(**paying)
        self._start, self._turns, self._seconds = totals, 0, 0.0

    def _judge(self, measured: Measured) -> None:
        loads, misses = measured.loads, measured.misses
        fetch_s = measured.busy_s / loads if loads else 0.0
        idle_s = max(0.0, self._seconds - measured.busy_s) / self._turns
        saved_s = measured.saved_s / misses if misses else 0.0
        for name, meter in self._meters.items():
            spent, count = self._predicting[name]
            wrong = 1.0 - (meter.precision or 0.0)  # a right one's reading only comes sooner
            cost_s = spent / max(1, count) + wrong * (measured.cpu_s / loads if loads else 0.0)
            pays = prefetch_pays(
                meter, fetch_s=fetch_s, idle_s=idle_s, saved_s=saved_s, cost_s=cost_s
            )
            self.judgements[name] = Judgement(
                pays=pays,
                precision=meter.precision,
                samples=meter.predicted,
                fetch_s=fetch_s,
                idle_s=idle_s,
                saved_s=saved_s,
                cost_s=cost_s,
            )
