"""Measures every combination of settings on one model: ``localrt bench --sweep FILE.json``.

Points with equal loading options share a child process, which measures them in order of increasing
memory, so that the process's peak is that of the point. A finished point is written to the file at
once, and is not measured again. If a point cannot run, the file has the reason. This module knows
no command line.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, cast

from localrt.bench import nvml
from localrt.bench.engines import Launch
from localrt.bench.process import ENGINE, ChildError, ChildProcess
from localrt.bench.runner import encoder, median_of, on_gpu
from localrt.bench.workload import Workload, make_prompts
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import read_text, write_text
from localrt.common.formatting import format_bytes, format_rate, format_seconds, parse_size, table
from localrt.common.option_names import option
from localrt.models.checkpoints import open_checkpoint
from localrt.quant.ops.kv_formats import KV_FORMATS

DEFAULT_VARY = "prompt_tokens=128,512,2048 batch=1,4"
GPU_VARY = "gpu_memory=8GB,6GB,4GB batch=1,2,4,8,16,32,64"
"""What varies by default, without and with a GPU."""

MEASURES: tuple[str, ...] = ("ttft_s", "tpot_s", "prefill_tok_s", "decode_tok_s")
MEASURES += ("peak_ram_bytes", "peak_vram_bytes", "expert_hit_rate")
"""The measures of a point, named as in `Metrics`; ``decode_tok_s`` is that of all answers."""

SOMETIMES = ("peak_vram_bytes", "expert_hit_rate")
"""The measures that are shown only where there are any."""

WORK = ("prompt_tokens", "tokens", "batch")
"""The settings of a workload; all others are loading options."""

_COUNTS = {"prompt_tokens": 1, "tokens": 2, "batch": 1, "threads": 1, "ctx": 1}  # smallest values
_CHOICES = {"format": ("file", "bf16", "f32"), "kv_format": KV_FORMATS}
SETTINGS = (*_COUNTS, *_CHOICES, "ram", "gpu_memory", "device", "draft")
"""Every setting that can vary."""

Setting: TypeAlias = int | str | None
"""A setting's value; None if it is chosen at loading."""

Point = dict[str, Any]
"""A point's settings by name; after it ran, also its measures or the reason why it failed."""


class SweepReport(TypedDict):
    """The contents of the file, besides the machine and the command."""

    model: str
    vary: Mapping[str, Sequence[Setting]]
    runs: int
    points: list[Point]
    interrupted: bool


def parse_vary(text: str) -> dict[str, list[Setting]]:
    """Parse ``"prompt_tokens=128,512 ram=1GB,2GB"``; sizes become bytes, ``format=file`` None.

    Raises:
        OptionError: the text is invalid.
    """
    varied: dict[str, list[Setting]] = {}
    for word in text.split():
        name, equals, values = word.partition("=")
        if not equals:
            raise OptionError(f"{option('vary')}: write NAME=VALUE,VALUE instead of {word!r:.80}")
        if name not in SETTINGS:
            known = ", ".join(SETTINGS)
            raise OptionError(f"{option('vary')}: no setting {name!r:.80}; there are {known}")
        if name in varied:
            raise OptionError(f"{option('vary')}: {name} is there twice; join its values by commas")
        varied[name] = list(dict.fromkeys(_value(name, value) for value in values.split(",")))
    if not varied:
        raise OptionError(f"{option('vary')} names no setting: write NAME=VALUE,VALUE")
    return varied


