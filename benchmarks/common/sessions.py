"""Contestants that take turns, so that whatever else runs here hits all of them, and their times.

``open_sessions`` opens both engines on one file in this process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from localrt.bench.engines import LLAMACPP_SETTINGS
from localrt.engine.llamacpp.engine import LlamaCppEngine
from localrt.engine.llamacpp.model import LlamaCppModel, LlamaCppSettings
from localrt.loading.load import load_model
from localrt.loading.options import LoadOptions

_PAUSE = 0.03  # seconds: another's threads spin for a while


def by_turns(
    calls: Mapping[str, Callable[[], Any]], runs: int, *, settle: float | None = None
) -> dict[str, list[float]]:
    """Seconds of each call in every run but the first, which warms up.

    With ``settle`` a call is made for so many seconds, once at least, before it counts: threads
    wake up, each on a core of its own.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs + 1):
        for name, call in calls.items():
            time.sleep(_PAUSE)
            if settle is not None:
                ends = time.perf_counter() + settle
                call()
                while time.perf_counter() < ends:
                    call()
            start = time.perf_counter()
            call()
            if run:
                samples[name].append(time.perf_counter() - start)
    return samples


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Of the two in one run: memory's rate is not always the same."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


@contextmanager
def open_sessions(
    path: Path, capacity: int, *, threads: int, settings: Collection[str] = tuple(LLAMACPP_SETTINGS)
) -> Iterator[dict[str, Any]]:
    """A session of ``native`` and of llama.cpp under each of its ``settings``, by name."""
    options = LoadOptions(engine="native", ctx=capacity, threads=threads)
    with ExitStack() as engines:
        loaded: dict[str, Any] = {"native": load_model(path, options).engine}
        engines.enter_context(closing(loaded["native"]))
        for name in settings:
            wanted = LlamaCppSettings(**LLAMACPP_SETTINGS[name])
            model = LlamaCppModel.load(path, threads=threads, settings=wanted)
            loaded[name] = LlamaCppEngine(model)
            engines.enter_context(closing(loaded[name]))
        yield {name: engine.session(capacity) for name, engine in loaded.items()}


def against_llamacpp(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Median seconds of both, llama.cpp's best setting, and how many times faster native is."""
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    ours = seconds.pop("native")
    best = min(seconds, key=seconds.__getitem__)
    return {
        "native_s": ours,
        "llamacpp_s": seconds,
        "best_setting": best,
        "times_llamacpp": median_ratio(samples[best], samples["native"]),
    }
