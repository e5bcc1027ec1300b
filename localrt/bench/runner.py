"""Runs a workload on several engines, fairly, and collects every sample.

If all models fit in memory at once, the engines alternate run by run, so that other load on the
machine affects all alike. Otherwise, or if an engine reads its weights while it runs or a GPU is
used, they run one after another. Each is warmed up first. This module does not load models itself,
and does not print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from localrt.bench.gpu import Peaks, used_nbytes
from localrt.bench.llama_bench import NO_ROOM, LlamaBench
from localrt.bench.process import ENGINE, LLAMACPP_SETTINGS, ChildError, ChildProcess, Launch
from localrt.bench.workload import (
    LONG_ANSWER,
    BenchOptions,
    Outcome,
    Result,
    Skipped,
    make_long_prompt,
    make_prompts,
)
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.formatting import format_bytes, format_rate
from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import load_tokenizer
from localrt.offload.memory import memory_state

# llama.cpp may take more or less GPU memory than it is given: the first of these shares with which
# it keeps to the budget counts. If that cannot be measured, `_SAFE`.
_SHARES, _SAFE = (1.1, 1.0, 0.9, 0.75, 0.6), 0.9

_NATIVE = ("format", "device", "gpu_memory", "ram", "kv_format", "draft")

# Upper bounds of a process's peak memory, as a multiple of the model's files.
_MEMORY_FACTOR = {"native": 6.0, "llamacpp": 2.5}
_PROCESS_BYTES = 500 << 20

_MEDIANS = (
    *("ttft_s", "tpot_s", "prefill_tok_s", "decode_tok_s"),
    *("pipeline_efficiency", "ceiling_tok_s", "predicted_tok_s", "ssd_read_bytes", "link_bytes"),
    "expert_hit_rate",
)


@dataclass(slots=True)
class _Running:
    engine: str
    setting: str
    child: Any  # a `ChildProcess`; None of a peer
    info: Mapping[str, Any]
    load_s: float
    peak_ram_bytes: int | None = None
    peak_vram_bytes: int | None = None
    samples: list[Any] = field(default_factory=list)
    once: dict[str, Any] = field(default_factory=dict)  # measured once, after the runs


def run_bench(
    options: BenchOptions,
    *,
    notify: Callable[[str], None],
    start: Callable[[str], ChildProcess] = lambda engine: ChildProcess(ENGINE),
    alone: bool = False,
) -> Outcome:
    """Run every engine that can run. ``notify`` is called with a line before each slow step, and
    one with its result.

    Ctrl+C ends the benchmark with the results so far. ``start`` starts an engine's process;
    ``alone`` allows only one at a time.
    """
    return _Bench(options, notify, start, alone).run()


class _Bench:
    def __init__(
        self,
        options: BenchOptions,
        notify: Callable[[str], None],
        start: Callable[[str], ChildProcess],
        alone: bool,
    ) -> None:
        self._options, self._notify, self._start_child = options, notify, start
        unnamed = options.device in (None, "auto") and used_nbytes() is not None
        self._gpu = options.uses_gpu or unnamed
        self._alone = alone or self._gpu
        self._prompts: list[list[int]] | None = None
        self._long_prompt: list[int] = []
        self._skipped: list[Skipped] = []
        self._running: list[_Running] = []

    def run(self) -> Outcome:
        candidates = list(_candidates(self._options, self._gpu))
        together = not self._alone and _fit_together(self._options, candidates)
        groups = [candidates] if together else [[candidate] for candidate in candidates]
        interrupted = False
        try:
            for group in groups:
                self._run_group(group)
            for name, program in self._options.peers.items():
                self._run_peer(name, program)
        except KeyboardInterrupt:
            interrupted = True
        results = [_result(each) for each in self._running if each.samples]
        return Outcome(results, self._skipped, together, interrupted)

    def _run_peer(self, name: str, program: Path) -> None:
        peer = LlamaBench(name, program, self._options, self._gpu, self._notify)
        try:
            setting, samples, info = peer.measure()
            ram, vram = (samples[-1][f"peak_{kind}_bytes"] for kind in ("ram", "vram"))
            running = _Running(name, setting, None, info, 0.0, ram, vram, samples=samples)
            self._running.append(running)
        except LocalrtError as error:
            self._skip(name, "", ChildError(type(error).__name__, str(error)))

    def _run_group(self, group: Sequence[_Candidate]) -> None:
        """Load and warm up a group's engines, then run them alternately; drop those that fail."""
        with ExitStack() as children:
            running = [r for r in (self._start(*c, children) for c in group) if r is not None]
            self._running += running
            for index in range(1, self._options.workload.runs + 1):
                running = [r for r in running if self._try(r, index)]
            for each in running:
                self._look(each)

    def _start(self, setting: str, tries: Sequence[Launch], children: ExitStack) -> _Running | None:
        """Load and warm up with the first of ``tries`` that keeps to the GPU memory."""
        engine, failed = tries[0].engine, ChildError("", "")
        if any(skip.engine == engine and not skip.setting for skip in self._skipped):
            return None  # the engine cannot run with any setting
        for launch in tries:
            child = children.enter_context(self._start_child(engine))
            try:
                with Peaks(child.pid) as peaks:
                    running = self._load(setting, launch, child)
                    self._warm_up(running)
                if on_gpu(running.info):
                    running.peak_vram_bytes = peaks.vram or running.peak_vram_bytes
                taken, budget = running.peak_vram_bytes or 0, self._options.gpu_memory
                if engine == "native" or budget is None or taken <= budget:
                    return running
                failed = ChildError("", f"takes {format_bytes(taken)} of the GPU's memory")
            except ChildError as error:
                failed = error
            child.close()
            if not NO_ROOM.search(str(failed)):
                break
        self._skip(engine, setting, failed)
        return None

    def _load(self, setting: str, launch: Launch, child: ChildProcess) -> _Running:
        engine, options = launch.engine, self._options
        self._notify(f"loading {_name(engine, setting)}")
        started = time.perf_counter()
        info = child.ask("load", launch=asdict(launch))
        trained = info.get("context_length")
        if trained and launch.ctx > trained:
            raise OptionError(
                f"prompt and answer need a context of {options.workload.ctx} tokens, which do not "
                f"fit the model's context of {trained}"
            )
        shown = setting or str(info.get("format", ""))
        return _Running(engine, shown, child, info, time.perf_counter() - started)

    def _warm_up(self, running: _Running) -> None:
        if self._prompts is None:
            work, encode = self._options.workload, _encoder(self._options.path, running.child)
            self._prompts = make_prompts(work, encode)
            if work.long_prompt_tokens:
                self._long_prompt = make_long_prompt(work, encode)
        self._notify(f"warming up {_name(running.engine, running.setting)}")
        sample = self._generate(running, 0)
        running.peak_ram_bytes = sample["peak_ram_bytes"]
        running.peak_vram_bytes = sample["peak_vram_bytes"]

    def _time(self, running: _Running, index: int) -> None:
        sample = self._generate(running, index)
        running.samples.append(sample)
        rates = [format_rate(sample.get(name)) for name in ("prefill_tok_s", "decode_tok_s")]
        self._notify(
            f"{_name(running.engine, running.setting)}, run {index} of "
            f"{self._options.workload.runs}: prefill {rates[0]}, decode {rates[1]} tok/s"
        )

    def _generate(self, running: _Running, index: int) -> Any:
        assert self._prompts is not None
        work, child = self._options.workload, running.child
        if work.batch == 1:
            return child.ask("generate", prompt=self._prompts[index], tokens=work.tokens)
        child.ask("free")  # caches of earlier answers need not leave for these
        prompts = self._prompts[index * work.batch : (index + 1) * work.batch]
        return child.ask("generate_batch", prompts=prompts, tokens=work.tokens)

    def _look(self, running: _Running) -> None:
        """Measure a long prompt's first token and the use of a GPU once; note a failure."""
        name, child = _name(running.engine, running.setting), running.child
        assert self._prompts is not None
        try:
            if self._long_prompt:
                self._notify(f"{name}: a prompt of {len(self._long_prompt)} tokens")
                answer = child.ask("generate", prompt=self._long_prompt, tokens=LONG_ANSWER)
                running.once["long_ttft_s"] = answer["ttft_s"]
            if self._gpu and running.engine == "native":
                running.once["busy"] = child.ask("busy_shares", prompt=self._prompts[0])
        except ChildError as error:
            self._notify(f"{name}: {error}")

    def _try(self, running: _Running, index: int) -> bool:
        try:
            self._time(running, index)
        except ChildError as error:
            self._skip(running.engine, running.setting, error)
            running.samples.clear()
            running.child.close()
            return False
        return True

    def _skip(self, engine: str, setting: str, error: ChildError) -> None:
        missing = error.kind == "MissingExtraError"
        setting = "" if missing else setting
        self._notify(f"{_name(engine, setting)}: {error}")
        self._skipped.append(Skipped(engine, setting, str(error), missing, error.kind))