def _value(name: str, text: str) -> Setting:
    what = f"{option('vary')}: {name}"
    if name in _COUNTS:
        if not text.isascii() or not text.isdigit() or int(text) < _COUNTS[name]:
            raise OptionError(
                f"{what} must be a whole number from {_COUNTS[name]}, is {text!r:.80}"
            )
        return int(text)
    if name in ("ram", "gpu_memory"):
        return parse_size(text, what)
    choices = _CHOICES.get(name)
    if not text or (choices and text not in choices):
        must = f"one of {', '.join(choices)}" if choices else "a value"
        raise OptionError(f"{what} must be {must}, is {text!r:.80}")
    return None if text == "file" else text


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What to measure. ``fixed`` are the settings that do not vary, except those that are None.

    ``identity`` identifies the model's contents and the machine: a file with another one is
    refused. ``facts`` are further keys of the file, such as ``machine`` and ``command``.
    """

    path: Path
    file: Path
    vary: Mapping[str, Sequence[Setting]]
    fixed: Mapping[str, Setting]
    runs: int
    identity: Mapping[str, object]
    facts: Mapping[str, object]

    def points(self) -> list[Point]:
        """Return every combination, grouped by loading options and sorted by size."""
        fixed = {"prompt_tokens": 512, "tokens": 128, "batch": 1, **self.fixed}
        names = [name for name in SETTINGS if name in self.vary]
        rows = itertools.product(*(self.vary[name] for name in names))
        points = [
            {name: fixed.get(name) for name in SETTINGS} | dict(zip(names, row, strict=True))
            for row in rows
        ]
        loads = list(dict.fromkeys(map(_load, points)))
        return sorted(points, key=lambda point: (loads.index(_load(point)), _held(point)))


def run_sweep(
    options: SweepOptions,
    *,
    notify: Callable[[str], None],
    start: Callable[[], ChildProcess] = lambda: ChildProcess(ENGINE),
) -> SweepReport:
    """Measure the points that are missing in the file; return the file's contents.

    ``notify`` is called with a line after each point. After Ctrl+C the file has the points so far,
    and ``interrupted`` is true.

    Raises:
        OptionError: the file is not a sweep, or of another model, machine or command.
    """
    return _Sweep(options, notify, start).run()


class _Sweep:
    def __init__(
        self,
        options: SweepOptions,
        notify: Callable[[str], None],
        start: Callable[[], ChildProcess],
    ) -> None:
        self._options, self._notify, self._start = options, notify, start
        self._points = options.points()
        plan = {"vary": options.vary, "fixed": options.fixed, "runs": options.runs}
        report = {
            "kind": "sweep",
            **options.facts,
            "identity": options.identity,
            **plan,
            "points": _finished(options, json.loads(json.dumps(plan))),
            "interrupted": True,
        }
        self._report = cast(SweepReport, report)
        self._trained = _trained_context(options.path)
        self._began: float | None = None  # start time of the first point's process
        self._work = 0
        self._peaks: nvml.Peaks | None = None  # of a process that uses a GPU

    def run(self) -> SweepReport:
        done = {_key(point) for point in self._report["points"]}
        left = [point for point in self._points if _key(point) not in done]
        if done:
            self._notify(f"{len(done)} of {len(self._points)} points are in {self._options.file}")
        try:
            left = [point for point in left if not self._refused(point)]
            self._began = time.monotonic()
            for _, group in itertools.groupby(left, _load):
                self._run_group(list(group))
        except KeyboardInterrupt:
            pass
        self._write()
        return self._report

    def _refused(self, point: Point) -> bool:
        """Finish a point that exceeds the context; returns whether it does."""
        needs = point["prompt_tokens"] + point["tokens"]
        most = min(point["ctx"] or needs, self._trained or needs)
        if needs > most:
            self._finish(point, {"reason": f"needs {needs} tokens of a context of {most}"})
        return bool(needs > most)

    def _run_group(self, points: list[Point]) -> None:
        """Measure points with equal loading options; if the child dies, continue in a new one."""
        while points:
            with closing(self._start()) as child, nvml.Peaks(child.pid) as peaks:
                try:
                    info = child.ask("load", launch=asdict(self._launch(points[0])))
                    if points[0]["gpu_memory"] and not on_gpu(info):
                        raise ChildError("OptionError", "gpu_memory: no GPU computes here")
                except ChildError as error:
                    for point in points:
                        self._finish(point, {"reason": str(error)})
                    return
                prompts = self._prompts(points, child)
                self._answer(child, points[0], prompts)  # warms up; a failure will recur
                self._peaks = peaks if on_gpu(info) else None
                while points and self._measure(child, points.pop(0), prompts):
                    pass

    def _launch(self, point: Point) -> Launch:
        own = {name: point[name] for name in SETTINGS if name not in (*WORK, "threads", "ctx")}
        return Launch(
            engine="native",
            path=str(self._options.path),
            ctx=point["ctx"] or self._longest(),
            threads=point["threads"],
            settings={name: value for name, value in own.items() if value is not None},
        )

    def _longest(self) -> int:
        """The context for points that set none: the same for all, so that they are comparable."""
        needs = [point["prompt_tokens"] + point["tokens"] for point in self._points]
        return int(max(need for need in needs if need <= (self._trained or need)))

    def _prompts(self, points: Sequence[Point], child: ChildProcess) -> Iterator[list[int]]:
        """Yield prompts of the longest length without common prefixes, so that no run finds
        another's cache.
        """
        count = sum(point["batch"] * self._options.runs for point in points) + points[0]["batch"]
        work = Workload(max(point["prompt_tokens"] for point in points), runs=count)
        return iter(make_prompts(work, encoder(self._options.path, child)))

    def _answer(
        self, child: ChildProcess, point: Point, prompts: Iterator[list[int]]
    ) -> Mapping[str, Any] | ChildError:
        own = [ids[: point["prompt_tokens"]] for ids in itertools.islice(prompts, point["batch"])]
        try:
            child.ask("free")
            if len(own) == 1:
                return dict(child.ask("generate", prompt=own[0], tokens=point["tokens"]))
            return dict(child.ask("generate_batch", prompts=own, tokens=point["tokens"]))
        except ChildError as error:
            return error

    def _measure(self, child: ChildProcess, point: Point, prompts: Iterator[list[int]]) -> bool:
        """Measure a point; return whether the child can continue."""
        samples = []
        for _ in range(self._options.runs):
            answer = self._answer(child, point, prompts)
            if isinstance(answer, ChildError):
                self._finish(point, {"reason": str(answer)})
                return answer.kind != "died"
            samples.append(answer)
        measured = {name: median_of(samples, name) for name in MEASURES}
        if self._peaks is not None and self._peaks.vram:
            measured["peak_vram_bytes"] = self._peaks.vram
        self._finish(point, {"reason": None, **measured})
        return True

    def _finish(self, point: Point, outcome: Mapping[str, Any]) -> None:
        points = self._report["points"]
        points.append({**point, **dict.fromkeys(MEASURES), **outcome})
        self._write()
        rest = ""
        if self._began is not None:
            self._work += _effort(point)
            done = {_key(each) for each in points}
            left = sum(_effort(each) for each in self._points if _key(each) not in done)
            seconds = (time.monotonic() - self._began) / self._work * left
            rest = f"; about {format_seconds(seconds)} left" if left else ""
        result = outcome["reason"] or (
            f"prefill {format_rate(outcome['prefill_tok_s'])}, "
            f"decode {format_rate(outcome['decode_tok_s'])} tok/s"
        )
        shown = describe(point, [name for name in SETTINGS if name in self._options.vary])
        self._notify(f"{len(points)} of {len(self._points)}: {shown}: {result}{rest}")

    def _write(self) -> None:
        self._report["interrupted"] = len(self._report["points"]) < len(self._points)
        write_text(self._options.file, json.dumps(self._report, indent=1) + "\n")


def _finished(options: SweepOptions, plan: Mapping[str, object]) -> list[Point]:
    """Return the finished points in the file; none if there is no file."""
    file = options.file
    if not file.exists():
        return []
    text = read_text(file)
    try:
        report = json.loads(text)
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.get("kind") != "sweep":
        raise OptionError(f"{file} is no sweep and stays as it is: give {option('sweep')} another")
    identity = report.get("identity", {})
    for what, value in options.identity.items():
        if identity.get(what) != value:
            raise OptionError(f"{file} is of another {what}: give {option('sweep')} another file")
    for name, value in plan.items():
        if report.get(name) != value:
            raise OptionError(
                f"{file} was made with other settings ({name} differs): "
                f"repeat its command, or give {option('sweep')} another file"
            )
    try:
        points = list(report["points"])
        all(_key(point) for point in points)
    except (KeyError, TypeError):
        raise OptionError(f"{file} is damaged: give {option('sweep')} another file") from None
    return points


def _trained_context(path: Path) -> int | None:
    try:
        with closing(open_checkpoint(path)) as checkpoint:
            trained = cast("int | None", checkpoint.config.get("max_position_embeddings"))
            return int(trained or 0) or None
    except LocalrtError:  # loading will report it
        return None


def _load(point: Point) -> tuple[Setting, ...]:
    return tuple(point[name] for name in SETTINGS if name not in WORK)


def _key(point: Point) -> tuple[Setting, ...]:
    return tuple(point[name] for name in SETTINGS)


def _held(point: Point) -> int:
    """Tokens in the KV caches at the end."""
    return int(point["batch"] * (point["prompt_tokens"] + point["tokens"]))


def _effort(point: Point) -> int:
    """A rough measure of a point's time: an answer token counts as much as 8 prompt tokens."""
    return int(point["batch"] * (point["prompt_tokens"] + 8 * point["tokens"]))


