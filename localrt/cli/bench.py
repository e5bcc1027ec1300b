"""``localrt bench [MODEL]``: engines side by side on one workload, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from localrt.cli.model_options import DEMO_MODEL
from localrt.errors import LocalrtError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "measure engines side by side on one model"

_PACKAGES = ("torch", "llama-cpp-python", "transformers", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", nargs="?", default=DEMO_MODEL, metavar="MODEL", help=f"default: {DEMO_MODEL}"
    )
    parser.add_argument(
        "--engines",
        type=_engines,
        default=("native", "llamacpp"),
        metavar="LIST",
        help="comma-separated: native, llamacpp, transformers (default: native,llamacpp)",
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="default: 512")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument(
        "--runs", type=int, default=5, metavar="N", help="runs behind each median (default: 5)"
    )
    parser.add_argument(
        "--memory-limit", metavar="SIZE", help="hard limit for each engine's process, like 1GB"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of every engine")
    parser.add_argument("--format", choices=("bf16", "f32"), help="format of the native engine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 when no engine could run."""
    from localrt import hardware
    from localrt.bench.report import to_json, to_table
    from localrt.bench.runner import BenchOptions, run_bench
    from localrt.bench.workload import Workload
    from localrt.offload.budget import parse_size

    limit = None if args.memory_limit is None else parse_size(args.memory_limit)
    workload = Workload(args.prompt_tokens, args.tokens, args.runs)
    name, path = _resolve(args.model)
    options = BenchOptions(
        path=path,
        engines=args.engines,
        workload=workload,
        memory_limit=limit,
        threads=args.threads,
        format=args.format,
    )
    machine = hardware.probe()
    floor = hardware.measure_memory_read(args.threads or machine.cpu.usable_cores)
    machine = replace(machine, memory_read_bytes_s=floor)
    outcome = run_bench(options, notify=_notify)
    if args.json:
        report = to_json(
            outcome,
            options,
            name=name,
            machine=machine,
            versions=_versions(),
            command=shlex.join(["localrt", *sys.argv[1:]]),
        )
        print(json.dumps(report, indent=2))
    else:
        print(to_table(outcome, options, name=name, machine=machine))
    if not outcome.results:
        reasons = "; ".join(f"{skip.engine}: {skip.reason}" for skip in outcome.skipped)
        raise LocalrtError(f"no engine could run: {reasons}")
    return 0


def _engines(text: str) -> tuple[str, ...]:
    from localrt.bench.engines import ENGINES

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in ENGINES]
    if unknown or not names:
        what = f"unknown engine {unknown[0]!r}" if unknown else "no engine"
        raise argparse.ArgumentTypeError(f"{what}: choose from {', '.join(ENGINES)}")
    return names


def _resolve(model: str) -> tuple[str, Path]:
    """The model on this machine, downloaded first if need be: children get a path."""
    from localrt.cli.pull import ProgressLine
    from localrt.hub import resolve
    from localrt.settings import Settings

    line = ProgressLine(sys.stderr)
    try:
        resolved = resolve(model, settings=Settings.from_environment(), progress=line)
    finally:
        line.close()
    return resolved.name, resolved.path


def _versions() -> dict[str, str]:
    import importlib.metadata

    from localrt import __version__

    versions = {"localrt": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _notify(line: str) -> None:
    print(f"localrt: {line}", file=sys.stderr, flush=True)