def _encoder(path: Path, child: ChildProcess) -> Callable[[str], list[int]]:
    """Load the model's tokenizer in this process, so that no engine's memory includes it."""
    try:
        with closing(open_checkpoint(path)) as checkpoint:
            tokenizer = load_tokenizer(checkpoint)
    except LocalrtError:  # the engine may support this tokenizer
        return lambda text: list(child.ask("encode", text=text))
    return lambda text: tokenizer.encode(text, add_special=False)


_Candidate = tuple[str, Sequence[Launch]]
"""A setting's name, and launches to try in this order."""


def on_gpu(info: Mapping[str, Any]) -> bool:
    """Whether an engine computes on a GPU, be it in part."""
    return not str(info.get("device", "cpu")).startswith("cpu")


def _candidates(options: BenchOptions, gpu: bool) -> Iterator[_Candidate]:
    for engine in options.engines:
        chosen = (options.settings or {}).get(engine)
        settings: Mapping[str, Mapping[str, object]] = LLAMACPP_SETTINGS
        tried: list[dict[str, object]] = [{}]
        if engine == "native":
            given = {name: getattr(options, name) for name in _NATIVE}
            settings = {"": {name: value for name, value in given.items() if value is not None}}
        elif gpu:
            tried = [{"device": options.device or "auto"}]
            if options.gpu_memory is not None:
                shares = (_SAFE,) if used_nbytes() is None else _SHARES
                tried = [{**tried[0], "gpu_memory": int(x * options.gpu_memory)} for x in shares]
        ctx, path = options.ctx or options.workload.ctx, str(options.path)
        plain = Launch(engine=engine, path=path, ctx=ctx, threads=options.threads)
        for setting, values in settings.items():
            if chosen is None or setting in chosen:
                yield setting, [replace(plain, settings={**values, **more}) for more in tried]