def describe(point: Point, names: Sequence[str]) -> str:
    """``"prompt_tokens=512 ram=1 GB"``: the settings ``names`` of a point."""
    return " ".join(f"{name}={show_setting(name, point[name])}" for name in names)


def show_setting(name: str, value: Any) -> str:
    """Return a setting's value as text."""
    if value is None:
        return "file" if name == "format" else "auto"
    return format_bytes(value) if name in ("ram", "gpu_memory") else str(value)


_BEST: Sequence[tuple[str, str, Callable[[Any], str], bool]] = (
    ("decode tok/s", "decode_tok_s", format_rate, True),
    ("prefill tok/s", "prefill_tok_s", format_rate, True),
    ("first token", "ttft_s", format_seconds, False),
    ("peak RAM", "peak_ram_bytes", format_bytes, False),
    ("peak VRAM", "peak_vram_bytes", format_bytes, False),
    ("experts in place", "expert_hit_rate", "{:.0%}".format, True),
)


def label(point: Point, names: Sequence[str]) -> str:
    """``"512 / 1 GB"``: the values of the settings ``names``."""
    return " / ".join(show_setting(name, point[name]) for name in names)


def loading_settings(report: SweepReport) -> list[str]:
    """Return the names of a sweep's varying loading options."""
    return [name for name, values in report["vary"].items() if name not in WORK and len(values) > 1]


