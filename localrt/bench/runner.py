"""Run a workload on several engines, fairly, and collect every sample.

With room for all models at once the engines take turns run by run, so that whatever else happens on
the machine hits all of them alike; else they run one after another. Each is warmed up first. This
module does not load models itself, and does not print.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from localrt.bench.engines import Launch
from localrt.bench.memory_limit import MemoryLimit
from localrt.bench.process import ChildError, ChildProcess, child_command
from localrt.bench.workload import Workload, make_prompts
from localrt.errors import OptionError
from localrt.offload.budget import memory_state

__all__ = ["BenchOptions", "Outcome", "Result", "Skipped", "run_bench"]

_LLAMACPP_SETTINGS: Mapping[str, Mapping[str, bool]] = {
    "repacked": {"repack": True, "flash_attention": False},
    "repacked, flash attention": {"repack": True, "flash_attention": True},
    "plain": {"repack": False, "flash_attention": False},
    "plain, flash attention": {"repack": False, "flash_attention": True},
}

# Peak memory of a process as a multiple of the model's files, generously: what may run together.
_MEMORY_FACTOR = {"native": 6.0, "llamacpp": 2.5, "transformers": 12.0}
_PROCESS_BYTES = 500 << 20

_MEDIANS = ("ttft_s", "tpot_s", "prefill_tok_s", "decode_tok_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to run. ``memory_limit`` is in bytes, for each engine's process."""

    path: Path
    engines: Sequence[str]
    workload: Workload = field(default_factory=Workload)
    memory_limit: int | None = None
    threads: int | None = None
    format: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One engine and setting: medians by the names of `Metrics`, and every sample behind them.

    Peak memory is that of loading and of the warm-up: what one generation takes.
    """

    engine: str
    setting: str
    metrics: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    load_s: float
    info: Mapping[str, Any]

    @property
    def workload_s(self) -> float:
        """Seconds of the whole workload, by the medians: what the best setting is chosen by."""
        later = self.metrics["completion_tokens"] - 1
        return float(self.metrics["ttft_s"] + later * self.metrics["tpot_s"])


@dataclass(frozen=True, slots=True)
class Skipped:
    """An engine, or one setting of it, that did not run. ``missing``: it is not installed."""

    engine: str
    setting: str
    reason: str
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it, in the order asked for."""

    results: Sequence[Result]
    skipped: Sequence[Skipped]
    interleaved: bool


@dataclass(frozen=True, slots=True)
class _Candidate:
    setting: str
    launch: Launch


@dataclass(slots=True)
class _Running:
    candidate: _Candidate
    child: ChildProcess
    info: Mapping[str, Any]
    load_s: float
    peak_ram_bytes: int | None = None
    samples: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def setting(self) -> str:
        return self.candidate.setting or str(self.info.get("format", ""))


def run_bench(
    options: BenchOptions,
    *,
    notify: Callable[[str], None],
    command: Sequence[str] | None = None,
) -> Outcome:
    """Run every engine that can be run; ``notify`` gets a line before each step that takes time.

    ``command`` starts a child; tests pass one that loads no model.

    Raises:
        LocalrtError: a memory limit was asked for and cannot be set.
    """
    return _Bench(options, notify, command or child_command()).run()


