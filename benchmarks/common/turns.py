"""Contestants take turns, so that whatever else runs here hits all of them; medians of turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from localrt.bench.engines import LLAMACPP_SETTINGS
from localrt.engine.llamacpp.engine import LlamaCppEngine
from localrt.engine.llamacpp.model import LlamaCppModel, LlamaCppSettings
from localrt.loading.options import LoadOptions
from localrt.loading.parts import load_parts

_PAUSE = 0.03  # seconds: another's threads spin for a while
Name, Found = TypeVar("Name"), TypeVar("Found")


def by_turns(
    calls: Mapping[Name, Callable[[], Found]], runs: int, *, warm_up: bool = True
) -> dict[Name, list[Found]]:
    """What each call returns in every run, each run in another order; the first may warm up."""
    found: dict[Name, list[Found]] = {name: [] for name in calls}
    names = list(calls)
    for run in range(runs + warm_up):
        for name in names:
            result = calls[name]()
            if run >= warm_up:
                found[name].append(result)
        names.append(names.pop(0))
    return found


def timed(call: Callable[[], object], *, settle: float | None = None) -> Callable[[], float]:
    """The seconds of ``call``. With ``settle`` it is made for so many seconds, once at least,
    before it counts: threads wake up, each on a core of its own.
    """

    def seconds() -> float:
        time.sleep(_PAUSE)
        if settle is not None:
            ends = time.perf_counter() + settle
            call()
            while time.perf_counter() < ends:
                call()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    low, median, high = np.percentile(samples, (25, 50, 75)).tolist()
    return {"median": median, "quartiles": [low, high], "samples": list(samples)}


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Of the two in each turn: memory's rate is not always the same."""
    return [a / b for a, b in zip(over, under, strict=True)]


# -- beside llama.cpp ------------------------------------------------------------------------------


@contextmanager
def open_sessions(
    path: Path, capacity: int, *, threads: int, settings: Collection[str] = tuple(LLAMACPP_SETTINGS)
) -> Iterator[dict[str, Any]]:
    """A session of ``native`` and of llama.cpp under each of its ``settings``, by name."""
    options = LoadOptions(engine="native", ctx=capacity, threads=threads)
    with ExitStack() as engines:
        loaded: dict[str, Any] = {"native": load_parts(path, options).engine}
        engines.enter_context(closing(loaded["native"]))
        for name in settings:
            wanted = LlamaCppSettings(**LLAMACPP_SETTINGS[name])
            model = LlamaCppModel.load(path, threads=threads, settings=wanted)
            loaded[name] = LlamaCppEngine(model)
            engines.enter_context(closing(loaded[name]))
        yield {name: engine.session(capacity) for name, engine in loaded.items()}


def against_llamacpp(
    sessions: Mapping[str, Any], work: Callable[[Any], object], runs: int, **options: Any
) -> dict[str, Any]:
    """Median seconds of ``work`` with each session, llama.cpp's best setting, and how many times
    faster native is.
    """
    calls = {name: timed(lambda s=each: work(s), **options) for name, each in sessions.items()}
    samples = by_turns(calls, runs)
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    native = seconds.pop("native")
    best = min(seconds, key=seconds.__getitem__)
    return {
        "native_s": native,
        "llamacpp_s": seconds,
        "best_setting": best,
        "times_llamacpp": statistics.median(ratios(samples[best], samples["native"])),
    }
