"""Measures the GPU use of a function: kernels, launches, waits, and how long the GPU was busy.

Torch's profiler sees every kernel and copy, including ours and those in graphs, and torch's calls
of CUDA; our calls of the driver are counted here. Profiling slows the work a little: use the times
as shares. Without torch for GPUs, all calls are ours, and events around each graph time it, with
the gaps between its kernels.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import get_native_id
from typing import Any

from localrt.quant.cuda.driver import Cuda, Event

_LAUNCHES = ("LaunchKernel", "GraphLaunch")
_OURS = "localrt"
_WAITS = frozenset({
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class GpuUse:
    """``kernels`` ran on the GPU, ``launches`` are calls that started them: a graph is one.

    ``waits`` are calls in which the launching thread waited for the GPU, ``reader_waits`` those of
    other threads. Of ``seconds``, kernels ran for ``busy_s`` (without a profiler: graphs), and
    copies to the GPU for ``link_s``. The longest times between two kernels and between two copies
    are ``idle_s`` and ``link_idle_s``. What only a profiler sees is None without one.
    """

    seconds: float
    kernels: int | None
    launches: int
    waits: int
    reader_waits: int
    busy_s: float | None
    link_s: float | None
    idle_s: float | None = None
    link_idle_s: float | None = None


def count_gpu_use(work: Callable[[], object]) -> GpuUse | None:
    """Run ``work`` and count its GPU use; None if no GPU was seen."""
    with suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            return _profiled(work)
    spans: list[tuple[Event, Event]] = []
    with _our_calls(spans) as calls:
        started = time.perf_counter()
        work()
        used = use_of(calls, time.perf_counter() - started)
    if used is None or not spans:
        return used
    spans[-1][1].synchronize()
    return replace(used, busy_s=sum(first.ms_until(last) for first, last in spans) / 1e3)


def _profiled(work: Callable[[], object]) -> GpuUse | None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities):  # the first takes seconds to begin
        torch.cuda.synchronize()
    with profile(activities=activities) as profiled, _our_calls() as calls:
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return use_of([*events, *calls], seconds)


@contextmanager
def _our_calls(
    graphs: list[tuple[Event, Event]] | None = None,
) -> Iterator[list[dict[str, object]]]:
    """Collect our calls of the driver within, as events of a trace; append to ``graphs`` events
    from before and after each graph.
    """
    calls, call = list[dict[str, object]](), Cuda.call

    def noted(self: Cuda, name: str, *args: Any, **options: Any) -> object:
        calls.append({"cat": _OURS, "name": name, "tid": get_native_id()})
        if graphs is None or name != "cuGraphLaunch":
            return call(self, name, *args, **options)
        first, last = (self.event(timed=True) for _ in range(2))
        call(self, "cuEventRecord", first.handle, args[1])
        result = call(self, name, *args, **options)
        call(self, "cuEventRecord", last.handle, args[1])
        graphs.append((first, last))
        return result

    Cuda.call = noted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        Cuda.call = call  # type: ignore[method-assign]


def use_of(events: Iterable[Mapping[str, Any]], seconds: float) -> GpuUse | None:
    """Return the GPU use from a trace's events, in Chrome's format."""
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "gpu_memcpy": []}
    launches: Counter[object] = Counter()
    waits: Counter[object] = Counter()
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        if kind in ("cuda_runtime", _OURS):
            launches[event.get("tid")] += any(each in name for each in _LAUNCHES)
            waits[event.get("tid")] += name in _WAITS
        elif kind in spans and (kind == "kernel" or "HtoD" in name):
            spans[kind].append((event["ts"], event["ts"] + event["dur"]))
    if not spans["kernel"] and not launches.total():
        return None
    profiled = bool(spans["kernel"])
    (busy, idle), (link, link_idle) = map(_covered, spans.values())
    thread, _ = launches.most_common(1)[0] if launches else (None, 0)
    return GpuUse(
        seconds=seconds,
        kernels=len(spans["kernel"]) if profiled else None,
        launches=launches.total(),
        waits=waits[thread],
        reader_waits=waits.total() - waits[thread],
        busy_s=busy if profiled else None,
        link_s=link if profiled else None,
        idle_s=idle if profiled else None,
        link_idle_s=link_idle if profiled else None,
    )


def _covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The seconds that the union of ``spans``, in microseconds, covers, and its longest gap."""
    total, gap, end = 0.0, 0.0, None
    for first, last in sorted(spans):
        end = first if end is None else end
        gap = max(gap, first - end)
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total / 1e6, gap / 1e6
