"""The reports of ``localrt bench``: a sweep, a card, and two reports side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from localrt.bench.card import run_card
from localrt.bench.compare import compare
from localrt.bench.page import Page, Report, card_rows, page_of, read_report, to_html, write_png
from localrt.bench.plots import Table
from localrt.bench.report import facts
from localrt.bench.sweep import (
    DEFAULT_VARY,
    GPU_VARY,
    SETTINGS,
    SweepOptions,
    parse_vary,
    run_sweep,
    to_table,
)
from localrt.bench.workload import BenchOptions, Workload
from localrt.cli.help import ProgressLine
from localrt.cli.options import Flag, add_flags
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import read_text, write_text
from localrt.common.formatting import printable, table
from localrt.common.option_names import option
from localrt.common.progress import note_to
from localrt.common.settings import Settings
from localrt.hub import DEMO_NAME, list_models, resolve
from localrt.models.checkpoints import open_checkpoint
from localrt.offload import hardware
from localrt.offload.store.pack import fingerprint
from localrt.planning import chooser

_SWEEP_HELP = (
    "measure every combination of --vary on the native engine; points go to FILE as they are "
    "measured, and the same command goes on where it ended (default: no sweep)"
)
_VARY_HELP = (
    f"settings and their values, of {', '.join(SETTINGS)} "
    f"(default: {DEFAULT_VARY!r}; with a GPU {GPU_VARY!r})"
)
_CARD_HELP = (
    "say what this PC runs, how fast, at which quality and power: these models "
    "(default: no card; without MODEL, all on this machine)"
)
_COMPARE_HELP = (
    "two mixes or two sweeps side by side, from their JSON; one file alone is shown (default: none)"
)
_TEXT_HELP = "with --card: also measure perplexity against f32 on this text (default: not measured)"
_FLAGS: tuple[Flag, ...] = (
    ("--sweep", Path, "FILE", _SWEEP_HELP),
    ("--vary", str, "'NAME=VALUE,VALUE ...'", _VARY_HELP),
    ("--text", Path, "FILE", _TEXT_HELP),
    ("--html", Path, "FILE", "write the report as a page without network, too (default: none)"),
    ("--png", Path, "FILE", "write it as a picture, too (default: none)"),
)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of reports."""
    group = parser.add_argument_group("reports")
    group.add_argument("--card", nargs="*", metavar="MODEL", help=_CARD_HELP)
    group.add_argument("--compare", nargs="+", type=Path, metavar="FILE", help=_COMPARE_HELP)
    add_flags(group, _FLAGS)


def run_report(args: argparse.Namespace, sizes: Mapping[str, int | None]) -> int | None:
    """Make the report that the arguments name; None if they name none.

    ``sizes`` are the bytes of ``ram`` and ``gpu_memory``.
    """
    makers = {"sweep": _sweep, "card": _card, "compare": _compare}
    reports = [name for name in makers if getattr(args, name) is not None]
    for name, needs in (("vary", "sweep"), ("text", "card")):
        if getattr(args, name) is not None and needs not in reports:
            raise OptionError(f"{option(name)} needs {option(needs)}")
    for name in ("html", "png"):
        if getattr(args, name) is not None and not reports:
            wanted = f"{option('sweep')}, {option('card')}, {option('compare')} or {option('mix')}"
            raise OptionError(f"{option(name)} needs a report: {wanted}")
    if args.card is not None and args.model != DEMO_NAME:
        raise OptionError(f"{option('card')} takes its models after it")
    if len(reports) > 1:
        raise OptionError(f"{option(reports[0])} and {option(reports[1])} cannot be combined")
    if not reports:
        return None
    for name in ("trace", "long_prompt", "peer"):
        if getattr(args, name) not in (None, []):
            raise OptionError(f"{option(name)} and {option(reports[0])} cannot be combined")
    return makers[reports[0]](args, sizes)


def write_page(args: argparse.Namespace, report: Report | Page) -> None:
    """Write a report's page to where the arguments want it."""
    if args.html is None and args.png is None:
        return
    page = report if isinstance(report, Page) else page_of(report)
    if args.html is not None:
        write_text(args.html, to_html(page))
        notify(f"wrote {args.html}")
    if args.png is not None:
        write_png(page, args.png)
        notify(f"wrote {args.png}")


