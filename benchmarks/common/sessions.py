"""Both engines on one file in this process: sessions that take turns, compared."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.timing import median_ratio
from localrt.bench.engines import LLAMACPP_SETTINGS
from localrt.engine.llamacpp.engine import LlamaCppEngine
from localrt.engine.llamacpp.model import LlamaCppModel, LlamaCppSettings
from localrt.loading.options import LoadOptions
from localrt.loading.parts import load_parts


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
