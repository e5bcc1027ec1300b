"""Repeats the native engine's benchmark for each value of an option (``localrt bench --sweep``), or
for each model (``--all``).

All go into one ``Outcome``, whose results are named by value or model. Each is loaded in a process
of its own. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from localrt.bench.gpu import lacks_gpu
from localrt.bench.process import ENGINE, ChildProcess
from localrt.bench.runner import on_gpu, run_bench
from localrt.bench.workload import BenchOptions, Outcome, Result, Skipped
from localrt.common.errors import OptionError
from localrt.common.formatting import parse_size
from localrt.common.option_names import on_command_line, option
from localrt.quant.ops.kv_formats import KV_FORMATS

_WORK = {"prompt_tokens": 1, "tokens": 2, "batch": 1}  # smallest values
_COUNTS = {**_WORK, "threads": 1, "ctx": 1}
_CHOICES = {"format": ("file", "bf16", "f32"), "kv_format": KV_FORMATS}
_SIZES = ("ram", "gpu_memory")

KNOBS = (*_COUNTS, *_CHOICES, *_SIZES, "device", "draft")
"""The options that can be swept."""

Value: TypeAlias = int | str | None

Point: TypeAlias = tuple[str, BenchOptions]
"""A name, and what to measure under it."""


def parse_sweep(text: str) -> tuple[str, dict[str, Value]]:
    """Parse ``"ram=1GB,2GB"``: the option, and its values by how they are written.

    Sizes become bytes, ``format=file`` None.

    Raises:
        OptionError: the text is invalid.
    """
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in KNOBS:
        known = ", ".join(KNOBS).replace("_", "-")
        raise OptionError(
            f"{option('sweep')} takes NAME=VALUE,VALUE, not {text!r:.80}; there are {known}"
        )
    return name, {each.strip(): _value(name, each.strip()) for each in values.split(",")}


def _value(name: str, text: str) -> Value:
    what = f"{option('sweep')}: {name.replace('_', '-')}"
    if name in _COUNTS:
        if not text.isascii() or not text.isdigit() or int(text) < _COUNTS[name]:
            raise OptionError(
                f"{what} must be a whole number from {_COUNTS[name]}, is {text!r:.80}"
            )
        return int(text)
    if name in _SIZES:
        return parse_size(text, what)
    choices = _CHOICES.get(name)
    if not text or (choices and text not in choices):
        must = f"one of {', '.join(choices)}" if choices else "a value"
        raise OptionError(f"{what} must be {must}, is {text!r:.80}")
    return None if text == "file" else text


def swept(options: BenchOptions, name: str, values: Mapping[str, Value]) -> list[Point]:
    """Return the point of each value."""

    def at(value: Any) -> BenchOptions:
        changed = {name: value}
        if name in _WORK:
            changed = {"workload": replace(options.workload, **changed)}
        return replace(options, **changed)

    return [(text, at(value)) for text, value in values.items()]


def run_sweep(
    points: Sequence[Point],
    varied: str,
    *,
    notify: Callable[[str], None],
    start: Callable[[str], ChildProcess] = lambda engine: ChildProcess(ENGINE),
) -> Outcome:
    """Measure each of ``points`` as ``run_bench`` does; ``varied`` says in what they differ.

    A point that cannot run has its reason. Ctrl+C ends the sweep with the results so far.
    """
    results: list[Result] = []
    skipped: list[Skipped] = []
    interrupted = False
    for number, (name, options) in enumerate(points, 1):
        if lacks_gpu(options):
            skipped.append(Skipped("native", name, "there is no GPU here"))
            continue
        try:
            notify(f"{name} ({number} of {len(points)})")
            outcome = run_bench(options, notify=notify, start=start)
        except OptionError as error:  # for example if the prompt exceeds the model's context
            skipped.append(Skipped("native", name, error.told(on_command_line), kind="OptionError"))
            continue
        except KeyboardInterrupt:
            interrupted = True
            break
        for result in outcome.results:
            if options.gpu_memory and not on_gpu(result.info):
                skipped.append(Skipped("native", name, "no GPU computes here"))
            else:
                results.append(replace(result, setting=name))
        skipped += [replace(each, setting=name) for each in outcome.skipped]
        if outcome.interrupted:
            interrupted = True
            break
    return Outcome(results, skipped, interleaved=False, interrupted=interrupted, varied=varied)