def best_rows(report: SweepReport) -> tuple[list[str], list[list[str]]]:
    """Return a table's headers and rows: per workload, the best figures and the settings that reach
    them.

    In brackets are the values of `loading_settings`.
    """
    loading = loading_settings(report)
    columns = [
        (header, measure, show, most)
        for header, measure, show, most in _BEST
        if measure not in SOMETIMES or any(point.get(measure) for point in report["points"])
    ]
    groups: dict[tuple[int, ...], list[Point]] = {}
    for point in report["points"]:
        groups.setdefault(tuple(point[name] for name in WORK), []).append(point)
    rows = []
    for work, points in sorted(groups.items()):
        row = [str(value) for value in work]
        for _, measure, show, most in columns:
            known = [point for point in points if point.get(measure) is not None]
            best = (max if most else min)(known, key=lambda point: point[measure], default=None)
            where = f" ({label(best, loading)})" if best and loading else ""
            row.append("-" if best is None else f"{show(best[measure])}{where}")
        rows.append(row)
    return ["prompt", "answer", "batch", *(header for header, *_ in columns)], rows


def failures(report: SweepReport) -> list[list[str]]:
    """Return the points that could not run, each with its reason."""
    names = [name for name in SETTINGS if name in report["vary"]]
    return [
        [describe(point, names), str(point["reason"])]
        for point in report["points"]
        if point["reason"]
    ]


def to_table(report: SweepReport) -> str:
    """Return the best figures and the points that could not run, as text."""
    headers, rows = best_rows(report)
    lines = [
        f"{report['model']}: {len(report['points'])} points, "
        f"medians of {report['runs']}{', interrupted' if report['interrupted'] else ''}",
        "",
        table(rows, headers, "rrr"),
    ]
    if loading := loading_settings(report):
        lines.append(f"in brackets: {' / '.join(loading)}")
    lines += [f"not run: {point}: {reason}" for point, reason in failures(report)]
    return "\n".join(lines)
