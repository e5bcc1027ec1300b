"""Loads before they are asked for: who may propose them, how often they are right, what they bring.

Three sources propose experts of a layer to come: its gate on the hidden state of now, the experts
of the token before, and the transition table. Each is off until a measurement shows that it pays:
at batch 1 the link is often the bottleneck, and a wrong load delays a right one. Nothing here loads
anything, or knows where experts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

__all__ = ["SOURCES", "PredictionMeter", "PrefetchSources", "prefetch_pays"]

SOURCES = ("gates", "previous", "transitions")
"""The fields of ``PrefetchSources``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchSources:
    """What may propose loads. All off: ``prefetch_pays`` decides."""

    gates: bool = False
    previous: bool = False
    transitions: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are on."""
        return tuple(name for name in SOURCES if getattr(self, name))


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

    def forget(self) -> None:
        """What was predicted is not compared with anything: another text comes between."""
        self._open.clear()

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
    cost_s: float = 0.0,
    victim_use: float = 0.0,
    least_samples: int = 64,
) -> bool:
    """Whether one load ahead saves more time than it costs, by what was measured.

    ``fetch_s`` is one load, ``idle_s`` how long the link (or disk) rests before the next demand, on
    average, ``saved_s`` what a layer is quicker by when one more expert is there. A right
    prediction saves that, as far as it fits the idle time. A wrong one delays the next demand by
    what does not fit. Every one takes ``cost_s`` of the processors that compute meanwhile, and
    costs ``victim_use``, the chance that what it replaced was needed meanwhile, times ``saved_s``.
    Too few samples are no reason to begin.
    """
    right = meter.precision
    if meter.predicted < least_samples or right is None or fetch_s <= 0:
        return False
    gain = right * saved_s * min(1.0, idle_s / fetch_s)
    loss = (1 - right) * max(0.0, fetch_s - idle_s) + cost_s + victim_use * saved_s
    return gain > loss