def _finish(args: argparse.Namespace, report: Mapping[str, object], text: str) -> int:
    """Print and write a report."""
    print(json.dumps(report) if args.json else text)
    write_page(args, report)
    if report["interrupted"]:
        raise KeyboardInterrupt
    return 0


def _compare(args: argparse.Namespace, sizes: Mapping[str, int | None]) -> int:
    if len(args.compare) > 2:
        raise OptionError(f"{option('compare')} takes one file or two, not {len(args.compare)}")
    reports = [read_report(path) for path in args.compare]
    if len(reports) == 1:
        page = page_of(reports[0])
        blocks = [block for _, blocks in page.sections for block in blocks]
        tables = [block for block in blocks if isinstance(block, Table)]
    else:
        page, differences = compare(*reports)
        tables = [differences]
    texts = [table(each.rows, each.headers, "lrrrrrrrrrrrr") for each in tables]
    print(printable("\n\n".join([page.title, *texts])))
    write_page(args, page)
    return 0


def _card(args: argparse.Namespace, sizes: Mapping[str, int | None]) -> int:
    if args.text is not None:
        read_text(args.text)  # a wrong path is said before anything is measured
    if args.card:
        models = [resolved(model) for model in args.card]
    else:
        here = list_models(Settings.from_environment())
        # File names only, as in `resolved`.
        models = [(m.path.name if m.place == "yours" else m.name, m.path) for m in here]
    if not models:
        raise LocalrtError(f"no model is on this machine yet: localrt pull {DEMO_NAME}")
    machine = hardware.probe()
    rate = hardware.measure_memory_read(args.threads or machine.cpu.cores.threads)
    machine = replace(machine, memory_read_bytes_s=rate, gpus=hardware.gpus() or machine.gpus)
    same = ("threads", "format", "device", "kv_format", "ctx")
    options = BenchOptions(
        path=Path(),
        engines=("native",),
        workload=Workload(args.prompt_tokens, args.tokens, args.runs),
        ram=sizes["ram"],
        gpu_memory=sizes["gpu_memory"],
        **{name: getattr(args, name) for name in same},
    )
    report = facts(machine) | run_card(models, options, text=args.text, notify=notify)
    page = page_of(report)
    headers, rows = card_rows(report)
    lines = [page.title, *page.notes, "", table(rows, headers, "lrrrrrrrrr")]
    return _finish(args, report, "\n".join(lines))


def _sweep(args: argparse.Namespace, sizes: Mapping[str, int | None]) -> int:
    machine = hardware.probe()
    machine = replace(machine, gpus=hardware.gpus() or machine.gpus)
    gpu = machine.gpus and args.device != "cpu" and sizes["gpu_memory"] is None
    usual = GPU_VARY if gpu else DEFAULT_VARY
    vary = parse_vary(usual if args.vary is None else args.vary)
    Workload(args.prompt_tokens, args.tokens, args.runs)  # refuses what cannot be
    names = ("prompt_tokens", "tokens", "threads", "format", "device", "kv_format", "ctx")
    fixed = {**{name: getattr(args, name) for name in names}, **sizes}
    name, path = resolved(args.model)
    with closing(open_checkpoint(path)) as checkpoint:
        model = fingerprint(checkpoint)
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
    return _finish(args, report, to_table(report))


def resolved(model: str) -> tuple[str, Path]:
    """Find the model, downloading it if needed: child processes get a path."""
    settings = Settings.from_environment()
    with ProgressLine() as line:
        choose = chooser(settings, say=note_to(line))
        found = resolve(model, settings=settings, choose=choose, progress=line)
    open_checkpoint(found.path).close()  # what no engine can read is told once
    # File names only: results may be shared.
    return (found.path.name if Path(found.name).exists() else found.name), found.path


def notify(line: str) -> None:
    """Print a line about the progress."""
    print(f"localrt: {line}", file=sys.stderr, flush=True)