class _Bench:
    def __init__(
        self, options: BenchOptions, notify: Callable[[str], None], command: Sequence[str]
    ) -> None:
        self._options = options
        self._notify = notify
        self._command = command
        self._prompts: list[list[int]] | None = None
        self._skipped: list[Skipped] = []

    def run(self) -> Outcome:
        candidates = list(_candidates(self._options))
        together = len(candidates) > 1 and _fit_together(self._options, candidates)
        groups = [candidates] if together else [[candidate] for candidate in candidates]
        results = [result for group in groups for result in self._run_group(group)]
        return Outcome(results, self._skipped, interleaved=together)

    def _run_group(self, group: Sequence[_Candidate]) -> list[Result]:
        """Load, warm up and run the members of a group in turns; those that fail drop out."""
        runs = self._options.workload.runs
        with ExitStack() as children:
            running = [r for r in (self._start(c, children) for c in group) if r is not None]
            running = [r for r in running if self._try(self._warm_up, r)]
            for index in range(1, runs + 1):
                if running:
                    self._notify(f"run {index} of {runs}")
                running = [r for r in running if self._try(self._time, r, index)]
        return [_result(r) for r in running]

    def _start(self, candidate: _Candidate, children: ExitStack) -> _Running | None:
        engine, options = candidate.launch.engine, self._options
        if any(skip.missing and skip.engine == engine for skip in self._skipped):
            return None
        self._notify(f"loading {_name(engine, candidate.setting)}")
        limit = None
        if options.memory_limit is not None:
            limit = MemoryLimit.create(options.memory_limit)
            _drop_from_cache(options.path)
        child = children.enter_context(ChildProcess(self._command, limit))
        started = time.perf_counter()
        try:
            info = child.ask("load", launch=asdict(candidate.launch))
        except ChildError as error:
            self._skip(engine, candidate.setting, error)
            return None
        trained = info.get("context_length")
        if trained and candidate.launch.ctx > trained:
            raise OptionError(
                f"{options.workload.prompt_tokens} prompt and {options.workload.tokens} answer "
                f"tokens do not fit the model's context of {trained}"
            )
        return _Running(candidate, child, info, time.perf_counter() - started)

    def _warm_up(self, running: _Running) -> None:
        if self._prompts is None:
            child = running.child
            self._prompts = make_prompts(
                self._options.workload, lambda text: list(child.ask("encode", text=text))
            )
        self._notify(f"warming up {_name(running.candidate.launch.engine, running.setting)}")
        running.peak_ram_bytes = self._generate(running, 0)["peak_ram_bytes"]

    def _time(self, running: _Running, index: int) -> None:
        running.samples.append(self._generate(running, index))

    def _generate(self, running: _Running, index: int) -> Mapping[str, Any]:
        assert self._prompts is not None
        tokens = self._options.workload.tokens
        metrics: Mapping[str, Any] = running.child.ask(
            "generate", prompt=self._prompts[index], tokens=tokens
        )
        return metrics

    def _try(self, step: Callable[..., None], running: _Running, *args: int) -> bool:
        try:
            step(running, *args)
        except ChildError as error:
            self._skip(running.candidate.launch.engine, running.setting, error)
            running.child.close()
            return False
        return True

    def _skip(self, engine: str, setting: str, error: ChildError) -> None:
        missing = error.kind == "MissingExtraError"
        self._skipped.append(Skipped(engine, "" if missing else setting, str(error), missing))


def _candidates(options: BenchOptions) -> Iterator[_Candidate]:
    workload = options.workload
    for engine in options.engines:
        settings: Mapping[str, Mapping[str, bool]] = {"": {}}
        if engine == "llamacpp":
            settings = _LLAMACPP_SETTINGS
        for setting, values in settings.items():
            launch = Launch(
                engine=engine,
                path=str(options.path),
                ctx=workload.prompt_tokens + workload.tokens,
                threads=options.threads,
                format=options.format if engine == "native" else None,
                settings=values,
            )
            yield _Candidate(setting, launch)


def _result(running: _Running) -> Result:
    samples = running.samples
    metrics = dict(samples[-1])
    for name in _MEDIANS:
        metrics[name] = median(sample[name] for sample in samples)
    metrics["peak_ram_bytes"] = running.peak_ram_bytes
    return Result(
        engine=running.candidate.launch.engine,
        setting=running.setting,
        metrics=metrics,
        samples=samples,
        load_s=running.load_s,
        info=running.info,
    )


def _name(engine: str, setting: str) -> str:
    return f"{engine} ({setting})" if setting else engine


def _fit_together(options: BenchOptions, candidates: Sequence[_Candidate]) -> bool:
    """Whether all models may be loaded at once.

    Never under a memory limit: the page cache of a file is charged to whoever reads it first, and
    the others would have it for free.
    """
    if options.memory_limit is not None:
        return False
    size = sum(path.stat().st_size for path in _files(options.path))
    needed = sum(size * _MEMORY_FACTOR[c.launch.engine] + _PROCESS_BYTES for c in candidates)
    return needed < memory_state().available


def _files(path: Path) -> list[Path]:
    """The files of a model: those of its folder, or all parts of a split GGUF."""
    if path.is_dir():
        return [file for file in path.iterdir() if file.is_file()]
    stem, separator, rest = path.name.partition("-00001-of-")
    return sorted(path.parent.glob(f"{stem}-*-of-{rest}")) if separator else [path]


def _drop_from_cache(path: Path) -> None:
    """Let the next reader of the model read the disk, and be charged for it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
