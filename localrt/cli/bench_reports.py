"""The reports of ``localrt bench``: a sweep."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from localrt.bench.batches import advise, save_advice, time_passes
from localrt.bench.batches import to_table as batches_table
from localrt.bench.report import facts
from localrt.bench.sweep import (
    DEFAULT_VARY,
    SETTINGS,
    SweepOptions,
    parse_vary,
    run_sweep,
    to_table,
)
from localrt.cli.help import ProgressLine
from localrt.cli.options import Flag, add_flags
from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.common.progress import note_to
from localrt.common.settings import Settings
from localrt.hub import resolve
from localrt.loading.options import LoadOptions
from localrt.loading.parts import load_parts
from localrt.models.checkpoints import open_checkpoint
from localrt.offload import hardware
from localrt.offload.store.pack import fingerprint
from localrt.planning import chooser

_SWEEP_HELP = (
    "measure every combination of --vary on the native engine; points go to FILE as they are "
    "measured, and the same command goes on where it ended (default: no sweep)"
)
_VARY_HELP = f"settings and their values, of {', '.join(SETTINGS)} (default: {DEFAULT_VARY!r})"
_ADVISE_HELP = (
    "time passes by how many answers share them, and say how many should; localrt serve MODEL then "
    "takes that (default: no)"
)
_FLAGS: tuple[Flag, ...] = (
    ("--advise", bool, None, _ADVISE_HELP),
    ("--sweep", Path, "FILE", _SWEEP_HELP),
    ("--vary", str, "'NAME=VALUE,VALUE ...'", _VARY_HELP),
)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of reports."""
    add_flags(parser.add_argument_group("reports"), _FLAGS)


def run_report(args: argparse.Namespace, sizes: Mapping[str, int | None]) -> int | None:
    """Make the report that the arguments name; None if they name none.

    ``sizes`` are the bytes of ``ram`` and ``gpu_memory``.
    """
    if args.vary is not None and args.sweep is None:
        raise OptionError(f"{option('vary')} needs {option('sweep')}: the file for the points")
    if args.advise:
        return _advise(args, sizes)
    if args.sweep is not None:
        return _sweep(args, sizes)
    return None


def _advise(args: argparse.Namespace, sizes: Mapping[str, int | None]) -> int:
    name, path = resolved(args.model)
    settings = Settings.from_environment()
    names = ("format", "kv_format", "threads", "ctx")
    chosen: dict[str, Any] = {key: getattr(args, key) for key in names} | dict(sizes)
    options = LoadOptions(engine="native", device=args.device or "auto", **chosen)
    with closing(load_parts(path, options, settings=settings).engine) as engine:
        times = time_passes(engine, notify=notify)
    advice = advise(times)
    save_advice(settings.cache_dir, path, times, advice)
    if args.json:
        passes = [asdict(each) for each in times]
        report = {"kind": "batches", "model": name, **facts(hardware.probe())}
        print(json.dumps({**report, "passes": passes, "advice": asdict(advice)}))
    else:
        print(batches_table(times, advice))
    return 0


def _sweep(args: argparse.Namespace, sizes: Mapping[str, int | None]) -> int:
    vary = parse_vary(DEFAULT_VARY if args.vary is None else args.vary)
    names = ("prompt_tokens", "tokens", "threads", "format", "device", "kv_format", "ctx")
    fixed = {**{name: getattr(args, name) for name in names}, **sizes}
    name, path = resolved(args.model)
    with closing(open_checkpoint(path)) as checkpoint:
        model = fingerprint(checkpoint)
    machine = hardware.probe()
    gibibytes = round(machine.memory.total / (1 << 30))
    gpus = [gpu.name for gpu in machine.gpus]
    options = SweepOptions(
        path=path,
        file=args.sweep,
        vary=vary,
        fixed={
            name: value for name, value in fixed.items() if value is not None and name not in vary
        },
        runs=args.runs,
        identity={"model": model, "machine": [*hardware.identity(), gibibytes, *gpus]},
        facts={**facts(machine), "model": name},
    )
    report = run_sweep(options, notify=notify)
    print(json.dumps(report) if args.json else to_table(report))
    if report["interrupted"]:
        raise KeyboardInterrupt
    return 0


def resolved(model: str) -> tuple[str, Path]:
    """Find the model, downloading it if needed: child processes get a path."""
    settings = Settings.from_environment()
    with ProgressLine() as line:
        choose = chooser(settings, say=note_to(line))
        found = resolve(model, settings=settings, choose=choose, progress=line)
    # File names only: results may be shared.
    return (found.path.name if Path(found.name).exists() else found.name), found.path


def notify(line: str) -> None:
    """Print a line about the progress."""
    print(f"localrt: {line}", file=sys.stderr, flush=True)
