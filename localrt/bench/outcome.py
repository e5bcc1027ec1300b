"""What a benchmark is asked for, and what comes of it: plain values, for runner and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrt.bench.workload import Workload
from localrt.errors import OptionError
from localrt.option_names import option

__all__ = ["BenchOptions", "Outcome", "Result", "Skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to run. Sizes are in bytes; ``memory_limit`` is for each engine's process.

    ``ram``, ``gpu_memory``, ``device``, ``format`` and ``kv_format`` are the native engine's;
    ``ctx`` is every engine's context, by default just long enough. ``settings`` names those of an
    engine to measure, by default all. Weights that peers need in another form are kept below
    ``cache``; ``stores`` is where the native engine keeps its own. ``trace`` asks for the native
    engine's tasks in its last run.
    """

    path: Path
    engines: Sequence[str]
    workload: Workload = field(default_factory=Workload)
    memory_limit: int | None = None
    threads: int | None = None
    format: str | None = None
    device: str | None = None
    gpu_memory: int | None = None
    ram: int | None = None
    kv_format: str | None = None
    ctx: int | None = None
    settings: Mapping[str, Sequence[str]] | None = None
    cache: Path | None = None
    stores: Path | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        work = self.workload
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"{option('threads')} must be at least 1, is {self.threads}")
        if self.ctx is not None and self.ctx < work.ctx:
            held = f"{work.prompt_tokens} prompt and {work.tokens} answer tokens"
            if work.ctx > work.prompt_tokens + work.tokens:
                held = f"a prompt of {work.long_prompt_tokens} tokens"
            raise OptionError(
                f"{option('ctx')} must be at least {work.ctx} to hold {held}, is {self.ctx}"
            )

    @property
    def uses_card(self) -> bool:
        """Whether a card was asked for: then it is looked at, too."""
        device = self.device or ""
        return self.gpu_memory is not None or device.startswith(("cuda", "virtual:"))


@dataclass(frozen=True, slots=True)
class Result:
    """One engine and setting: medians by the names of `Metrics`, and every sample behind them.

    ``peak_ram_bytes`` is that of loading and of the warm-up: what one generation takes. Beside the
    metrics are ``read_bytes_per_token`` (from disk, while decoding) and, under a memory limit,
    ``peak_cgroup_bytes`` (of all runs, page cache included); of a long prompt ``long_ttft_s``; and
    of a card that was asked for what ``CardUse`` has. ``trace`` has the tasks of the last run,
    where they were asked for and there are any.
    """

    engine: str
    setting: str
    metrics: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    load_s: float
    info: Mapping[str, Any]
    trace: Sequence[Mapping[str, Any]] | None = None

    @property
    def workload_s(self) -> float:
        """Seconds of the whole workload, by the medians: what the best setting is chosen by."""
        later = self.metrics["completion_tokens"] - 1
        return float(self.metrics["ttft_s"] + later * self.metrics["tpot_s"])


@dataclass(frozen=True, slots=True)
class Skipped:
    """An engine, or one setting of it, that did not run. ``missing``: it is not installed.

    ``kind`` is the error's class.
    """

    engine: str
    setting: str
    reason: str
    missing: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it, in the order asked for.

    ``page_cache`` says what was dropped from it before and after each engine, if anything was;
    ``interrupted``, that some runs are missing.
    """

    results: Sequence[Result]
    skipped: Sequence[Skipped]
    interleaved: bool
    page_cache: str | None = None
    interrupted: bool = False