def _result(running: _Running) -> Result:
    samples = running.samples
    metrics = dict(samples[-1])
    for name in _MEDIANS:
        metrics[name] = _median_of(samples, name)
    if metrics["predicted_tok_s"] and metrics["decode_tok_s"]:
        metrics["of_predicted"] = metrics["decode_tok_s"] / metrics["predicted_tok_s"]
    reads = _median_of(samples, "decode_read_bytes")
    steps = metrics["completion_tokens"] - 1  # decoding begins after the first token
    metrics.pop("decode_read_bytes", None)
    metrics["read_bytes_per_token"] = None if reads is None else round(reads / steps)
    joules = _median_of(samples, "decode_joules")
    metrics.pop("decode_joules", None)
    metrics["joules_per_token"] = None if joules is None else joules / steps
    metrics |= running.once
    metrics["peak_ram_bytes"] = running.peak_ram_bytes
    metrics["peak_vram_bytes"] = running.peak_vram_bytes
    return Result(
        engine=running.engine,
        setting=running.setting,
        metrics=metrics,
        samples=samples,
        load_s=running.load_s,
        info=running.info,
    )


def _median_of(samples: Sequence[Mapping[str, Any]], name: str) -> object:
    """Return the median of the samples that have the value."""
    known = [value for sample in samples if (value := sample.get(name)) is not None]
    return median(known) if known else None


def _name(engine: str, setting: str) -> str:
    return f"{engine} ({setting})" if setting else engine


def _fit_together(options: BenchOptions, candidates: Sequence[_Candidate]) -> bool:
    """Whether all engines may be loaded at once: they fit, and none has a RAM limit."""
    if options.ram is not None or len(candidates) < 2:
        return False
    size = sum(path.stat().st_size for path in model_files(options.path))
    factors = [_MEMORY_FACTOR[launches[0].engine] for _, launches in candidates]
    return sum(size * factor + _PROCESS_BYTES for factor in factors) < memory_state().available


def model_files(path: Path) -> list[Path]:
    """Return a model's files: all in its folder, or all parts of a split GGUF."""
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file()]
    stem, separator, rest = path.name.partition("-00001-of-")
    return sorted(path.parent.glob(f"{stem}-*-of-{rest}")) if separator else [path]
