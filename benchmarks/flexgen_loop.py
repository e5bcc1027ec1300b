"""A FlexGen-style loop out of the pipeline's own parts: one barrier per unit, the same kernels.

While a unit is computed the next one is loaded, and nothing else; both must end before the next
step begins. It is made by holding the pipeline back: a ``Gate`` lets the load of a unit begin when
the computation before it begins. That the step ends with the later of both follows: a computation
waits for its unit anyway. Nothing in localrt knows of it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from localrt.offload.cards.clock import Clock, later
from localrt.offload.reading.files import FileReader

__all__ = ["HEAD", "Gate", "GatedCard", "GatedClock", "GatedFiles"]

HEAD = "head"


class Gate:
    """Knows the units of a pass in order, which of them are streamed, and how far the pass is.

    It also takes the times: seconds of each unit's loads and computations. ``link`` is the bytes
    per second of a virtual link, where loads go over one.
    """

    def __init__(
        self,
        order: Sequence[str],
        streamed: Mapping[str, int],
        *,
        closed: bool,
        link: float | None = None,
    ) -> None:
        self._link = link
        self._order = list(order)
        self._streamed = streamed  # bytes by name
        self._place = {name: index for index, name in enumerate(order)}
        self._closed = closed
        self._changed = threading.Condition()
        self._asked: dict[str, int] = defaultdict(int)  # bytes
        self._loaded: dict[str, int] = defaultdict(int)  # bytes
        self._begun = 0  # computations, of all passes
        self._mark: Any = None  # when the latest of them began, on a virtual clock
        self._since: dict[str, float] = {}
        self.loads: dict[str, list[float]] = defaultdict(list)
        self.computes: dict[str, list[float]] = defaultdict(list)

    def enter(self, name: str, nbytes: int) -> Any:
        """Wait until ``nbytes`` of a unit may be loaded; returns the mark from which on."""
        size = self._streamed[name]
        with self._changed:
            round_, inside = divmod(self._asked[name], size)
            self._asked[name] += nbytes
            turn = round_ * len(self._order) + self._place[name]
            while self._closed and self._begun < turn:
                self._changed.wait()
            if not inside:
                self._since[name] = time.perf_counter()
            return self._mark if self._closed else None

    def leave(self, name: str, nbytes: int) -> None:
        """These bytes are there."""
        with self._changed:
            self._loaded[name] += nbytes
            if self._loaded[name] % self._streamed[name] == 0:
                self.loads[name].append(time.perf_counter() - self._since[name])
            self._changed.notify_all()

    def begin(self, mark: Any = None) -> None:
        """A computation begins."""
        with self._changed:
            self._begun += 1
            self._mark = mark
            self._changed.notify_all()

    def open(self) -> None:
        """Hold nothing back any more."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    def forget_times(self) -> None:
        """Drop the times so far: warming up."""
        with self._changed:
            self.loads.clear()
            self.computes.clear()

    def times(self) -> list[tuple[float, float]]:
        """Of each unit in order, medians: seconds of its load, 0 where resident, and compute."""
        with self._changed:
            return [
                (self._load(name), statistics.median(self.computes[name])) for name in self._order
            ]

    def _load(self, name: str) -> float:
        if name not in self._streamed:
            return 0.0
        if self._link is not None:
            return self._streamed[name] / self._link
        return statistics.median(self.loads[name])


class GatedClock:
    """See ``Clock``: tells the gate when computations begin."""

    def __init__(self, inner: Clock, gate: Gate) -> None:
        self._inner, self._gate = inner, gate
        self.simulated = inner.simulated

    def now(self) -> float:
        return self._inner.now()

    def begin(self, resource: Any) -> float:
        if resource in ("cpu", "gpu") and not self.simulated:
            self._gate.begin()
        return self._inner.begin(resource)

    def end(
        self,
        resource: Any,
        name: str,
        started: float,
        *,
        after: Any = None,
        cost_s: float | None = None,
    ) -> Any:
        wall = time.perf_counter() - started
        mark = self._inner.end(resource, name, started, after=after, cost_s=cost_s)
        if resource in ("cpu", "gpu"):
            seconds = wall if cost_s is None else cost_s
            # The slices of a resident head are computed at once.
            self._gate.computes[HEAD if name.startswith("head") else name].append(seconds)
            if self.simulated:
                self._gate.begin(mark - seconds)
        return mark


class GatedFiles:
    """See ``FileReader``: reads of the streamed ``units`` wait for the gate."""

    def __init__(self, inner: FileReader, gate: Gate, units: Sequence[Any]) -> None:
        self._inner, self._gate, self._units = inner, gate, units

    def read_into(self, name: str, offset: int, out: np.ndarray) -> None:
        unit = self._find(name, offset)
        if unit is not None:
            self._gate.enter(unit.name, out.nbytes)
        try:
            self._inner.read_into(name, offset, out)
        except BaseException:
            self._gate.open()  # the pass hears of it
            raise
        if unit is not None:
            self._gate.leave(unit.name, out.nbytes)

    def check_unchanged(self) -> None:
        self._inner.check_unchanged()

    def close(self) -> None:
        self._gate.open()
        self._inner.close()

    def _find(self, name: str, offset: int) -> Any:
        for unit in self._units:
            if unit.file == name and unit.offset <= offset < unit.offset + unit.nbytes:
                return unit
        return None


class GatedCard:
    """An accelerator whose copies of streamed units wait for the gate."""

    def __init__(self, inner: Any, gate: Gate, streamed: Mapping[str, int]) -> None:
        self._inner, self._gate, self._streamed = inner, gate, streamed

    def copy_in(self, name: str, source: Any, out: Any, after: Any, there: Any) -> Any:
        if name not in self._streamed:
            return self._inner.copy_in(name, source, out, after, there)
        start = self._gate.enter(name, source.nbytes)
        mark = self._inner.copy_in(name, source, out, later(after, start), there)
        self._gate.leave(name, source.nbytes)
        return mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
